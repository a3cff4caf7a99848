"""initialize: the shards of a model built on meta are those of the model built whole, bit for bit."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.deferred_init.initialize import initialize
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds

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


class Scale(nn.Module):
    """No initialiser of its own, but it can be made again from its attributes."""

    def __init__(self, size: int, std: float, bias: bool) -> None:
        super().__init__()
        self.size, self.std = size, std
        self.weight = nn.Parameter(std * torch.randn(size))
        self.bias = nn.Parameter(torch.ones(size)) if bias else None
        self.register_buffer("rank", torch.arange(size))


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


class PlainTie(nn.Module):
    """The head has the embedding's weight: a normal one, not the uniform one of a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight


class PlainTieBack(nn.Module):
    """The other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.embedding.weight = self.head.weight


# ---- models with `_init_weights`


class Language(nn.Module):
    """Ordinary parts; what a subclass ties and how it initialises them differs."""

    padding: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, self.padding)
        self.rnn = nn.LSTM(6, 6)
        self.head = nn.Linear(6, 11, bias=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Linear) else 0.5)


class TieBefore(Language):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.weight = self.head.weight
        self.apply(self._init_weights)


class TieBeforeBack(Language):
    """The head is initialised last, though the weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)


class TieAfter(Language):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)
        self.head.weight = self.embedding.weight


class TieAfterBack(Language):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)
        self.embedding.weight = self.head.weight


class TieAfterPadded(TieAfter):
    """As many writes as if the tie had been made before, of the head's weight."""

    padding = 3


class Data(TieBefore):
    """Writes through `.data`, which leaves no count."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02 if isinstance(module, nn.Linear) else 0.5)


class Parts(Language):
    """Writes some of the elements, and scales: what the constructor drew is needed again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6, 4))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        with torch.no_grad():
            if isinstance(module, nn.LSTM):
                module.bias_hh_l0[6:12] = 1.0
            if isinstance(module, nn.Embedding):
                module.weight.data[2].zero_()
            if isinstance(module, nn.Linear):
                module.weight.uniform_().mul_(2)
            if module is self:
                self.embedding.weight.div_(3)
                self.head.weight *= torch.rand((), device="cpu")
                for half in self.scale.chunk(2):
                    nn.init.xavier_normal_(half)


class All(nn.Module):
    """One initialiser for all below, in the manner of the annotated transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5))
        self.sizes = nn.ParameterList([torch.empty(n) for n in (2, 3)])
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.xavier_uniform_(p) if p.dim() > 1 else nn.init.normal_(p)


class PartsOfParts(nn.Module):
    """Parts of what one call wrote with others, and of what was made again."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.scale = All(), Scale(5, 2.0, True)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            with torch.no_grad():
                self.all.inner[0].weight[0] = 0
                self.all.inner[2].weight[0] = 0
                self.scale.weight[1:3] *= 2


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
        self.inner = TieBefore()
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
    "plain-tie": PlainTie,
    "plain-tie-back": PlainTieBack,
    "tie-before": TieBefore,
    "tie-before-back": TieBeforeBack,
    "tie-after": TieAfter,
    "tie-after-back": TieAfterBack,
    "tie-after-padded": TieAfterPadded,
    "data": Data,
    "parts": Parts,
    "all-at-once": All,
    "parts-of-parts": PartsOfParts,
    "pretrained": WithEncoder,
    "pretrained-inside": lambda: nn.Sequential(nn.Linear(2, 3), WithEncoder()),
    "nested": Nested,
}


# ---- each as it is built whole


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
  or else  make it with device="cpu": tensors that are not on meta keep their values""",
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
        """Back.reset_parameters() returns to `a.weight` after another module's tensors
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
