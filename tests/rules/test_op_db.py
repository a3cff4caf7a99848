"""Every rule against PyTorch's own samples of operators: the cases nobody here wrote."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from graphs import CALLS
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autotp.passes.lower.prove_rules import prove
from autotp.rules.registry import RULES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = 2  # of each operator at most
EACH = 8  # calls of each overload
BIGGEST = 4096  # elements of a tensor
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
pytestmark = pytest.mark.timeout(600)  # The samples are recorded once, within the first test.
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
    """Samples of an operator, far from each other, the last first; in double precision where it has that."""
    dtype = next((d for d in DTYPES if d in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return []
    every = list(info.sample_inputs_func(info, "cpu", dtype, False))
    return every[:: -(len(every) // SAMPLES + 1)]


def record(op: Any, sample: Any, calls: Recorded) -> None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
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
def test_rule(name: str, sizes: tuple[int, ...], recorded: Recorded) -> None:
    for op, args, kwargs in recorded.get(name, []):
        for tp in sizes:
            assert prove(op, args, kwargs, tp) == []


def test_coverage(recorded: Recorded) -> None:
    """Every operator of the table is tried: what no sample calls, on a call made by hand."""
    by_hand = {op._schema.name.split("::")[1] for op, *_ in CALLS.values() if isinstance(op, OpOverload)}
    assert set(PACKETS) - set(recorded) <= by_hand
    assert len(set(PACKETS) & set(recorded)) > 370
