"""The table of operators: each family on calls made by hand, random shapes, and rules that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autotp
from autotp import Error
from autotp.call import Call
from autotp.families import fixed
from autotp.operators import RULES, SIZE_ARGUMENTS, USER_RULES, overloads, rule_of
from autotp.passes.axes import infer_axes
from autotp.prove import prove, prove_node
from autotp.rule import Rule

aten = torch.ops.aten
TP = (2, 3, 4)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def bools(*shape: int) -> Tensor:
    return ints(2, *shape).bool()


def problems(op: Any, *args: Any, **kwargs: Any) -> list[str]:
    return [problem for tp in TP for problem in prove(op, args, kwargs, tp)]


def printed(op: Any, *args: Any, **kwargs: Any) -> str:
    """The rule of a call, as it prints."""
    flat = [x for arg in [*args, *kwargs.values()] for x in (arg if isinstance(arg, list) else [arg])]
    names = [argument.name for argument in op._schema.arguments]
    defaults = {one.name: one.default_value for one in op._schema.arguments if one.has_default_value()}
    found = op(*args, **kwargs)
    outputs = tuple(found) if isinstance(found, list | tuple) else (found,)
    bound = defaults | dict(zip(names, args, strict=False)) | kwargs
    found_rule = rule_of(Call(op, bound, tuple(x for x in flat if isinstance(x, Tensor)), outputs))
    return "unknown" if found_rule is None else str(found_rule)


NAN, INF = float("nan"), float("inf")

CALLS: dict[str, tuple[Any, ...]] = {
    # pointwise
    "and": (aten.__and__.Tensor, bools(5, 3), bools(3)),
    "or": (aten.__or__.Scalar, ints(9, 5), 3),
    "xor": (aten.__xor__.Tensor, ints(9, 5), ints(9, 2, 1)),
    "lshift": (aten.__lshift__.Scalar, ints(9, 5), 2),
    "rshift": (aten.__rshift__.Tensor, ints(9, 5), ints(3, 5)),
    "add": (aten.add.Tensor, r(4, 5), r(5)),
    "add-number": (aten.add.Tensor, r(4, 5), 2.0),
    "sub-alpha": (aten.sub.Tensor, r(4, 5), r(4, 1), {"alpha": 3}),
    "rsub": (aten.rsub.Tensor, r(4), r(3, 1), {"alpha": 2}),
    "rsub-number": (aten.rsub.Scalar, r(4), 2.0),
    "mul": (aten.mul.Tensor, r(4, 5), r(5)),
    "mul-int": (aten.mul.Tensor, ints(5, 4), ints(7, 4)),
    "div": (aten.div.Tensor, r(4, 5), r(5)),
    "div-by": (aten.div.Tensor, 1.0, r(5)),
    "div-floor": (aten.div.Tensor_mode, r(4, 5), r(5), {"rounding_mode": "floor"}),
    "div-trunc": (aten.div.Scalar_mode, r(4, 5), 0.3, {"rounding_mode": "trunc"}),
    "div-true": (aten.div.Tensor_mode, r(4, 5), r(5), {"rounding_mode": None}),
    "where": (aten.where.self, bools(4, 5), r(5), r(4, 1)),
    "where-number": (aten.where.ScalarSelf, bools(4, 5), 1.0, r(4, 1)),
    "where-zero": (aten.where.ScalarOther, bools(4, 5), r(5), 0.0),
    "masked-fill": (aten.masked_fill.Scalar, r(4, 5), bools(5), -INF),
    "masked-fill-zero": (aten.masked_fill.Scalar, r(4, 5), bools(4, 1), 0),
    "masked-fill-tensor": (aten.masked_fill.Tensor, r(4, 5), bools(5), torch.tensor(2.0, dtype=torch.float64)),
    "softplus": (aten.softplus.default, r(7), 2.0, 0.5),
    "type-as": (aten.type_as.default, r(4, 5), r(3)),
    "type-as-cast": (aten.type_as.default, r(4, 5), ints(9, 3)),
    "to-copy": (aten._to_copy.default, r(4, 5), {"dtype": torch.float32}),
    "to-dtype": (aten.to.dtype, r(4, 5), torch.int64),
    "to-other": (aten.to.other, r(4, 5), r(2, 2)),
    "copy": (aten.copy.default, r(4, 5), r(5)),
    "copy-cast": (aten.copy.default, ints(9, 4, 5), r(5)),
    "fill": (aten.fill.Tensor, r(4, 5), torch.tensor(2.0, dtype=torch.float64)),
    "alias": (aten.alias.default, r(4)),
    "detach": (aten.detach.default, r(4)),
    "lift": (aten.lift.default, r(4)),
    "lift-fresh": (aten.lift_fresh.default, r(4)),
    "contiguous": (aten.contiguous.default, r(4, 5).t()),
    "conj": (aten.conj.default, torch.complex(r(5), r(5))),
    "scalar": (aten.exp.default, r()),
    "glu": (aten.glu.default, r(2, 8, 3), 1),
    "prelu": (aten.prelu.default, r(2, 5, 3), r(5)),
    "prelu-one": (aten.prelu.default, r(2, 5, 3), r(1)),
    "alpha-dropout-eval": (aten.alpha_dropout.default, r(4), 0.5, False),
    # contractions
    "linear": (aten.linear.default, r(2, 3, 7), r(5, 7)),
    "linear-bias": (aten.linear.default, r(2, 3, 7), r(5, 7), r(5)),
    "linear-vector": (aten.linear.default, r(7), r(5, 7)),
    "linear-of-one": (aten.linear.default, r(2, 7), r(1, 7)),
    "bilinear": (aten.bilinear.default, r(2, 3), r(2, 4), r(5, 3, 4)),
    "bilinear-bias": (aten.bilinear.default, r(2, 3), r(2, 4), r(5, 3, 4), r(5)),
    "addmm": (aten.addmm.default, r(4), r(5, 3), r(3, 4), {"beta": 2, "alpha": 3}),
    "baddbmm": (aten.baddbmm.default, r(2, 5, 1), r(2, 5, 3), r(2, 3, 4)),
    "addr": (aten.addr.default, r(4), r(5), r(4)),
    "linalg-matmul": (aten.linalg_matmul.default, r(2, 1, 4, 3), r(3, 3, 5)),
    "vdot": (aten.vdot.default, r(5), r(5)),
    "einsum-ellipsis": (aten.einsum.default, "...ij,jk->...ik", [r(2, 4, 3), r(3, 5)]),
    "einsum-implicit": (aten.einsum.default, "ij,jk", [r(4, 3), r(3, 5)]),
    "einsum-sums": (aten.einsum.default, "bij,k->b", [r(2, 4, 3), r(5)]),
    "einsum-one": (aten.einsum.default, "ij,jk->ik", [r(4, 1), r(3, 5)]),
    "einsum-diagonal": (aten.einsum.default, "ii->i", [r(4, 4)]),
    "conv1d": (aten.conv1d.default, r(2, 4, 9), r(5, 4, 3)),
    "conv2d-bias": (aten.conv2d.default, r(2, 4, 6, 6), r(5, 4, 3, 3), r(5)),
    "conv1d-unbatched": (aten.conv1d.default, r(4, 9), r(5, 4, 3)),
    "conv1d-groups": (aten.conv1d.default, r(2, 4, 9), r(6, 2, 3), None, [1], [0], [1], 2),
    "conv1d-same": (aten.conv1d.padding, r(4, 9), r(5, 4, 3), None, [1], "same"),
    # views and movement
    "view-minus-one": (aten.view.default, r(2, 3, 12), [2, -1, 4, 3]),
    "unsafe-view": (aten._unsafe_view.default, r(6, 4), [4, 6]),
    "view-of-nothing": (aten.view.default, r(0, 3), [3, 0]),
    "unflatten": (aten.unflatten.int, r(3, 12), 1, [4, 3]),
    "view-as": (aten.view_as.default, r(6, 4), r(2, 3, 4)),
    "squeeze": (aten.squeeze.default, r(4, 1, 3)),
    "squeeze-dim": (aten.squeeze.dim, r(4, 1, 3), 1),
    "squeeze-kept": (aten.squeeze.dims, r(4, 1, 3), [0, 1]),
    "expand": (aten.expand.default, r(4, 1), [3, -1, 5]),
    "expand-as": (aten.expand_as.default, r(4, 1), r(3, 4, 5)),
    "broadcast-to": (aten.broadcast_to.default, r(4, 1), [2, 4, 3]),
    "movedim": (aten.movedim.intlist, r(2, 3, 4, 5), [0, -1], [2, 0]),
    "swapaxes": (aten.swapaxes.default, r(2, 3, 4), 0, -1),
    "swapdims": (aten.swapdims.default, r(2, 3, 4), 0, -1),
    "moveaxis": (aten.moveaxis.int, r(2, 3, 4), 0, -1),
    "slice": (aten.slice.Tensor, r(3, 12), 1, 4, 8),
    "slice-negative": (aten.slice.Tensor, r(3, 12), -1, -8, -4),
    "slice-step": (aten.slice.Tensor, r(3, 12), 1, 0, 12, 2),
    "slice-all": (aten.slice.Tensor, r(3, 12), 1, 0, 2**63 - 1),
    "slice-none": (aten.slice.Tensor, r(3, 12), 1, 20, 30),
    "narrow": (aten.narrow.default, r(3, 12), 1, 6, 6),
    "narrow-all": (aten.narrow.default, r(3, 12), 1, 0, 12),
    "select": (aten.select.int, r(3, 12), 1, -1),
    "split": (aten.split.Tensor, r(3, 12), 4, -1),
    "split-rest": (aten.split.Tensor, r(3, 10), 4, 1),
    "split-ones": (aten.split.Tensor, r(3, 4), 1, 1),
    "split-with-sizes": (aten.split_with_sizes.default, r(3, 12), [8, 2, 2], 1),
    "chunk": (aten.chunk.default, r(3, 12), 3, 1),
    "tensor-split": (aten.tensor_split.sections, r(3, 11), 3, 1),
    "tensor-split-at": (aten.tensor_split.indices, r(3, 12), [4, 8], 1),
    "cat": (aten.cat.default, [r(2, 4), r(2, 6)], -1),
    "cat-one": (aten.cat.default, [r(2, 4)], 1),
    "cat-nothing": (aten.cat.default, [r(2, 4), r(2, 0)], 1),
    "cat-old-style": (aten.cat.default, [r(2, 4), r(0)], 1),
    "cat-ones": (aten.cat.default, [r(4, 1), r(4, 1), r(4, 2)], 1),
    "stack": (aten.stack.default, [r(4, 3), r(4, 3)], -1),
    "vstack": (aten.vstack.default, [r(4, 3), r(2, 3)]),
    "row-stack": (aten.row_stack.default, [r(4), r(4)]),
    "hstack": (aten.hstack.default, [r(4, 2), r(4, 6)]),
    "hstack-flat": (aten.hstack.default, [r(4), r(6)]),
    "dstack": (aten.dstack.default, [r(4, 2, 2), r(4, 2, 4)]),
    "meshgrid": (aten.meshgrid.indexing, [r(4), r(5), r(2)], {"indexing": "xy"}),
    "repeat": (aten.repeat.default, r(4, 1, 3), [2, 1, 5, 2]),
    "tile": (aten.tile.default, r(2, 4, 3), [2]),
    "repeat-interleave": (aten.repeat_interleave.self_int, r(3, 4), 2, 1),
    "repeat-interleave-flat": (aten.repeat_interleave.self_int, r(3, 4), 2),
    "repeat-interleave-tensor": (aten.repeat_interleave.self_Tensor, r(3, 2), torch.tensor([1, 2, 3]), 0),
    "pad": (aten.pad.default, r(4, 5), [1, 2]),
    "pad-value": (aten.constant_pad_nd.default, r(4, 5), [0, 0, 1, 0], 3.0),
    "pad-reflect": (aten.pad.default, r(4, 5, 6), [2, 2], "reflect"),
    "flip": (aten.flip.default, r(4, 5), [1]),
    "roll": (aten.roll.default, r(4, 5), [2], [0]),
    "roll-flat": (aten.roll.default, r(4, 5), [2]),
    "tril": (aten.tril.default, r(2, 4, 5)),
    "diagonal": (aten.diagonal.default, r(2, 4, 5), 1, 0, 2),
    "unfold": (aten.unfold.default, r(2, 9), 1, 3, 2),
    "slice-scatter": (aten.slice_scatter.default, r(4, 6), r(4, 2), 1, 2, 4),
    "slice-scatter-all": (aten.slice_scatter.default, r(4, 6), r(4, 6), 1),
    "select-scatter": (aten.select_scatter.default, r(4, 6), r(4), 1, -1),
    # reductions and norms
    "sum": (aten.sum.dim_IntList, r(4, 5, 3), [0, -1], True),
    "sum-all": (aten.sum.default, r(4, 5)),
    "sum-cast": (aten.sum.dim_IntList, r(4, 5), [1], False, {"dtype": torch.float32}),
    "sum-none": (aten.sum.dim_IntList, r(4, 5), []),
    "sum-scalar": (aten.sum.dim_IntList, r(), [0]),
    "count-nonzero": (aten.count_nonzero.default, ints(2, 4, 5), 1),
    "max-dim": (aten.max.dim, r(4, 5), 1),
    "argmax": (aten.argmax.default, r(4, 5)),
    "norm": (aten.norm.ScalarOpt_dim, r(4, 5), 2, [1]),
    "cumsum": (aten.cumsum.default, r(4, 5), 1),
    "softmax": (aten._softmax.default, r(4, 5), 1, False),
    "log-softmax": (aten._log_softmax.default, r(4, 5), 1, False),
    "topk": (aten.topk.default, r(4, 5), 2),
    "layer-norm": (aten.layer_norm.default, r(2, 4, 5), [5], r(5), r(5)),
    "layer-norm-two": (aten.layer_norm.default, r(3, 4, 5), [4, 5]),
    "rms-norm": (aten.rms_norm.default, r(4, 5), [5], r(5)),
    "batch-norm": (aten.batch_norm.default, r(4, 5), None, None, r(5), r(5).abs(), False, 0.1, 1e-5, False),
    # creation
    "zeros": (aten.zeros.default, [4, 5], {"dtype": torch.float64}),
    "full": (aten.full.default, [4, 5], 2.0),
    "new-ones": (aten.new_ones.default, r(3), [4, 5]),
    "new-full": (aten.new_full.default, r(), [4, 5], 2.0),
    "arange": (aten.arange.default, 5),
    "randn": (aten.randn.default, [4, 5]),
    "rand-like": (aten.rand_like.default, r(4, 5)),
    "randperm": (aten.randperm.default, 5),
    "poisson": (aten.poisson.default, r(4).abs()),
    # lookups, updates and losses
    "embedding": (aten.embedding.default, r(7, 5), ints(7, 3, 2), 2),
    "gather": (aten.gather.default, r(4, 7), 1, ints(7, 4, 3)),
    "gather-less": (aten.gather.default, r(4, 7), 1, ints(7, 2, 3)),
    "index": (aten.index.Tensor, r(4, 5, 6), [None, ints(5, 3), ints(6, 2, 1)]),
    "index-apart": (aten.index.Tensor, r(4, 5, 6), [ints(4, 3), None, ints(6, 3)]),
    "index-scalar": (aten.index.Tensor, r(4, 5), [torch.tensor(2)]),
    "index-mask": (aten.index.Tensor, r(4, 5), [None, torch.tensor([True, False, True, True, False])]),
    "index-put": (aten.index_put.default, r(4, 5, 6), [None, ints(5, 3)], r(3, 6)),
    "index-put-adds": (aten.index_put.default, r(4, 5), [ints(4, 3), ints(5, 3)], r(3), True),
    "index-select": (aten.index_select.default, r(4, 5), 1, ints(5, 3)),
    "index-add": (aten.index_add.default, r(4, 5), 1, ints(5, 3), r(4, 3)),
    "index-fill": (aten.index_fill.int_Scalar, r(4, 5), 1, ints(5, 3), 2.0),
    "scatter": (aten.scatter.src, r(4, 5), 1, ints(5, 4, 3), r(4, 3)),
    "scatter-value": (aten.scatter.value, r(4, 5), 0, ints(4, 3, 5), 1.0),
    "scatter-add-less": (aten.scatter_add.default, r(4, 5), 1, ints(5, 3, 3), r(4, 3)),
    "one-hot": (aten.one_hot.default, ints(5, 4, 3), 5),
    "one-hot-counted": (aten.one_hot.default, ints(5, 4, 3)),
    "isin": (aten.isin.Tensor_Tensor, ints(5, 4, 3), ints(5, 2)),
    "bucketize": (aten.bucketize.Tensor, r(4, 5), r(3).sort().values),
    "searchsorted": (aten.searchsorted.Tensor, r(4, 5).sort().values, r(4, 3)),
    "nll": (aten.nll_loss.default, r(6, 5), ints(5, 6), None, 0),
    "cross-entropy-sum": (aten.cross_entropy_loss.default, r(6, 5, 3), ints(5, 6, 3), r(5), 2, 1, 0.1),
    "cross-entropy-mean": (aten.cross_entropy_loss.default, r(6, 5), ints(5, 6)),
    "cross-entropy-soft": (aten.cross_entropy_loss.default, r(6, 5), r(6, 5)),
    "mse-sum": (aten.mse_loss.default, r(6, 5), r(6, 5), 2),
    "bce-sum": (aten.binary_cross_entropy_with_logits.default, r(6, 5), r(6, 5), r(5), r(5), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    op, *args = CALLS[name]
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    assert op in RULES
    assert problems(op, *args, **kwargs) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", "* i, o i -> * o"),
        ("linear-bias", "* i^, o i^, o -> * o"),
        ("embedding", "v! h, * -> * h"),
        ("sum", "a b c -> 1 b 1"),
        ("view-minus-one", "f0 f1 (f2 f3) -> f0 f1 f2 f3"),
        ("unsafe-view", "(f0 x0^) x1^ -> (f0 y0^) y1^"),
        ("slice", "a (p | q | r) -> a q"),
        ("split-with-sizes", "a (p0 | p1 | p2) -> a p0, a p1, a p2"),
        ("einsum-ellipsis", "* i j, j k -> * i k"),
        ("einsum-diagonal", "unknown"),
        ("index-mask", "unknown"),
        ("index", "a b^ c^, k1, k0 k1 -> a k0 k1"),
        ("index-apart", "a^ b c^, k0, k0 -> k0 b"),
        ("cat-old-style", "unknown"),
        ("cross-entropy-soft", "unknown"),
        ("cross-entropy-mean", "n^ c!, n^ -> ()"),
        ("squeeze-kept", "a^ b^ c -> a^ c"),
        ("repeat", "b c d -> ra^ b rc^ (rd^ d)"),
        ("layer-norm", "* n0^, n0^, n0^ -> * n0^"),
    ],
)
def test_rule_of_call(name: str, expected: str) -> None:
    op, *args = CALLS[name]
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    assert printed(op, *args, **kwargs) == expected


def test_dropout() -> None:
    assert printed(aten.dropout.default, r(4, 5), 0.1, True) == "a! b! -> a! b!"
    assert printed(aten.dropout.default, r(4, 5), 0.1, False) == "* -> *"
    assert printed(aten.alpha_dropout.default, r(4, 5), 0.1, True) == "x0_0^ x0_1^ -> y0_0^ y0_1^"


# ---- random shapes


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of equally many elements, sizes of one among them."""
    base = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))
    before, after = ([prod(group) for group in draw(st.just(base).flatmap(_groups))] for _ in range(2))
    return before, draw(st.permutations(after)) if draw(st.booleans()) else after


