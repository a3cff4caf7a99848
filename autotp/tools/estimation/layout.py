"""layout: how a model is divided for a step, and what a training library does beside the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from autotp.errors import Error
from autotp.options import CpAttention, Memory, Overlap, Recompute
from autotp.training.distribute import expect_experts
from autotp.training.pipeline.schedules import Training

DTYPES = (None, torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """A layout of a training step; the arguments of `estimate` explain the fields.

    Raises:
        Error: a size is no whole number of 1 or more, or the batch is not divided evenly.
    """

    batch: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch: int = 1
    schedule: str = "1F1B"
    interleave: int | None = None
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    memory: Memory = None
    state_bytes: float | None = None
    capacity: float | None = None
    overlap: Overlap = "none"
    cp_attention: CpAttention = "auto"
    zero: int = 0
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "tp", "pp", "dp", "cp", "ep", "micro_batch"):
            size: Any = getattr(self, name)
            # To Python, True is an int.
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise Error(f"{name}={size!r} is not a whole number of 1 or more", fix=f"{name}=2")
        if self.batch % (self.dp * self.micro_batch):
            raise Error(
                f"a batch of {self.batch} rows on dp={self.dp} replicas, in microbatches of {self.micro_batch}: "
                f"{self.dp} x {self.micro_batch} does not divide {self.batch}",
                fix=f"batch={-(-self.batch // (self.dp * self.micro_batch)) * self.dp * self.micro_batch}",
            )
        if self.dtype not in DTYPES:
            raise Error(f"dtype={self.dtype} is not one of its values", expected=", ".join(map(str, DTYPES)))
        if self.zero not in (0, 1, 2, 3):
            raise Error(f"zero={self.zero!r} is not one of its values", expected="0, 1, 2, 3")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.model_ranks * self.pp * self.dp

    @property
    def axes(self) -> tuple[int, ...]:
        """The sizes of the mesh's axes; neighbouring ranks are along the first."""
        return self.tp, self.cp, self.dp, self.pp

    @property
    def model_ranks(self) -> int:
        """The number of ranks that share a stage of one replica: they are neighbours, those along tp first."""
        return self.tp * self.cp

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a replica in a step."""
        return self.batch // (self.dp * self.micro_batch)

    @property
    def training(self) -> Training:
        """What `distribute` would be asked for, but for the number of microbatches."""
        schedule: Any = self.schedule
        return Training(
            outputs="local", sequence_parallel=self.sequence_parallel, recompute=self.recompute, memory=self.memory,
            state_bytes=self.state_bytes, capacity=self.capacity, summed=True, schedule=schedule,
            compute_dtype=self.dtype, cp=self.cp, ep=self.ep, overlap=self.overlap, cp_attention=self.cp_attention,
            zero=self.zero,
        )  # fmt: skip

    def expect_experts(self) -> None:
        """Raises Error if `distribute` refuses to cut experts over ranks, or their exchange is not counted."""
        expect_experts(self.training, self.dp)
        if self.ep > 1 and self.cp > 1:
            problem = f"ep={self.ep} beside cp={self.cp}: estimates do not count rows of parts of sequences"
            raise Error(problem, fix="cp=1, or distribute, which has both")

    def equals_but_for_micro_batch(self, layout: StepLayout) -> bool:
        """True if the layouts are equal, or differ in the rows of a microbatch only."""
        return {**vars(self), "micro_batch": 0} == {**vars(layout), "micro_batch": 0}

    def __str__(self) -> str:
        rounds = f" x{self.interleave}" if self.interleave else ""
        parts = [f"tp={self.tp}", *[f"cp={self.cp}"] * (self.cp > 1), f"pp={self.pp}", f"dp={self.dp}"]
        parts += [f"ep={self.ep}"] * (self.ep > 1)
        parts += [f"micro_batch={self.micro_batch}"]
        parts += [f"{self.schedule}{rounds}"] * (self.pp > 1)
        parts += ["sequence_parallel"] * self.sequence_parallel
        parts += [f"overlap={self.overlap}"] * (self.overlap != "none")
        parts += [f"cp_attention={self.cp_attention}"] * (self.cp_attention != "auto")
        parts += [f"recompute={self.recompute}"] * (self.recompute != "none")
        parts += [f"memory={self.memory}"] * (self.memory is not None)
        parts += [f"{name}={x}" for name in ("state_bytes", "capacity") if (x := getattr(self, name)) is not None]
        parts += [f"zero={self.zero}"] * bool(self.zero)
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Practice:
    """What a training library does beside the graph.

    Attributes:
        fused: whether pointwise operators that follow one another are one kernel.
        beside_products: whether collectives of a model's ranks run beside kernels until their wait.
        casts: whether a step casts each parameter; else the optimizer writes the copy in the dtype of computation.
        accumulation: bytes that are moved for each parameter and microbatch to add up gradients, beside the products;
            None: a gradient is read in the dtype of computation, and added in the parameter's own.
        optimizer: bytes that an optimizer's step moves for each parameter: 28 by `AdamW(fused=True)`.
        state: bytes of the optimizer's state for each parameter; None: two numbers of the parameter's dtype.
        scattered: whether ranks of one stage send a part each of what they all hold, and gather it behind the link
            (Narayanan et al. 2021, section 4.1).
        gradient: bytes of an element of a gradient, as it is kept and summed over replicas; None: the parameter's own.
        buckets: whether replicas copy gradients of less than 25 MiB into one tensor before they sum them, and back.
        overlapped: whether replicas sum gradients beside backward: of the last microbatch, with ZeRO 2 and 3 of each.
        ahead: whether ZeRO gathers parameters beside computation that does not need them: ZeRO 1 and 2 gather all
            units from the start of a step, ZeRO 3 gathers each beside the computation of the one before.
        gathers: how often ZeRO 3 gathers a parameter for a microbatch.
        units: what ZeRO gathers at a time: a block, or a parameter.
        listed: whether ZeRO gathers into a list of tensors, one for each replica: NCCL fills one tensor, and each part
            of it is copied by a kernel of its own; likewise before sums.
        early_stop: whether what is computed again ends where backward needs no more.
        products: the dtype of the operands of products with 16 bits; None: their own. float8 has twice their peak.
        exchange: the part that is sent of the bytes of rows on their way to experts and back.
        without: passes of autotp that the library has nothing like.
    """

    fused: bool = False
    beside_products: bool = True
    casts: bool = True
    accumulation: float | None = None
    optimizer: float = 28.0
    state: float | None = None
    scattered: bool = False
    gradient: int | None = None
    buckets: bool = True
    overlapped: bool = True
    ahead: bool = True
    gathers: int = 2
    units: Literal["block", "parameter"] = "block"
    listed: bool = False
    early_stop: bool = True
    products: torch.dtype | None = None
    exchange: float = 1.0
    without: tuple[str, ...] = ()


FOREACH = 80.0
"""Bytes that `AdamW` moves for each parameter as torch makes it by default on GPUs: in eight passes (foreach)."""
AUTOTP = Practice()
COMPILED = Practice(fused=True)
"""autotp with `compile_blocks()`."""
