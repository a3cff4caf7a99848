"""verify: a parallel model against the untouched one, on a laptop, in one process and in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autotp.errors import within
from autotp.inputs import example_inputs as find_inputs
from autotp.layout import Layout
from autotp.lockstep import run_lockstep
from autotp.passes.bind import bind
from autotp.passes.capture import skeleton_of
from autotp.report import Traffic, traffic
from autotp.transform import Analysis, Outputs, analyse, rank_graph

TOLERANCE = 1e-9
"""The largest difference, relative to the scale of what is compared, that float64 round-off explains."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of one thing from one device, relative to its scale.

    The scale of a gradient is the largest element of the whole model's gradient, since some true gradients are
    zero (a key bias under softmax).
    """

    name: str
    error: float

    def __str__(self) -> str:
        return f"{self.error:.1e}  {self.name}"


@dataclass(frozen=True)
class Report:
    """What `verify` found; `str(report)` is for reading.

    Attributes:
        model, tp: what was verified.
        outputs, gradients, steps: differences of the outputs, of every parameter's gradient, and of every
            parameter after an optimizer step, largest first; empty for a model on meta.
        traffic: the collectives of a step.
        tolerance: what is allowed.
    """

    model: str
    tp: int
    outputs: tuple[Difference, ...]
    gradients: tuple[Difference, ...]
    steps: tuple[Difference, ...]
    traffic: Traffic
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        """True if nothing differs by more than round-off. Not a number is never ok."""
        return all(d.error <= self.tolerance for d in (*self.outputs, *self.gradients, *self.steps))

    @property
    def worst(self) -> Difference:
        """The parameter whose gradient differs most."""
        return self.gradients[0] if self.gradients else Difference("nothing compared", 0.0)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def verify_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    outputs: Any,
    change: Callable[[fx.Graph, int], fx.Graph] | None = None,
) -> Report:
    """The differences between `model` and its `tp` ranks in lockstep, both in float64 and drawing the same numbers.

    Args:
        change: what a test does to each rank's graph before it runs; None changes nothing.
    """
    name = type(model).__name__
    if any(p.is_meta for p in model.parameters()):
        analysis = analyse(skeleton_of(model), args, kwargs, tp, outputs)
        graphs = [rank_graph(analysis, rank, "exact") for rank in range(tp)]
        return Report(name, tp, (), (), (), traffic(graphs[0], analysis))
    with all_double():
        whole = copy.deepcopy(model).cpu().double()
        args, kwargs = pytree.tree_map_only(Tensor, _doubled, (args, kwargs))
        analysis = analyse(skeleton_of(whole), args, kwargs, tp, outputs)
        graphs = [rank_graph(analysis, rank, "exact") for rank in range(tp)]
        count = traffic(graphs[0], analysis)
        ready = [bind(change(g, r) if change else g, torch.device("cpu"), {}) for r, g in enumerate(graphs)]
        parts = [{n: lay.take(_parameter(whole, n), r) for n, lay in analysis.layouts.items()} for r in range(tp)]
        ranks = [{n: nn.Parameter(t, _parameter(whole, n).requires_grad) for n, t in part.items()} for part in parts]
        found = _run_ranks(analysis, ready, ranks, whole, args, kwargs)
        expected = _run_whole(whole, args, kwargs)
        return _compare(name, analysis, whole, ranks, expected, found, count)


def _run_whole(whole: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [t for t in pytree.tree_leaves(whole(*args, **kwargs)) if isinstance(t, Tensor)]


def _run_ranks(
    analysis: Analysis, graphs: Sequence[fx.Graph], ranks: Sequence[Mapping[str, Tensor]], whole: nn.Module, args: Any, kwargs: Any
) -> list[tuple[Any, ...]]:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    captured, buffers = analysis.captured, dict(whole.named_buffers())
    inputs = []
    for graph, parameters in zip(graphs, ranks, strict=True):
        queue, row = iter(tensors), []
        for node in graph.nodes:
            if node.op == "placeholder" and node.name in captured.parameters:
                row.append(parameters[captured.parameters[node.name]])
            elif node.op == "placeholder" and node.name in captured.buffers:
                row.append(buffers[captured.buffers[node.name]].clone())
            elif node.op == "placeholder" and node.name in captured.constants:
                row.append(captured.constants[node.name])
            elif node.op == "placeholder":
                row.append(next(queue))
        inputs.append(row)
    torch.manual_seed(0)
    return run_lockstep(graphs, inputs)


def _compare(
    name: str, analysis: Analysis, whole: nn.Module, ranks: list[dict[str, nn.Parameter]],
    expected: list[Tensor], found: list[tuple[Any, ...]], count: Traffic,
) -> Report:  # fmt: skip
    outputs = [_output(i, value, [row[i] for row in found], analysis) for i, value in enumerate(expected)]
    kept = [i for i, value in enumerate(expected) if i not in analysis.local_outputs and value.requires_grad]
    _objective([expected[i] for i in kept]).backward()
    torch.autograd.backward([_objective([row[i] for i in kept]) for row in found])
    own = dict(whole.named_parameters())
    scale = max((float(p.grad.abs().max()) for p in own.values() if p.grad is not None and p.grad.numel()), default=1.0)
    gradients = [
        Difference(n, _apart(p.grad, [rank[n].grad for rank in ranks], layout, scale))
        for (n, layout), p in zip(analysis.layouts.items(), (own[n] for n in analysis.layouts), strict=True)
    ]
    for parameters in (own.values(), *(rank.values() for rank in ranks)):
        torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.1).step()
    largest = max((float(p.detach().abs().max()) for p in own.values() if p.numel()), default=1.0)
    steps = [
        Difference(n, _apart(own[n].detach(), [rank[n].detach() for rank in ranks], layout, largest))
        for n, layout in analysis.layouts.items()
    ]
    ordered = [tuple(sorted(row, key=lambda d: -_rank(d.error))) for row in (outputs, gradients, steps)]
    return Report(name, analysis.tp, *ordered, count)


def _rank(error: float) -> float:
    return float("inf") if error != error else error


def _objective(outputs: Sequence[Tensor]) -> Tensor:
    """A number whose gradient reaches every element of every output, each with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for value in outputs:
        weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
        total = total + (value * weights).sum()
    return total


