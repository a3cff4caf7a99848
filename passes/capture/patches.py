"""The modes and replaced functions of torch that are active while a model is captured.

NOTE [What is patched during capture]
A graph has operators only, so whatever else a model does has to be seen while it runs. Where torch offers no other way,
a function of torch or Python is replaced, in the regions of this file and nowhere else, and put back at their end:

- `nn.Module.__getattribute__`: attributes that are read are noted (`guard.py`).
- the same, `__setattr__` and `__delattr__`, `forward` of blocks' classes, all methods of the classes of objects that
  blocks are given: blocks that are alike are captured once (`repeats.py`, `queries.py`).
- `torch.autograd.Function.apply`: own backwards come into the graph (`lost_gradients.py`).
- `torch.is_grad_enabled`, `torch.is_inference_mode_enabled`: they answer for the call, not for the exporter
  (`python_state.py`).
- `nn.TransformerEncoder.forward`, and torch's look whether a mask is causal (`transformer_layers.py`).
- `torch.SymInt`'s text and hash: a size that is a text or a key is a number (`sizes_as_keys.py`).
- logging and stderr: the exporter prints a page about each error.
- torch's cache of what operators give on fake tensors: with sizes that are symbols an operator is computed twice to
  fill it, and each export begins with an empty one. Without it a capture takes half the time.

Captures are for one thread at a time (`CAPTURING`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO

from torch import nn

from autotp.ops.eager_mode import alone
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.guards.guard import Reads
from autotp.passes.capture.guards.python_state import Asked, without_chance
from autotp.passes.capture.repeats.repeats import Repeats
from autotp.passes.capture.transformer_layers import slow_path
from autotp.passes.capture.unsupported.lost_gradients import nothing_lost
from autotp.passes.capture.unsupported.random_branches import Decided
from autotp.passes.capture.unsupported.sizes_as_keys import known_sizes

CAPTURING = threading.RLock()
"""torch.export, and what it is captured under, are for one thread at a time."""


@contextmanager
def around_capture(autocast: Autocast) -> Iterator[None]:
    """A region for a whole capture. NOTE [What is patched during capture]"""
    with alone(), autocast.on(), slow_path(), known_sizes(), _quiet(), _no_cache():
        yield


@contextmanager
def around_export(model: nn.Module, repeats: Repeats | None) -> Iterator[Reads]:
    """A region in which the exporter runs: what `model` reads of its attributes is noted.

    Args:
        repeats: through which the calls of its blocks go.
    """
    reads = Reads(model)
    with reads.watched(), ExitStack() as stack:
        if repeats is not None:
            stack.enter_context(repeats.watched(model))
        yield reads


@contextmanager
def around_forward(model: nn.Module, asked: Asked) -> Iterator[None]:
    """A region for one run of the model: what a graph would lose is seen or refused."""
    with nothing_lost(model), Decided(), asked, asked.answering(), without_chance(model):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs and prints a page about what an Error says in three lines."""
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
