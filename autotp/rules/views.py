"""Rule functions of operators that move elements and compute nothing: views, permutations, joins, repeats.

All of them are linear. Functions may return None, as in `common.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from autotp.rules.call import Call
from autotp.rules.common import entire, letters, present, same_dtype, unread
from autotp.rules.language import Rule, spell
from autotp.sharding.axis import ONE, Size

EMPTY = Size(0)

# ---- views


def view(call: Call) -> Rule:
    """A change of shape that keeps the order of elements; the rule follows from the two shapes."""
    return regroup(call.operands[0].shape, call.outputs[0].shape)


def view_as(call: Call) -> Rule:
    """A view with the shape of a second operand; only this shape is read."""
    rule = view(call)
    return Rule((*rule.ins, *rule.outs), rule.outs, rule.sizes, (frozenset({0}),))


def regroup(before: Sequence[Any], after: Sequence[Any]) -> Rule:
    """Returns the rule of a view: splits dimensions at common divisors, `b s (h d) -> b s h d`, also symbolic ones."""
    exprs: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    # Dimensions of size 1 may stand anywhere on either side, so they take no part.
    queue = tuple([(i, Size.of(n)) for i, n in enumerate(shape) if Size.of(n) != ONE] for shape in (before, after))
    sizes: dict[str, Any] = {}
    for name in (f"f{i}" for i in count()):
        if not queue[0] or not queue[1]:
            break
        (i, a), (j, b) = queue[0][0], queue[1][0]
        part, rests = _line_up(a, b)
        if part == ONE:
            break
        sizes[name] = part
        exprs[0][i].append(name)
        exprs[1][j].append(name)
        for side, dim, rest in ((0, i, rests[0]), (1, j, rests[1])):
            queue[side][:1] = [(dim, rest)] if rest is not None and rest != ONE else []
    for side in (0, 1):  # Factors that do not line up are whole.
        for dim, rest in queue[side]:
            exprs[side][dim].append(f"{'xy'[side]}{dim}^")
            sizes[f"{'xy'[side]}{dim}"] = rest
    terms = ([f"({' '.join(e)})" if len(e) > 1 else e[0] if e else "1" for e in side] for side in exprs)
    return Rule.of(spell(*([term] for term in terms)), "all", **sizes)


def _line_up(a: Size, b: Size) -> tuple[Size, tuple[Size | None, Size | None]]:
    """Returns the part that two dimensions have in common, and what is left of both.

    0 is a product of 0 and anything: where a rank has no position, the other dimensions line up as on other ranks.
    """
    if a == b:
        return a, (ONE, ONE)
    if EMPTY in (a, b):
        return (b, (EMPTY, ONE)) if a == EMPTY else (a, (ONE, EMPTY))
    part = a.common(b)
    return part, (a.divided(part), b.divided(part))


def squeeze(call: Call) -> Rule:
    """Removes dimensions of size 1. A named dimension of another size stays, so it must not get size 1 on a rank."""
    ndim, dim = call.operands[0].dim(), call.get("dim")
    dims = range(ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    named = {d % max(ndim, 1) for d in dims} & set(range(ndim))
    ns = [n + "^" * (i in named) for i, n in enumerate(letters(ndim))]
    gone = {i for i in named if Size.of(call.operands[0].shape[i]) == ONE}
    if len(gone) < ndim - call.outputs[0].dim():  # A computed size, of which the graph assumes that it is 1.
        gone = {i for i in named if _hint(call.operands[0].shape[i]) == 1}
    return Rule.of(spell([ns], [[n for i, n in enumerate(ns) if i not in gone]]), "all")


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def expand(call: Call) -> Rule:
    """Dimensions of size 1 become new factors, the others pass through; `expand_as` reads a second operand's shape."""
    outs = letters(call.outputs[0].dim())
    return Rule.of(spell([outs[len(outs) - x.dim() :] for x in present(call)], [outs]), ((0,),))


def broadcast_tensors(call: Call) -> Rule:
    """Returns all operands in the shape that they broadcast to."""
    outs = letters(call.outputs[0].dim())
    return Rule.of(spell([outs[len(outs) - x.dim() :] for x in present(call)], [outs] * len(call.outputs)), "all")


def reorder(call: Call) -> Rule:
    """A permutation of dimensions, found by running the operator on an example whose sizes all differ."""
    ns = letters(call.operands[0].dim())
    lengths = range(2, 2 + len(ns))
    example = torch.empty(tuple(lengths), device="meta")
    shape = call.target(example, *list(call.arguments.values())[1:]).shape
    return Rule.of(spell([ns], [[ns[lengths.index(n)] for n in shape]]), "all")


