"""Random transformers: the ordinary spellings of attention, MLP, norm, position, mask and loss, in every combination.

`architectures()` draws an `Architecture`; `transformer.py` is its network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


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
