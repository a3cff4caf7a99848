"""Random transformers: the ordinary spellings of attention, MLP, norm, position, mask and loss, in every combination.

`architectures()` draws an `Architecture`; `model()` makes its network, which knows nothing of autotp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """What a model is made of; the defaults are a small GPT-2 in training."""

    layers: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 4
    hidden: int = 16
    width: int = 32  # of the MLP
    vocab: int = 23
    linear: str = "linear"  # conv1d: weight transposed; bare: F.linear; matmul, einsum: a parameter and an operator
    activation: str = "gelu"
    gate: str = "none"  # separate: gate and up; chunk, interleaved: one weight for both
    qkv: str = "split"
    qk_norm: str = "none"  # head: over head_dim; full: over all heads
    bias: bool = True  # of the linears in the blocks
    norm: str = "layer"
    norm_bias: bool = True
    order: str = "pre"  # where the norms stand: before a branch, or after its addition
    residual: str = "serial"  # parallel: both branches read one norm; two_norms: each its own
    positions: str = "learned"
    mask: str = "causal"
    additive: bool = False  # a mask of floats that is added, rather than one of bools
    attention: str = "sdpa"
    repeat: str = "expand"  # how keys and values are repeated for the queries of their group
    dropout: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the embedding, the attention, the residual
    tied: bool = True
    head_bias: bool = False
    loss: str = "cross_entropy"
    shift: str = "none"  # slice: logits[:-1] against labels[1:]; pad: a missing label at the end
    ignore: bool = False  # some labels are -100
    smoothing: float = 0.0
    reduction: str = "mean"
    weighted: bool = False  # by class
    logits: bool = False  # returned beside the loss
    train: bool = True


ONE_HEAD_EACH = ("three", "per_head", "per_head_select", "module")
"""Layouts of fused QKV with as many key as query heads."""


CHOICES: dict[str, tuple[Any, ...]] = {
    "layers": (1, 1, 1, 1, 2, 3),
    "linear": ("linear", "linear", "conv1d", "bare", "matmul", "einsum"),
    "activation": ("gelu", "gelu_tanh", "gelu_by_hand", "relu", "relu2", "silu", "silu_by_hand", "tanh"),
    "gate": ("none", "none", "separate", "chunk", "interleaved"),
    "qk_norm": ("none", "none", "head", "full"),
    "bias": (True, False),
    "norm": ("layer", "rms", "layer_by_hand", "rms_by_hand"),
    "norm_bias": (True, False),
    "order": ("pre", "post"),
    "residual": ("serial", "serial", "parallel", "two_norms"),
    "positions": ("learned", "none", "rotary", "rotary_pairs", "alibi", "relative"),
    "mask": ("none", "causal", "padding", "both"),
    "additive": (False, True),
    "attention": ("sdpa", "sdpa", "sdpa_gqa", "eager", "einsum", "grouped", "bmm"),
    "repeat": ("expand", "repeat_interleave"),
    "tied": (True, False),
    "head_bias": (False, True),
    "loss": ("none", "cross_entropy", "transposed", "nll", "gather", "logsumexp"),
    "shift": ("none", "slice", "pad"),
    "ignore": (False, True),
    "smoothing": (0.0, 0.1),
    "reduction": ("mean", "mean", "sum"),
    "weighted": (False, False, True),
    "logits": (False, True),
    "train": (True, True, False),
}
"""What each part may be; more often what stands twice."""


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Any architecture that is a legal model."""
    qkv = draw(st.sampled_from(("separate", "split", "slice", "per_group", "per_group_index", *ONE_HEAD_EACH)))
    parts = {name: draw(st.sampled_from(values)) for name, values in (CHOICES | _without(qkv)).items()}
    if parts["loss"] not in ("cross_entropy", "transposed"):
        parts["smoothing"] = 0.0
        parts["weighted"] = parts["weighted"] and parts["loss"] == "nll"
    dropout = tuple(draw(st.sampled_from((0.0, 0.1))) for _ in range(3))
    return Architecture(qkv=qkv, dropout=dropout, **draw(_sizes(qkv, parts["positions"])), **parts)


