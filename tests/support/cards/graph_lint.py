"""A lint of CUDA graph capture: what a step does that a captured step may not do. It works on the CPU, too.

`torch.cuda.graph` records kernels. A host that reads a tensor, copies pageable memory, makes or seeds a generator,
times an event or makes a process group breaks the capture, or is left out when the graph is replayed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve()
OURS = ("/autotp/", "/passes/")

HOST_READS = frozenset({
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "equal", "is_nonzero", "_unique2",
    "unique_dim", "unique_consecutive", "bincount", "repeat_interleave.Tensor", "_linalg_check_errors",
})  # fmt: skip
"""Operators whose result, or its size, the host waits for."""
METHOD_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__})
"""Methods that read a tensor and are no operators on the CPU."""
FORBIDDEN: tuple[tuple[Any, str, str], ...] = (
    (torch, "Generator", "a new generator"),
    (torch, "manual_seed", "a generator is seeded"),
    (torch.cuda, "manual_seed", "a generator is seeded"),
    (torch.cuda, "manual_seed_all", "a generator is seeded"),
    (torch.cuda, "get_rng_state", "the state of a generator is read"),
    (torch.cuda, "set_rng_state", "the state of a generator is set"),
    (torch.cuda, "synchronize", "the host waits for the device"),
    (torch.cuda.Stream, "synchronize", "the host waits for the device"),
    (torch.cuda.Event, "synchronize", "the host waits for the device"),
    (torch.cuda.Event, "query", "the host asks an event"),
    (dist, "new_group", "a new process group"),
)
"""Owner and name of a function, and what its call is."""


@dataclass(frozen=True)
class Finding:
    """What a captured step may not do, and the innermost line of autotp that does it (else of any other code)."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what}: {self.where}"


class Notes:
    """The findings so far."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, what: str) -> None:
        frames = traceback.extract_stack(sys._getframe(1))
        frames = [f for f in frames if Path(f.filename) != HERE and "torch/utils/_python_dispatch" not in f.filename]
        own = [f for f in frames if any(folder in f.filename for folder in OURS)]
        last = (own or frames)[-1]
        self.findings.append(Finding(what, f"{Path(last.filename).name}:{last.lineno} {last.line}"))


class _Operators(TorchDispatchMode):
    """Notes operators that read a tensor of the device, make a constant, or copy pageable memory."""

    keeps_no_tensor = True

    def __init__(self, notes: Notes, device: str) -> None:
        super().__init__()
        self.notes, self.device = notes, device

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name, full = op._opname, str(op).partition(".")[2]
        tensors = [x for x in args if isinstance(x, Tensor)]
        if (name in HOST_READS or full in HOST_READS) and self._of_device(*tensors):
            self.notes.add(f"the host reads a tensor ({name})")
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_") and self._by_mask(args):
            self.notes.add(f"the host reads a mask ({name})")
        elif name == "lift_fresh" and self.device == "cpu":
            self.notes.add("a constant is made from numbers of Python")
        elif name in ("_to_copy", "copy_") and self._is_pageable(name, result, args):
            self.notes.add("a copy between pageable memory and the device")
        return result

    def _of_device(self, *tensors: Tensor) -> bool:
        return any(x.device.type == self.device for x in tensors)

    def _by_mask(self, args: Any) -> bool:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        return any(x.dtype in (torch.bool, torch.uint8) for x in indices) and self._of_device(*indices)

    def _is_pageable(self, name: str, result: Any, args: Any) -> bool:
        source = args[1] if name == "copy_" else args[0]
        types = {source.device.type, result.device.type}
        host = source if source.device.type == "cpu" else result
        return types == {"cpu", self.device} and self.device != "cpu" and not host.is_pinned()


class _Methods(TorchFunctionMode):
    """Notes methods that read a tensor of the device."""

    def __init__(self, notes: Notes, device: str) -> None:
        super().__init__()
        self.notes, self.device = notes, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHOD_READS and args[0].device.type == self.device:
            self.notes.add(f"the host reads a tensor ({func.__name__})")
        return func(*args, **(kwargs or {}))


@contextmanager
def graph_lint(device: str = "cpu") -> Iterator[list[Finding]]:
    """A region; yields the list of what it does that a captured region may not do.

    Args:
        device: the type of the device on which it computes. With "cpu" every tensor counts as one of the device.
    """
    notes = Notes()
    with ExitStack() as stack:
        for owner, name, what in FORBIDDEN:
            stack.enter_context(patch.object(owner, name, _noting(getattr(owner, name), what, notes)))
        stack.enter_context(_Methods(notes, device))
        stack.enter_context(_Operators(notes, device))
        yield notes.findings


def _noting(function: Callable[..., Any], what: str, notes: Notes) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.add(what)
        return function(*args, **kwargs)

    return noted


def findings_of(step: Callable[[], Any], warm_up: int = 3, device: str = "cpu") -> list[str]:
    """What a warm step does that a captured one may not do, each once and as text."""
    for _ in range(warm_up):
        step()
    with graph_lint(device) as findings:
        step()
    return list(dict.fromkeys(map(str, findings)))


def counts_of(findings: list[Finding]) -> Mapping[str, int]:
    """How often each finding is there."""
    return {str(one): findings.count(one) for one in dict.fromkeys(findings)}