# ---- parts


def _at(ns: list[str], dim: int, *names: str) -> list[str]:
    """Returns the term `ns` with other factors in place of the factor at `dim`."""
    return [*ns[:dim], *names, *ns[dim + 1 :]]


def slice_(call: Call) -> Rule:
    """A slice with fixed bounds is a part of a concatenation; every k-th position is the major part of a product.

    A slice with symbolic bounds, or whose step does not divide the length, needs the dimension whole.
    """
    x, dim = call.operands[0], call.dim()
    ns, start = letters(x.dim()), 0 if call["start"] is None else call["start"]
    length, out_length = x.shape[dim], call.outputs[0].shape[dim]
    # Compared as expressions: `==` of symbolic lengths would assume its outcome for all calls.
    if Size.of(length) == Size.of(out_length):
        return Rule.of(spell([ns], [ns]), "all")
    step, fixed = call.get("step", 1), all(isinstance(n, int) for n in (length, out_length, start))
    if fixed and length and 0 <= start < step and length == out_length * step:
        return Rule.of(spell([_at(ns, dim, "(n k^)")], [_at(ns, dim, "n")]), "all", k=step)
    if not fixed or step != 1 or not out_length:
        return Rule.of(spell([_at(ns, dim, "k^")], [_at(ns, dim, "l^")]), "all")
    start = max(start + length, 0) if start < 0 else start
    # The parts p, q, r before, in and behind the slice; an empty part is left out of the concatenation.
    sizes = {name: n for name, n in zip("pqr", (start, out_length, length - start - out_length), strict=True) if n}
    return Rule.of(spell([_at(ns, dim, f"({' | '.join(sizes)})")], [_at(ns, dim, "q")]), "all", **sizes)


def select(call: Call) -> Rule:
    """Picks one position of `dim`."""
    ns, dim = letters(call.operands[0].dim()), call.dim()
    return Rule.of(spell([_at(ns, dim, "k^")], [_at(ns, dim)]), "all")


def unbind(call: Call) -> Rule:
    """Returns every position of `dim` as a separate output."""
    ns, dim = letters(call.operands[0].dim()), call.dim()
    return Rule.of(spell([_at(ns, dim, "k^")], [_at(ns, dim)] * len(call.outputs)), "all")


def split(call: Call) -> Rule:
    """Returns the parts of a concatenation as separate outputs; a symbolic length makes the dimension whole."""
    ns, dim = letters(call.operands[0].dim()), call.dim()
    parts, joined = _parts([out.shape[dim] for out in call.outputs])
    return Rule.of(spell([_at(ns, dim, joined)], [_at(ns, dim, part) for part in parts]), "all")


def _parts(lengths: Sequence[Any]) -> tuple[list[str], str]:
    """Returns the factors of a concatenation's parts, and the concatenation without empty parts (an empty cache)."""
    nonempty = [i for i, n in enumerate(lengths) if not (isinstance(n, int) and n == 0)]
    if len(nonempty) == 1:
        return [f"p{i}{'^' * (i not in nonempty)}" for i in range(len(lengths))], f"p{nonempty[0]}"
    if not all(isinstance(n, int) for n in lengths):
        return [f"p{i}^" for i in range(len(lengths))], "k^"
    parts = [f"p{i}" for i in range(len(lengths))]
    return parts, f"({' | '.join(parts)})" if len(parts) > 1 else parts[0]


def diagonal(call: Call) -> Rule:
    """Takes the diagonal of two dimensions as the new last dimension."""
    ns = letters(call.operands[0].dim())
    dims = {call[name] % len(ns) for name in ("dim1", "dim2")}
    ins = [n + "^" * (i in dims) for i, n in enumerate(ns)]
    return Rule.of(spell([ins], [[*(n for i, n in enumerate(ns) if i not in dims), "k^"]]), "all")


def unfold(call: Call) -> Rule:
    """Returns windows along `dimension`, with the window as the last dimension."""
    ns, dim = letters(call.operands[0].dim()), call.dim("dimension")
    ins, out = (_at(ns, dim, "k^"), _at(ns, dim, "w^")) if ns else ([], [])
    return Rule.of(spell([ins], [[*out, "s^"]]), "all")


# ---- joins


def cat(call: Call) -> Rule | None:
    """Concatenates its operands; a symbolic length makes the dimension whole."""
    return _cat(call, call.get("dim", 0))


def stacked(dim: int) -> Callable[[Call], Rule | None]:
    """`hstack` and the like: a concatenation along `dim` if the operands have that dimension; else there is no rule."""
    return lambda call: _cat(call, min(dim, call.outputs[0].dim() - 1))


