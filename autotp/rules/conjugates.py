"""Rule functions of conjugates, and of moves without communication, over one mesh axis in a graph that is cut along
another one.

All are linear. They combine the same positions of all ranks of their axis, so the dimensions that they do not move pass
through.
"""

from __future__ import annotations

from autotp.rules.call import Call
from autotp.rules.common import letters, pointwise
from autotp.rules.language import Rule, spell


def one_for_one(call: Call) -> Rule | None:
    """`copy(x, axis)` and `reduce(x, axis, op)`: every position by itself. Only a sum is linear."""
    return pointwise("all" if call.get("op", "sum") == "sum" else ())(call)


def another_length(call: Call) -> Rule:
    """`scatter`, `gather`, `all_gather`, `reduce_scatter`, `take` and `place`: `dim` has another length, and is needed
    whole."""
    ns, dim = letters(call.operands[0].dim()), call.dim()
    before, after = ([*ns[:dim], name, *ns[dim + 1 :]] for name in ("x^", "y^"))
    return Rule.of(spell([before], [after]), "all")


def two_other_lengths(call: Call) -> Rule:
    """`all_to_all`: both its dimensions have another length, and are needed whole."""
    ns, dims = letters(call.operands[0].dim()), (call.dim(), call.dim("to_dim"))
    before, after = ([f"{name}{d}^" if d in dims else n for d, n in enumerate(ns)] for name in ("x", "y"))
    return Rule.of(spell([before], [after]), "all")


def heads_in_parts(call: Call) -> Rule:
    """`by_heads`: the heads are `(h p)`, or `(h p g)` with `g` heads of queries for each of keys."""
    (x,), dim, sizes = call.operands, call.dim(), {"p": call["parts"], "g": call["group"]}
    ns = [f"n{d}" for d in range(x.dim())]
    before, after = ([f"{name}{d}^" if d in call["separate"] else n for d, n in enumerate(ns)] for name in ("x", "y"))
    before[dim] = after[dim] = "(h p g)" if sizes["g"] > 1 else "(h p)"
    return Rule.of(spell([before], [after]), "all", **{name: n for name, n in sizes.items() if n > 1})


def with_positions_before(call: Call) -> Rule:
    """`nearby(x, dim, ...)` and `halo(x, axis, dim, size, ...)`: `dim` has another axis behind."""
    ns, dim, mark = letters(call.operands[0].dim()), call.dim(), "^" if "group" in call.arguments else "!"
    before, after = ([*ns[:dim], name, *ns[dim + 1 :]] for name in (f"x{mark}", "y^"))
    return Rule.of(spell([before, *[["z^"]] * (len(call.operands) - 1)], [after]), ((0,),))


def ends_of_whole(call: Call) -> Rule:
    """`ends_of_numbers`: any two tokens may have one number, so all are needed, in each row."""
    return Rule.of(spell([[f"n{d}^" for d in range(call.operands[0].dim())]], [["e^"]]))


def whole_along(call: Call) -> Rule:
    """`first`: positions of `dim` have a gradient or none, so it is needed whole."""
    names = letters(call.operands[0].dim())
    if names:
        names[call.dim()] = "x^"
    return Rule.of(spell([names], [names]), "all")
