"""Runs an operator on cut tensors: on their parts, if its rule says that this gives the parts of the result.

Before: y = div(x, t)                          x: [b s v@tp], t: []
After:  part of y = div(part of x, t)          by the rule "*, * -> *", and y: [b s v@tp]

The rules are those by which graphs are cut. A result that is cut alike stays cut. A tensor that every rank has whole
takes part with the rank's slice of it. Where a rule needs the cut dimension whole, sums over it, or is not known, the
operator runs on the wholes: see `whole_operators.py`. Its result is that of one device in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from autotp.distributed.cut_tensors.whole_operators import (
    equal_or_close,
    gradient_is_whole,
    on_wholes,
    overload_name,
    reduced,
    shape_refused,
)
from autotp.distributed.replica_check import expect_replicas
from autotp.errors import Error
from autotp.groups.process_group import process_group
from autotp.ops.eager_mode import is_transformed
from autotp.rules import common as f
from autotp.rules.call import Call, bound_arguments, called_with, result_tensors, tensor_arguments
from autotp.rules.language import STAR, UNIT, Name, Rule, Term
from autotp.rules.registry import has_rule, rule_of
from autotp.rules.row import Trait
from autotp.rules.traits import functional_of, has, size_argument
from autotp.sharding.layout import Layout

aten = torch.ops.aten
Factor = tuple[str, int]
"""A factor of a term; of `*` with its place from the right."""


@dataclass(frozen=True)
class OperatorPlan:
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
        Error: a part has derivatives of its own, in a transform of torch.func.
    """
    cuts: list[Any] = []
    _mapped(lambda x: cuts.append(x) if isinstance(x, cut_type) else None, [*args, *kwargs.values()])
    if not all(map(_is_detached, cuts)):
        raise operator_error(func, cuts[0], " inside a transform of torch.func")
    if has(func, Trait.SAME) and len(cuts) == 1:  # The way of a cast, which each token of `generate` takes, is short.
        return _same(cuts[0], func(cuts[0].part, *args[1:], **kwargs))
    if func.namespace in ("c10d", "_c10d_functional"):
        return _among_replicas(func, args, kwargs, cuts[0], cut_type)
    if func.name().startswith("aten::_foreach_"):
        return _on_lists(func, args, kwargs, cut_type)
    if torch.Tag.pointwise in func.tags and (result := _pointwise(func, args, kwargs, cuts, cut_type)) is not None:
        return result
    if (answer := equal_or_close(func, args, kwargs)) is not None:
        return answer
    composed = func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)
    if composed and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
        return result  # Without autograd (in inference mode), torch does not take these apart itself.
    if torch.Tag.inplace_view in func.tags:
        return _reshaped(func, args, kwargs, cut_type)
    form = _functional(func, args, cut_type)
    if form is None or torch.Tag.nondeterministic_seeded in func.tags:
        return on_wholes(func, args, kwargs)
    bound = _with_places(form, bound_arguments(form, args, kwargs))
    if form in NEW:
        return _new(form, bound)
    if (number := reduced(form, bound, cut_type)) is not None:
        return number
    plan = _plan(form, bound, cuts, cut_type)
    if plan is None:
        return on_wholes(func, args, kwargs)
    local = _local(form, bound, plan, cut_type)
    if form is func:
        return _joined(called_with(func, local), plan)
    cuts[0].expect_writable()
    # A form that writes in place has the arguments of its functional form, perhaps under other names.
    called_with(func, dict(zip((arg.name for arg in func._schema.arguments), local.values(), strict=True)))
    cuts[0].was_written()
    return args[0]


def _among_replicas(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], cut: Any, cut_type: Any) -> Any:
    """Runs a collective over ranks that have the same part, as replicas do."""
    groups = [x for x in args if isinstance(x, str | torch.ScriptObject)]
    ranks = [r for x in groups for r in _ranks_of(x)]
    expect_replicas(overload_name(func).rstrip("_"), f"a tensor {shape_text(cut)}", ranks, cut.mesh)
    part = lambda x: x.part if isinstance(x, cut_type) else x  # noqa: E731
    result = func(*(_mapped(part, x) for x in args), **{key: _mapped(part, x) for key, x in kwargs.items()})
    return _mapped(lambda x: cut if x is cut.part else x, result)


def _ranks_of(group: Any) -> list[int]:
    """Returns the global ranks of a group, which a collective gets by name or as an object of TorchScript."""
    try:
        resolved = process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
    except (Error, RuntimeError, TypeError):  # The kind of a sum, by name or as an object.
        return []
    return dist.get_process_group_ranks(resolved)


