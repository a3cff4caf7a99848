"""Fine-tuning BERT: what its heads read, their gradients tensor-parallel, where they start from, the script itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning import inputs
from finetuning.formats import Answer, Choice, Pair, Question
from finetuning.heads import MultipleChoice, PairClassifier, SpanExtractor
from finetuning.initial import initial
from finetuning.inputs import Reader
from finetuning.windows import windows
from ranks import run_ranks
from text.tokens import SEP, word_pieces
from torch import Tensor

import autotp
from autotp.models.bert import BERT, BERTConfig

SIZES: dict[str, Any] = {"block_size": 16, "vocab_size": 50, "n_layer": 2, "n_head": 4, "n_embd": 16, "dropout": 0.1}
HEADS = {"pair": lambda bert: PairClassifier(bert, 3), "span": SpanExtractor, "choice": MultipleChoice}
WORDS = "a b c d e f g h i j"


def bert(**changed: Any) -> BERT:
    torch.manual_seed(0)
    return BERT(BERTConfig(**SIZES | changed))


def reader(seq: int = 10, query: int = 3) -> Reader:
    return Reader(word_pieces([WORDS], 100), seq, query)


def read(some: Reader, row: Tensor) -> str:
    return " ".join(str(some.tokenizer.id_to_token(i)) for i in row.tolist())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("head", HEADS)
def test_every_gradient_is_one_devices(head, norm):
    report = autotp.verify(HEADS[head](bert(norm=norm)), tp=2)
    assert report.ok, str(report)
    assert report.outputs[0].name == "loss"
    assert "bert.layer.0.attention.query.weight" in [cut.name for cut in report.plan.cuts]


@pytest.mark.parametrize("head", HEADS)
def test_all_parameters_are_trained(head):
    model = HEADS[head](bert())
    model(**model.dummy_inputs).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("head", HEADS)
def test_padding_is_not_read(head):
    model = HEADS[head](bert()).eval()
    given = {name: value for name, value in model.dummy_inputs.items() if name != "labels"}
    padded = given["mask"] == 0
    found = model(**given)
    other = model(**given | {"tokens": given["tokens"].masked_fill(padded, 9)})
    assert torch.equal(found, other) and bool(padded.any())


def test_span_is_not_in_the_padding():
    model = SpanExtractor(bert())
    given = model.dummy_inputs
    logits = model(given["tokens"], given["types"], given["mask"])
    assert torch.equal(logits.isinf().all(-1), given["mask"] == 0)


def test_choice_is_the_loss_of_the_right_option():
    model = MultipleChoice(bert(dropout=0.0))
    for linear in (model.bert.pooler, model.output):
        linear.weight.data.mul_(50)  # at first all options are alike
    given = model.dummy_inputs
    logits = torch.stack([model.output(inputs_of(model, given, option))[:, 0] for option in range(4)], 1)
    expected = -logits.log_softmax(-1)[torch.arange(3), given["labels"]].mean()
    assert model(**given).item() == pytest.approx(expected.item(), rel=1e-5)


def inputs_of(model: MultipleChoice, given: dict[str, Tensor], option: int) -> Tensor:
    states = model.bert.encode(*(given[name][:, option] for name in ("tokens", "types", "mask")))
    return model.bert.pooler(states[:, 0]).tanh()


def test_pairs_are_joined_and_padded():
    some = reader()
    batch = some([Pair("a b", "c", 2), Pair("d", "e f g", 0)])
    assert [read(some, row) for row in batch["tokens"]] == [
        "[CLS] a b [SEP] c [SEP] [PAD]",
        "[CLS] d [SEP] e f g [SEP]",
    ]
    assert batch["types"].tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]]
    assert batch["mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0], [1] * 7]
    assert batch["labels"].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(9, 1, (6, 1)), (1, 9, (1, 6)), (9, 9, (3, 4)), (3, 9, (3, 4)), (3, 4, (3, 4))]
)
def test_the_longer_text_is_cut_first(first, second, expected):
    kept = inputs.shortened(list(range(first)), list(range(second)), 7)
    assert kept == (list(range(expected[0])), list(range(expected[1])))


def test_choices_have_a_dimension_for_the_options():
    some = reader()
    batch = some([Choice("a b c d e f g", "h _ i", ("a", "b", "c", "j"), 3), Choice("a", "b", ("c", "d", "e", "f"), 0)])
    assert batch["tokens"].shape == (2, 4, 10) and batch["labels"].tolist() == [3, 0]
    assert read(some, batch["tokens"][0, 1]) == "[CLS] a b c d [SEP] h b i [SEP]"
    assert read(some, batch["tokens"][1, 2, :7]) == "[CLS] a [SEP] b e [SEP] [PAD]"


def test_windows_are_read_with_their_question():
    some = reader()
    parts = windows([Question("q", "h i", WORDS, (Answer("f", 10),))], some.tokenizer, 10, 3, 4)
    batch = some(parts)
    assert [read(some, row) for row in batch["tokens"]] == [
        "[CLS] h i [SEP] a b c d e [SEP]",
        "[CLS] h i [SEP] e f g h i [SEP]",
        "[CLS] h i [SEP] i j [SEP] [PAD] [PAD] [PAD]",
    ]
    assert batch["labels"].tolist() == [[0, 0], [5, 5], [0, 0]]


def test_name_of_a_special_token_is_text_and_a_tokenizer_has_them():
    other = word_pieces([WORDS], 100)
    other.encode_special_tokens = True
    assert SEP not in other.encode("a [SEP] b").tokens
    from tokenizers import Tokenizer, models

    with pytest.raises(ValueError) as error:
        Reader(Tokenizer(models.WordPiece({"a": 0, "[PAD]": 1})), 8, 4)
    assert str(error.value) == "the tokenizer has no [CLS]: it is another model's"


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_initial_weights_are_those_of_the_file(tmp_path, norm):
    whole = bert(norm=norm)
    torch.save(whole.state_dict(), tmp_path / "bert.pt")
    found = initial(tmp_path / "bert.pt", heads=4, dropout=0.1)
    assert found.config == whole.config
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), whole.parameters(), strict=True))
    assert all(p.requires_grad for p in found.parameters())


def changed_state(change: str) -> Any:
    state: dict[str, Any] = dict(bert(norm="pre").state_dict())
    match change:
        case "names":
            state["layer.0.mlp.up.weight"] = state.pop("layer.0.mlp.intermediate.weight")
        case "shape":
            state["pooler.bias"] = torch.zeros(3)
        case "other":
            state = {f"bert.{name}": value for name, value in state.items()}
        case "checkpoint":
            state = {"model": state, "step": 3}
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "names",
            " is no state dict of a BERT with 2 layers, norm=pre: missing: layer.0.mlp.intermediate.weight; "
            "unexpected: layer.0.mlp.up.weight",
        ),
        ("shape", " is no state dict of a BERT with 2 layers, norm=pre: of another shape: pooler.bias"),
        (
            "other",
            " is no state dict of a BERT: no 'embeddings.word.weight', but bert.embeddings.word.weight, "
            "bert.embeddings.position.weight, bert.embeddings.segment.weight and 43 more",
        ),
        ("checkpoint", " has no state dict: names and tensors, and nothing else"),
    ],
)
def test_file_that_has_no_bert(tmp_path, change, message):
    file = tmp_path / "bert.pt"
    torch.save(changed_state(change), file)
    with pytest.raises(ValueError) as error:
        initial(file, heads=4, dropout=0.1)
    assert str(error.value) == f"{file}{message}"


def test_file_that_cannot_be_read(tmp_path):
    file = tmp_path / "bert.pt"
    file.write_text("nothing of the sort")
    with pytest.raises(ValueError, match=r"bert\.pt cannot be read: "):
        initial(file, heads=4, dropout=0.1)


def small(folder: Path, name: str) -> list[str]:
    """Files of a task in which the answer is easy to tell, and the flags to learn it with."""
    words = WORDS.split()
    match name:
        case "qqp":
            rows = [f"{first}\t{second}\t{int(first < 'f')}" for first in words for second in words]
            text, files = "\n".join(["question1\tquestion2\tis_duplicate", *rows]), ["train.tsv", "dev.tsv"]
        case "squad1":
            paragraphs = [
                {
                    "context": " ".join("c" if word == at else "d" for word in words),
                    "qas": [{"id": at, "question": "c", "answers": [{"text": "c", "answer_start": 2 * i}]}],
                }
                for i, at in enumerate(words)
            ]
            text, files = json.dumps({"data": [{"paragraphs": paragraphs}]}), ["train-v1.1.json", "dev-v1.1.json"]
        case _:
            record = {"article": "a b", "questions": ["e"] * 8, "options": [list("chij")] * 8, "answers": ["A"] * 8}
            text, files = json.dumps(record), ["train/1.txt", "dev/middle/1.txt", "dev/high/1.txt"]
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    sizes = ["--width", "16", "--seq", "16", "--query", "4", "--stride", "5", "--batch", "8", "--lr", "1e-2"]
    return [name, "--data", str(folder), "--out", str(folder), *sizes]


def script(rank: int, n: int, flags: list[str]) -> None:
    """The script as torchrun runs it; its assertion is the test."""
    import finetune_bert

    sys.argv = ["finetune_bert.py", *flags]
    finetune_bert.main()


@pytest.mark.parametrize(
    ("name", "epochs"),
    [("qqp", 12), *(pytest.param(*it, marks=pytest.mark.rare) for it in (("squad1", 15), ("race", 8)))],
)
def test_script_learns_on_two_ranks(tmp_path, name, epochs):
    """The first of them from weights and a tokenizer in files."""
    flags = small(tmp_path, name)
    flags = start(flags, tmp_path, vocab_size=15, norm="pre") if name == "qqp" else flags
    run_ranks(script, 2, [*flags, "--epochs", str(epochs), "--at-least", "0.9"], timeout=110)


def test_script_starts_from_the_weights_in_a_file(tmp_path, monkeypatch):
    import finetune_bert

    monkeypatch.setattr(sys, "argv", ["finetune_bert.py", *start(small(tmp_path, "qqp"), tmp_path), "--seed", "3"])
    found, whole = finetune_bert.bert_of(finetune_bert.arguments(), 50), bert()
    assert torch.equal(found.layer[1].mlp.output.weight, whole.layer[1].mlp.output.weight)


def start(flags: list[str], folder: Path, **sizes: Any) -> list[str]:
    """With a BERT and a tokenizer in files."""
    torch.save(bert(**sizes).state_dict(), folder / "bert.pt")
    word_pieces([WORDS], 100).save(str(folder / "words.json"))
    return [*flags, "--init", str(folder / "bert.pt"), "--tokenizer", str(folder / "words.json")]


def failure(flags: list[str]) -> str:
    """What the script ends with on one process."""
    import finetune_bert

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as error:
        patch.setattr(sys, "argv", ["finetune_bert.py", *flags])
        finetune_bert.main()
    return str(error.value)


def test_bad_input_ends_the_script_with_one_line(tmp_path):
    flags = small(tmp_path, "qqp")
    few = f"finetune_bert: {tmp_path}: 100 to train on are no --batch 101"
    assert failure([*flags, "--batch", "101"]) == few
    size = f"finetune_bert: --tokenizer has 15 tokens, and --init {tmp_path / 'bert.pt'} embeddings for 9"
    assert failure(start(flags, tmp_path, vocab_size=9)) == size
    seq = f"finetune_bert: --seq has 17 tokens, and --init {tmp_path / 'bert.pt'} embeddings for 16"
    assert failure([*start(flags, tmp_path), "--seq", "17"]) == seq
    assert failure([*start(flags, tmp_path)[:-1], str(tmp_path / "bert.pt")]).startswith("finetune_bert: --tokenizer ")
    (tmp_path / "train.tsv").unlink()
    hint = "no such file. Try examples/finetuning/bert_samples.py, which writes small ones"
    assert failure(flags) == f"finetune_bert: {tmp_path / 'train.tsv'}: {hint}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("qqp --init bert.pt", "--init needs the --tokenizer that it was trained with"),
        ("squad1 --stride 46", "--stride 46 must be from 1 to --seq less --query less 3: 45"),
        ("race --seq 20", "--seq 20 leaves no room for a text beside --query 16"),
    ],
)
def test_flags_that_do_not_go_together(flags, message, capsys):
    assert failure(flags.split()) == "2"
    assert f"error: {message}\n" in capsys.readouterr().err