def _output(i: int, value: Tensor, parts: list[Tensor], analysis: Analysis) -> Difference:
    layout = analysis.local_outputs.get(i, Layout(tuple(value.shape)))
    layout = Layout(tuple(value.shape), layout.dim, layout.pieces, layout.axis)
    kind = "loss" if value.dim() == 0 else f"output {i}"
    scale = float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 1.0
    return Difference(kind, _apart(value.detach(), [part.detach() for part in parts], layout, scale or 1.0))


def _apart(whole: Tensor | None, parts: Sequence[Tensor | None], layout: Layout, scale: float) -> float:
    """The largest difference between a tensor and its parts put together, and between copies, over `scale`."""
    if whole is None:
        return 0.0 if all(part is None or not part.any() for part in parts) else float("inf")
    zeros = [torch.zeros(layout.local_shape(r), dtype=whole.dtype) for r in range(len(parts))]
    given = [zero if part is None else part for zero, part in zip(zeros, parts, strict=True)]
    if layout.dim is None:
        return max(_largest(part, whole) for part in given) / scale
    joined = torch.full_like(whole, float("nan")) if whole.is_floating_point() else torch.zeros_like(whole)
    for rank, part in enumerate(given):
        layout.put(joined, part, rank)
    return _largest(joined, whole) / scale


def _largest(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    equal = (a == b) | ((a != a) & (b != b))  # Infinities and undefined values agree with themselves.
    return float((a.double() - b.double()).abs().masked_fill(equal, 0).max()) if a.numel() else 0.0


def _parameter(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name)


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double() if tensor.is_floating_point() else tensor.detach().cpu()


class _Double(TorchFunctionMode):
    """Casts to float32 and below become casts to float64, so that round-off does not hide a bug."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        low = (torch.float32, torch.float16, torch.bfloat16)
        swap = lambda value: torch.float64 if value in low else value  # noqa: E731
        args, kwargs = pytree.tree_map_only(torch.dtype, swap, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def all_double() -> Iterator[None]:
    """A region in which every floating computation is in float64, whatever the model asks for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(before)


def _lines(report: Report) -> Iterator[str]:
    verdict = "equal to one device" if report.ok else "DIFFERENT from one device"
    if not report.gradients:
        yield f"{report.model} on tp={report.tp}: the model is on meta: proved and counted, nothing computed"
    else:
        yield f"{report.model} on tp={report.tp}: {verdict} (float64, tolerance {report.tolerance:.0e})"
        for label, rows in (("outputs", report.outputs), ("gradients", report.gradients), ("after a step", report.steps)):
            worst = rows[0] if rows else "none"
            yield f"  {label:<13}{len(rows):>4} compared, worst {worst}"
            for bad in [row for row in rows[1:8] if not row.error <= report.tolerance]:
                yield f"  {'':<13}     and {bad}"
    kinds = [", ".join(f"{n} {kind}" for kind, n in c.items()) or "none" for c in (report.traffic.forward, report.traffic.backward)]
    yield f"  collectives  forward {kinds[0]}; backward {kinds[1]}"


def verify(model: nn.Module, tp: int, *, example_inputs: Any = None, outputs: Outputs = "auto") -> Report:
    """How far `tp` ranks of `model` are from the model itself: outputs, loss, every gradient, a step of an optimizer.

    In one process, without process groups: the ranks run in lockstep, in float64, and draw the numbers that one
    device draws. `model` is not touched. A model on `meta` is proved statically and counted, and nothing computed.

    Args:
        model: an ordinary model, in the mode (train or eval) that is to be verified.
        tp: how many ranks.
        example_inputs, outputs: as for `parallelize`.
    """
    return within(f"verify({type(model).__name__}, tp={tp})", lambda: verify_model(model, *find_inputs(model, example_inputs), tp, outputs))