def _without(qkv: str) -> dict[str, tuple[str, ...]]:
    """Fewer choices, where attention is torch's own module."""
    return {"positions": ("learned", "none"), "qk_norm": ("none",)} if qkv == "module" else {}


@st.composite
def _sizes(draw: st.DrawFn, qkv: str, positions: str) -> dict[str, int]:
    def some(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    heads = some(1, 8)
    divisors = [n for n in range(heads, 0, -1) if heads % n == 0]
    head_dim = 2 * some(1, 4) if positions.startswith("rotary") else some(2, 6)
    whole = qkv == "module" or draw(st.booleans())
    return {
        "heads": heads,
        "kv_heads": heads if qkv in ONE_HEAD_EACH else draw(st.sampled_from(divisors)),
        "head_dim": head_dim,
        "hidden": heads * head_dim if whole else some(3, 24),
        "width": draw(st.sampled_from((32, 68)) | st.integers(1, 40)),
        "vocab": some(7, 97),
    }


# ---- the network


SEQ = 8  # the longest sequence
BUCKETS = 5  # of a relative position


def arguments(arch: Architecture, batch: int = 2, seq: int = 5) -> dict[str, Tensor]:
    """Keyword arguments for `Model(arch)`: tokens, and the labels and the padding mask that it wants."""
    given = {"tokens": torch.arange(batch * seq).mul(7).remainder(arch.vocab).view(batch, seq)}
    if arch.loss != "none":
        given["labels"] = given["tokens"].mul(3).add(1).remainder(arch.vocab)
        if arch.ignore:
            given["labels"][0, 1] = given["labels"][-1, -1] = -100
    if arch.mask in ("padding", "both"):
        given["padding"] = torch.ones(batch, seq, dtype=torch.int64)
        given["padding"][-1, seq - 2 :] = 0
    return given


def model(arch: Architecture) -> Model:
    """The model in its mode, every parameter random: a bias of 0 or a norm's weight of 1 would hide a bug."""
    torch.manual_seed(0)
    made = Model(arch).train(arch.train)
    for p in made.parameters():
        nn.init.normal_(p, std=0.4)
    return made


# ---- the parts


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_by_hand": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "silu_by_hand": lambda x: x * torch.sigmoid(x),
    "tanh": torch.tanh,
}


