"""result: an estimate, as numbers and as a table, each with its error bar (`error_bars.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotp.costs.hardware import GIB, Hardware
from autotp.costs.room import ALLOCATOR, LIBRARIES, reserved
from autotp.diagnostics.plan import MemoryPlan
from autotp.display.sheet import Sheet, Shown, Table
from autotp.display.text_table import bytes_text
from autotp.errors import within
from autotp.tools.estimation.error_bars import FULLEST, memory_bar, row_bar, step_bar
from autotp.tools.estimation.layout import StepLayout
from autotp.tools.estimation.seconds.times import EXPERTS

KINDS_OF_TENSORS = ("weights", "copies", "gradients", "optimizer", "activations", "logits", "transients")
"""The kinds of tensors in the memory of a rank."""


def mfu(flops: float, seconds: float, devices: int, peak: float) -> float:
    """Returns the part of the devices' peak that a model's own operations take (model FLOPs utilization).

    Source: Chowdhery et al. 2022 (PaLM), appendix B.

    Args:
        flops: operations of a step, without those computed again.
        peak: FLOP/s of a device.
    """
    return flops / seconds / devices / peak


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """Returns the tokens of a step by its seconds, of all devices together; None where rows have no tokens."""
    return tokens / seconds if tokens else None


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one pipeline rank at its fullest moment, in bytes.

    Attributes:
        weights: parameters in their own dtype.
        copies: parameters in the dtype of computation.
        gradients: gradients, in the parameters' dtype.
        optimizer: the state of Adam.
        activations: what backward reads, of all microbatches in flight.
        logits: the part of it behind the last block.
        transients: what the running block needs beside.
        buffers: those of NCCL's communicators, at most. They are no tensors, and not a part of `total`.
        is_gpu: whether it is that of a GPU: estimates for a CPU have other error bars.
    """

    DATA = (*KINDS_OF_TENSORS, "buffers", "total", "error_bytes", "reserved")

    weights: float = 0.0
    copies: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    transients: float = 0.0
    buffers: float = 0.0
    is_gpu: bool = True

    @property
    def kinds(self) -> dict[str, float]:
        """The bytes of tensors of each kind."""
        return {name: getattr(self, name) for name in KINDS_OF_TENSORS}

    @property
    def total(self) -> float:
        """The bytes of all tensors."""
        return sum(self.kinds.values())

    @property
    def reserved(self) -> float:
        """The bytes of the device that are taken at most: with the allocator's part, libraries, and NCCL's buffers."""
        return reserved(self.total, self.error_bytes, self.buffers)

    @property
    def error_bytes(self) -> float:
        """The error bar of `total`: the sum of those of all kinds, as if all erred in the same direction."""
        return sum(size * memory_bar(category, self.is_gpu) for category, size in self.kinds.items())

    @property
    def text(self) -> str:
        """The bytes of all tensors with their error bar, in GiB."""
        return f"{self.total / GIB:.1f} ±{self.error_bytes / GIB:.1f}"


@dataclass(frozen=True, kw_only=True)
class RankGathers:
    """What ZeRO gathers in a step of a pipeline rank.

    Attributes:
        times: how often parameters are gathered: those of a block, or those outside of blocks.
        bytes: of what is gathered, in the dtype of computation.
        room: the number of blocks that are whole at a time; None where all stay until the step ends.
    """

    DATA = ("times", "bytes", "room")

    times: int
    bytes: float
    room: int | None

    def __str__(self) -> str:
        staying = "all stay" if self.room is None else f"room for {self.room} blocks"
        return f"{self.times} gathers, {bytes_text(self.bytes)}, {staying}"


