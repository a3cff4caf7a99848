"""Rule functions (`Call -> Rule`) of operators that have the same factors: pointwise, reductions, norms, losses.

A function may return None: then the call has no rule, and its operands and outputs stay replicated.
Products are in `products.py`, movement of elements in `views.py`, lookups and updates by index in `indexing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch

from autotp.rules.call import Call
from autotp.rules.language import Rule, spell

RuleFunction = Callable[[Call], Rule | None]
Linear = Literal["each", "all"] | tuple[tuple[int, ...], ...]
MEAN = 1
"""A loss's `reduction` argument: 0 none, 1 mean, 2 sum."""


def present(call: Call) -> list[Any]:
    """Returns the operands that are not None, in the order of the rule's terms."""
    return [operand for operand in call.operands if operand is not None]


def letters(ndim: int, mark: str = "") -> list[str]:
    """Returns names for `ndim` dimensions; rule functions use no other names from a to h."""
    return [f"{name}{mark}" for name in ("abcdefgh" if ndim <= 8 else [f"d{i}" for i in range(ndim)])][:ndim]


def unread(operand: Any, i: int) -> list[str]:
    """Returns the term of an operand that must not be cut."""
    return [f"x{i}_{d}^" for d in range(operand.dim())]


def same_dtype(call: Call) -> bool:
    """False for an operator that casts. Partial values are reduced before a cast, in their own precision."""
    return bool(call.operands[0].dtype == call.outputs[0].dtype)


# ---- any operator


def entire(call: Call) -> Rule:
    """Every rank needs all operands whole. For random numbers: so all ranks draw the same."""
    ins = [unread(operand, i) for i, operand in enumerate(present(call))]
    return Rule.of(spell(ins, [[f"y{i}_{d}^" for d in range(out.dim())] for i, out in enumerate(call.outputs)]))


def fixed(text: str, linear: Linear = ()) -> RuleFunction:
    """Returns a rule function with one factor string for all calls; it drops the terms of absent operands."""
    ins, outs = text.split("->")
    terms = ins.split(",")

    def of(call: Call) -> Rule:
        # `linear` counts all operands, and a rule only those that are present.
        positions = [i for i, operand in enumerate(call.operands[: len(terms)]) if operand is not None]
        groups = linear
        if not isinstance(linear, str):
            groups = tuple(tuple(positions.index(i) for i in group) for group in linear if set(group) <= set(positions))
        return Rule.of(",".join(terms[i] for i in positions) + "->" + outs, groups)

    return of


def exact(text: str) -> RuleFunction:
    """Returns a rule function with one factor string, for a mark whose operands or outputs are gradients, too."""
    return lambda call: replace(Rule.of(text), exact=True)


def either(argument: str, if_true: RuleFunction, if_false: RuleFunction) -> RuleFunction:
    """Returns a rule function that is `if_true` if `argument` is given and true, else `if_false`."""

    def of(call: Call) -> Rule | None:
        value = call.get(argument)
        return (if_true if value is not None and value is not False and value != 0 else if_false)(call)

    return of


# ---- pointwise


def pointwise(linear: Linear = ()) -> RuleFunction:
    """Each output element depends on the elements at the same place, with broadcasting."""
    return lambda call: Rule.of(spell([["*"]] * len(present(call)), [["*"]] * len(call.outputs)), linear)


def additive(call: Call) -> Rule | None:
    """A sum of tensors is linear in all operands together; a tensor plus a number is not linear."""
    # In `partial + 1` every rank would add the 1, and the sum over ranks would have it tp times.
    return pointwise("all" if len(present(call)) > 1 else ())(call)


def divide(call: Call) -> Rule | None:
    """A quotient is linear in the dividend, unless the dividend is a number or the quotient is rounded."""
    dividend = isinstance(call["self"], torch.Tensor)
    return pointwise(((0,),) if dividend and not call.get("rounding_mode") else ())(call)


def cast(call: Call) -> Rule:
    """A change of dtype; only the dtype of a second operand (`type_as`) is read."""
    rest = [unread(operand, i) for i, operand in enumerate(call.operands[1:], 1)]
    return Rule.of(spell([["*"], *rest], [["*"]]), ((0,),) if same_dtype(call) else ())


def copy(call: Call) -> Rule | None:
    """`src`, broadcast to the shape and cast to the dtype of `self`."""
    return pointwise(((1,),) if call.operands[1].dtype == call.outputs[0].dtype else ())(call)


