"""Evaluation of language models: WikiText's spaces and words, overlapping windows, last words; against oracles."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import evaluate_lm
import pytest
import torch
from ranks import run_ranks
from support import training
from text import lm_samples, tokens
from tokenizers import Tokenizer
from torch import Tensor

from autotp.models.gpt import GPT, GPTConfig

PARTED = """ \n = The 2 @-@ 1 Game = \n \n = = First half ( 1899 ) = = \n \n It 's " half @-@ time " , 1 @,@ 000 fans
 aren 't in ; the soldiers ' score : 1 @.@ 5 ! It cost $ 5 ( or £ 2 ) . <unk> said " so . " Why ? \n"""
ORDINARY = """= The 2-1 Game =\n\n== First half (1899) ==\n\nIt's "half-time", 1,000 fans
aren't in; the soldiers' score: 1.5! It cost $5 (or £2). <unk> said "so." Why?"""


def model(block: int = 8, size: int = 300, scale: float = 4) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(block_size=block, vocab_size=size, n_layer=2, n_head=2, n_embd=16, dropout=0.1)
    made = GPT(config).double()
    for parameter in made.parameters():
        parameter.data.mul_(scale)  # So that it is sure of something.
    return made.eval()


def trained(folder: Path, texts: list[str], size: int = 300) -> Tokenizer:
    return tokens.prepare(folder, tokens.GPT, lambda: iter(texts), size)[0]


def test_detokenized():
    assert evaluate_lm.detokenized(PARTED) == ORDINARY


def test_samples_are_wikitext():
    text = """Ada (or "Bo?") left, well-kept. It's 5,000!"""
    parted = """Ada ( or " Bo ? " ) left , well @-@ kept . It 's 5 @,@ 000 !"""
    assert lm_samples.wikitext([("T", text[:-1])]) == f" \n = T = \n \n {parted[:-2]} . \n"
    assert evaluate_lm.detokenized(parted) == text


def test_words_are_those_of_wikitext_with_line_ends():
    assert evaluate_lm.count_words(" \n = A @-@ b = \n \n One , two . \n \n") == 5 + 2 + 4


def test_perplexity_is_of_words():
    assert evaluate_lm.perplexity(loss=2.0, tokens=30, words=20) == pytest.approx(math.exp(3))


@torch.no_grad()
def one_by_one(model: GPT, start: int, found: list[int], block: int, stride: int) -> float:
    """The sum of what each token costs, read behind the tokens that its window has before it."""
    whole, total = [start, *found], 0.0
    for at in range(1, len(whole)):
        ends = (min(end, len(found)) for end in range(block, len(whole) + block, stride))
        end = next(end for end in ends if end >= at)
        seen = whole[max(0, end - block) : at]
        total -= float(model(torch.tensor([seen]))[0, -1].log_softmax(-1)[whole[at]])
    return total


@pytest.mark.parametrize(("length", "stride"), [(30, 3), (30, 8), (32, 8), (8, 2), (5, 2), (9, 1), (2, 8)])
@pytest.mark.parametrize("batch", [1, 3])
def test_perplexity_of_windows(length, stride, batch):
    torch.manual_seed(1)
    found = torch.randint(1, 300, (length,)).tolist()
    batches = list(evaluate_lm.windows(found, 0, 8, stride, batch))
    assert {len(rows) for rows, _ in batches} == {batch}
    assert sum(int((labels >= 0).sum()) for _, labels in batches) == length
    loss = training.held_out_loss(model(), batches)
    assert loss * length == pytest.approx(one_by_one(model(), 0, found, 8, stride), rel=1e-9)


def test_last_words_are_all_their_tokens(tmp_path):
    tokenizer = trained(tmp_path, ["the cat sat " * 9])
    ((inputs, labels),) = evaluate_lm.last_words(["the cat sat zoo"], tokenizer, 99)
    word = tokenizer.encode(" zoo").ids
    assert len(word) > 1
    assert tokenizer.decode(inputs.tolist(), skip_special_tokens=False) == "<|endoftext|>the cat sat zo"
    assert labels.tolist() == [-100] * (len(labels) - len(word)) + word


def test_a_long_passage_keeps_its_end(tmp_path):
    tokenizer = trained(tmp_path, ["the cat sat " * 9])
    ((inputs, labels),) = evaluate_lm.last_words(["the cat sat " * 9 + "zoo"], tokenizer, 6)
    whole = tokenizer.encode("the cat sat " * 9 + "zoo").ids
    assert inputs.tolist() == whole[-7:-1] and labels.tolist()[-3:] == whole[-3:]


def test_one_word_is_no_passage(tmp_path):
    with pytest.raises(ValueError, match="a passage needs two words: 'alone '"):
        evaluate_lm.last_words(["two words", "alone "], trained(tmp_path, ["a"]), 9)


