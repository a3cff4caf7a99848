"""Compares models on real ranks with one device: processes of their own, which compute together over gloo.

Each rank is an interpreter of its own, as torchrun starts them, so that sets of strings have another order on each.
"""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp
from autotp.diagnostics.double import all_double

TOLERANCE = 1e-5
"""The largest difference, relative to the scale of the compared values: models in float64 may cast to float32."""

Make = Callable[[str], tuple[nn.Module, Any]]


class Died(Exception):
    """A rank ended without an answer."""


@dataclass(frozen=True)
class Compared:
    """What a rank found of a model.

    Attributes:
        difference: "" if all is equal; else the largest difference, and of what.
        error: an error of autotp, whole, or "".
        crash: another error, its type and first line, or "".
        share: the share of the parameters in numbered blocks that is cut.
        seconds: the processor time of the rank.
        low: in what it was compared beside its own dtype, or why not.
    """

    difference: str = ""
    error: str = ""
    crash: str = ""
    share: float = 0.0
    seconds: float = 0.0
    low: str = ""


class Ranks:
    """Running processes, one a rank; they end with `end`, or when this process ends."""

    def __init__(self, n: int, make: Make) -> None:
        self.n, self.make, self.runs = n, make, itertools.count()
        self.folder = ""
        self.ranks: list[tuple[Any, Connection]] = []

    def compare(self, name: str, tp: int, limit: float) -> list[Compared]:
        """Returns what each of `tp` ranks found of a model.

        Raises:
            TimeoutError: a rank was not done within `limit` seconds.
            Died: a rank ended.
        """
        if not self.ranks:
            self.folder = tempfile.mkdtemp()
            self.ranks = [_started(rank, self.make) for rank in range(self.n)]
        rendezvous = Path(self.folder, f"run{next(self.runs)}").as_uri()
        for _, pipe in self.ranks[:tp]:
            pipe.send((name, tp, rendezvous, limit))
        try:
            return _answers([pipe for _, pipe in self.ranks[:tp]], limit)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        for process, pipe in self.ranks:
            pipe.close()
            process.kill()
            process.join()
        if self.ranks:
            shutil.rmtree(self.folder)
        self.ranks = []


def _started(rank: int, make: Make) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(rank, there, make), daemon=True)
    with _hash_seed(2 * rank + 1):
        process.start()
    there.close()
    return process, here


@contextmanager
def _hash_seed(seed: int) -> Iterator[None]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(seed)
    try:
        yield
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def _answers(pipes: list[Connection], limit: float) -> list[Compared]:
    found: dict[Connection, Compared] = {}
    end = time.monotonic() + limit
    while len(found) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in found], max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no end after {limit:.0f} s")
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    found[pipe] = pipe.recv()
                except (EOFError, ConnectionError) as error:
                    raise Died(f"rank {rank} of {len(pipes)} ended") from error
    return [found[pipe] for pipe in pipes]


def _serve(rank: int, pipe: Connection, make: Make) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with suppress(EOFError):
        while True:
            name, tp, rendezvous, limit = pipe.recv()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": tp, "LOCAL_WORLD_SIZE": tp}
            os.environ.update({key: str(value) for key, value in place.items()})
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=tp, timeout=timedelta(seconds=limit)
            )
            start = time.process_time()
            found = compared(lambda: make(name), tp, rank)  # noqa: B023
            dist.barrier()
            dist.destroy_process_group()
            gc.collect()
            pipe.send(Compared(**vars(found) | {"seconds": round(time.process_time() - start, 1)}))


def compared(made: Callable[[], tuple[nn.Module, Any]], tp: int, rank: int) -> Compared:
    """Returns what this rank finds of a model: in train and in eval mode, with other values, and with more rows."""
    from support.hf_walk import share

    try:
        torch.manual_seed(0)
        whole, inputs = made()
        whole.train()  # An activation that is the default of an argument is in the mode of the model before.
        whole, inputs = in_double(whole), mapped(inputs, lambda x: x.double() if x.is_floating_point() else x)
        with casts(whole, inputs):
            parallel = autotp.parallelize(
                copy.deepcopy(whole), tp, example_inputs=inputs, outputs="full", randomness="exact"
            )
            for train, other in itertools.product((True, False), (_same, _flipped, _longer)):
                given = mapped(inputs, other)
                try:
                    expected = trained(whole.train(train), given)
                except Exception:  # It has no other number of rows.
                    if other is not _longer:
                        raise
                    continue
                found = trained(parallel.train(train), given)
                worst, of_what = max(differences(expected, found, parallel, rank), default=(0.0, ""))
                if not worst <= TOLERANCE:
                    mode = "train" if train else "eval"
                    return Compared(f"{mode}, {other.__name__.strip('_')} values: {worst:.1e} of {of_what}")
            return Compared(share=share(parallel.plan))
    except autotp.Error as error:
        return Compared(error=str(error))
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return Compared(crash=f"{type(error).__name__}: {first}")