def _groups(base: list[int]) -> st.SearchStrategy[list[list[int]]]:
    cuts = st.lists(st.integers(0, len(base)), max_size=4).map(lambda found: [0, *sorted(found), len(base)])
    return cuts.map(lambda at: [base[a:b] for a, b in pairwise(at)])


@settings(deadline=None)
@given(regrouped(), st.sampled_from(TP))
def test_any_view(shapes: tuple[list[int], list[int]], tp: int) -> None:
    before, after = shapes
    assert prove(aten.view.default, (r(*before), after), {}, tp) == []
    assert prove(aten.reshape.default, (r(*before).mT if len(before) > 1 else r(*before), after), {}, tp) == []


@settings(deadline=None)
@given(st.data(), st.sampled_from(TP))
def test_any_matmul(data: st.DataObject, tp: int) -> None:
    sizes = st.integers(1, 5)
    m, i, n = (data.draw(sizes) for _ in range(3))
    batch = data.draw(st.lists(sizes, max_size=2))
    shapes = []
    for matrix in ([m, i], [i, n]):
        kept = batch[data.draw(st.integers(0, len(batch))) :]
        mine = [data.draw(st.sampled_from([1, b])) for b in kept]
        shapes.append(matrix if not mine and data.draw(st.booleans()) else [*mine, *matrix])
    a, b = (r(*shape) for shape in shapes)
    a = a[0] if a.dim() == 2 and data.draw(st.booleans()) else a
    b = b[..., 0] if b.dim() == 2 and data.draw(st.booleans()) else b
    assert prove(aten.matmul.default, (a, b), {}, tp) == []


