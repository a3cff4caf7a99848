"""Rule functions of products, which sum over factors that their operands share."""

from __future__ import annotations

from typing import Any

import torch

from autotp.ops.attention.zigzag import zigzag_rows
from autotp.rules.call import Call
from autotp.rules.common import RuleFunction, fixed, present
from autotp.rules.language import Rule, spell
from autotp.sharding.axis import Size


def biased(text: str, bias: str) -> RuleFunction:
    """Returns the rule function of a product, linear in each operand.

    With a bias as last operand no cut factor may be reduced, because every rank would add the bias.
    """
    product, n = Rule.of(text, "each"), text.count(",") + 1
    terms = [*_whole_where_reduced(product), bias]
    # With a partial bias the product may be partial, too: the sum over ranks has each of them once.
    whole_sum = fixed(f"{', '.join(terms)} ->{text.split('->')[1]}", tuple((i, n) for i in range(n)))
    return lambda call: whole_sum(call) if len(present(call)) > n else product


def _whole_where_reduced(rule: Rule) -> list[str]:
    """Returns the operands' terms of a rule without groups, with `^` at factors that are missing from the output."""
    output_factors = {str(expr) for expr in rule.outs[0]}
    return [" ".join(f"{n}" if str(n) in output_factors else f"{n}^" for n in term) for term in rule.ins]


def matmul(call: Call) -> Rule:
    """`[... m i] @ [... i n]`; either operand may be a vector; `*` are the batches."""
    a, b = (operand.dim() for operand in call.operands)
    batched = ["*"] if max(a, b) > 2 else []
    lhs = [*batched, "m", "i"] if a > 1 else ["i"]
    rhs = [*batched, "i", "n"] if b > 1 else ["i"]
    return Rule.of(spell([lhs, rhs], [[*batched, *["m"] * (a > 1), *["n"] * (b > 1)]]), "each")


def added(text: str) -> RuleFunction:
    """`addmm` and the like: `beta * input + alpha * product`, with the input broadcast to the product's shape."""
    product = Rule.of(text)
    out, terms = [str(expr) for expr in product.outs[0]], [term.split() for term in _whole_where_reduced(product)]
    # The added input is broadcast, which aligns its last dimensions.
    return lambda call: Rule.of(spell([out[len(out) - call.operands[0].dim() :], *terms], [out]), ((0, 1), (0, 2)))


def grouped_mm(call: Call) -> Rule | None:
    """`[s i] @ [e i o]` with the rows in groups, one for each expert; `offs: [e]` has the ends of the groups."""
    a, b = call.operands[:2]
    if (a.dim(), b.dim()) != (2, 3) or call.get("bias") is not None:
        return None
    # Where the groups end is known at run time only, so neither rows nor groups can be cut here.
    return Rule.of("s^ i, e^ i o, e^ -> s^ o", ((0,), (1,)))


def inner(call: Call) -> Rule:
    """`inner(a, b)` sums over the last dimensions; a scalar multiplies."""
    a, b = (operand.dim() for operand in call.operands)
    if not a or not b:
        return Rule.of(spell([["*"], ["*"]], [["*"]]), "each")
    lhs, rhs = ([f"{name}{i}" for i in range(n - 1)] for name, n in (("m", a), ("n", b)))
    return Rule.of(spell([[*lhs, "i"], [*rhs, "i"]], [[*lhs, *rhs]]), "each")


def solved(call: Call) -> Rule:
    """`linalg_solve_triangular`: `A x = b` for each column `k` of b, or `x A = b` for each row; linear in b."""
    return Rule.of("* i^ m^, * m^ k -> * m^ k" if call["left"] else "* m^ i^, * k m^ -> * k m^", ((1,),))


def einsum(call: Call) -> Rule | None:
    """An einsum equation is a rule already. A diagonal (`ii`), one factor in two dimensions, has no rule."""
    ins, arrow, out = call["equation"].replace(" ", "").replace("...", ".").partition("->")
    # Without `->` the output has the letters that come once, in the order of the alphabet.
    if not arrow:
        once = sorted({c for c in ins if ins.count(c) == 1} - {","} - {"."})
        out = "." * ("." in ins) + "".join(once)
    if any(term.count(c) > 1 for term in ins.split(",") for c in term):
        return None
    text = spell([list(term) for term in ins.split(",")], [list(out)])
    return Rule.of(text.replace(".", "*"), "each")