def casts(model: nn.Module, inputs: Any) -> AbstractContextManager[None]:
    """Returns a region in which the model runs in float64: one without casts to less, where these do not fit it."""
    try:
        trained(copy.deepcopy(model), inputs)
    except RuntimeError as error:
        if "dtype" in str(error):
            return all_double()
    return nullcontext()


def in_double(model: nn.Module) -> nn.Module:
    """Returns the model in float64, with noise: biases of 0 and norm weights of 1 would hide a wrong cut."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.double().parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.02)
    return model


def mapped(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return pytree.tree_map_only(Tensor, change, inputs)


def _same(x: Tensor) -> Tensor:
    return x


def _flipped(x: Tensor) -> Tensor:
    return x.flip(0) if x.dim() and x.size(0) == 2 else x


def _longer(x: Tensor) -> Tensor:
    return torch.cat([x, x[:1]]) if x.dim() and x.size(0) == 2 else x


@dataclass(frozen=True)
class Call:
    """The outputs of a call, and the gradients of a loss that weighs each number of them in another way."""

    loss: float
    outputs: tuple[Any, ...]
    gradients: Mapping[str, Tensor | None]
    of_inputs: tuple[Tensor | None, ...]
    buffers: Mapping[str, Tensor]


def trained(model: nn.Module, inputs: Any, of_inputs: bool = True) -> Call:
    """Returns what a call computes, and its gradients; with `of_inputs` those of the inputs, too."""
    given = mapped(inputs, lambda x: x.clone().requires_grad_(of_inputs and x.is_floating_point()))
    leaves = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    model.zero_grad()
    torch.manual_seed(3)
    np.random.seed(3)  # Some models of sound draw masks from numpy.
    found = model(**given) if isinstance(given, dict) else model(*given)
    outputs = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
    generator = torch.Generator().manual_seed(2)
    loss = torch.zeros((), dtype=torch.float64)
    for x in outputs:
        if x.requires_grad and x.is_floating_point():
            loss = loss + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() / x.numel() ** 0.5
    loss.backward()
    return Call(
        loss=loss.item(),
        outputs=tuple(x.detach().clone() for x in outputs),
        gradients={name: p.grad for name, p in model.named_parameters()},
        of_inputs=tuple(x.grad for x in leaves),
        buffers={name: x.clone() for name, x in model.named_buffers()},
    )


def differences(whole: Call, parts: Call, model: Any, rank: int, dtypes: bool = True) -> Iterator[tuple[float, str]]:
    """Yields the difference of each compared tensor, relative to its scale, and its name.

    Args:
        model: the parallel model of `parts`; None for one on one device.
        dtypes: whether other dtypes are a difference.
    """
    difference = partial(_difference, dtypes=dtypes)
    layouts = {} if model is None else model.layouts
    # It is a weighted sum of all outputs, which may cancel.
    largest = max([abs(whole.loss), *map(_largest, whole.outputs)])
    losses = [torch.tensor(call.loss, dtype=torch.float64) for call in (whole, parts)]
    yield difference(losses[0], losses[1], largest), "the loss"
    if len(whole.outputs) != len(parts.outputs) or whole.gradients.keys() != parts.gradients.keys():
        yield float("inf"), "the number of outputs or parameters"
        return
    for place, (x, y) in enumerate(zip(whole.outputs, parts.outputs, strict=True)):
        yield difference(x, y), f"output {place}"
    gradients = [g for g in whole.gradients.values() if g is not None]
    scale = max((_largest(g) for g in gradients), default=0.0) or 1.0
    for name, gradient in whole.gradients.items():
        yield difference(gradient, parts.gradients[name], scale), f"the gradient of {name}"
    for place, (x, y) in enumerate(zip(whole.of_inputs, parts.of_inputs, strict=True)):
        yield difference(x, y), f"the gradient of input {place}"
    for name, buffer in whole.buffers.items():
        expected = layouts[name].take(buffer, rank) if name in layouts else buffer
        yield difference(expected, parts.buffers[name]), f"the buffer {name}"


def _largest(x: Tensor) -> float:
    x = x.detach().abs()
    return x[x.isfinite()].max().item() if x.isfinite().any() else 0.0


def _difference(x: Tensor | None, y: Tensor | None, scale: float = 0.0, dtypes: bool = True) -> float:
    if x is None or y is None:
        return 0.0 if x is y else float("inf")
    if x.shape != y.shape or (dtypes and x.dtype != y.dtype):
        return float("inf")
    if not x.numel() or torch.equal(x, y):
        return 0.0
    kind = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(kind), y.to(kind)
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return float("inf")
    x, y = x[finite], y[finite]
    return (x - y).abs().max().item() / (scale or x.abs().max().item() or 1.0) if x.numel() else 0.0
