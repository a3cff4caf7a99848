"""initialize: the shards of a model built on meta are those of the model built whole, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Scale, cut, expect_as_built_whole, on_meta
from torch import nn

from autotp.deferred_init.initialize import initialize
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig
from autotp.sharding.layout import Layout

CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


# ---- models without `_init_weights`


def layers() -> nn.Module:
    """One of each of torch's layers that draw, or that write what they do not draw."""
    return nn.Sequential(
        nn.Conv1d(3, 4, 2), nn.ConvTranspose2d(4, 3, 2), nn.BatchNorm1d(4), nn.Embedding(11, 3, padding_idx=1),
        nn.Linear(3, 7, bias=False), nn.PReLU(5), nn.LSTM(7, 3, 2), nn.GRUCell(3, 5), nn.Bilinear(2, 3, 4),
        nn.GroupNorm(2, 4), nn.RMSNorm(5), nn.LayerNorm(6), nn.EmbeddingBag(5, 3),
    )  # fmt: skip


def encoder() -> nn.Module:
    """Its layers are copies of one that is not in the model."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    return nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(8, 3))


class Shared(nn.Module):
    """One block that stands in two places, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 5))
        self.second = nn.Sequential(nn.Linear(5, 6), self.first)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.uniform_(module.weight)


# ---- models with `_init_weights`


class Pretrained(nn.Module):
    """Hugging Face's way: each module once, by the innermost model, and not on meta; then ties."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def post_init(self) -> None:
        if torch.get_default_device().type != "meta":
            self._walk(self, self)

    def _walk(self, module: nn.Module, owner: Pretrained) -> None:
        for child in module.children():
            self._walk(child, child if isinstance(child, Pretrained) else owner)
        owner._initialize_weights(module)

    def _initialize_weights(self, module: nn.Module) -> None:
        if not hasattr(module, "initialized"):
            self._init_weights(module)
            module.initialized = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.std)


class Encoder(Pretrained):
    """Leaves it to the model it is in to initialise it."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.linear = nn.Linear(4, 5)


class WithEncoder(Pretrained):
    def __init__(self) -> None:
        super().__init__(0.5)
        self.embedding = nn.Embedding(9, 4)
        self.encoder = Encoder()
        self.head = nn.Linear(4, 9)
        self.post_init()
        self.head.weight = self.embedding.weight


class Nested(nn.Module):
    """Two models in one, each of which initialises all below it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT(GPTConfig(block_size=9, vocab_size=13, n_layer=1, n_head=2, n_embd=6))
        self.out = nn.Linear(6, 5)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.trunc_normal_(module.weight)


MODELS: dict[str, Make] = {
    "gpt": lambda: GPT(GPTConfig(block_size=9, vocab_size=13, n_layer=2, n_head=2, n_embd=10)),
    "gpt-nobias": lambda: GPT(GPTConfig(block_size=9, vocab_size=13, n_layer=1, n_head=2, n_embd=10, bias=False)),
    "bert-post": lambda: BERT(BERTConfig(block_size=9, vocab_size=13, n_layer=2, n_head=2, n_embd=10)),
    "bert-pre": lambda: BERT(BERTConfig(block_size=9, vocab_size=13, n_layer=2, n_head=2, n_embd=10, norm="pre")),
    "layers": layers,
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=5, vdim=6),
    "encoder": encoder,
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2, nn.LayerNorm(8)),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "made-again": lambda: nn.Sequential(Scale(5, 0.3, True), nn.Linear(5, 3), Scale(7, 2.0, False)),
    "shared-module": Shared,
    "pretrained": WithEncoder,
    "pretrained-inside": lambda: nn.Sequential(nn.Linear(2, 3), WithEncoder()),
    "nested": Nested,
}


@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MODELS.items()])
def test_initialize_gives_shards_of_the_model_built_whole(make: Make, tp: int) -> None:
    expect_as_built_whole(make, tp)


def hugging_face(name: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes}
    return getattr(transformers, name)(getattr(transformers, name).config_class(**config))


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 31}


HUGGING_FACE: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 9, "vocab_size": 13},
    "BertForPreTraining": SMALL,
    "LlamaForCausalLM": SMALL,
    "Qwen3ForCausalLM": {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    "MixtralForCausalLM": {**SMALL, "num_local_experts": 2, "num_key_value_heads": 1},
    "AlbertForMaskedLM": {**SMALL, "embedding_size": 8},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    "ModernBertForMaskedLM": {**SMALL, "cls_token_id": 3, "sep_token_id": 4},
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_initialize_of_transformers_gives_shards_of_the_whole(name: str) -> None:
    expect_as_built_whole(lambda: hugging_face(name, **HUGGING_FACE[name]), 3)


def test_initialize_cuts_a_fused_weight_in_pieces() -> None:
    layout = Layout((12, 4), 0, (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))), "(q | k | v)")
    torch.manual_seed(1)
    whole = nn.Linear(4, 12)
    torch.manual_seed(1)
    got = initialize(on_meta(lambda: nn.Linear(4, 12)), {"weight": layout}, 1, CPU)
    assert torch.equal(got["weight"], whole.weight[[2, 3, 6, 7, 10, 11]])
    assert torch.equal(got["bias"], whole.bias)


def test_initialize_keeps_values_that_are_not_on_meta() -> None:
    class Table(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.register_buffer("table", torch.arange(4, device="cpu"), persistent=False)

    model = on_meta(Table)
    model.bias = nn.Parameter(torch.arange(4.0))
    torch.manual_seed(1)
    got = initialize(model, {"bias": cut(model.bias, 0, 2)}, 1, CPU)
    assert got["table"].tolist() == [0, 1, 2, 3]
    assert got["bias"].tolist() == [2, 3]
    assert model.table.device == model.bias.device == CPU


def test_initialize_follows_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        expect_as_built_whole(MODELS["gpt"], 2)
    finally:
        torch.set_default_dtype(before)
