"""Runs an operator on the parts of cut tensors, if its rule says that this gives the parts of the result.

Before: y = div(x, t)                          x: [b s v@tp], t: []
After:  part of y = div(part of x, t)          by the rule "*, * -> *", and y: [b s v@tp]

The rules are those by which graphs are cut. A result that is cut alike stays cut. A tensor that every rank has whole
takes part with the rank's slice of it. Where a rule needs the cut dimension whole, sums over it, or is not known, the
operator is an Error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autotp.errors import Error
from autotp.ops.eager_mode import is_transformed
from autotp.rules import common as f
from autotp.rules.call import Call, bound_arguments, called_with, tensor_arguments, tensors_in
from autotp.rules.language import STAR, UNIT, Name, Rule, Term
from autotp.rules.registry import has_rule, rule_of
from autotp.rules.row import Trait
from autotp.rules.traits import functional_of, has, size_argument
from autotp.sharding.layout import Layout

aten = torch.ops.aten
Factor = tuple[str, int]
"""A factor of a term; of `*` with its place from the right."""


@dataclass(frozen=True)
class Plan:
    """How an operator runs on parts.

    Attributes:
        source: a `Sharded` that is cut as the results are.
        rule: the operator's rule.
        factor: the factor that is cut.
        results: the shapes, on meta, of what one device would give.
    """

    source: Any
    rule: Rule
    factor: Factor
    results: tuple[Tensor, ...]

    def dim_in(self, term: Term, tensor: Tensor) -> int | None:
        """Returns the dimension of an operand or a result that is cut; None if it has none."""
        factors = _factors(term, tensor.dim())
        return factors.index(self.factor) if self.factor in factors else None


def on_parts(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], cut_type: Any) -> Any:
    """Returns what an operator gives for cut tensors of this type.

    Raises:
        Error: no rank can compute its part of the result from its parts.
    """
    cuts: list[Any] = []
    _mapped(lambda x: cuts.append(x) if isinstance(x, cut_type) else None, [*args, *kwargs.values()])
    if not all(map(_is_detached, cuts)):
        raise refused(func, cuts[0], " inside a transform of torch.func")
    if has(func, Trait.SAME) and len(cuts) == 1:  # The way of a cast, which each token of `generate` takes, is short.
        return _same(cuts[0], func(cuts[0].part, *args[1:], **kwargs))
    composed = func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)
    if composed and (found := func.decompose(*args, **kwargs)) is not NotImplemented:
        return found  # Without autograd (in inference mode), torch does not take these apart itself.
    form = _functional(func, args, cut_type)
    if form is None or torch.Tag.nondeterministic_seeded in func.tags:
        raise refused(func, cuts[0])
    bound = _with_places(form, bound_arguments(form, args, kwargs))
    if form in NEW:
        return _new(form, bound)
    plan = _plan(form, bound, cuts, cut_type)
    if plan is None:
        raise refused(func, cuts[0])
    local = _local(form, bound, plan, cut_type)
    if form is func:
        return _joined(called_with(func, local), plan)
    called_with(func, dict(zip((arg.name for arg in func._schema.arguments), local.values(), strict=True)))
    return args[0]


def _same(cut: Any, part: Tensor) -> Any:
    """Returns a tensor with the elements of another, perhaps in another order in memory."""
    return cut.like(part, cut.cut[0], cut.stride() if part.stride() == cut.part.stride() else None)


def _is_detached(cut: Any) -> bool:
    """False for a part with derivatives of its own. That of a transform that has ended may have none left."""
    if is_transformed(cut.part):
        cut.part = torch._C._functorch.unwrap_if_dead(cut.part)
    return not (is_transformed(cut.part) or cut.part.requires_grad)


def refused(func: Any, cut: Any, where: str = "") -> Error:
    """Returns the Error of an operator that would take a part for the whole."""
    name = str(func._schema.name).removeprefix("aten::") if isinstance(func, OpOverload) else str(func)
    shape = ", ".join(f"{n}@{cut.mesh.axis}" if d == cut.cut[0] else str(n) for d, n in enumerate(cut.shape))
    return Error(
        f"`{name}` of a tensor [{shape}] of which each rank holds a part{where}",
        fix="autotp.gather(tensor) on all ranks, which is whole, with its gradient",
        alternative='parallelize(..., outputs="full")',
    )


def _functional(func: OpOverload, args: Sequence[Any], cut_type: Any) -> OpOverload | None:
    """Returns the operator, or its form that returns a new tensor; None if it writes into a tensor that is not cut."""
    written = [i for i, arg in enumerate(func._schema.arguments) if arg.alias_info and arg.alias_info.is_write]
    if not written:
        return func
    in_place = written == [0] and isinstance(args[0], cut_type) and torch.Tag.inplace_view not in func.tags
    return functional_of(func) if in_place else None


def _with_places(func: OpOverload, bound: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with the places of a mask's true elements for the mask, as torch indexes by it."""
    if func not in INDEXED or not any(_is_mask(x) for x in bound["indices"]):
        return bound
    places: list[Any] = []
    for index in bound["indices"]:
        places += index.nonzero(as_tuple=True) if _is_mask(index) else [index]
    return {**bound, "indices": places}