class Weight(nn.Module):
    """A linear in the spellings that are no nn.Linear."""

    def __init__(self, ins: int, outs: int, bias: bool, kind: str) -> None:
        super().__init__()
        self.kind, self.outs = kind, outs
        self.weight = nn.Parameter(torch.empty((ins, outs) if kind in ("conv1d", "matmul") else (outs, ins)))
        self.bias = nn.Parameter(torch.empty(outs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bare":
            return F.linear(x, self.weight, self.bias)
        if self.kind == "conv1d" and self.bias is not None:  # As in Hugging Face's GPT-2.
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.outs)
        found = torch.einsum("bsi,oi->bso", x, self.weight) if self.kind == "einsum" else x @ self.weight
        return found if self.bias is None else found + self.bias


def linear(arch: Architecture, ins: int, outs: int) -> nn.Module:
    return nn.Linear(ins, outs, arch.bias) if arch.linear == "linear" else Weight(ins, outs, arch.bias, arch.linear)


class Norm(nn.Module):
    """A norm written out: of layers, or root mean square."""

    def __init__(self, size: int, centred: bool, bias: bool) -> None:
        super().__init__()
        self.centred = centred
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias and centred else None

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        if self.centred:
            h = (h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5)
        else:
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = self.weight * h.to(x.dtype)
        return h if self.bias is None else h + self.bias


def norm(arch: Architecture, size: int) -> nn.Module:
    match arch.norm:
        case "layer":
            return nn.LayerNorm(size, bias=arch.norm_bias)
        case "rms":
            return nn.RMSNorm(size, eps=1e-6)
        case kind:
            return Norm(size, kind == "layer_by_hand", arch.norm_bias)


class MLP(nn.Module):
    """linear -> activation -> linear, gated or not."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate, self.act = arch.gate, ACTIVATIONS[arch.activation]
        fused = arch.gate in ("chunk", "interleaved")
        self.up = linear(arch, arch.hidden, arch.width * (2 if fused else 1))
        self.gated = linear(arch, arch.hidden, arch.width) if arch.gate == "separate" else None
        self.down = linear(arch, arch.width, arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)  # [batch seq width], or twice as wide
        if self.gate == "none":
            return self.down(self.act(h))
        if self.gated is not None:
            return self.down(self.act(self.gated(x)) * h)
        gate, up = h.chunk(2, -1) if self.gate == "chunk" else (h[..., ::2], h[..., 1::2])
        return self.down(self.act(gate) * up)


class QKV(nn.Module):
    """Queries [batch heads seq head_dim], keys and values [batch kv_heads seq head_dim], from one weight or three."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        sizes = [arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.kv_heads * arch.head_dim]
        if arch.qkv == "separate":
            self.q, self.k, self.v = (linear(arch, arch.hidden, size) for size in sizes)
        else:
            self.qkv = linear(arch, arch.hidden, sum(sizes))
        if arch.qk_norm != "none":
            self.q_norm, self.k_norm = (norm(arch, n if arch.qk_norm == "full" else arch.head_dim) for n in sizes[:2])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._projected(x)
        if self.arch.qk_norm == "full":
            q, k = (n(y.flatten(2)).view(y.shape) for n, y in ((self.q_norm, q), (self.k_norm, k)))
        if self.arch.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [batch seq heads head_dim]."""
        h, n, d = self.arch.heads, self.arch.kv_heads, self.arch.head_dim
        if self.arch.qkv == "separate":
            return tuple(y.view(*x.shape[:2], -1, d) for y in (self.q(x), self.k(x), self.v(x)))  # type: ignore[return-value]
        y = self.qkv(x)
        shape = x.shape[:2]
        match self.arch.qkv:
            case "split":  # q | k | v, as GPT-2
                return tuple(part.view(*shape, -1, d) for part in y.split([h * d, n * d, n * d], -1))  # type: ignore[return-value]
            case "slice":
                parts = y[..., : h * d], y[..., h * d : (h + n) * d], y[..., (h + n) * d :]
                return tuple(part.reshape(*shape, -1, d) for part in parts)  # type: ignore[return-value]
            case "three":  # as ViT
                return y.view(*shape, 3, h, d).permute(2, 0, 1, 3, 4).unbind(0)  # type: ignore[return-value]
            case "per_head":  # heads x (q | k | v), as GPT-NeoX
                return y.view(*shape, h, 3 * d).chunk(3, -1)  # type: ignore[return-value]
            case "per_head_select":  # as BLOOM
                y = y.view(*shape, h, 3, d)
                return y[..., 0, :], y[..., 1, :], y[..., 2, :]
            case "per_group":  # kv_heads x (queries | k | v)
                parts = y.view(*shape, n, h // n + 2, d).split([h // n, 1, 1], 3)
                return tuple(part.flatten(2, 3) for part in parts)  # type: ignore[return-value]
            case _:  # as Falcon
                y = y.view(*shape, n, -1, d)
                return y[..., :-2, :].flatten(2, 3), y[..., [-2], :].flatten(2, 3), y[..., [-1], :].flatten(2, 3)


class Attention(nn.Module):
    """QKV -> attention -> projection."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch, self.p = arch, arch.dropout[1]
        self.qkv = QKV(arch)
        self.out = linear(arch, arch.heads * arch.head_dim, arch.hidden)

    def forward(self, x: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        """bias: [1|batch 1|heads 1|seq seq] of bools or floats"""
        q, k, v = self.qkv(x)
        if self.arch.positions.startswith("rotary"):
            q, k = (rotated(y, self.arch.positions == "rotary_pairs") for y in (q, k))
        if self.arch.attention == "sdpa_gqa":
            p = self.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, bias, p, causal, enable_gqa=True)
        elif self.arch.attention == "grouped":
            y = self._grouped(q, k, v, bias)
        else:
            k, v = (repeated(y, self.arch.heads // self.arch.kv_heads, self.arch.repeat) for y in (k, v))
            y = self._attention(q, k, v, bias, causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        match self.arch.attention:
            case "sdpa":
                return F.scaled_dot_product_attention(q, k, v, bias, self.p if self.training else 0.0, causal)
            case "eager":
                return self._weights(q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)), bias) @ v
            case "einsum":
                scores = torch.einsum("bhsd,bhtd->bhst", q, k) * q.size(-1) ** -0.5
                return torch.einsum("bhst,bhtd->bhsd", self._weights(scores, bias), v)
            case _:  # as OPT and BLOOM
                shape = q.shape
                q, k, v = (y.reshape(-1, *y.shape[2:]) for y in (q * q.size(-1) ** -0.5, k, v))
                scores = torch.bmm(q, k.transpose(1, 2)).view(*shape[:2], shape[2], shape[2])
                return torch.bmm(self._weights(scores, bias).view(-1, shape[2], shape[2]), v).view(shape)

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Eager attention, the queries of a group beside each other."""
        grouped = q.unflatten(1, (self.arch.kv_heads, -1))  # [batch kv_heads group seq head_dim]
        scores = grouped @ k.unsqueeze(2).transpose(-1, -2) / math.sqrt(q.size(-1))
        weights = self._weights(scores.flatten(1, 2), bias).unflatten(1, (self.arch.kv_heads, -1))
        return (weights @ v.unsqueeze(2)).flatten(1, 2)

    def _weights(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        return F.dropout(weights, self.p, self.training)


def rotated(x: Tensor, pairs: bool) -> Tensor:
    """Rotary positions (Su et al. 2021): halves as in Llama, or neighbours as in GPT-J. x: [batch heads seq dim]"""
    dim = x.size(-1)
    rate = 1 / 10 ** (torch.arange(0, dim, 2, device=x.device) / dim)
    angle = torch.outer(torch.arange(x.size(2), device=x.device), rate).to(x.dtype)  # [seq dim/2]
    if pairs:
        even, odd, angle = x[..., ::2], x[..., 1::2], angle.repeat_interleave(2, -1)
        turned = torch.stack((-odd, even), -1).flatten(-2)
    else:
        half, angle = dim // 2, torch.cat((angle, angle), -1)
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * angle.cos() + turned * angle.sin()


def repeated(x: Tensor, times: int, how: str) -> Tensor:
    """Each key head `times` times. x: [batch kv_heads seq dim] -> [batch heads seq dim]"""
    if times == 1:
        return x
    if how == "repeat_interleave":
        return x.repeat_interleave(times, 1)
    b, n, s, d = x.shape
    return x[:, :, None].expand(b, n, times, s, d).reshape(b, n * times, s, d)


class Module(nn.Module):
    """Attention as torch's own module."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(arch.hidden, arch.heads, arch.dropout[1], arch.bias, batch_first=True)
        self.weights = arch.attention in ("eager", "einsum", "bmm")

    def forward(self, x: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        if causal:
            bias = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril()
        if bias is not None:
            bias = ~bias if bias.dtype == torch.bool else bias  # Here true is what is left out.
            if bias.dim() == 4:  # [batch 1 1|seq seq]: one for each head here
                heads = self.attention.num_heads
                bias = bias.expand(x.size(0), heads, x.size(1), x.size(1)).reshape(-1, x.size(1), x.size(1))
        return self.attention(x, x, x, need_weights=self.weights, attn_mask=bias)[0]


class Block(nn.Module):
    """One layer."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.norm_1 = norm(arch, arch.hidden)
        self.attention = Module(arch) if arch.qkv == "module" else Attention(arch)
        self.norm_2 = norm(arch, arch.hidden) if arch.residual != "parallel" else None
        self.mlp = MLP(arch)
        self.dropout = nn.Dropout(arch.dropout[2])

    def forward(self, x: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        """x and the result: [batch seq hidden]"""
        pre = self.arch.order == "pre"
        if self.arch.residual == "serial":
            x = x + self.dropout(self.attention(self.norm_1(x) if pre else x, bias, causal))
            x = x if pre else self.norm_1(x)
            x = x + self.dropout(self.mlp(self.norm_2(x) if pre else x))  # type: ignore[misc]
            return x if pre else self.norm_2(x)  # type: ignore[misc]
        y = self.norm_1(x)
        z = y if self.norm_2 is None else self.norm_2(x)
        return x + self.dropout(self.attention(y, bias, causal)) + self.dropout(self.mlp(z))


class Model(nn.Module):
    """The language model: logits [batch seq vocab], the loss, or both."""

    slopes: Tensor
    classes: Tensor

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.tokens = nn.Embedding(arch.vocab, arch.hidden)
        if arch.positions == "learned":
            self.places = nn.Embedding(SEQ, arch.hidden)
        if arch.positions == "relative":
            self.distances = nn.Embedding(BUCKETS, arch.heads)
        self.register_buffer("slopes", torch.linspace(0.1, 0.9, arch.heads))
        self.register_buffer("classes", torch.linspace(0.5, 1.5, arch.vocab))
        self.blocks = nn.ModuleList(Block(arch) for _ in range(arch.layers))
        self.norm = norm(arch, arch.hidden)
        self.head = nn.Linear(arch.hidden, arch.vocab, bias=arch.head_bias)
        if arch.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, padding: Tensor | None = None) -> Any:
        """tokens, labels: [batch seq]; padding: [batch seq], 1 for a token that is there."""
        x = self.tokens(tokens)
        place = torch.arange(tokens.size(1), device=tokens.device)
        if self.arch.positions == "learned":
            x = x + self.places(place)
        x = F.dropout(x, self.arch.dropout[0], self.training)
        bias, causal = self._bias(place, padding, x.dtype)
        for block in self.blocks:
            x = block(x, bias, causal)
        logits = self.head(self.norm(x) if self.arch.order == "pre" else x)
        if labels is None:
            return logits
        loss = self._loss(logits, labels)
        return (loss, logits) if self.arch.logits else loss

    def _bias(self, place: Tensor, padding: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        """The mask and the positions' bias, or whether attention is merely causal."""
        apart = place[None, :] - place[:, None]  # [seq seq]
        allowed = apart <= 0 if self.arch.mask in ("causal", "both") else None
        positions = None
        if self.arch.positions == "alibi":  # Press et al. 2021
            positions = (self.slopes[:, None, None] * apart).to(dtype)[None]
        if self.arch.positions == "relative":  # as T5
            positions = self.distances(apart.clamp(-2, 2) + 2).permute(2, 0, 1)[None]
        if padding is not None:
            there = padding[:, None, None, :] > 0
            allowed = there if allowed is None else allowed & there
        elif positions is None and self.arch.attention.startswith("sdpa"):
            return None, allowed is not None
        if allowed is None or (positions is None and not self.arch.additive):
            return positions if allowed is None else allowed, False
        added = torch.zeros(allowed.shape, dtype=dtype, device=place.device).masked_fill(~allowed, -1e4)
        return added if positions is None else positions + added, False

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.arch.shift == "slice":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.arch.shift == "pad":
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        weight = self.classes if self.arch.weighted else None
        how: dict[str, Any] = {"weight": weight, "reduction": self.arch.reduction}
        match self.arch.loss:
            case "cross_entropy":
                flat = logits.reshape(-1, logits.size(-1)), labels.reshape(-1)
                return F.cross_entropy(*flat, label_smoothing=self.arch.smoothing, **how)
            case "transposed":
                return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=self.arch.smoothing, **how)
            case "nll":
                return F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), labels.flatten(), **how)
            case _:
                return self._loss_by_hand(logits, labels)

    def _loss_by_hand(self, logits: Tensor, labels: Tensor) -> Tensor:
        kept = labels != -100
        at = labels.clamp(min=0).unsqueeze(-1)
        if self.arch.loss == "gather":
            losses = -logits.log_softmax(-1).gather(-1, at).squeeze(-1)
        else:
            losses = logits.logsumexp(-1) - logits.gather(-1, at).squeeze(-1)
        total = (losses * kept).sum()
        return total / kept.sum() if self.arch.reduction == "mean" else total
