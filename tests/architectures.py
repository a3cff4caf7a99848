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


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Any architecture that is a legal model."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def some(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    qkv = one_of("separate", "split", "slice", "per_group", "per_group_index", *ONE_HEAD_EACH)
    heads = some(1, 8)
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    kv_heads = heads if qkv in ONE_HEAD_EACH else one_of(*reversed(divisors))
    module = qkv == "module"
    positions = one_of("learned", "none", *(() if module else ("rotary", "rotary_pairs", "alibi", "relative")))
    head_dim = 2 * some(1, 4) if positions.startswith("rotary") else some(2, 6)
    loss = one_of("none", "cross_entropy", "transposed", "nll", "gather", "logsumexp")
    classed = loss in ("cross_entropy", "transposed")
    return Architecture(
        layers=one_of(1, 1, 1, 1, 2, 3),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=heads * head_dim if module or one_of(True, False) else some(3, 24),
        width=one_of(32, 341 // 5, some(1, 40)),
        vocab=some(7, 97),
        linear=one_of("linear", "linear", "conv1d", "bare", "matmul", "einsum"),
        activation=one_of("gelu", "gelu_tanh", "gelu_by_hand", "relu", "relu2", "silu", "silu_by_hand", "tanh"),
        gate=one_of("none", "none", "separate", "chunk", "interleaved"),
        qkv=qkv,
        qk_norm="none" if module else one_of("none", "none", "head", "full"),
        bias=one_of(True, False),
        norm=one_of("layer", "rms", "layer_by_hand", "rms_by_hand"),
        norm_bias=one_of(True, False),
        order=one_of("pre", "post"),
        residual=one_of("serial", "serial", "parallel", "two_norms"),
        positions=positions,
        mask=one_of("none", "causal", "padding", "both"),
        additive=one_of(False, True),
        attention=one_of("sdpa", "sdpa", "sdpa_gqa", "eager", "einsum", "grouped", "bmm"),
        repeat=one_of("expand", "repeat_interleave"),
        dropout=(one_of(0.0, 0.1), one_of(0.0, 0.1), one_of(0.0, 0.1)),
        tied=one_of(True, False),
        head_bias=one_of(False, True),
        loss=loss,
        shift=one_of("none", "slice", "pad"),
        ignore=one_of(False, True),
        smoothing=one_of(0.0, 0.1) if classed else 0.0,
        reduction=one_of("mean", "mean", "sum"),
        weighted=one_of(False, False, True) if classed or loss == "nll" else False,
        logits=one_of(False, True),
        train=one_of(True, True, False),
    )
