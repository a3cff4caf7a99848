"""Rule functions, one for each family of operators that share their factors: `Call -> Rule`.

A function here may return None: then nothing is known of this call and all it touches stays replicated.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Literal

from autotp.axis import ONE, Size
from autotp.call import Call
from autotp.rule import Rule

RuleFunction = Callable[[Call], Rule | None]
Linear = Literal["each", "all"] | tuple[tuple[int, ...], ...]


def fixed(text: str, linear: Linear = ()) -> RuleFunction:
    """The same factor string for every call; terms of trailing operands that are absent are dropped."""

    def of(call: Call) -> Rule:
        ins, outs = text.split("->")
        terms = [term for term, operand in zip(ins.split(","), call.operands, strict=False) if operand is not None]
        return Rule.of(",".join(terms) + "->" + outs, linear)

    return of


def pointwise(linear: Linear = ()) -> RuleFunction:
    """Every output element from the elements at its place, with broadcasting."""

    def of(call: Call) -> Rule:
        outs = ", ".join("*" for _ in call.outputs)
        return Rule.of(", ".join("*" for operand in call.operands if operand is not None) + " -> " + outs, linear)

    return of


def additive(call: Call) -> Rule:
    """A sum of tensors is linear in all of them together; a tensor plus a number is not linear."""
    return pointwise("all" if len(call.operands) > 1 else ())(call)


def divide(call: Call) -> Rule:
    return pointwise(() if call.get("rounding_mode") else ((0,),))(call)


def cast(call: Call) -> Rule:
    """A change of dtype is a barrier to Partial values: they are reduced in the precision they were computed in."""
    return pointwise("all" if call.operands[0].dtype == call.outputs[0].dtype else ())(call)


def where(call: Call) -> Rule:
    return pointwise(((1, 2),) if len(call.operands) == 3 else ())(call)


def masked_fill(call: Call) -> Rule:
    zero = isinstance(call["value"], int | float) and call["value"] == 0
    return pointwise(((0,),) if zero else ())(call)


def dropout(call: Call) -> Rule:
    """Pass-through where nothing is drawn; where something is, each factor is cut in a parallel form."""
    p, train = call["p"], call["train"]
    return pointwise("all")(call) if not train or p == 0 else along(call, range(call.operands[0].dim()), "!")


def letters(ndim: int, skip: int = 0) -> list[str]:
    """`ndim` factor names, the same for the same arguments."""
    return [string.ascii_lowercase[i] for i in range(skip, skip + ndim)]


def along(call: Call, dims: Iterable[int], mark: str = "^", linear: Linear = ()) -> Rule:
    """Shape-preserving on the first operand, working along `dims` (marked), pass-through elsewhere."""
    marked = [d % max(call.operands[0].dim(), 1) for d in dims]
    term = " ".join(n + mark * (i in marked) for i, n in enumerate(letters(call.operands[0].dim())))
    return Rule.of(f"{term} -> " + ", ".join(term for _ in call.outputs), linear)


def along_dim(mark: str = "^", linear: Linear = ()) -> RuleFunction:
    """Works along its `dim` argument: softmax, cumsum, sort, ..."""
    return lambda call: along(call, [call.dim()], mark, linear)


def along_dims(call: Call) -> Rule:
    """Works along its `dims` argument: flip, roll (all of them where none is given)."""
    return along(call, call["dims"] or range(call.operands[0].dim()), linear="all")


def along_last_two(call: Call) -> Rule:
    return along(call, [-2, -1], linear="all")


def view(call: Call) -> Rule:
    """A change of shape that keeps the elements' order, read off the two shapes."""
    return regroup(call.operands[0].shape, call.outputs[0].shape)


def regroup(before: Sequence[Any], after: Sequence[Any]) -> Rule:
    """The rule of a view: dimensions split at common divisors, `b s (h d) -> b s h d`, symbolic sizes included."""
    exprs: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    queue = tuple([(i, Size.of(n)) for i, n in enumerate(shape) if Size.of(n) != ONE] for shape in (before, after))
    sizes: dict[str, Size] = {}
    for name in (f"f{i}" for i in count()):
        if not queue[0] or not queue[1]:
            break
        (i, a), (j, b) = queue[0].pop(0), queue[1].pop(0)
        part = a.common(b)
        if part == ONE or Size(0) in (a, b):
            queue[0].insert(0, (i, a))
            queue[1].insert(0, (j, b))
            break
        sizes[name] = part
        exprs[0][i].append(name)
        exprs[1][j].append(name)
        for side, at, rest in ((0, i, a.divided(part)), (1, j, b.divided(part))):
            if rest != ONE:
                queue[side].insert(0, (at, rest))  # type: ignore[arg-type]
    for side in (0, 1):  # What does not line up is whole.
        for at, rest in queue[side]:
            name = f"{'xy'[side]}{at}"
            exprs[side][at].append(name + "^")
            sizes[name] = rest
    terms = (" ".join(f"({' '.join(e)})" if len(e) > 1 else e[0] if e else "1" for e in side) for side in exprs)
    return Rule.of(" -> ".join(terms), "all", **sizes)