def convolution_rule(call: Call) -> Rule:
    """A convolution is a linear in its channels, group by group: `x: [n (g i) ...]`, `weight: [(g o) i ...]`."""
    x, weight = call.operands
    inside = weight.shape[1]
    groups = x.shape[x.dim() - weight.dim() + 1] // max(inside, 1)
    outside = weight.shape[0] // max(groups, 1)
    return _convolved(x, weight.dim() - 2, ["go", "i"], groups, inside, outside)


def conv_transpose_rule(call: Call) -> Rule:
    """The same for a transposed convolution: `x: [n (g i) ...]`, `weight: [g i o ...]`."""
    x, weight = call.operands
    return _convolved(x, weight.dim() - 3, ["g", "i", "o"], *weight.shape[:3])


def _convolved(x: torch.Tensor, places: int, weight: list[str], groups: int, inside: int, outside: int) -> Rule:
    """Returns the rule of a convolution whose weight has these dimensions before those of the kernel."""
    # A factor of size 1 has no name, as an axis (`product`) drops its parts of size 1.
    many = {name: n != 1 for name, n in zip("gio", (groups, inside, outside), strict=True)}

    def channels(names: str) -> str:
        factors = [name for name in names if many[name]]
        return f"({' '.join(factors)})" if len(factors) > 1 else "".join(factors) or "1"

    before, kernel, after = ([f"{name}{d}^" for d in range(places)] for name in "xky")
    front = ["n"] * (x.dim() - places - 1)
    ins = [[*front, channels("gi"), *before], [*map(channels, weight), *kernel]]
    sizes: dict[str, Any] = {"g": groups} if many["g"] else {}
    return Rule.of(spell(ins, [[*front, channels("go"), *after]]), "each", **sizes)


def attention(call: Call) -> Rule | None:
    """Scaled dot-product attention: `query: [* h s d]`, `key: [* k t d]`, `value: [* k t e]`, `mask: [* h s t]`.

    Linear in `value` without dropout. With dropout the mask is drawn for all heads at once, so a cut needs the parallel
    form. With `is_causal` the positions of queries matter: a cut needs the parallel form `causal_rows`, or that of
    `zigzag_rows`, and a part of the queries stays as it is. So do the queries of a form that does not know theirs.
    """
    query, key, _, *mask = present(call)
    if query.dim() != call.outputs[0].dim():  # The query is broadcast: torch fails on empty parts then.
        return None
    mark = "!" if call.get("dropout_p") else ""
    heads = [f"h{i}{mark}" for i in range(call.outputs[0].dim() - 2)]
    kv, sizes = heads, {}
    if call.get("enable_gqa") and Size.of(query.shape[-3]) != Size.of(key.shape[-3]):
        kv, heads, sizes = [*heads[:-1], f"k{mark}"], [*heads[:-1], f"(k{mark} g{mark})"], {"k": key.shape[-3]}
    causal = ("^" if "rank" in call.arguments else "!") if call.get("is_causal") else mark
    if "parts" in call.arguments:  # `zigzag_rows`, of all ranks or of one.
        causal = "!" if call["rank"] is None else "^"
    s = "s^" if "start" in call.arguments else f"s{causal}"
    terms = [[*heads, s, "d^"], [*kv, "t^", "d^"], [*kv, "t^", "e"], *[[*heads, s, "t^"]] * len(mask)]
    terms = [term[len(term) - operand.dim() :] for term, operand in zip(terms, present(call), strict=True)]
    return Rule.of(spell(terms, [[*heads, s, "e"]]), () if mark else ((2,),), **sizes)


def has_mask(call: Call) -> bool:
    """Returns whether an attention reads a mask."""
    return call.get("attn_mask") is not None


def zigzag_attention(call: Call) -> Any:
    """Returns the operator for queries in the order of `zigzag`; None if the attention is not causal."""
    return zigzag_rows if call.get("is_causal") else None