@settings(deadline=None)
@given(st.data(), st.sampled_from(TP))
def test_any_einsum(data: st.DataObject, tp: int) -> None:
    length = {c: data.draw(st.integers(1, 5)) for c in "abcde"}
    terms = data.draw(st.lists(st.lists(st.sampled_from("abcde"), unique=True, max_size=3), min_size=1, max_size=3))
    used = sorted({c for term in terms for c in term})
    out = data.draw(st.permutations(used)) if used else []
    out = out[: data.draw(st.integers(0, len(out)))]
    equation = ",".join(map("".join, terms)) + "->" + "".join(out)
    assert prove(aten.einsum.default, (equation, [r(*(length[c] for c in term)) for term in terms]), {}, tp) == []


@settings(deadline=None)
@given(st.data(), st.sampled_from(TP))
def test_any_attention(data: st.DataObject, tp: int) -> None:
    b, kv, group, s, t, d, e = (data.draw(st.integers(1, n)) for n in (3, 4, 3, 3, 4, 3, 4))
    grouped = data.draw(st.booleans())
    heads = kv * group if grouped else kv
    query, key, value = r(b, heads, s, d), r(b, kv, t, d), r(b, kv, t, e)
    shape = [data.draw(st.sampled_from([1, n])) for n in (b, heads)] + [s, t]
    masks = [None, r(*shape), bools(*shape) | True, r(s, t)]
    mask = data.draw(st.sampled_from(masks))
    causal = mask is None and data.draw(st.booleans())
    options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": grouped}
    assert prove(aten.scaled_dot_product_attention.default, (query, key, value), options, tp) == []