NEW = tuple(getattr(aten, f"new_{name}").default for name in ("zeros", "ones", "full", "empty", "empty_strided"))
INDEXED = (aten.index.Tensor, aten.index_put.default)


def _new(func: OpOverload, bound: Mapping[str, Any]) -> Any:
    """Returns a new tensor: cut as the operand is, if its size is that of the operand there; else whole."""
    cut, sizes = bound["self"], list(bound["size"])
    dim = cut.cut[0]
    if len(sizes) != cut.dim() or sizes[dim] != cut.shape[dim]:
        return called_with(func, {**bound, "self": cut.part})
    shape = [*sizes[:dim], cut.part.shape[dim], *sizes[dim + 1 :]]
    rest = {name: value for name, value in bound.items() if name not in ("self", "size", "stride")}
    dense = {"stride": torch.empty(shape, device="meta").stride()} if "stride" in bound else {}
    return cut.like(called_with(func, {"self": cut.part, "size": shape, **dense, **rest}), dim)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


# ---- what is cut


def _plan(func: OpOverload, bound: Mapping[str, Any], cuts: Sequence[Any], cut_type: Any) -> Plan | None:
    """Returns how an operator runs on parts; None if it does not."""
    if func not in MORE_RULES and not has_rule(func) and torch.Tag.pointwise not in func.tags:
        return None
    example = {name: _mapped(_on_meta, value) for name, value in bound.items()}
    if isinstance(example.get("device"), torch.device):
        example["device"] = torch.device("meta")
    try:
        results = tensors_in(called_with(func, example))
    except NotImplementedError:  # Shapes that depend on values, or an operator without shapes.
        return None
    call = Call(func, example, tuple(tensor_arguments(func, example, _is_tensor)), results)
    rule = _rule(func, call)
    if rule is None:
        return None
    operands = [x for x in tensor_arguments(func, bound, _is_tensor) if x is not None]
    rows = zip(rule.ins, operands, strict=True)
    factors = {_factors(term, x.dim())[x.cut[0]] for term, x in rows if isinstance(x, cut_type)}
    factor = factors.pop() if len(factors) == 1 else None
    if factor is None or any(x.cut[1] != cuts[0].cut[1] for x in cuts):
        return None
    plan, size = Plan(cuts[0], rule, factor, results), cuts[0].shape[cuts[0].cut[0]]
    dims = [plan.dim_in(term, x) for term, x in zip(rule.outs, results, strict=True)]
    alike = all(d is not None and x.shape[d] == size for d, x in zip(dims, results, strict=True))
    return plan if alike and results else None


def _rule(func: OpOverload, call: Call) -> Rule | None:
    if func in MORE_RULES:
        return MORE_RULES[func](call)
    found = rule_of(call)
    return f.pointwise()(call) if found is None and torch.Tag.pointwise in func.tags else found