def continued(model: GPT, context: Tensor, count: int) -> list[int]:
    """The most likely tokens behind the context, one after the other."""
    for _ in range(count):
        context = torch.cat((context, model(context[None])[0, -1].argmax().view(1)))
    return context[len(context) - count :].tolist()


def test_accuracy_is_that_of_greedy_continuation(tmp_path):
    """Half of the passages end as the model would end them, others nearly so."""
    tokenizer, gpt = trained(tmp_path, ["the cat sat " * 9]), model(block=40)
    rows, right = [], 0
    for i in range(12):
        torch.manual_seed(i)
        context, count = torch.randint(256, (4 + i,)), 1 + i % 3
        word = continued(gpt, context, count)
        for at in range(i % 2 * count):  # An odd one differs in one token: the first, the last or one between.
            word[at] = (word[at] + int(at == i // 2 % count)) % 300
        right += continued(gpt, context, count) == word
        labels = torch.tensor([-100] * (len(context) - 1) + word)
        rows.append((torch.cat((context, torch.tensor(word[:-1], dtype=torch.int64))), labels))
    assert right == 6
    assert [evaluate_lm.count_right(gpt, rows, batch) for batch in (1, 5, 12)] == [6, 6, 6]
    assert tokenizer.get_vocab_size() <= 300


def pretrained(folder: Path) -> tuple[Path, Path]:
    """A folder as `pretrain_gpt.py` leaves it, and one of samples, some of which the model ends rightly."""
    lm_samples.write(folder / "samples", 40, seed=0)
    out = folder / "gpt"
    out.mkdir()
    tokenizer = trained(folder, [(folder / "samples" / "train.jsonl").read_text()])
    tokenizer.save(str(out / "tokenizer.json"))
    gpt = model(block=16, scale=2)
    torch.save(gpt.float().state_dict(), out / "model.pt")
    (out / "config.json").write_text(json.dumps(vars(gpt.config)))
    right = passages_it_ends(gpt, tokenizer, (folder / "samples" / "train.jsonl").read_text().split(" "))
    with (folder / "samples" / "lambada_test.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in right)
    return out, folder / "samples"


def passages_it_ends(gpt: GPT, tokenizer: Tokenizer, words: list[str]) -> list[str]:
    """Three passages whose last word is one token, the most likely one."""
    found: list[str] = []
    for end in range(30, len(words)):
        context = " ".join(words[end - 30 : end]).rstrip()
        tokens = tokenizer.encode(context).ids[-gpt.config.block_size :]
        likely = int(gpt(torch.tensor([tokens]))[0, -1].argmax())
        word = tokenizer.decode([likely])
        if word[1:].isalpha() and tokenizer.encode(word).ids == [likely] and word[0] == " ":
            found.append(context + word)
    return found[:3]


def evaluated(rank: int, n: int, out: Path, samples: Path) -> str:
    files = ["--wikitext", str(samples / "wiki.test.tokens"), "--lambada", str(samples / "lambada_test.jsonl")]
    sys.argv = ["evaluate_lm.py", str(out), *files, "--stride", "4", "--batch", "3"]
    torch.manual_seed(rank)  # As processes start, each with a seed of its own.
    said: list[str] = []
    evaluate_lm.say = lambda *what: said.append(*what)
    evaluate_lm.main()
    assert not evaluate_lm.load(out, torch.device("cpu"))[0].training
    return "\n".join(said)


def test_measured_on_two_ranks(tmp_path):
    out, samples = pretrained(tmp_path)
    found = run_ranks(evaluated, 2, out, samples)
    tokenizer = tokens.load_tokenizer(out / "tokenizer.json")
    raw = (samples / "wiki.test.tokens").read_text()
    ids, words = tokenizer.encode(evaluate_lm.detokenized(raw)).ids, len(raw.strip().split(" "))
    total = one_by_one(model(block=16, scale=2), tokenizer.token_to_id(tokens.END), ids, 16, 4)
    for said in found:
        first, second = said.splitlines()
        assert float(first.split()[1]) == pytest.approx(math.exp(total / words), rel=1e-5)
        assert first.endswith(f" a word: {words} words, {len(ids)} tokens")
        assert second == "accuracy    42.9% of last words: 3 of 7"


def test_no_model(tmp_path):
    with pytest.raises(ValueError) as error:
        evaluate_lm.load(tmp_path, torch.device("cpu"))
    assert str(error.value) == f"no model in {tmp_path}. Try examples/pretrain_gpt.py --out {tmp_path} first"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "nothing to measure. Try --wikitext FILE or --lambada FILE"),
        (["--lambada", "x", "--stride", "0"], "--stride and --batch must be 1 or more"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], expected: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate_lm.py", *flags])
    with pytest.raises(SystemExit):
        evaluate_lm.arguments()
    assert f"error: {expected}\n" in capsys.readouterr().err


def test_an_empty_file(tmp_path):
    with pytest.raises(ValueError, match="no text in x"):
        evaluate_lm.some([], Path("x"))