def where(call: Call) -> Rule | None:
    """`where` is linear in the two values together, if each is a tensor or zero."""
    chosen = [call.get("self"), call.get("other")]
    # A number is chosen on every rank, so in the sum over ranks it counts tp times, unless it is 0.
    zero = all(isinstance(value, torch.Tensor) or value == 0 for value in chosen)
    return pointwise((tuple(range(1, len(call.operands))),) if zero else ())(call)


def masked_fill(call: Call) -> Rule | None:
    """Linear in the tensor if the value is zero; in tensor and value together if the value is a tensor."""
    value = call["value"]
    if isinstance(value, torch.Tensor):
        return pointwise(((0, 2),))(call)
    return pointwise(((0,),) if value == 0 else ())(call)


def dropout(call: Call) -> Rule | None:
    """Pass-through if nothing is drawn; otherwise each factor can be cut in the parallel form."""
    # One device draws a mask for the whole tensor. Whatever is cut, a rank has to find its part of this mask.
    drawn = call.get("train", True) and call["p"] != 0
    return along(call, range(call.operands[0].dim()), "!") if drawn else pointwise("all")(call)


def gated(call: Call) -> Rule:
    """`glu`: the first half of `dim` times the sigmoid of the second half; both halves are cut together."""
    before, after, dim = letters(call.operands[0].dim()), letters(call.operands[0].dim()), call.dim()
    before[dim], after[dim] = "(k | k)", "k"
    return Rule.of(spell([before], [after]))


def channelwise(call: Call) -> Rule:
    """`prelu`: `input: [a b ...]`, with one weight for all, or one for each `b`."""
    x, weight = call.operands
    ns = letters(x.dim())
    return Rule.of(spell([ns, ns[1:2] if x.dim() > 1 and weight.dim() else unread(weight, 1)], [ns]))


# ---- along dimensions


def along(call: Call, dims: Iterable[int], mark: str = "^", linear: Linear = ()) -> Rule:
    """Keeps the first operand's shape, mixes along `dims` (which get the mark), passes other dimensions through."""
    marked = [d % max(call.operands[0].dim(), 1) for d in dims]
    term = [n + mark * (i in marked) for i, n in enumerate(letters(call.operands[0].dim()))]
    return Rule.of(spell([term], [term] * len(call.outputs)), linear)


def along_dim(mark: str = "^", linear: Linear = ()) -> RuleFunction:
    """Mixes along its argument `dim`: softmax, cumsum, sort, ..."""
    return lambda call: along(call, [call.dim()], mark, linear if same_dtype(call) else ())


def along_dims(call: Call) -> Rule:
    """Mixes along its argument `dims`: flip, roll (along all dimensions if none is given)."""
    return along(call, call["dims"] or range(call.operands[0].dim()), linear="all")


def along_fixed(*dims: int, linear: Linear = ()) -> RuleFunction:
    """Mixes along these dimensions: tril, fliplr, msort, ..."""
    return lambda call: along(call, dims, linear=linear)


def norm(call: Call) -> Rule:
    """Layer and RMS norm: whole along the normalised dimensions, pass-through before them."""
    normed = [f"n{i}^" for i in range(len(call["normalized_shape"]))]
    return Rule.of(spell([["*", *normed]] + [normed] * (len(present(call)) - 1), [["*", *normed]]))


def group_norm(call: Call) -> Rule:
    """`x: [n g c ...]`, `weight: [g c]`, `bias: [g c]`: each group is normalised over its channels and places."""
    x, *rest = present(call)
    term = ["n", "g", *(f"c{d}^" for d in range(x.dim() - 2))]
    return Rule.of(spell([term] + [term[1:3]] * len(rest), [term]))


def batch_norm(call: Call) -> Rule:
    """`x: [n c ...]`, other operands `[c]`: each channel by itself, in training over the whole batch."""
    x, *rest = present(call)
    # In training the statistics are means over all rows and places, and those of a part would be others.
    mark = "^" if call.get("training", True) else ""
    term = [f"n{mark}", "c", *(f"d{d}{mark}" for d in range(x.dim() - 2))]
    # `batch_norm_moving` also returns the new mean and variance of each channel.
    return Rule.of(spell([term] + [["c"]] * len(rest), [term, *[["c"]] * (len(call.outputs) - 1)]))


