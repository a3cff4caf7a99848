"""The regions in which a model is captured: modes of torch, and what stands for functions of torch and Python.

NOTE [What is patched during capture]
A graph has operators only, so anything else that a model does must be observed while it runs. Where torch offers no
other way, a function of torch or Python is replaced. `autotp/torch_internals.py` lists them, with the reason for each.
Beside these, while a model is captured:
- blocks that are alike are captured once: their classes have another `forward`, and the classes of objects that they
        are given have other methods (`repeats.py`, `queries.py`).
- what a library of models asks for (`model_library.py`): transformers' masks.
- there are no logs and no stderr: the exporter prints a page about each error.
- torch does not cache results of operators on fake tensors: with symbolic sizes it computes each operator twice to fill
        an entry, and each export begins with an empty cache. Without the cache a capture takes half the time.
- torch's fake tensors may be on two devices: on a model that runs on another device, operators also take tensors that
        the model makes on the CPU, because a rank has them all on its own device (`relocate.py`).
- the Python code of the exporter's intermediate graphs is written only where they run.
Only one thread captures at a time (`CAPTURING`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType

from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autotp import torch_internals as internals
from autotp.model_library import library
from autotp.ops.eager_mode import alone
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.guards import values
from autotp.passes.capture.guards.gradient_queries import GradientQueries
from autotp.passes.capture.guards.random_numbers import unseeded, without_python_random
from autotp.passes.capture.inline import rows_first, with_whole
from autotp.passes.capture.python_state.guard import Reads
from autotp.passes.capture.repeats.repeats import Repeats
from autotp.passes.capture.replacements import number_classes
from autotp.passes.capture.replacements.everywhere import everywhere
from autotp.passes.capture.replacements.forward_collectives import as_operators
from autotp.passes.capture.replacements.functions import ReplacedFunctions
from autotp.passes.capture.replacements.number_classes import numbers_of_python
from autotp.passes.capture.replacements.opaque import opaque_modules, recording_opaque_calls
from autotp.passes.capture.replacements.transformer_layers import slow_path
from autotp.passes.capture.unsupported import long_sizes
from autotp.passes.capture.unsupported.conversions import none_converted
from autotp.passes.capture.unsupported.lost_gradients import nothing_lost, without_derivatives
from autotp.passes.capture.unsupported.random_branches import CertainComparisons
from autotp.passes.capture.unsupported.sizes_as_keys import known_sizes
from autotp.passes.capture.unsupported.tensor_values import none_caught
from autotp.source_location import calling_frame, is_library_file

CAPTURING = threading.RLock()
"""Held during a capture: torch.export and the patches allow one thread at a time."""
RUN = str(Path(__file__).with_name("flatten.py"))
"""The file that calls the model."""
ASKING_FILES = (long_sizes.__file__, number_classes.__file__, values.__file__)
"""The files whose functions stand for operators of sizes and numbers."""


@contextmanager
def around_capture(autocast: Autocast) -> Iterator[None]:
    """A region for a whole capture. NOTE [What is patched during capture]"""
    with (
        alone(), autocast.on(), slow_path(), known_sizes(), _quiet(), _no_cache(), _use_lazy_graph_module(True),
        _one_device(autocast.device), recording_opaque_calls(),
        _lines_of_models(),
        internals.STACK_OF_NODE.replaced_by(UserStack), internals.METADATA_OF_NODE.replaced_by(lambda value: None),
        internals.BATCHED_ROWS.replaced_by(with_whole), internals.ROWS_OF_BATCH.replaced_by(rows_first),
    ):  # fmt: skip
        yield


@contextmanager
def around_export(model: nn.Module, repeats: Repeats | None) -> Iterator[Reads]:
    """A region in which the exporter runs, and notes the attributes that `model` reads.

    Args:
        repeats: handles the calls of the model's blocks; None: each block is captured by itself.
    """
    reads = Reads(model)
    with reads.watched(), ExitStack() as stack:
        if repeats is not None:
            stack.enter_context(repeats.watched(model))
        yield reads


@contextmanager
def around_forward(model: nn.Module, queries: GradientQueries, exactly: bool, looks: bool) -> Iterator[None]:
    """A region for one run of the model: behaviour that a graph would lose is noted or refused.

    Args:
        exactly, looks: as for `ModelLibrary.during_capture`.
    """
    with (
        none_caught(), library().during_capture(exactly, looks), ReplacedFunctions(), nothing_lost(model),
        CertainComparisons(),
        queries, everywhere([*queries.answering(), *unseeded(), *without_derivatives(), *as_operators()], model),
        without_python_random(model), none_converted(model), numbers_of_python(), opaque_modules(model),
    ):  # fmt: skip
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """A region without logs and stderr: the exporter prints a page where our Error has three lines."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


@contextmanager
def _no_cache() -> Iterator[None]:
    """A region in which torch does not cache what operators give on fake tensors."""
    from torch._dynamo import config  # All of Dynamo comes with it (1 s). The exporter imports it as well.

    with config.patch(fake_tensor_cache_enabled=False):
        yield


@contextmanager
def _lines_of_models() -> Iterator[None]:
    """A region in which torch says of an assumption about sizes which line of the model made it, and none of autotp."""
    files = {*internals.FILES_OF_GUARDS.original()(), *ASKING_FILES}
    with internals.FILES_OF_GUARDS.replaced_by(lambda: files):
        yield


def _one_device(device_type: str) -> AbstractContextManager[None]:
    """A region in which an operator may have operands on a device of this kind and on the CPU."""
    from torch._functorch import config

    return config.patch(fake_tensor_prefer_device_type=None if device_type == "cpu" else device_type)


@dataclass(frozen=True)
class UserStack:
    """The frames named `forward` of the model's own code, in place of torch's `CapturedTraceback`.

    If the model has none, these are the frames named `forward` of torch's layers.

    Attributes:
        frames: from the outermost one to the operator.
    """

    frames: StackSummary

    @staticmethod
    def extract() -> UserStack:
        """Returns the frames below the run of the model."""
        frames: list[tuple[str, int, str]] = []
        frame: FrameType | None = calling_frame()
        while frame is not None and frame.f_code.co_filename != RUN:
            if frame.f_code.co_name == "forward":  # Torch drops all others.
                frames.append((frame.f_code.co_filename, frame.f_lineno, "forward"))
            frame = frame.f_back
        user_frames = [entry for entry in frames if not is_library_file(entry[0])] or frames
        return UserStack(StackSummary([FrameSummary(*entry, lookup_line=False) for entry in reversed(user_frames)]))

    def summary(self) -> StackSummary:
        return self.frames
