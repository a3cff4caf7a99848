"""Rule functions of lookups and updates by index; None where there is no rule.

The indexed dimension stays whole, because an index is a position in the global tensor. Only `embedding` and `gather`
have a parallel form along this dimension, marked `!`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autotp.rules.call import Call
from autotp.rules.common import entire, letters, present, unread
from autotp.rules.language import Rule, spell
from autotp.sharding.axis import Size


def embedding(call: Call) -> Rule | None:
    """Rows `v` of a table. A part of the table cannot compute gradients that are scaled by frequency, nor sparse ones,
    which ranks cannot sum: then each rank looks up all rows."""
    if call["scale_grad_by_freq"]:
        return None
    if call["sparse"]:
        rows = [f"{name}^" for name in letters(call.operands[1].dim())]
        return replace(Rule.of(spell([["v^", "x"], rows], [[*rows, "x"]])), exact=True)
    return Rule.of("v! h, * -> * h", ((0,),))


def one_hot(call: Call) -> Rule:
    """A new dimension of classes; without `num_classes` their number depends on values, and everything stays whole."""
    return Rule.of("* -> * k^") if call["num_classes"] >= 0 else entire(call)


def gather(call: Call) -> Rule | None:
    """One element of `x` along `dim` for each index: linear in `x`, with a parallel form along `dim`."""
    # Ranks cannot sum sparse gradients.
    if call.operands[0].dim() != call.operands[1].dim() or call["sparse_grad"]:
        return None
    x, index = _beside(call)
    if x:
        x[call.dim()], index[call.dim()] = "v!", "k"
    return Rule.of(spell([x, index], [index]), ((0,),))


def scatter(call: Call) -> Rule | None:
    """`scatter`, `scatter_add`, `scatter_reduce`: moves `src` along `dim` as `index` says, elementwise elsewhere."""
    if any(operand.dim() != call.operands[0].dim() for operand in call.operands):
        return None
    terms = _beside(call)
    # Not strict: where a number is scattered, there is no `src`.
    for term, name in zip(terms, ("v^", "k^", "s^"), strict=False):
        term[call.dim() : call.dim() + 1] = [name] if term else []
    return Rule.of(spell(terms, terms[:1]))


def _beside(call: Call) -> list[list[str]]:
    """Returns terms with a common factor in dimensions of equal length, and whole separate factors in the others."""
    terms: list[list[str]] = [[] for _ in call.operands]
    for n, *lengths in zip(letters(call.operands[0].dim()), *(operand.shape for operand in call.operands), strict=True):
        # torch reads the first positions of a longer dimension only, so its parts would not be those of a shorter one.
        equal_lengths = len({Size.of(length) for length in lengths}) == 1
        for i, term in enumerate(terms):
            term.append(n if equal_lengths else f"x{i}{n}^")
    return terms


def index_select(call: Call) -> Rule:
    """Picks positions of `dim`, in the order of a list."""
    x, index = call.operands
    ns, dim = letters(x.dim()), call.dim()
    before, after = ([*ns[:dim], name, *ns[dim + 1 :]] if ns else [] for name in ("v^", "k"))
    return Rule.of(spell([before, ["k"] if index.dim() and ns else unread(index, 1)], [after]), ((0,),))


def index_update(call: Call) -> Rule | None:
    """`index_add`, `index_copy`, `index_fill`: changes the positions of `dim` in a list."""
    x, index, *source = call.operands
    if not x.dim() or any(value.dim() not in (0, x.dim()) for value in source):
        return None
    ns, dim = letters(x.dim()), call.dim()
    into, source_term = ([*ns[:dim], name, *ns[dim + 1 :]] for name in ("v^", "k^"))
    return Rule.of(spell([into, unread(index, 1), *(source_term if value.dim() else [] for value in source)], [into]))


def index(call: Call) -> Rule | None:
    """Advanced indexing by integers: the indexed dimensions are needed whole, the others pass through."""
    if not _integers(call):
        return None
    x, terms, out = _indexed(call, "")
    return Rule.of(spell([x, *terms], [out]), ((0,),))


def index_put(call: Call) -> Rule | None:
    """Advanced indexing that writes; `values` is broadcast to the shape that the same indices would read."""
    if not _integers(call):
        return None
    x, terms, out = _indexed(call, "^")
    # `values` is broadcast, which aligns its last dimensions. Each element is one of x or of values: linear in both.
    return Rule.of(spell([x, *terms, out[len(out) - call["values"].dim() :]], [x]), ((0, len(terms) + 1),))


def _integers(call: Call) -> bool:
    """True if all indices are integers; the length of a result picked by a mask depends on values."""
    dtypes = [value.dtype for value in call["indices"] if value is not None]
    return bool(dtypes) and all(dtype in (torch.int64, torch.int32) for dtype in dtypes)


def _indexed(call: Call, mark: str) -> tuple[list[str], list[list[str]], list[str]]:
    """Returns the terms of `x`, of the indices (their factors get `mark`), and of the result.

    The picked dimensions are at the place of the indices if these are neighbours, else in front.
    """
    ns, indices = letters(call.operands[0].dim()), call["indices"]
    places = [i for i, value in enumerate(indices) if value is not None]
    ranks = [indices[i].dim() for i in places]
    picked = [f"k{i}{mark}" for i in range(max(ranks))]
    start = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    out = [n for i, n in enumerate(ns) if i not in places]
    # Indices are broadcast, which aligns their last dimensions.
    terms = [picked[len(picked) - rank :] for rank in ranks]
    return [n + "^" * (i in places) for i, n in enumerate(ns)], terms, [*out[:start], *picked, *out[start:]]


def searched(call: Call) -> Rule:
    """`searchsorted` and `bucketize`: the place of each number in a sorted list, one for all or one for each row."""
    numbers = call["self"]
    listed = next(operand for operand in present(call) if operand is not numbers)
    rows = ["*"] if listed.dim() == 1 else [*letters(listed.dim() - 1), "k"]
    ranked = ["t^"] if listed.dim() == 1 else [*rows[:-1], "t^"]
    return Rule.of(spell([rows if operand is numbers else ranked for operand in present(call)], [rows]))


def membership(call: Call) -> Rule:
    """`isin`: compares each element with a whole set."""
    return Rule.of(spell([["*"], unread(call.operands[1], 1)], [["*"]]))