def by_channel(call: Call) -> Rule:
    """`x: [... c places...]`: each channel by itself, with another number of places."""
    dim, ndim = call["dim"], call.operands[0].dim()
    front = [*letters(ndim)[:dim], "k"]
    before, after = ([*front, *(f"{name}{d}^" for d in range(dim + 1, ndim))] for name in "xy")
    return Rule.of(spell([before], [after] * len(call.outputs)))


def resized(call: Call) -> Rule:
    """A result of another length along `dim`: topk, diff. The operands are needed whole along `dim`."""
    dim, ns = call.dim(), letters(call.operands[0].dim())
    names = [f"x{i}^" for i in range(len(present(call)))]
    *before, after = ([*ns[:dim], name, *ns[dim + 1 :]] if ns else [] for name in [*names, "y^"])
    return Rule.of(spell(before, [after] * len(call.outputs)))


# ---- reductions


def reduced_dims(call: Call) -> set[int]:
    """Returns the dimensions in a reduction's argument `dim`; all dimensions if it is absent or empty."""
    ndim, dim = call.operands[0].dim(), call.get("dim")
    dims = [dim] if isinstance(dim, int) else dim
    # torch takes dim=0 and dim=-1 of a number, too, which has nothing to reduce.
    return {d % max(ndim, 1) for d in dims} & set(range(ndim)) if dims else set(range(ndim))


def reduction(mark: str = "", linear: Linear = ()) -> RuleFunction:
    """Reduces the dimensions in its argument `dim` (all if none is given), which get the mark."""

    def of(call: Call) -> Rule:
        ns, dims = letters(call.operands[0].dim()), reduced_dims(call)
        ins = [n + mark * (i in dims) for i, n in enumerate(ns)]
        out = ["1" if i in dims else n for i, n in enumerate(ns) if i not in dims or call.get("keepdim")]
        return Rule.of(spell([ins], [out] * len(call.outputs)), linear if same_dtype(call) else ())

    return of


def argmax(call: Call) -> Rule | None:
    """Reduces `dim`, which can be cut if keys that ranks compare have the values: `argmax_key`."""
    dtype = call.operands[0].dtype
    has_keys = call.get("dim") is not None and dtype.is_floating_point and dtype.itemsize <= 4
    return reduction("!" if has_keys else "^")(call)


def paired(mark: str, linear: Linear = ()) -> RuleFunction:
    """Broadcasts two operands and reduces `dim`: cosine_similarity, vecdot."""

    def of(call: Call) -> Rule:
        ins = broadcast(call)
        out = max(ins, key=len)
        dim = call.dim(ndim=len(out)) if "dim" in call.arguments else len(out) - 1
        ins = [[n + mark if n == out[dim] else n for n in term] for term in ins]
        reduced = ["1"] if call.get("keepdim") else []
        return Rule.of(spell(ins, [[*out[:dim], *reduced, *out[dim + 1 :]]]), linear)

    return of


def broadcast(call: Call, mark: str = "") -> list[list[str]]:
    """Returns the terms of operands that are broadcast, as `*` says, but with named factors."""
    ndim = max(operand.dim() for operand in present(call))
    return [letters(ndim, mark)[ndim - operand.dim() :] for operand in present(call)]


# ---- losses


def elementwise_loss(call: Call) -> Rule:
    """An elementwise loss with the reductions none, mean and sum: mse_loss, binary_cross_entropy, ..."""
    # A mean divides by the count of all elements, and a rank has the count of its part: `decompose` divides the sum.
    ins = broadcast(call, "!" if call["reduction"] == MEAN else "")
    return Rule.of(spell(ins, [[] if call["reduction"] else max(ins, key=len)]))


def class_loss(call: Call) -> Rule:
    """Cross-entropy and negative log-likelihood over classes `c`, with a parallel form along the classes.

    `input: [n c ...]` or `[c]`, `target: [n ...]` of class indices, or probabilities, `[n c ...]`.
    """
    x, target, *weight = present(call)
    mark = "!" if call["reduction"] == MEAN else ""
    front, tail = [f"n{mark}"] * (x.dim() > 1), [f"d{i}{mark}" for i in range(x.dim() - 2)]
    classes = ["c!"] if target.dtype.is_floating_point else []
    ins = [[*front, "c!", *tail], [*front, *classes, *tail], *[["c!"]] * len(weight)]
    return Rule.of(spell(ins, [[] if call["reduction"] else [*front, *tail]]))


# ---- creation


