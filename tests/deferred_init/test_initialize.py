"""initialize: the shards of a model built on meta are those of the model built whole, bit for bit."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from initialisers import MODELS, Language, Make
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.deferred_init.initialize import initialize
from autotp.models.gpt import GPT, GPTConfig
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds

CPU = torch.device("cpu")


@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MODELS.items()])
def test_as_built_whole(make: Make, tp: int) -> None:
    check(make, tp)


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
def test_hugging_face_as_built_whole(name: str) -> None:
    check(lambda: hugging_face(name, **HUGGING_FACE[name]), 3)


def check(make: Make, tp: int) -> None:
    """Each rank's shards, whole tensors, and the random state afterwards, against the model built whole."""
    torch.manual_seed(5)
    whole = make()
    after = torch.get_rng_state()
    model = on_meta(make)
    before = {name: id(t) for name, t in tensors_of(model, remove_duplicate=False)}
    layouts = {name: cut(p, i % p.dim(), tp) for i, (name, p) in enumerate(model.named_parameters()) if p.dim()}
    for rank in range(tp):
        torch.manual_seed(5)
        got = initialize(model, layouts, rank, CPU)
        assert torch.equal(torch.get_rng_state(), after)
        want = {name: layouts[name].take(t, rank) if name in layouts else t for name, t in tensors_of(whole)}
        assert got.keys() == want.keys()
        assert [name for name in want if not same(want[name], got[name])] == []
    assert {name: id(t) for name, t in tensors_of(model, remove_duplicate=False)} == before
    assert all(t.is_meta for _, t in tensors_of(model))


def on_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make()


def tensors_of(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    yield from model.named_buffers(remove_duplicate=remove_duplicate)


def cut(tensor: Tensor, dim: int, tp: int) -> Layout:
    n = tensor.shape[dim]
    return Layout(tuple(tensor.shape), dim, tuple(((chunk_bounds(n, tp, rank)),) for rank in range(tp)), "n")


def same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


# ---- what else it keeps to


def test_fused_weight_is_cut_in_pieces() -> None:
    layout = Layout((12, 4), 0, (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))), "(q | k | v)")
    torch.manual_seed(1)
    whole = nn.Linear(4, 12)
    torch.manual_seed(1)
    got = initialize(on_meta(lambda: nn.Linear(4, 12)), {"weight": layout}, 1, CPU)
    assert torch.equal(got["weight"], whole.weight[[2, 3, 6, 7, 10, 11]])
    assert torch.equal(got["bias"], whole.bias)


def test_what_is_not_on_meta_keeps_its_value() -> None:
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


def test_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check(MODELS["gpt"], 2)
    finally:
        torch.set_default_dtype(before)


# ---- memory


class Live(TorchDispatchMode):
    """The bytes of the floating tensors on the CPU that live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: Counter[int] = Counter()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.device == CPU and x.is_floating_point():
                self._hold(x)
        self.peak = max(self.peak, self.bytes)
        return result

    def _hold(self, x: Tensor) -> None:
        key, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
        self.bytes += 0 if self.holders[key] else size
        self.holders[key] += 1
        weakref.finalize(x, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        self.bytes -= 0 if self.holders[key] else size


def bytes_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


MEMORY: dict[str, tuple[Make, int]] = {  # with the bytes of what lives beside the shards
    "gpt": (lambda: GPT(GPTConfig(64, 1000, n_layer=3, n_head=2, n_embd=64)), 4 * 1000 * 64),
    "all-at-once": (lambda: nn.Transformer(64, 2, 2, 2, 128, batch_first=True), 4 * 3 * 64 * (64 + 1)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_peak_memory_is_the_shards_and_one_module(name: str) -> None:
    make, largest = MEMORY[name]
    model = on_meta(make)
    layouts = {name: cut(p, 0, 4) for name, p in model.named_parameters()}
    with Live() as live:
        got = initialize(model, layouts, 0, CPU)
    shards = bytes_of(got.values())
    assert live.bytes == shards
    assert shards < live.peak <= shards + largest + 256
    assert bytes_of(model.parameters()) > 1.5 * (shards + largest)


# ---- what it refuses


class Bare(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))


class Rope(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(dim) / dim)


class Token(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.token = nn.Parameter(torch.randn(size))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.normal_(self.token)


class Afterwards(nn.Module):
    """nanoGPT's constructor: it scales some weights after applying `_init_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(3, 5), nn.Linear(5, 3)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.01)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class Half(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2].fill_(1)