def _pointwise(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Sequence[Any], cut_type: Any
) -> Any:
    """Returns what a pointwise operator gives for tensors that are cut alike, and numbers; None for others.

    This is the short way of an optimizer's operators.
    """
    first = cuts[0]
    for x in (*args, *kwargs.values()):
        if isinstance(x, cut_type):
            if x.shape != first.shape or x.cut != first.cut:
                return None
        elif isinstance(x, list | tuple) or (isinstance(x, Tensor) and (x.dim() > 0 or x.requires_grad)):
            return None
    written = func._schema.is_mutable
    if written and not (args and isinstance(args[0], cut_type) and "out" not in kwargs):
        return None
    if written:
        args[0].expect_writable()
    result = func(*(x.part if isinstance(x, cut_type) else x for x in args), **kwargs)
    if written:
        args[0].was_written()
    return args[0] if written else first.like(result, first.cut[0]) if isinstance(result, Tensor) else None


def _on_lists(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], cut_type: Any) -> Any:
    """Returns what an operator over lists gives. All are pointwise, but for norms and maxima."""
    name = func.name().removeprefix("aten::_foreach_").partition(".")[0]
    if name in ("norm", "max"):
        return [torch.linalg.vector_norm(x, *args[1:], **kwargs) if name == "norm" else x.max() for x in args[0]]
    lists = [x for x in args if isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x)]
    sources = [next((y for y in row if isinstance(y, cut_type)), None) for row in zip(*lists, strict=True)]
    local = [[_alike(y, source, cut_type) for y, source in zip(x, sources, strict=True)] for x in lists]
    written = zip(args[0], sources, strict=True) if func._schema.is_mutable else ()
    copied = any(source is not None and not isinstance(x, cut_type) for x, source in written)
    if copied or any(y is None for row in local for y in row):
        return on_wholes(func, args, kwargs)
    parts = iter(local)
    result = func(*(next(parts) if any(x is y for y in lists) else x for x in args), **kwargs)
    for source in sources if func._schema.is_mutable else ():
        if source is not None:
            source.was_written()
    if not isinstance(result, list | tuple):
        return result
    return [y if c is None else c.like(y, c.cut[0]) for y, c in zip(result, sources, strict=True)]


def _alike(x: Tensor, source: Any, cut_type: Any) -> Tensor | None:
    """Returns the part of a tensor that goes with a cut one element by element; None if its parts are others."""
    if source is None:
        return x
    if isinstance(x, cut_type):
        return x.part if (x.shape, x.cut) == (source.shape, source.cut) else None
    if x.dim() == 0:
        return x
    return source.held.take(x, source.mesh.rank) if x.shape == source.shape and type(x) is Tensor else None


def _same(cut: Any, part: Tensor) -> Any:
    """Returns a tensor with the elements of another, perhaps in another order in memory."""
    return cut.like(part, cut.cut[0], cut.stride() if part.stride() == cut.part.stride() else None)


def _is_detached(cut: Any) -> bool:
    """False for a part with derivatives of its own. That of a transform that has ended may have none left."""
    if cut.is_box:
        cut.part = cut.memory = torch._C._functorch.unwrap_if_dead(cut.part)
        cut.is_box = is_transformed(cut.part)
    return not (cut.is_box or cut.part.requires_grad)


def shape_text(cut: Any) -> str:
    """Returns the shape of a cut tensor as text: `[30@tp, 8]`."""
    return f"[{', '.join(f'{n}@{cut.mesh.axis}' if d == cut.cut[0] else str(n) for d, n in enumerate(cut.shape))}]"


def operator_error(func: Any, cut: Any, where: str = "") -> Error:
    """Returns the Error of an operator that cannot be given for a cut tensor."""
    return Error(
        f"`{overload_name(func)}` of a tensor {shape_text(cut)} of which each rank holds a part{where}",
        fix="autotp.gather(tensor) on all ranks, which is whole, with its gradient",
        alternative='parallelize(..., outputs="full")',
    )


def _reshaped(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], cut_type: Any) -> Any:
    """Changes the shape of a cut tensor in place, as `transpose_` does.

    Raises:
        Error: the tensor is not cut alike then.
    """
    form, cut = functional_of(func), args[0]
    bound = {} if form is None else bound_arguments(form, args, kwargs)
    plan = None if form is None else _plan(form, bound, [cut], cut_type)
    if plan is None:
        raise shape_refused(overload_name(func))
    func(cut.part, *args[1:], **kwargs)
    # The wrapper has sizes of its own, which change without a look at the part.
    with torch._C._DisableTorchDispatch():
        func(cut, *args[1:], **kwargs)
    cut.held = replace(cut.held, dim=plan.dim_in(plan.rule.outs[0], plan.results[0]))
    return cut


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
SCRATCH = (aten.new_empty.default, aten.new_empty_strided.default)
INDEXED = (aten.index.Tensor, aten.index_put.default)