def new_tensor(call: Call) -> Rule:
    """A new tensor whose elements do not depend on their place; only the dtypes of its operands are read."""
    ins = [unread(operand, i) for i, operand in enumerate(present(call))]
    return Rule.of(spell(ins, [letters(call.outputs[0].dim())]))


# ---- our own parallel forms


def dispatched(call: Call) -> Rule:
    """`dispatch`: rows in the order of their chosen experts."""
    return Rule.of("s^ -> (e! n)", e=call["stop"] - call["start"])


def arriving(call: Call) -> Rule:
    """`arrival`: rows in the order of this rank's experts."""
    return Rule.of("p^ r^ o^ -> (o^ n^)", o=call.operands[0].shape[2])


def _around(call: Call, *names: str) -> list[list[str]]:
    """Returns terms like that of the first operand, with another factor along `dim`; "" drops the dimension."""
    ns, dim = letters(call.operands[0].dim()), call.dim()
    return [[*ns[:dim], *([name] if name else []), *ns[dim + 1 :]] for name in names]


def parallel_gather(call: Call) -> Rule:
    """`gather` with a cut factor along `dim`: see `lookup.gather(x, dim, index, start, size)`."""
    x, index = _around(call, "v", "k")
    return Rule.of(spell([x, index], [index]), ((0,),))


def parallel_peak(call: Call) -> Rule:
    """`peak(x, dim)`: a maximum without a gradient, so it can be reduced over ranks."""
    x, top = _around(call, "v", "1")
    return Rule.of(spell([x], [top]), reducer="max")


def parallel_argmax(call: Call) -> Rule:
    """`argmax_key(x, dim, start)`: a maximum without a gradient, too."""
    x, key = _around(call, "v!", "")
    return Rule.of(spell([x], [key]), reducer="max")


def parallel_class_terms(call: Call) -> Rule:
    """`class_terms(x, top, classes, dim, start)`: two sums for each row over classes, which may be cut."""
    x, top, row = _around(call, "v!", "1", "")
    return Rule.of(spell([x, top, row], [["t^", *row]]))


def parallel_linear_class_terms(call: Call) -> Rule:
    """`linear_class_terms(weight, x, classes, ...)`: terms of each row over classes, which may be cut."""
    row, has_sum = letters(call["classes"].dim()), call.get("first_part") or call.get("second_part")
    reducer = "logsumexp" if not has_sum else "logsumexp_mean" if call.get("shares") is None else "logsumexp_sum"
    return Rule.of(spell(_of_heads(call, row, "v!"), [["t^", *row]]), reducer=reducer)  # type: ignore[arg-type]


def _of_heads(call: Call, row: list[str], v: str) -> list[list[str]]:
    """Returns the terms of the tensors of one head or two. v: the letter of the classes"""
    shares = call.get("shares")
    terms = {
        "weight": [v, "i^"], "x": [*row, "i^"], "lse": row, "second_lse": row, "share": row, "second_share": row,
        "classes": row, "of_lse": row, "of_class": row,
        "of_total": row, "of_second_lse": row, "bias": [v],
        "second_weight": [v, "j^"], "second_x": [*row, "j^"], "second_bias": [v],
        "shares": [*row, v] if shares is not None and shares.dim() > 1 else [v],
        "low_weight": [v, "k^"], "low_x": [*row, "k^"],
        "second_low_weight": [v, "l^"], "second_low_x": [*row, "l^"],
    }  # fmt: skip
    return [term for name, term in terms.items() if call.get(name) is not None]


def parallel_linear_mixture(call: Call) -> Rule:
    """`linear_mixture_sums(weight, x, lse, ...)`: two sums of each row over classes, which may be cut."""
    row = letters(call["lse"].dim())
    return Rule.of(spell(_of_heads(call, row, "v"), [["t^", *row]]))


def parallel_linear_argmax(call: Call) -> Rule:
    """`linear_argmax_key(weight, x, start, ...)`: a maximum of each row over classes, which may be cut."""
    row = letters(call["x"].dim() - 1)
    return Rule.of(spell(_of_heads(call, row, "v!"), [row]), reducer="max")


def whole_linear_loss_sum(call: Call) -> Rule:
    """`linear_loss_sum(weight, x, classes, of_lse, of_class, ...)`: a sum over rows. It needs all classes."""
    return Rule.of(spell(_of_heads(call, letters(call["classes"].dim()), "v^"), [[]]))