def _cat(call: Call, dim: int) -> Rule | None:
    """Concatenates as `torch.cat` does: an operand of shape [0] is ignored."""
    ns, operands = letters(call.outputs[0].dim()), present(call)
    real = [operand for operand in operands if operand.dim() == len(ns)]
    if not ns or any(operand.dim() != len(ns) and operand.shape != (0,) for operand in operands):
        return None
    dim %= len(ns)
    parts, joined = _parts([operand.shape[dim] for operand in real])
    names = iter(parts)
    terms = [_at(ns, dim, next(names)) if x.dim() == len(ns) else unread(x, i) for i, x in enumerate(operands)]
    return Rule.of(spell(terms, [_at(ns, dim, joined)]), "all")


def stack(call: Call) -> Rule:
    """Stacks the operands along a new dimension."""
    ns = letters(call.outputs[0].dim() - 1)
    dim = call["dim"] % (len(ns) + 1)
    return Rule.of(spell([ns] * len(present(call)), [[*ns[:dim], "k^", *ns[dim:]]]), "all")


def meshgrid(call: Call) -> Rule:
    """Makes one dimension for each operand, in order; with `xy` the first two are exchanged."""
    ns = [f"m{i}" for i in range(len(present(call)))]
    order = [*ns[1::-1], *ns[2:]] if call.get("indexing") == "xy" else ns
    ins = [[n] if operand.dim() else [] for n, operand in zip(ns, present(call), strict=True)]
    return Rule.of(spell(ins, [order] * len(ns)), "all")


# ---- repeats and pads


def repeat(call: Call) -> Rule:
    """`repeat` and `tile`: a dimension `n` becomes `r n`; each rank has all repetitions."""
    times, x = list(call.get("repeats") or call.get("dims") or ()), call.operands[0]
    ndim = call.outputs[0].dim()
    times, ns = [1] * (ndim - len(times)) + times, letters(ndim)
    before = ns[ndim - x.dim() :]
    shape = [1] * (ndim - x.dim()) + list(x.shape)
    after = [_repeated(n, length, t) for n, length, t in zip(ns, shape, times, strict=True)]
    return Rule.of(spell([before], [after]), "all")


def _repeated(name: str, length: Any, times: Any) -> str:
    if Size.of(times) == ONE:
        return name
    return f"r{name}^" if Size.of(length) == ONE or Size.of(times) == Size(0) else f"(r{name}^ {name})"


def repeat_interleave(call: Call) -> Rule | None:
    """Repeats each position of `dim`: `n` becomes `n r`. If the repeats are a tensor, there is no rule."""
    ns, dim, times = letters(call.operands[0].dim()), call.get("dim"), call.get("repeats")
    if not isinstance(times, int) or call.get("output_size") is not None or not ns:
        return None
    if dim is None:
        return Rule.of(spell([ns], [[f"({' '.join(ns)} r^)"]]), "all", r=times)
    return Rule.of(spell([ns], [_at(ns, call.dim(), f"({ns[call.dim()]} r^)")]), "all", r=times)


def pad(call: Call) -> Rule:
    """Pads dimensions, the last one first; a padded dimension is needed whole. Other modes refuse empty tensors."""
    if call.get("mode", "constant") != "constant":
        return entire(call)
    ns, amounts = letters(call.operands[0].dim()), call["pad"]
    padded = {len(ns) - 1 - i // 2 for i, n in enumerate(amounts) if not isinstance(n, int) or n}
    ins, outs = ([f"{side}{n}^" if i in padded else n for i, n in enumerate(ns)] for side in "xy")
    return Rule.of(spell([ins], [outs]), () if call.get("value") else "all")


def updated_slice(call: Call) -> Rule:
    """`slice_scatter`: `src` replaces a slice of `self`; `dim` is needed whole, unless all of it is replaced."""
    x, src = call.operands
    ns, dim = letters(x.dim()), call.dim()
    every = Size.of(x.shape[dim]) == Size.of(src.shape[dim]) and same_dtype(call)
    into, source_term = ([ns] * 2) if every else (_at(ns, dim, "k^"), _at(ns, dim, "l^"))
    return Rule.of(spell([into, source_term], [into]), "all")


def updated_place(call: Call) -> Rule:
    """`select_scatter`: `src` replaces one position of `dim` of `self`."""
    ns, dim = letters(call.operands[0].dim()), call.dim()
    return Rule.of(spell([_at(ns, dim, "k^"), _at(ns, dim)], [_at(ns, dim, "k^")]), "all")
