"""Models for test_initialize: the ways in which constructors and `_init_weights` fill parameters, and tie them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig

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