def permuted(call: Call, order: Sequence[int]) -> Rule:
    ns = letters(call.operands[0].dim())
    return Rule.of(f"{' '.join(ns)} -> {' '.join(ns[d] for d in order)}", "all")


def permute(call: Call) -> Rule:
    return permuted(call, call["dims"])


def transpose(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    order = list(range(ndim))
    if ndim:
        i, j = (call.get(name, at) % ndim for name, at in (("dim0", -2), ("dim1", -1)))
        order[i], order[j] = j, i
    return permuted(call, order)


def reverse(call: Call) -> Rule:
    return permuted(call, list(reversed(range(call.operands[0].dim()))))


def expand(call: Call) -> Rule:
    """Dimensions of one element become new factors; the others pass through."""
    before, after = call.operands[0].shape, call.outputs[0].shape
    new = len(after) - len(before)
    outs = letters(len(after))
    kept = [outs[new + i] if Size.of(n) == Size.of(after[new + i]) else "1" for i, n in enumerate(before)]
    return Rule.of(f"{' '.join(kept)} -> {' '.join(outs)}", "all")


def reduction(mark: str = "", linear: Linear = (), reducer: Literal["sum", "max"] = "sum") -> RuleFunction:
    """Reduces its `dim` argument (all dimensions where none is given), which carry `mark`."""

    def of(call: Call) -> Rule:
        ndim = call.operands[0].dim()
        given = call.get("dim")
        given = [given] if isinstance(given, int) else given
        dims = {d % ndim for d in given} if given else set(range(ndim))
        ns = letters(ndim)
        ins = " ".join(n + mark * (i in dims) for i, n in enumerate(ns))
        kept = ["1" if i in dims else n for i, n in enumerate(ns) if i not in dims or call.get("keepdim")]
        out = " ".join(kept)
        return Rule.of(f"{ins} -> " + ", ".join(out for _ in call.outputs), linear, reducer)

    return of


def maximum(call: Call) -> Rule:
    """`amax` sends its gradient to where the maximum is, which one rank cannot know: cut only where none is wanted."""
    return reduction("" if not call.operands[0].requires_grad else "^", reducer="max")(call)


def linear(call: Call) -> Rule:
    """`input: [* i]`, `weight: [o i]`, `bias: [o]`: linear in input and in weight where there is no bias."""
    bias = call.get("bias") is not None
    return fixed("* i, o i, o -> * o", () if bias else "each")(call)


def matmul(call: Call) -> Rule:
    a, b = (operand.dim() for operand in call.operands)
    left = "i" if a == 1 else "* m i"
    right = "i" if b == 1 else "* i n"
    out = " ".join(["*"] * (a > 1 or b > 1) + ["m"] * (a > 1) + ["n"] * (b > 1)) if max(a, b) > 2 else None
    if out is None:
        left, right = left.replace("* ", ""), right.replace("* ", "")
        out = " ".join(["m"] * (a > 1) + ["n"] * (b > 1))
    return Rule.of(f"{left}, {right} -> {out}", "each")


def einsum(call: Call) -> Rule | None:
    """An einsum equation is a rule already."""
    equation = call["equation"].replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    ins, out = equation.split("->")
    spaced = ", ".join(" ".join(term) for term in ins.split(","))
    return Rule.of(f"{spaced} -> {' '.join(out)}", "each")


def attention(call: Call) -> Rule:
    """Scaled dot-product attention: `query: [* h s d]`, `key: [* k t d]`, `value: [* k t e]`, `mask: [* h s t]`.

    Linear in `value` where no weights are dropped. With dropout the mask is drawn for all heads at once, so a
    cut goes through the parallel form; with `is_causal` the positions matter.
    """
    query, key, _, mask = (*call.operands, None)[:4]
    mark = "!" if call.get("dropout_p") else ""
    kv = heads = [f"h{i}{mark}" for i in range(query.dim() - 2)]
    if call.get("enable_gqa") and Size.of(query.shape[-3]) != Size.of(key.shape[-3]):
        kv, heads = [*heads[:-1], f"k{mark}"], [*heads[:-1], f"(k{mark} g{mark})"]
    s = "s^" if call.get("is_causal") or mark else "s"
    terms = [[*heads, s, "d^"], [*kv, "t^", "d^"], [*kv, "t^", "e"]]
    if mask is not None:
        names = [*heads, s, "t^"][-mask.dim() :]
        terms.append(["1" if Size.of(n) == ONE else name for n, name in zip(mask.shape, names, strict=True)])
    return Rule.of(f"{', '.join(map(' '.join, terms))} -> {' '.join([*heads, s, 'e'])}", () if mark else ((2,),))


def norm(call: Call) -> Rule:
    """Layer and RMS norm: whole along the normalised dimensions, pass-through before them."""
    shape = call["normalized_shape"]
    normed = " ".join(f"n{i}^" for i in range(len(shape)))
    terms = [f"* {normed}"] + [normed for operand in call.operands[1:] if operand is not None]
    return Rule.of(f"{', '.join(terms)} -> * {normed}")


def slice_(call: Call) -> Rule:
    """A slice of fixed bounds is a part of a concatenation; one that moves or has a step needs the whole."""
    x, out, dim = call.operands[0], call.outputs[0], call.dim()
    length, taken = x.shape[dim], out.shape[dim]
    if Size.of(length) == Size.of(taken):
        return along(call, [], linear="all")
    start = call.get("start") or 0
    fixed_ = isinstance(length, int) and isinstance(taken, int) and isinstance(start, int) and call.get("step", 1) == 1
    ns = letters(x.dim())
    before, after, sizes = [*ns], [*ns], {}
    if fixed_:
        start = max(start + length, 0) if start < 0 else start
        sizes = {"p": start, "q": taken, "r": length - start - taken}
        sizes = {name: size for name, size in sizes.items() if size}
        before[dim], after[dim] = f"({' | '.join(sizes)})" if len(sizes) > 1 else "q", "q"
    else:
        before[dim], after[dim] = "x^", "y^"
    return Rule.of(f"{' '.join(before)} -> {' '.join(after)}", "all", **(sizes if len(sizes) > 1 else {}))


def select(call: Call) -> Rule:
    ns, dim = letters(call.operands[0].dim()), call.dim()
    term = " ".join(n + "^" * (i == dim) for i, n in enumerate(ns))
    return Rule.of(f"{term} -> {' '.join(n for i, n in enumerate(ns) if i != dim)}", "all")


def _with(ns: list[str], dim: int, name: str) -> str:
    """The term `ns` with another factor at `dim`."""
    return " ".join([*ns[:dim], name, *ns[dim + 1 :]])


def split(call: Call) -> Rule:
    """Parts of a concatenation, one output each."""
    ns, dim = letters(call.operands[0].dim()), call.dim()
    lengths = [out.shape[dim] for out in call.outputs]
    parts = [f"p{i}" if isinstance(n, int) else f"p{i}^" for i, n in enumerate(lengths)]
    whole = f"({' | '.join(parts)})" if all(isinstance(n, int) for n in lengths) else "w^"
    return Rule.of(f"{_with(ns, dim, whole)} -> " + ", ".join((_with(ns, dim, part) for part in parts)), "all")


def unbind(call: Call) -> Rule:
    ns, dim = letters(call.operands[0].dim()), call.dim()
    term = " ".join(n + "^" * (i == dim) for i, n in enumerate(ns))
    out = " ".join(n for i, n in enumerate(ns) if i != dim)
    return Rule.of(f"{term} -> " + ", ".join(out for _ in call.outputs), "all")


def cat(call: Call) -> Rule:
    """A concatenation of its operands; whole where a length is symbolic. Old-style empty operands stay unknown."""
    ndim = call.outputs[0].dim()
    if any(operand.dim() != ndim for operand in call.operands):
        return None  # type: ignore[return-value]
    ns, dim = letters(ndim), call["dim"] % ndim
    lengths = [operand.shape[dim] for operand in call.operands]
    static = all(isinstance(n, int) for n in lengths)
    parts = [f"p{i}" if static else f"p{i}^" for i in range(len(lengths))]
    whole = (f"({' | '.join(parts)})" if len(parts) > 1 else parts[0]) if static else "w^"
    return Rule.of(", ".join((_with(ns, dim, part) for part in parts)) + f" -> {_with(ns, dim, whole)}", "all")


def stack(call: Call) -> Rule:
    ndim = call.outputs[0].dim()
    ns, dim = letters(ndim - 1), call["dim"] % ndim
    out = [*ns[:dim], "k^", *ns[dim:]]
    return Rule.of(", ".join(" ".join(ns) for _ in call.operands) + f" -> {' '.join(out)}", "all")


def filled(call: Call) -> Rule:
    """A new tensor whose elements do not depend on their place; of its operands nothing but the dtype is read."""
    ins = ", ".join(" ".join(f"x{i}_{j}^" for j in range(operand.dim())) for i, operand in enumerate(call.operands))
    return Rule.of(f"{ins} -> {' '.join(letters(call.outputs[0].dim()))}")


def enumerated(call: Call) -> Rule:
    """A new tensor whose elements depend on their place."""
    return Rule.of("-> " + " ".join(f"{n}^" for n in letters(call.outputs[0].dim())))


def gather(call: Call) -> Rule:
    """One element of `x` along `dim` for each index: linear in `x`, and cut along `dim` in a parallel form."""
    x, index = call.operands
    dim, ns = call.dim(), letters(x.dim())
    shared = [Size.of(a) == Size.of(b) for a, b in zip(x.shape, index.shape, strict=True)]
    xs = ["v!" if i == dim else n if shared[i] else f"{n}x^" for i, n in enumerate(ns)]
    ks = ["k" if i == dim else n if shared[i] else f"{n}y^" for i, n in enumerate(ns)]
    return Rule.of(f"{' '.join(xs)}, {' '.join(ks)} -> {' '.join(ks)}", ((0,),))


def index_select(call: Call) -> Rule:
    ns, dim = letters(call.operands[0].dim()), call.dim()
    return Rule.of(f"{_with(ns, dim, 'v^')}, k -> {_with(ns, dim, 'k')}", ((0,),))


def index(call: Call) -> Rule | None:
    """Advanced indexing by integers: the indexed dimensions whole, the others pass through."""
    x, indices = call.operands[0], list(call["indices"])
    if any(i is not None and i.dtype.is_floating_point for i in indices):
        return None
    if any(i is not None and str(i.dtype) in ("torch.bool", "torch.uint8") for i in indices):
        return None
    places = [i for i, value in enumerate(indices) if value is not None]
    given = [value for value in indices if value is not None]
    ns = letters(x.dim())
    xs = [n + "^" * (i in places) for i, n in enumerate(ns)]
    block = max(value.dim() for value in given)
    picked = [f"k{i}" for i in range(block)]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    rest = [(i, n) for i, n in enumerate(ns) if i not in places]
    at = places[0] if adjacent else 0
    out = [n for i, n in rest if i < at] + picked + [n for i, n in rest if i >= at]
    broadcast = call.outputs[0].shape[len([1 for i, _ in rest if i < at]) :][:block]
    terms = []
    for value in given:
        names = picked[block - value.dim() :]
        lengths = broadcast[block - value.dim() :]
        terms.append(" ".join(k if Size.of(n) == Size.of(m) else "1" for k, n, m in zip(names, value.shape, lengths, strict=True)))
    return Rule.of(", ".join([" ".join(xs), *terms]) + f" -> {' '.join(out)}", ((0,),))


def class_loss(call: Call) -> Rule | None:
    """Cross-entropy and negative log-likelihood over classes `c`: parallel along the classes.

    `input: [n c ...]` or `[c]`, `target: [n ...]` of class indices; probabilities as target stay unknown.
    """
    x, target, *weight = call.operands
    if target.dtype.is_floating_point:
        return None
    rest = [f"d{i}" for i in range(max(x.dim() - 2, 0))]
    mark = "" if call["reduction"] == 0 else "^"
    front = [f"n{mark}"] if x.dim() > 1 else []
    tail = [d + mark for d in rest]
    terms = [" ".join([*front, "c!", *tail]), " ".join([*front, *tail])]
    terms += ["c!" for w in weight if w is not None]
    out = " ".join([*front, *tail]) if mark == "" else ""
    return Rule.of(f"{', '.join(terms)} -> {out}")


def parallel_gather(call: Call) -> Rule:
    """`gather` where the factor along `dim` is cut: see `parallel.gather(x, dim, index, start)`."""
    (x, index), dim = call.operands, call["1"] % call.operands[0].dim()
    ns = letters(x.dim())
    return Rule.of(f"{_with(ns, dim, 'v')}, {_with(ns, dim, 'k')} -> {_with(ns, dim, 'k')}", ((0,),))


def parallel_peak(call: Call) -> Rule:
    """`peak(x, dim)`: a maximum without a gradient, so it can be reduced over ranks."""
    x, dim = call.operands[0], call["1"] % call.operands[0].dim()
    ns = letters(x.dim())
    return Rule.of(f"{' '.join(ns)} -> {_with(ns, dim, '1')}", reducer="max")
