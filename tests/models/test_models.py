"""The models against Hugging Face's on the same weights, and against what their papers say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from autotp.models import bert, gpt
from autotp.models.bert import BERT, BERTConfig
from autotp.models.configs import BERT_SIZES, GPT_SIZES, GPT_SIZES_2021
from autotp.models.gpt import GPT, GPTConfig

SIZES = SimpleNamespace(block=11, vocab=29, layers=3, heads=3, width=12, dropout=0.1)
BATCH, SEQ = 4, 9

GPT_NAMES = {"wte|wpe|h|ln_f": r"transformer.\g<0>"}  # ours -> Hugging Face's
BERT_NAMES = {
    r"embeddings\.word": "bert.embeddings.word_embeddings",
    r"embeddings\.position": "bert.embeddings.position_embeddings",
    r"embeddings\.segment": "bert.embeddings.token_type_embeddings",
    r"embeddings\.norm": "bert.embeddings.LayerNorm",
    r"(layer\.\d+\.attention)\.(query|key|value)": r"bert.encoder.\1.self.\2",
    r"(layer\.\d+\.attention)\.output": r"bert.encoder.\1.output.dense",
    r"(layer\.\d+)\.attention_norm": r"bert.encoder.\1.attention.output.LayerNorm",
    r"(layer\.\d+)\.mlp\.(intermediate|output)": r"bert.encoder.\1.\2.dense",
    r"(layer\.\d+)\.mlp_norm": r"bert.encoder.\1.output.LayerNorm",
    r"pooler": "bert.pooler.dense",
    r"mlm\.transform": "cls.predictions.transform.dense",
    r"mlm\.norm": "cls.predictions.transform.LayerNorm",
    r"mlm": "cls.predictions",
    r"nsp": "cls.seq_relationship",
}
MEGATRON_NAMES = BERT_NAMES | {
    r"(layer\.\d+)\.attention_norm": r"bert.encoder.\1.attention.ln",
    r"(layer\.\d+)\.mlp_norm": r"bert.encoder.\1.ln",
    r"norm": "bert.encoder.ln",
}


def our_gpt() -> GPT:
    s = SIZES
    return GPT(GPTConfig(s.block, s.vocab, s.layers, s.heads, s.width, s.dropout))


def our_bert(norm: str) -> BERT:
    s = SIZES
    return BERT(BERTConfig(s.block, s.vocab, 2, s.layers, s.heads, s.width, s.dropout, norm))


def their_gpt() -> nn.Module:
    s = SIZES
    sizes = {"n_positions": s.block, "vocab_size": s.vocab, "n_layer": s.layers, "n_head": s.heads, "n_embd": s.width}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager"))


def their_bert(model: type[nn.Module], config: type[BertConfig] | type[MegatronBertConfig]) -> nn.Module:
    s = SIZES
    sizes = {"hidden_size": s.width, "intermediate_size": 4 * s.width, "vocab_size": s.vocab}
    counts = {"num_hidden_layers": s.layers, "num_attention_heads": s.heads, "max_position_embeddings": s.block}
    return model(config(**sizes, **counts, attn_implementation="eager"))


def their_name(name: str, names: dict[str, str]) -> str:
    """The name that the first fitting pattern gives."""
    pattern = next(pattern for pattern in names if re.match(rf"({pattern})\.", name))
    return re.sub(rf"^(?:{pattern})(?=\.)", names[pattern], name)


def laid_out(value: Tensor, name: str) -> Tensor:
    """Hugging Face's GPT-2 keeps its linears' weights transposed (`Conv1D`). value: [out in] or another parameter"""
    return value.T if re.search(r"\.c_\w+\.weight$", name) else value


def twins(ours: nn.Module, theirs: nn.Module, names: dict[str, str]) -> None:
    """Gives both the same random weights, in float64: biases and norms too, which the models start as constants."""
    ours.double(), theirs.double()
    generator = torch.Generator().manual_seed(0)
    copies = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            copies.pop(their_name(name, names)).copy_(laid_out(parameter, name))
    assert not copies, f"nothing of ours is their {list(copies)}"


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, names: dict[str, str]) -> None:
    copies = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = laid_out(copies[their_name(name, names)].grad, name)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def random_tokens(high: int = SIZES.vocab) -> Tensor:
    return torch.randint(high, (BATCH, SEQ), generator=torch.Generator().manual_seed(high))


def some_ignored(labels: Tensor) -> Tensor:
    return labels.masked_fill(torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 5 == 0, -100)


# --- equality with Hugging Face


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_gpt_loss_and_gradients_are_hugging_face_s(train):
    ours, theirs = our_gpt().train(train), their_gpt().train(train)
    twins(ours, theirs, GPT_NAMES)
    tokens, labels = random_tokens(), some_ignored(random_tokens(SIZES.vocab - 1))
    torch.manual_seed(1)
    loss = ours(tokens, labels)
    torch.manual_seed(1)  # in train mode the same dropout, draw for draw
    logits = theirs(tokens).logits
    # Their own loss shifts the labels, and leaves float64.
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward(), expected.backward()
    assert_same_gradients(ours, theirs, GPT_NAMES)


def test_gpt_loss_is_their_loss_of_unshifted_labels():
    ours, theirs = our_gpt().eval(), their_gpt().eval()
    twins(ours, theirs, GPT_NAMES)
    tokens = random_tokens()
    shifted = F.pad(tokens[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(ours(tokens, shifted).float(), theirs(tokens, labels=tokens).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("norm", "config", "model", "names"),
    [
        ("post", BertConfig, BertForPreTraining, BERT_NAMES),
        ("pre", MegatronBertConfig, MegatronBertForPreTraining, MEGATRON_NAMES),
    ],
    ids=["post", "pre"],
)
def test_bert_loss_and_gradients_are_hugging_face_s(norm, config, model, names, train):
    ours, theirs = our_bert(norm).train(train), their_bert(model, config).train(train)
    twins(ours, theirs, names)
    tokens, labels, types = random_tokens(), some_ignored(random_tokens(SIZES.vocab - 1)), random_tokens(2)
    mask = (torch.arange(SEQ) < torch.tensor([[SEQ], [4], [7], [1]])).long()
    order = torch.tensor([0, 1, 1, 0])
    torch.manual_seed(1)
    loss = ours(tokens, types, mask, labels, order)
    torch.manual_seed(1)  # in train mode the same dropout, draw for draw
    named = {"token_type_ids": types, "attention_mask": mask, "labels": labels, "next_sentence_label": order}
    expected = theirs(tokens, **named).loss
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward(), expected.backward()
    assert_same_gradients(ours, theirs, names)


def test_bert_without_optional_arguments_is_hugging_face_s():
    ours, theirs = our_bert("post").eval(), their_bert(BertForPreTraining, BertConfig).eval()
    twins(ours, theirs, BERT_NAMES)
    expected = theirs(random_tokens())
    mlm, nsp = ours(random_tokens())
    torch.testing.assert_close(mlm, expected.prediction_logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(nsp, expected.seq_relationship_logits, rtol=1e-10, atol=1e-12)


def test_bert_masked_tokens_alone_are_the_loss_without_next_sentence():
    model, labels = our_bert("post").eval(), some_ignored(random_tokens())
    mlm, _ = model(random_tokens())
    expected = F.cross_entropy(mlm.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model(random_tokens(), labels=labels), expected)


# --- what every model has

MODELS = [
    pytest.param(our_gpt, id="gpt"),
    pytest.param(lambda: our_bert("post"), id="bert-post"),
    pytest.param(lambda: our_bert("pre"), id="bert-pre"),
]


def test_models_without_labels_return_logits():
    assert our_gpt()(random_tokens()).shape == (BATCH, SEQ, SIZES.vocab)
    mlm, nsp = our_bert("pre")(random_tokens())
    assert (mlm.shape, nsp.shape) == ((BATCH, SEQ, SIZES.vocab), (BATCH, 2))


@pytest.mark.parametrize("build", MODELS)
def test_dummy_inputs_reach_every_parameter(build: Callable[[], nn.Module]):
    model = build()
    assert all(min(value.shape) > 1 for value in model.dummy_inputs.values())
    loss = model(**model.dummy_inputs)
    loss.backward()
    assert loss.shape == () and loss.isfinite()
    assert all(parameter.grad.any() for name, parameter in model.named_parameters() if not name.endswith("key.bias"))


@pytest.mark.parametrize("build", MODELS)
def test_dummy_inputs_of_a_meta_model_are_the_same_on_the_cpu(build: Callable[[], nn.Module]):
    with torch.device("meta"):
        model = build()
    inputs = model.dummy_inputs
    assert {value.device.type for value in inputs.values()} == {"cpu"}
    torch.testing.assert_close(inputs, build().dummy_inputs, rtol=0, atol=0)


@pytest.mark.parametrize("build", MODELS)
def test_dummy_inputs_draw_no_random_numbers(build: Callable[[], nn.Module]):
    model = build()
    before = torch.get_rng_state()
    assert model.dummy_inputs
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("build", MODELS)
def test_init_weights_fills_only_a_module_s_own_parameters(build: Callable[[], nn.Module]):
    model = build()
    assert not list(model.buffers())
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    for module in model.modules():
        own, others = dict(module.named_parameters(recurse=False)), {id(p): p.clone() for p in model.parameters()}
        assert not own or hasattr(module, "reset_parameters")
        model._init_weights(module)
        for name, parameter in model.named_parameters():
            if any(parameter is mine for mine in own.values()):
                assert parameter.isfinite().all(), name
            else:
                torch.testing.assert_close(parameter, others[id(parameter)], rtol=0, atol=0, equal_nan=True)


def stds(model: nn.Module, ends: str) -> list[float]:
    return [p.std().item() for name, p in model.named_parameters() if re.search(ends, name)]


def test_projections_into_the_residual_stream_start_smaller():
    small = 0.02 / math.sqrt(2 * 2)
    of_gpt = GPT(GPTConfig(64, 500, n_layer=2, n_head=2, n_embd=128))
    assert stds(of_gpt, r"c_proj.weight$") == pytest.approx([small] * 4, rel=0.05)
    assert stds(of_gpt, r"(wte|wpe|c_attn|c_fc).weight$") == pytest.approx([0.02] * 6, rel=0.05)
    for norm, expected in (("pre", small), ("post", 0.02)):
        of_bert = BERT(BERTConfig(64, 500, n_layer=2, n_head=2, n_embd=128, norm=norm))
        assert stds(of_bert, r"output.weight$") == pytest.approx([expected] * 4, rel=0.05)
        assert stds(of_bert, r"(word|query|key|value|transform|pooler).weight$") == pytest.approx([0.02] * 9, rel=0.05)


def test_models_import_nothing_of_autotp():
    sources = {Path(module.__file__).parent for module in (gpt, bert)}
    files = [file for folder in sources for file in folder.glob("*.py")]
    assert len(files) == 4
    assert not [file.name for file in files if re.search(r"(import|from) autotp", file.read_text())]


# --- GPT alone


def test_gpt_without_bias_has_none():
    model = GPT(GPTConfig(SIZES.block, SIZES.vocab, 1, 3, 12, bias=False))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model(**model.dummy_inputs).isfinite()


def test_generate_continues_with_the_most_likely():
    model, tokens = our_gpt().eval(), random_tokens()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # a model that does not say the same at every position
    text = model.generate(tokens, 5, top_k=1)  # longer than the block: 9 + 5 > 11
    assert torch.equal(text[:, :SEQ], tokens)
    for end in range(SEQ, SEQ + 5):
        assert torch.equal(text[:, end], model(text[:, max(0, end - SIZES.block) : end])[:, -1].argmax(-1))


def test_generate_draws_from_the_logits():
    class Certain(GPT):
        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
            """Logits by which 0 and 1 are 1 : 3 likely at temperature 1/2."""
            return torch.tensor([0.0, math.log(3) / 2, -99.0]).expand(*tokens.shape, 3)

    torch.manual_seed(0)
    drawn = Certain(GPTConfig(4, 3, 1, 1, 4)).generate(torch.zeros(1000, 1, dtype=torch.int64), 4, temperature=0.5)
    assert drawn[:, 1:].float().mean().item() == pytest.approx(0.75, abs=0.02)


# --- the published sizes


def count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("355M", 354_823_168),
        ("1.2B", 1_212_031_488),
        ("2.5B", 2_488_598_400),
        ("4.2B", 4_196_936_448),
        ("8.3B", 8_314_143_744),
    ],
)
def test_gpt_sizes_have_published_parameter_counts(size, parameters):
    with torch.device("meta"):
        assert count(GPT(GPT_SIZES[size])) == parameters
    assert rounded(parameters) == size


@pytest.mark.parametrize(
    ("size", "parameters", "heads"),
    [
        ("334M", 336_226_108, 2_133_820),
        ("1.3B", 1_280_595_772, 8_431_420),
        ("3.9B", 3_869_081_404, 13_153_084),
    ],
)
def test_bert_sizes_have_published_parameter_counts(size, parameters, heads):
    with torch.device("meta"):
        model = BERT(BERT_SIZES[size])
    assert (count(model), count(model.mlm, model.pooler, model.nsp)) == (parameters, heads)
    assert rounded(parameters - heads) == size


def rounded(parameters: int) -> str:
    """As the paper writes it."""
    return f"{parameters / 1e6:.0f}M" if parameters < 1e9 else f"{parameters / 1e9:.1f}B"


def test_published_sizes_are_all_listed():
    assert [*GPT_SIZES] == ["355M", "1.2B", "2.5B", "4.2B", "8.3B"]
    assert [*BERT_SIZES] == ["334M", "1.3B", "3.9B"]


TABLE_1 = {
    "1.7B": (24, 2304, 24), "3.6B": (32, 3072, 30), "7.5B": (32, 4096, 36), "18.4B": (48, 6144, 40),
    "39.1B": (64, 8192, 48), "76.1B": (80, 10240, 60), "145.6B": (96, 12288, 80), "310.1B": (128, 16384, 96),
    "529.6B": (128, 20480, 105), "1008B": (160, 25600, 128),
}  # fmt: skip
"""Narayanan et al. 2021: size -> (attention heads, hidden size, layers)."""


def test_gpt_sizes_of_2021_are_those_of_the_table() -> None:
    sizes = {name: (config.n_head, config.n_embd, config.n_layer) for name, config in GPT_SIZES_2021.items()}
    assert sizes == TABLE_1
    assert {(config.block_size, config.vocab_size) for config in GPT_SIZES_2021.values()} == {(2048, 51200)}


@pytest.mark.parametrize("size", TABLE_1)
def test_gpt_sizes_of_2021_have_rounded_parameter_counts(size: str) -> None:
    """Table 1 has them rounded."""
    with torch.device("meta"):
        assert round(count(GPT(GPT_SIZES_2021[size])) / 1e9, 1) == float(size.removesuffix("B"))


# --- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GPTConfig(n_embd=10, n_head=3), "GPTConfig: n_embd=10 is not a multiple of n_head=3"),
        (lambda: BERTConfig(n_embd=10, n_head=3), "BERTConfig: n_embd=10 is not a multiple of n_head=3"),
        (lambda: BERTConfig(norm="rms"), 'BERTConfig: norm=\'rms\' is neither "post" nor "pre"'),
        (
            lambda: our_gpt()(torch.zeros(1, 12, dtype=torch.int64)),
            "GPT: a sequence of 12 tokens is longer than block_size=11",
        ),
        (
            lambda: our_bert("pre")(torch.zeros(1, 12, dtype=torch.int64)),
            "BERT: a sequence of 12 tokens is longer than block_size=11",
        ),
    ],
    ids=["gpt-heads", "bert-heads", "bert-norm", "gpt-long", "bert-long"],
)
def test_models_refuse_bad_sizes_and_long_sequences(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