class Back(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.a.weight.fill_(1)
        self.b.weight.fill_(1)
        self.a.weight.mul_(2)


class Unclear(Language):
    """The tie does not show in the source, and both ways give as many writes."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)
        setattr(self.head, "weight", self.embedding.weight)  # noqa: B010


class OnTheDevice(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise ValueError("no such device")
        super().reset_parameters()


ERRORS: dict[str, tuple[Make, str]] = {
    "parameter": (
        lambda: nn.Sequential(nn.Linear(2, 2), Bare(3)),
        """nothing initialises the parameter `1.scale`, whose values are lost on meta
  try      fill self.scale in Bare.reset_parameters(self) and call that in the constructor,
  or       in _init_weights(self, module) of the model, applied at the end of its constructor""",
    ),
    "buffer": (
        lambda: nn.Sequential(nn.Linear(2, 2), Rope(3)),
        """nothing initialises the buffer `1.angles`, whose values are lost on meta
  try      fill self.angles in Rope.reset_parameters(self) and call that in the constructor,
  or       in _init_weights(self, module) of the model, applied at the end of its constructor
  or else  make it with device="cpu": what is not on meta keeps its value""",
    ),
    "draws": (
        lambda: nn.Sequential(Token(3)),
        """the constructor of Token, `0`, draws random numbers itself: randn
  try      draw them in Token.reset_parameters(self), and call that in the constructor""",
    ),
    "afterwards": (
        Afterwards,
        """the constructors wrote `c_proj.weight` differently from its initialisers
  expected 2 writes: Linear.reset_parameters(), Afterwards._init_weights(Linear)
  got      3 writes
  try      fill self.weight in Linear.reset_parameters(self) and call that in the constructor,
  or       in _init_weights(self, module) of the model, applied at the end of its constructor""",
    ),
    "copy": (
        lambda: copy.deepcopy(nn.Linear(2, 3)),
        """the constructors wrote `weight` differently from its initialisers
  expected 1 writes: Linear.reset_parameters()
  got      0 writes
  try      the model built under torch.device("meta") itself, not a copy of it""",
    ),
    "part": (
        lambda: nn.Sequential(Half()),
        """Half.reset_parameters() leaves `0.weight` or a part of it empty
  try      fill self.weight in Half.reset_parameters(self) and call that in the constructor,
  or       in _init_weights(self, module) of the model, applied at the end of its constructor""",
    ),
    "back": (
        Back,
        """Back.reset_parameters() comes back to `a.weight` after another module's tensors
  try      initialise the modules one after the other""",
    ),
    "unclear-tie": (
        Unclear,
        """`embedding.weight` is tied to `head.weight`, and it is not clear which was initialised last
  try      tie them in the constructor that has both: self.head.weight = self.embedding.weight""",
    ),
    "fails": (OnTheDevice, "OnTheDevice.reset_parameters() failed on cpu: ValueError: no such device"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    make, message = ERRORS[name]
    model = on_meta(make)
    before = {name: id(t) for name, t in tensors_of(model, remove_duplicate=False)}
    with pytest.raises(autotp.Error) as error:
        initialize(model, {}, 0, CPU)
    assert str(error.value) == message
    assert {name: id(t) for name, t in tensors_of(model, remove_duplicate=False)} == before


def test_an_error_before_the_first_draw_leaves_the_random_state() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Bare(3)))
    before = torch.get_rng_state()
    with pytest.raises(autotp.Error):
        initialize(model, {}, 0, CPU)
    assert torch.equal(torch.get_rng_state(), before)