def _reads_places(call: Call) -> Rule:
    """The gradient of a slice, or of a position: the dimension that is indexed is whole."""
    gradient, dim = call.operands[0], call.dim(ndim=call.outputs[0].dim())
    names = f.letters(call.outputs[0].dim())
    after = [*names[:dim], "k^", *names[dim + 1 :]]
    before = [*names[:dim], "l^", *names[dim + 1 :]] if gradient.dim() == len(names) else names[:dim] + names[dim + 1 :]
    return Rule.of(f"{' '.join(before) or '()'} -> {' '.join(after)}")


def _softmax_gradient(call: Call) -> Rule:
    names = f.letters(call.operands[0].dim())
    term = " ".join([*names[: call.dim()], "k^", *names[call.dim() + 1 :]])
    return Rule.of(f"{term}, {term} -> {term}")


POINTWISE = (
    "zero", "elu_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward",
    "mish_backward", "softplus_backward",
)  # fmt: skip
"""Operators without a rule that are pointwise, and not tagged as such by torch."""

MORE_RULES: dict[OpOverload, Callable[[Call], Rule | None]] = {
    **{getattr(aten, name).default: f.pointwise() for name in POINTWISE},
    aten.slice_backward.default: _reads_places,
    aten.select_backward.default: _reads_places,
    aten._softmax_backward_data.default: _softmax_gradient,
    aten._log_softmax_backward_data.default: _softmax_gradient,
}
"""Rules of operators that graphs do not have: gradients, and forms of writes."""


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns an argument or a result with `function` of its tensors: of one, or of those in a list."""
    if isinstance(value, Tensor):
        return function(value)
    return [_mapped(function, x) for x in value] if isinstance(value, list | tuple) else value


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _factors(term: Term, ndim: int) -> list[Factor | None]:
    """Returns the factor of each dimension; None for a dimension that must be whole, or is composed of factors."""
    found: list[Factor | None] = []
    for expr in term:
        if expr == STAR:
            length = ndim - len(term) + 1
            found += [("*", length - i) for i in range(length)]
        else:
            plain = isinstance(expr, Name) and expr != UNIT and not expr.mark
            found.append((expr.name, 0) if plain and isinstance(expr, Name) else None)
    return found


# ---- on a rank


def _local(func: OpOverload, bound: Mapping[str, Any], plan: Plan, cut_type: Any) -> dict[str, Any]:
    """Returns the arguments of a rank's own call.

    Raises:
        Error: a tensor that is whole, and requires a gradient, is combined with a cut one.
    """
    terms = iter(plan.rule.ins)
    part = lambda x: _part(x, next(terms), plan, cut_type)  # noqa: E731
    local = {name: _mapped(part, value) for name, value in bound.items()}
    name = "input_sizes" if "input_sizes" in bound else size_argument(func)
    if name in ("size", "shape", "input_sizes"):
        dim = plan.dim_in(plan.rule.outs[0], plan.results[0])
        assert dim is not None
        shape = plan.results[0].shape
        local[name] = [*shape[:dim], plan.source.part.shape[plan.source.cut[0]], *shape[dim + 1 :]]
    return local


def _part(x: Any, term: Term, plan: Plan, cut_type: Any) -> Tensor:
    """Returns this rank's part of an operand."""
    if isinstance(x, cut_type):
        return x.part
    if torch.is_grad_enabled() and x.requires_grad:
        raise Error(
            f"a tensor {list(x.shape)} that is whole, and requires a gradient, beside one of which each rank holds a "
            "part: each rank would have a part of its gradient",
            fix="autotp.gather(tensor) of the cut one, on all ranks",
        )
    dim = plan.dim_in(term, x)
    if dim is None or x.shape[dim] == 1:
        return x
    layout = Layout(tuple(x.shape), dim, plan.source.held.pieces, "")
    return layout.take(x, plan.source.mesh.rank)


def _joined(found: Any, plan: Plan) -> Any:
    """Returns the rank's results as parts of the wholes."""
    rows = iter(zip(plan.rule.outs, plan.results, strict=True))

    def whole(part: Tensor) -> Any:
        term, result = next(rows)
        dim = plan.dim_in(term, result)
        assert dim is not None  # `_plan` has looked.
        return plan.source.like(part, dim, result.stride())

    return _mapped(whole, found)