@settings(deadline=None)
@given(st.data(), st.sampled_from(TP))
def test_any_fused_projection(data: st.DataObject, tp: int) -> None:
    """Parts of any lengths, split and joined again: what they have in common is cut together."""
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    x = r(2, sum(lengths))
    assert prove(aten.split_with_sizes.default, (x, lengths, 1), {}, tp) == []
    assert prove(aten.cat.default, (list(x.split(lengths, 1)), 1), {}, tp) == []
    start = data.draw(st.integers(-sum(lengths) - 1, sum(lengths) + 1))
    assert prove(aten.slice.Tensor, (x, 1, start, data.draw(st.integers(start, sum(lengths) + 1))), {}, tp) == []


# ---- symbolic sizes


class Symbolic(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = torch.nn.functional.linear(x, w).view(b, s, 3, 2).transpose(1, 2)
        y = y[:, :, : s - 1] + torch.zeros(b, 3, s - 1, 2).repeat(1, 1, 1, 1)
        y = torch.cat([y, y[:, :, -1:]], 2).flatten(2).split([4, 2 * s - 4], -1)[0]
        return y.expand(b, 3, 4) * torch.arange(s, device=x.device).sum()


def test_symbolic_sizes() -> None:
    """What is symbolic is whole, or passes through, and asks nothing about its size."""
    sizes = {0: torch.export.Dim("b", min=2), 1: torch.export.Dim("s", min=4)}
    program = torch.export.export(Symbolic(), (torch.randn(3, 5, 4), torch.randn(6, 4)), dynamic_shapes=(sizes, None))
    axes = infer_axes(program.graph)
    heads = next(n for n in program.graph.nodes if "transpose" in n.name)
    weight = next(n for n in program.graph.nodes if n.name == "w")
    assert [str(axis) for axis in axes.of(weight)] == ["(3 2)", "4"]
    assert axes.dim_of(weight, axes.of(heads)[1]) == 0


# ---- rules that are wrong on purpose


def first(text: str, kind: str = "pass-through") -> str:
    """How the first problem of a factor of 4 on 2 ranks begins."""
    return f"factor {text} of 4 on 2 ranks, {kind}: "


SDPA = aten.scaled_dot_product_attention.default
WRONG: list[tuple[str, Any, str, Any, tuple[Any, ...], str]] = [
    ("softmax", aten.softmax.int, "a b -> a b", (), (r(2, 4), 1), first("b") + "output 0, rank 0: off by"),
    ("cumsum", aten.cumsum.default, "a b -> a b", (), (r(2, 4), 1), first("b") + "output 0, rank 1: off by"),
    ("layer-norm", aten.layer_norm.default, "* n -> * n", (), (r(2, 4), [4]), first("n") + "rank 0: RuntimeError"),
    ("mean", aten.mean.dim, "a b -> a", (), (r(2, 4), [1]), first("b", "reduced") + "output 0: off by"),
    ("amax", aten.amax.default, "a b -> a", (), (r(2, 4), [1]), first("b", "reduced") + "output 0: off by"),
    (
        "linear-bias", aten.linear.default, "* i, o i, o -> * o", (), (r(2, 4), r(3, 4), r(3)),
        first("i", "reduced") + "output 0: off by",
    ),
    (
        "causal", SDPA, "b h s d^, b h t^ d^, b h t^ e -> b h s e", (), (r(1, 1, 4, 2),) * 3 + (None, 0.0, True),
        first("s") + "output 0, rank 1: off by",
    ),
    (
        "transposed", aten.mm.default, "m i, i n -> n m", (), (r(4, 4), r(4, 4)),
        first("m") + "output 0, rank 0: float64[2, 4] where float64[4, 2] was to come",
    ),
    (
        "squeezed", aten.squeeze.default, "a b -> a b", (), (r(2, 3),),
        "factor a of 2 on 2 ranks, pass-through: output 0, rank 0: float64[3] where float64[1, 3] was to come",
    ),
    (
        "glued", aten.view.default, "(a b) -> b a", (), (r(4), [2, 2]),
        "factor b of 2 on 2 ranks, pass-through: output 0, rank 0: off by",
    ),
    ("unequal", aten.cat.default, "a b, a b -> a k^", (), ([r(2, 4), r(2, 2)], 1), "factor b does not line up"),
    ("terms", aten.add.Tensor, "* -> *", (), (r(2, 4), r(4)), "the rule does not fit: ValueError"),
    ("linear-gelu", aten.gelu.default, "* -> *", "all", (r(2, 4),), "linear in operands [0]: output 0: off by"),
    ("linear-add", aten.add.Tensor, "*, * -> *", "each", (r(2, 4), r(4)), "linear in operands [0]: output 0: off by"),
    ("linear-mul", aten.mul.Tensor, "*, * -> *", "all", (r(2, 4), r(4)), "linear in operands [0, 1]: output 0: off by"),
    ("linear-cast", aten.to.dtype, "* -> *", "all", (r(9) * 9, torch.int64), "linear in operands [0]: output 0: other"),
]  # fmt: skip


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets a rule, for this test alone."""
    yield lambda op, text, linear=(): monkeypatch.setitem(RULES, op, fixed(text, linear))


@pytest.mark.parametrize(
    ("op", "text", "linear", "args", "expected"), [wrong[1:] for wrong in WRONG], ids=[wrong[0] for wrong in WRONG]
)
def test_a_wrong_rule_is_found(
    op: Any, text: str, linear: Any, args: tuple[Any, ...], expected: str, rules: Callable[..., None]
) -> None:
    assert prove(op, args, {}, 2) == []
    rules(op, text, linear)
    found = prove(op, args, {}, 2)
    assert any(problem.startswith(f"{op}: {expected}") for problem in found), found


def test_uneven_and_empty_parts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A maximum is right on any slice that is not empty, and fails on one that is."""
    monkeypatch.setitem(RULES, aten.amax.default, lambda call: Rule.of("a b -> a", reducer="max"))
    assert prove(aten.amax.default, (r(2, 5), [1]), {}, 3) == []
    [problem] = prove(aten.amax.default, (r(2, 5), [1]), {}, 4)
    assert problem.startswith("aten.amax.default: factor b of 5 on 4 ranks, reduced: rank 3: IndexError: amax()")


# ---- a user's own


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registry as it was, after the test."""
    before, users = dict(RULES), set(USER_RULES)
    yield
    RULES.clear()
    RULES.update(before)
    USER_RULES.clear()
    USER_RULES.update(users)


@torch.library.custom_op("autotp_test::scale", mutates_args=())
def scale(x: Tensor, weight: Tensor, causal: bool = False) -> Tensor:
    return x.cumsum(0) * weight if causal else x * weight


@scale.register_fake
def _(x: Tensor, weight: Tensor, causal: bool = False) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autotp_test::write", mutates_args=("x",))
def write(x: Tensor) -> None:
    x.zero_()


def test_own_rule(registry: None) -> None:
    op = torch.ops.autotp_test.scale
    autotp.rule(op, "s h, h -> s h", linear="each")
    assert {op.default} == USER_RULES
    assert problems(op.default, r(5, 4), r(4)) == []
    assert len(prove(op.default, (r(5, 4), r(4), True), {}, 2)) == 1


class Scaled(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.autotp_test.scale(x, w, self.causal)


def scaled(causal: bool) -> Any:
    """The node of the operator in a graph with a symbolic length."""
    shapes = ({0: torch.export.Dim("s", min=2)}, None)
    program = torch.export.export(Scaled(causal), (torch.randn(4, 6), torch.randn(6)), dynamic_shapes=shapes)
    return next(n for n in program.graph.nodes if "scale" in str(n.target))


def test_own_rule_is_proved_on_the_graph(registry: None) -> None:
    autotp.rule(torch.ops.autotp_test.scale, "s h, h -> s h")
    prove_node(scaled(causal=False))
    with pytest.raises(Error) as caught:
        prove_node(scaled(causal=True))
    message = str(caught.value).splitlines()
    assert message[0] == "the rule of autotp_test.scale.default is not true of this call"
    assert message[1].startswith("  found    factor s of 4 on 2 ranks, pass-through: output 0, rank 1: off by ")
    assert message[2] == "  shapes   [4, 6], [6]"
    assert message[3].startswith("  at       test_operators.py:")
    assert message[4:] == ["  try      mark what the operator mixes with ^, name only operands it is linear in"]


def test_own_rule_that_does_not_fit(registry: None) -> None:
    autotp.rule(torch.ops.autotp_test.scale, "s h -> s h")
    node = scaled(causal=False)
    with pytest.raises(Error) as caught:
        infer_axes(node.graph)
    assert str(caught.value).splitlines()[:2] == [
        "the rule of autotp_test.scale.default does not fit",
        "  rule     s h -> s h",
    ]


@pytest.mark.parametrize(
    ("op", "text", "expected"),
    [
        ("gelu", "* -> *", ["rule: 'gelu' is no operator", "  try      torch.ops.mylib.myop"]),
        (
            torch.ops.autotp_test.scale,
            "* -> ",
            [
                'rule(autotp_test.scale): the rule "* -> " does not parse',
                "  expected a term for each output behind `->`, `()` for a tensor without dimensions",
                '  try      for example "* i, o i -> * o"',
            ],
        ),
        (
            torch.ops.autotp_test.scale,
            "s! h, h -> s! h",
            ["rule(autotp_test.scale): `!` is for operators that autotp has a parallel form of", "  try      `^`"],
        ),
        (
            torch.ops.autotp_test.write,
            "* -> *",
            ["rule: autotp_test.write writes into its operands", "  try      an operator that returns a new tensor"],
        ),
        (
            aten.add_.Tensor,
            "*, * -> *",
            ["rule: aten.add_.Tensor writes into its operands", "  try      an operator that returns a new tensor"],
        ),
    ],
)
def test_refused(op: Any, text: str, expected: list[str], registry: None) -> None:
    with pytest.raises(Error) as caught:
        autotp.rule(op, text)
    assert str(caught.value).splitlines() == expected
    assert not USER_RULES


# ---- the table as a whole


def test_table() -> None:
    rules = [op for op in RULES if hasattr(op, "_schema")]
    assert len({op._schema.name for op in rules}) > 350
    assert not any(op._schema.is_mutable for op in rules)
    assert aten.nonzero.default not in RULES and aten.where.default not in RULES


def test_size_arguments_exist() -> None:
    for name, argument in SIZE_ARGUMENTS.items():
        for op in overloads(getattr(aten, name.removeprefix("aten."))):
            assert op not in RULES or argument in [arg.name for arg in op._schema.arguments], op