def _new(func: OpOverload, bound: Mapping[str, Any]) -> Any:
    """Returns a new tensor: cut as the operand is, if its size is that of the operand there; else whole.

    One without values is whole: code that fills it may change its shape, as `nn.init.orthogonal_` does.
    """
    cut, sizes = bound["self"], list(bound["size"])
    dim = cut.cut[0]
    if func in SCRATCH or len(sizes) != cut.dim() or sizes[dim] != cut.shape[dim]:
        return called_with(func, {**bound, "self": cut.part})
    shape = [*sizes[:dim], cut.part.shape[dim], *sizes[dim + 1 :]]
    rest = {name: value for name, value in bound.items() if name not in ("self", "size", "stride")}
    dense = {"stride": torch.empty(shape, device="meta").stride()} if "stride" in bound else {}
    return cut.like(called_with(func, {"self": cut.part, "size": shape, **dense, **rest}), dim)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


# ---- what is cut


def _plan(func: OpOverload, bound: Mapping[str, Any], cuts: Sequence[Any], cut_type: Any) -> OperatorPlan | None:
    """Returns how an operator runs on parts; None if it does not."""
    if func not in MORE_RULES and not has_rule(func) and torch.Tag.pointwise not in func.tags:
        return None
    # What one device would give, without values: only shapes and types are asked for.
    example = {name: _mapped(_on_meta, value) for name, value in bound.items()}
    if isinstance(example.get("device"), torch.device):
        example["device"] = torch.device("meta")
    try:
        results = result_tensors(called_with(func, example))
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
    plan, size = OperatorPlan(cuts[0], rule, factor, results), cuts[0].shape[cuts[0].cut[0]]
    dims = [plan.dim_in(term, x) for term, x in zip(rule.outs, results, strict=True)]
    # A slice of the cut dimension has other parts than its operand.
    fits = all(d is not None and x.shape[d] == size for d, x in zip(dims, results, strict=True))
    return plan if fits and results else None


def _rule(func: OpOverload, call: Call) -> Rule | None:
    if func in MORE_RULES:
        return MORE_RULES[func](call)
    rule = rule_of(call)
    return f.pointwise()(call) if rule is None and torch.Tag.pointwise in func.tags else rule


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
    factors: list[Factor | None] = []
    for expr in term:
        if expr == STAR:
            # Broadcasting aligns dimensions from the right.
            length = ndim - len(term) + 1
            factors += [("*", length - i) for i in range(length)]
        else:
            plain = isinstance(expr, Name) and expr != UNIT and not expr.mark
            factors.append((expr.name, 0) if plain and isinstance(expr, Name) else None)
    return factors


# ---- on a rank


def _local(func: OpOverload, bound: Mapping[str, Any], plan: OperatorPlan, cut_type: Any) -> dict[str, Any]:
    """Returns the arguments of a rank's own call."""
    terms = iter(plan.rule.ins)
    part = lambda x: _part(x, next(terms), plan, cut_type)  # noqa: E731
    local = {name: _mapped(part, value) for name, value in bound.items()}
    # A view is told its sizes: of the cut dimension it gets the part's.
    name = "input_sizes" if "input_sizes" in bound else size_argument(func)
    if name in ("size", "shape", "input_sizes"):
        dim = plan.dim_in(plan.rule.outs[0], plan.results[0])
        assert dim is not None
        shape = plan.results[0].shape
        local[name] = [*shape[:dim], plan.source.part.shape[plan.source.cut[0]], *shape[dim + 1 :]]
    return local


def _part(x: Any, term: Term, plan: OperatorPlan, cut_type: Any) -> Tensor:
    """Returns this rank's part of an operand."""
    if isinstance(x, cut_type):
        return x.part
    gradient_is_whole(x)
    dim = plan.dim_in(term, x)
    # A dimension of 1 goes with every part.
    if dim is None or x.shape[dim] == 1:
        return x
    layout = Layout(tuple(x.shape), dim, plan.source.held.pieces, "")
    return layout.take(x, plan.source.mesh.rank)


def _joined(local_result: Any, plan: OperatorPlan) -> Any:
    """Returns the rank's results as parts of the wholes."""
    rows = iter(zip(plan.rule.outs, plan.results, strict=True))

    def whole(part: Tensor) -> Any:
        term, result = next(rows)
        dim = plan.dim_in(term, result)
        assert dim is not None  # `_plan` has looked.
        return plan.source.like(part, dim, result.stride())

    return _mapped(whole, local_result)
