"""Every rule against PyTorch's own samples of operators: the cases nobody here wrote."""

from __future__ import annotations

import logging
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graphs import CALLS
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autotp.passes.builder import Builder
from autotp.passes.emit.bind import bind
from autotp.passes.lower.local_sizes import Local, Target
from autotp.passes.lower.localize import localize
from autotp.passes.lower.prove_rules import _call_node, _Trial, prove_rule
from autotp.passes.plan.infer_axes import infer_axes
from autotp.rules.registry import RULES
from autotp.sharding.layout import layout_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = 2  # of each operator at most
EACH = 8  # calls of each overload
BIGGEST = 4096  # elements of a tensor
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
pytestmark = pytest.mark.timeout(600)  # The samples are recorded once, within the first test.
BY_HAND = {op._schema.name.split("::")[1] for op, *_ in CALLS.values() if isinstance(op, OpOverload)}
PACKETS = sorted({op._schema.name.split("::")[1] for op in RULES if isinstance(op, OpOverload)})

Recorded = dict[str, list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]]


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the calls of operators that have a rule."""

    def __init__(self, module: fx.GraphModule, calls: Recorded) -> None:
        super().__init__(module)
        self.calls = calls

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in RULES:
            kept = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
            calls = self.calls.setdefault(target._schema.name.split("::")[1], [])
            if sum(call[0] is target for call in calls) < EACH:
                calls.append((target, *kept))
        return super().call_function(target, args, kwargs)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """The ATen calls that the samples make in a graph captured as the exporter does, by operator name."""
    calls: Recorded = {}
    logging.disable()  # Tracing logs every graph, and pytest would keep it all.
    with warnings.catch_warnings(), torch.random.fork_rng(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for info in op_db:
            for i, sample in enumerate(samples(info)):
                for variant in (info, *info.aliases) if i < 2 else (info,):
                    record(variant, sample, calls)
    logging.disable(logging.NOTSET)
    return calls


def samples(info: Any) -> list[Any]:
    """Samples of an operator, far from each other, the last first; in double precision where it has that.

    Those with a tensor without elements are left out: they prove nothing.
    """
    dtype = next((d for d in DTYPES if d in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return []
    every = list(info.sample_inputs_func(info, "cpu", dtype, False))
    every = [x for x in every if all(t.numel() for t in tensors_of(x))]
    return every[:: -(len(every) // SAMPLES + 1)]


def tensors_of(sample: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, Tensor)]


def record(op: Any, sample: Any, calls: Recorded) -> None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = tensors_of(sample)
    if any(x.numel() > BIGGEST or x.layout is not torch.strided for x in tensors):
        return

    def call(*given: Tensor) -> Any:
        queue = iter(given)
        x, args, kwargs = pytree.tree_unflatten([next(queue) if isinstance(x, Tensor) else x for x in leaves], spec)
        return op(x, *args, **kwargs)

    try:
        graph = make_fx(call, pre_dispatch=True)(*tensors)
    except Exception:  # It reads numbers (`item`), or needs what this machine has not: no graph of it is ever captured.
        return
    Recorder(graph, calls).run(*tensors)


@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((4,), marks=pytest.mark.rare)], ids=["2-3", "4"])
@pytest.mark.parametrize("name", PACKETS)
def test_rule_holds_on_samples_of_torch(name: str, sizes: tuple[int, ...], recorded: Recorded) -> None:
    assert name in recorded or name in BY_HAND, "it has no sample: add a call to CALLS"
    for op, args, kwargs in recorded.get(name, []):
        for tp in sizes:
            assert prove_rule(op, args, kwargs, tp) == []


@pytest.mark.parametrize("name", PACKETS)
def test_empty_parts_have_every_gradient_of_one_device(name: str, recorded: Recorded) -> None:
    """A rank without elements has a gradient for each operand that has one on one device: else loops over gradients,

    and sums of several gradients at once, would run other collectives on this rank.
    """
    by_hand = [(op, args) for op, *args in CALLS.values() if getattr(op, "_schema", None) is not None]
    calls = list(recorded.get(name, []))
    for op, args in by_hand:
        if op._schema.name.split("::")[1] == name:
            kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
            calls.append((op, tuple(args), kwargs))
    for op, args, kwargs in calls:
        assert without_gradient(op, args, kwargs) == []


MANY = 64
"""A number of ranks, of which the last one has no elements."""


def without_gradient(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The operands that have a gradient on one device and none on a rank without elements, with the factor cut."""
    with torch.no_grad():
        node = _call_node(op, args, kwargs)
        axes = infer_axes(node.graph)
        bound = axes.bound.get(node)
    try:
        whole = learned(node.graph, [n.meta["val"] for n in node.graph.nodes if n.op == "placeholder"])
    except (NotImplementedError, RuntimeError):  # It has no derivative for such operands.
        return []
    if bound is None or not bound.known:
        return []
    trial, found = _Trial(node, axes, bound, MANY), []
    for leaf in trial._leaves():
        factor = bound.cuttable(leaf)
        if factor is None or (factor.mark and not trial._one_call(factor, leaf)):
            continue
        local, mine = Local(Builder(nullcontext()), Target("tp", MANY, MANY - 1)), []  # type: ignore[arg-type]
        for x in node.all_input_nodes:
            layout = layout_of(tuple(x.meta["val"].shape), axes.of(x), leaf, MANY, "")
            mine.append(layout.take(x.meta["val"], MANY - 1))
            local.builder.copy(x)
        with torch.no_grad():
            local.builder.graph.output((localize(local, node, axes, factor, leaf),))
        bound_graph = bind(local.builder.graph, torch.device("cpu"), {}, reuse=False)
        found += [f"operand {i}, {factor.name} cut" for i in sorted(whole - learned(bound_graph, mine))]
    return found


def learned(graph: fx.Graph, values: list[Tensor]) -> set[int]:
    """The positions of the inputs of a graph of one call that get a gradient."""
    inputs = [x.detach().clone() for x in values]
    for x in inputs:
        x.requires_grad_(x.is_floating_point() or x.is_complex())
    given = iter(inputs)
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            made = node.target(*args, **kwargs)
    outputs = [y for y in pytree.tree_leaves(made) if isinstance(y, Tensor) and y.requires_grad]
    if not outputs:
        return set()
    wanted = [i for i, x in enumerate(inputs) if x.requires_grad]
    grads = torch.autograd.grad(sum(y.sum().abs() for y in outputs), [inputs[i] for i in wanted], allow_unused=True)
    return {i for i, grad in zip(wanted, grads, strict=True) if grad is not None}


def test_most_operators_of_the_table_have_samples_of_torch(recorded: Recorded) -> None:
    assert len(set(PACKETS) & set(recorded)) > 370