@dataclass(frozen=True, kw_only=True)
class TimeSaving:
    """What one way to hide or to fuse work brings.

    Attributes:
        name: the way, such as "sums of gradients under backward".
        used: whether the estimate counts with it.
        seconds: of a step with it, all else as in the estimate.
        without: of a step without it.
    """

    name: str
    used: bool
    seconds: float
    without: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate(Shown):
    """A predicted training step, returned by `estimate`.

    Attributes:
        layout: the layout.
        device: the kind of device.
        seconds: of a step: forward, backward, the sums over replicas and the optimizer's step.
        flops: floating-point operations of the model in a step, without those computed again.
        flops_again: those computed again.
        spent: what the seconds of the busiest pipeline rank are spent on; they add up to `seconds`. Collectives count
            as far as they are not hidden behind computation; "pipeline" is the bubble, and the time of sends.
        memory: of each pipeline rank, at its fullest moment.
        stages: the blocks of each stage.
        homes: the pipeline rank of each stage.
        budgets: what `memory=` does with the values of a microbatch in each stage; empty without it.
        gathers: what ZeRO gathers in each pipeline rank; empty without it.
        savings: what each way to hide or to fuse work brings, of those that bring something in this layout.
        row: the shapes of the tensors of a row of the batch, such as "[2048], [2048]" for tokens and labels.
        tokens: of a step; 0 where the first tensor of a row is no sequence of whole numbers.
        source: the captured model with its prices, which `save_page` and `save_trace` draw; not a part of what is
            compared, copied by pickle or printed.

    Example:
        >>> from autotp.models.gpt import GPT, GPTConfig
        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig(vocab_size=51200, n_layer=4, n_head=8, n_embd=1024))
        >>> est = autotp.estimate(model, gpu="a100-80gb", tp=2, pp=2, batch=8, dtype=torch.bfloat16)
        >>> len(est.memory), est.fits, 0 < est.mfu < 1
        (2, True, True)
    """

    DATA = (
        "layout", "device", "row", "seconds", "error", "tflops", "hardware_tflops", "mfu", "tokens_per_second", "spent",
        "savings", "memory", "memory_error", "fits", "stages", "homes", "budgets", "gathers",
    )  # fmt: skip

    layout: StepLayout
    device: Hardware
    seconds: float
    flops: float
    flops_again: float
    spent: Mapping[str, float]
    memory: tuple[RankMemory, ...]
    stages: tuple[tuple[str, ...], ...]
    homes: tuple[int, ...]
    row: str
    tokens: int = 0
    savings: tuple[TimeSaving, ...] = ()
    budgets: tuple[MemoryPlan, ...] = ()
    gathers: tuple[RankGathers, ...] = ()
    source: Any = field(default=None, compare=False)

    @property
    def tflops(self) -> float:
        """The model's TFLOP/s of one device: without what is computed again."""
        return self.flops / self.seconds / self.layout.devices / 1e12

    @property
    def hardware_tflops(self) -> float:
        """The TFLOP/s that one device computes: with what is computed again."""
        return (self.flops + self.flops_again) / self.seconds / self.layout.devices / 1e12

    @property
    def mfu(self) -> float:
        """The model's part of the device's peak (model FLOPs utilization)."""
        return mfu(self.flops, self.seconds, self.layout.devices, self.peak)

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens of a second, of all devices together; None where rows have no tokens."""
        return tokens_per_second(self.tokens, self.seconds)

    @property
    def peak(self) -> float:
        """The device's peak in the dtype of computation: FLOP/s."""
        # The higher peak is that of products in 16 bits.
        wide = self.layout.dtype is None or self.layout.dtype.itemsize > 2
        return self.device.vector_flops if wide else self.device.matrix_flops

    @property
    def fits(self) -> bool:
        """Whether each rank fits: with libraries, NCCL's buffers and the allocator's part."""
        return max(rank.reserved for rank in self.memory) <= self.device.memory

    @property
    def fullest(self) -> RankMemory:
        """The memory of the pipeline rank with the most."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def memory_error(self) -> dict[str, float]:
        """Kind of memory that a rank has -> the relative error bar of its bytes."""
        present = {kind for rank in self.memory for kind, size in rank.kinds.items() if size}
        return {kind: memory_bar(kind, self.device.is_gpu) for kind in KINDS_OF_TENSORS if kind in present}

    @property
    def error(self) -> float:
        """The relative error bar of `seconds`, and of all that is computed from it."""
        return step_bar(self.device, self.layout.zero) + self.uneven_seconds / self.seconds

    @property
    def uneven_seconds(self) -> float:
        """The seconds by which a step is longer where the fullest rank of `ep` has more rows than the mean."""
        of_rows = sum(self.spent.get(name, 0.0) for name in (EXPERTS, "all-to-all ep"))
        return FULLEST * of_rows * (self.layout.ep > 1)

    def watch(self, trainer: Any, steps: int = 20, show: Callable[[Any], Any] = print) -> Any:
        """Returns a `Comparison` that the next steps of a trainer fill: what was predicted, and what is measured.

        The first rank shows it after the last of these steps. Call it on every rank. A step is measured from its
        beginning to that of the next one: with the optimizer, and with what the loop does between steps. It costs
        nothing after the last step.

        Args:
            trainer: what `autotp.distribute` returned, in the layout of this estimate.
            steps: the steps to watch; the first two are not counted. What it shows comes before the next step.
            show: is called with the `Comparison`; by default it is printed.

        Raises:
            Error: the trainer has another layout.
        """
        from autotp.tools.estimation.watch import watch  # A trainer and an estimate need each other for nothing else.

        return within("watch", lambda: watch(self, trainer, steps, show))

    def summary(self) -> str:
        """Returns layout, seconds and memory in a line."""
        fit = "fits" if self.fits else "does not fit"
        return (
            f"{self.layout} on {self.layout.devices} x {self.device.name}: {self.seconds:.3g} s and "
            f"{self.tflops:.0f} TFLOP/s ±{self.error:.0%}, {self.fullest.text} GiB, {fit}"
        )

    def batch_line(self) -> tuple[str, ...]:
        """Returns what a step trains on, as a part of a sheet."""
        return (f"a step       {self.layout.batch} rows; the tensors of a row are {self.row}",)

    def sheet(self) -> Sheet:
        """Returns the tables of the time and of the memory."""
        row = row_bar(self.device, self.layout.zero)
        times = tuple(
            (name, f"{s:.4g} s", f"±{s * row:.2g} s", f"{s / self.seconds:.1%}")
            for name, s in sorted(self.spent.items(), key=lambda item: -item[1])
        )
        speed = self.tokens_per_second or 0.0
        total = ("a step", f"{self.seconds:.4g} s", f"±{self.seconds * self.error:.2g} s", "100%")
        lines = (
            f"model        {self.tflops:.1f} ±{self.tflops * self.error:.1f} TFLOP/s a device, "
            f"{self.mfu:.1%} ±{self.mfu * self.error:.1%} of the peak",
            f"hardware     {self.hardware_tflops:.1f} ±{self.hardware_tflops * self.error:.1f} TFLOP/s, with what is "
            "computed again",
            *[f"tokens       {speed:,.0f} ±{speed * self.error:,.0f} a second"] * bool(speed),
            *[
                f"experts      {self.uneven_seconds:.2g} s of the error bar is for a rank of ep={self.layout.ep} with "
                f"{FULLEST:.0%} more rows than the mean"
            ]
            * (self.layout.ep > 1),
        )
        lines += (f"zero         a step has {self.gathers_text}",) * bool(self.gathers)
        bars = ("error bar", *(f"±{bar:.1%}" for bar in self.memory_error.values()), "")
        fit, fullest = "fits" if self.fits else "does not fit", self.fullest
        beside = (
            f"memory       {fit}: at most {fullest.reserved / GIB:.1f} of {self.device.memory / GIB:.1f} GiB, with "
            f"{LIBRARIES / GIB:.0f} GiB for libraries, {fullest.buffers / GIB:.1f} for NCCL's buffers and "
            f"{ALLOCATOR:.0%} for the allocator",
        )
        head = ("pp rank", *self.memory_error, "GiB in all")
        return Sheet(
            f"{self.layout} on {self.layout.devices} x {self.device.name}",
            (
                self.batch_line(),
                Table(("where the time goes", "", "", ""), (*times, total), ("", "cut", "note", "note")),
                *self.savings_table(),
                lines,
                Table(head, (*self._memory_rows(), bars), ("", *("note",) * (len(head) - 2), "cut")),  # type: ignore[arg-type]
                beside,
                *self.budget_table(),
                *[about_budget for about_budget in [self.budget_lines()] if about_budget],
            ),
        )  # fmt: skip

    @property
    def gathers_text(self) -> str:
        """What ZeRO gathers in a step, of the pipeline rank that gathers most; "" without it."""
        return str(max(self.gathers, key=lambda rank: rank.bytes)) if self.gathers else ""

    def budget_table(self) -> tuple[Table, ...]:
        """Returns the table of what a stage keeps for backward under a budget: of the one that computes most again."""
        most = max(self.budgets, key=lambda stage: stage.seconds, default=None)
        return () if most is None else (most.table(),)

    def budget_lines(self) -> tuple[str, ...]:
        """Returns the lines about a budget, of each stage; of more than eight stages, of two at each end."""
        count, lines = len(self.budgets), list[str]()
        for i, stage in enumerate(self.budgets):
            if count <= 8 or not 2 <= i < count - 2:
                lines += [f"stage {i}"] * (count > 1) + list(stage.lines())
            elif i == 2:
                lines.append("...")
        return tuple(lines)

    def savings_table(self) -> tuple[Table, ...]:
        """Returns the table of what is hidden and fused, if something is: a part of the sheet and of the page."""
        head = ("what shortens a step", "", "with", "without", "")
        rows = tuple(
            (x.name, "counted" if x.used else "not counted", f"{x.seconds:.4g} s", f"{x.without:.4g} s",
             f"{x.seconds / x.without - 1:+.1%}")
            for x in self.savings
        )  # fmt: skip
        return (Table(head, rows, ("", "note", "cut", "", "note")),) if rows else ()

    def _memory_rows(self) -> Iterator[tuple[str, ...]]:
        """Yields a row for each pipeline rank; of more than eight, for two at each end."""
        hidden = range(2, len(self.memory) - 2) if len(self.memory) > 8 else range(0)
        for i, rank in enumerate(self.memory):
            if i not in hidden:
                cells = (f"{rank.kinds[category] / GIB:.2f}" for category in self.memory_error)
                yield (str(i), *cells, f"{rank.total / GIB:.2f} ±{rank.error_bytes / GIB:.1g}")
            elif i == hidden.start:
                yield ("...", *("" for _ in self.memory_error), "")
