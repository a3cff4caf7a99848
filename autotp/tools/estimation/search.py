"""`search`: the fastest layouts of a model on a number of devices, and why the obvious ones are not among them.

The model is captured once, and planned once for each number of tensor-parallel ranks; then each micro-batch is recorded
once. All layouts get a rough price from these records. The best of them are priced as `estimate` does, until five are
found that fit. Where sequences are cut, a low price is made of the records of two ranks; the model is lowered for other
context-parallel ranks only where their low price is among the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autotp.arguments import expect_arguments
from autotp.costs.hardware import GIB, Hardware, estimated_on, hardware_of
from autotp.costs.room import tensor_room
from autotp.display.sheet import Sheet, Shown, Table
from autotp.errors import Error, within
from autotp.ops.eager_mode import uncollected
from autotp.ops.experts.rows import dispatch
from autotp.options import Memory, Options, Recompute, memory_limit
from autotp.passes.plan.experts.experts import experts
from autotp.passes.plan.infer_axes import infer_axes
from autotp.tools.estimation.closed_form import ClosedForms
from autotp.tools.estimation.counts.pieces import Lowered, lowered_again
from autotp.tools.estimation.error_bars import why_zero_3
from autotp.tools.estimation.estimate import estimated_call, lowered_for
from autotp.tools.estimation.layout import AUTOTP, COMPILED, Practice, StepLayout
from autotp.tools.estimation.price import Prices, memory_of_ranks, price, step_seconds
from autotp.tools.estimation.result import Estimate
from autotp.tools.estimation.start_lines import in_lines, python_line, torchrun_line
from autotp.training.pipeline.schedules import engine_of

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (1, 2, 4, 8)
"""The numbers of ranks that long sequences may be cut over."""
LONG = 8192
"""The tokens of a long sequence."""
INTERLEAVES = (2, 3, 4, 6, 8)
SHOWN = 5
"""The layouts that a search returns."""
FAR = 1.1
"""What a rough price may exceed the memory by: it is not exact."""
PRICED = 60
"""The layouts that are priced in full, at most."""


@dataclass(frozen=True)
class Lost:
    """An obvious layout that is not the best, and why."""

    layout: str
    why: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Search(Shown):
    """The result of `search`.

    Attributes:
        best: the fastest layouts that fit, the fastest first; five at most.
        lost: obvious layouts that are slower or do not fit, and why.
        tried: the number of legal layouts.

    Example:
        >>> from autotp.models.gpt import GPT, GPTConfig
        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig(vocab_size=51200, n_layer=8, n_head=8, n_embd=1024))
        >>> found = autotp.search(model, gpus=8, gpu="a100-80gb", batch=64, dtype=torch.bfloat16)
        >>> found.best[0].fits, found.best[0].layout.devices
        (True, 8)
    """

    best: tuple[Estimate, ...]
    lost: tuple[Lost, ...]
    tried: int

    def summary(self) -> str:
        """Returns the best layout in a line."""
        return self.best[0].summary()

    def sheet(self) -> Sheet:
        """Returns the tables of the best layouts and of those that lost."""
        first, (best, *lost) = self.best[0], self.tables()
        title = f"the best of {self.tried} layouts on {first.layout.devices} x {first.device.name}"
        notes: tuple[str, ...] = (f"too close    {ties}",) if (ties := self._ties()) else ()
        if any(est.layout.zero == 3 for est in self.best):
            notes += (f"zero=3       {why_zero_3()}",)
        if without := self._without_zero_3():
            notes += (f"without      {without}",)
        command = in_lines(torchrun_line(first.layout.devices, first.device.node), "\\")
        lines = *command, *in_lines(python_line(first.layout))
        return Sheet(title, (first.batch_line(), best, *[notes] * bool(notes), *lost, ("the first:", *lines)))

    def tables(self) -> list[Table]:
        """Returns the table of the best layouts, and that of the obvious ones that lost, if there are any."""
        head = ("layout", "a step", "TFLOP/s", "of peak", "tokens/s", "GiB")
        rows = tuple(
            (
                str(est.layout),
                f"{est.seconds:.3g} ±{float(f'{est.seconds * est.error:.1g}'):g} s",
                f"{est.tflops:.0f} ±{est.tflops * est.error:.0f}",
                f"{est.mfu:.0%} ±{est.mfu * est.error:.0%}",
                f"{speed:,.0f} ±{speed * est.error:,.0f}" if (speed := est.tokens_per_second) else "",
                est.fullest.text,
            )
            for est in self.best
        )
        lost = tuple((loser.layout, loser.why) for loser in self.lost)
        tables = [Table(head, rows, ("cut", "", "note", "note", "note", "note"))]
        return tables + [Table(("obvious, and", "why it lost"), lost, ("", "note"))] * bool(lost)

    def _without_zero_3(self) -> str:
        """Returns which of the best is the fastest without ZeRO 3; "" where it is the first, or none is."""
        numbers = (i for i, est in enumerate(self.best) if est.layout.zero < 3)
        if not (number := next(numbers, 0)):
            return ""
        more = self.best[number].seconds - self.best[0].seconds
        text = f"the fastest without ZeRO 3 is layout {number + 1} of these: {_two_digits(more)} s"
        return f"{text} ({more / self.best[0].seconds:+.0%})"

    def _ties(self) -> str:
        """Returns which layouts the error bars do not tell from the first one; "" for none."""
        first = self.best[0]
        near = [est for est in self.best[1:] if est.seconds * (1 - est.error) <= first.seconds * (1 + first.error)]
        which = "all others" if len(near) == len(self.best) - 1 else f"{len(near)} of the others"
        return f"the error bars of {which} overlap that of the first: measure before you choose" if near else ""


def search(
    model: nn.Module,
    *,
    gpus: int,
    gpu: str | Hardware,
    batch: int,
    memory: float | str = "auto",
    dtype: torch.dtype | None = None,
    compiled: bool = False,
    sequence: int | None = None,
    example_inputs: Any = None,
    state_bytes: float | None = None,
    capacity: float | None = None,
) -> Search:
    """Returns the fastest layouts of a training step of `model` on `gpus` devices, by `estimate`.

    It tries all numbers of tensor-parallel ranks that divide `gpus`, up to two nodes; all numbers of stages and
    replicas; for sequences of 8,192 tokens or more, 2, 4 and 8 context-parallel ranks; for a mixture, all numbers of
    replicas that its experts can be cut over; micro-batches of 1 to 32 rows; the schedules 1F1B, interleaved and
    zero-bubble; ZeRO 0 and 1, and without a pipeline 2 and 3, too. What does not fit is tried with `memory=`, the
    fastest choice of what stays and what is computed again.
    Sequence parallelism is on wherever there are tensor-parallel ranks: over NCCL it sends as many bytes, and saves
    memory. Graphs are counted here; `estimate` and `distribute` check their types, too.

    Args:
        model, gpu, batch, dtype, compiled, sequence, example_inputs, state_bytes, capacity: as for `estimate`.
        gpus: the number of devices.
        memory: "auto": a layout fits where `estimate` says so, with libraries, NCCL's buffers and the allocator's part.
            Or less: a part of a device's memory (0.5, "50%") or bytes ("20GiB"), which tensors may take at most.

    Raises:
        Error: as `estimate`; or no layout fits.

    Example:
        >>> from autotp.models.gpt import GPT, GPTConfig
        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig(vocab_size=51200, n_layer=8, n_head=8, n_embd=1024))
        >>> print(autotp.search(model, gpus=8, gpu="h100-80gb", batch=64, dtype=torch.bfloat16).best[0].layout.tp)
        1
    """

    def run() -> Search:
        expect_arguments(search, gpu=gpu, dtype=dtype, compiled=compiled, sequence=sequence)
        Options(state_bytes=state_bytes, capacity=capacity)
        # All that is wrong raises before the model is captured, which takes seconds.
        device, tensor_limit = expect_search(gpus, gpu, batch, memory)
        practice = COMPILED if compiled else AUTOTP
        fixed = StepLayout(batch=batch, dtype=dtype, state_bytes=state_bytes, capacity=capacity)
        layouts = Layouts(model, device, practice, fixed, sequence, example_inputs, tensor_limit)
        with uncollected():
            return _searched(layouts, gpus, batch)

    return within(f"search({type(model).__name__}, gpus={gpus})", run)


def expect_search(gpus: int, gpu: str | Hardware, batch: int, memory: float | str) -> tuple[Hardware, float]:
    """Returns the kind of device of a search, and the bytes that the user lets tensors take; inf for "auto".

    Arguments as for `search`.

    Raises:
        Error: one of them is wrong.
    """
    device = hardware_of(gpu)
    StepLayout(batch=batch)
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise Error(f"gpus={gpus!r} is not a whole number of 1 or more", fix="gpus=8")
    if memory == "auto":
        return device, math.inf
    if isinstance(memory, str):
        memory = memory_limit(memory)
        return device, memory if memory > 1 else memory * device.memory
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory <= 1:
        raise Error(f"memory={memory!r} is not a part of a device's memory", fix='memory="auto"')
    return device, memory * device.memory


@dataclass(frozen=True)
class Rough:
    """The seconds of a step, and the bytes of the fullest device, by a closed form."""

    seconds: float
    memory: float


class Layouts:
    """A model, captured for each number of tensor-parallel and context-parallel ranks when it is first needed.

    Args:
        fixed: what all layouts have, on one device.
        tensor_limit: the bytes that the user lets tensors take.
    """

    def __init__(
        self, model: nn.Module, device: Hardware, practice: Practice, fixed: StepLayout, sequence: int | None,
        example_inputs: Any, tensor_limit: float = math.inf,
    ) -> None:  # fmt: skip
        self.device, self.tensor_limit, self.fixed = device, tensor_limit, fixed
        self._rough: dict[tuple[StepLayout, ClosedForms], Rough] = {}
        self._practice, self._call = practice, estimated_call(model, sequence, example_inputs)
        self._prices: dict[tuple[int, int, int, Recompute, bool], Prices] = {}
        self._forms: dict[tuple[int, int, int, bool], ClosedForms] = {}
        self.pipelines = True

    def prices(self, tp: int, cp: int, recompute: Recompute, halves: bool = False, ep: int = 1) -> Prices:
        """Returns the prices of numbers of tensor-parallel and context-parallel ranks, with a way of recomputation.

        Args:
            halves: whether backward runs in two halves: then no sum over ranks runs beside products.
            ep: the replicas that experts are cut over.
        """
        if (tp, cp, ep, "none", halves) not in self._prices:
            with estimated_on(self.device):
                model = self._halved(tp, cp) if halves else self._lowered(tp, cp, ep)
            earlier = next(iter(self._prices.values()), None)  # The FLOPs of a row are those of any number of ranks.
            flops = None if earlier is None else earlier.flops(1)
            prices = Prices(model, self.device, self._practice, scaled=True, flops=flops)
            self._prices[tp, cp, ep, "none", halves] = prices
        if (tp, cp, ep, recompute, halves) not in self._prices:
            plain = self._prices[tp, cp, ep, "none", halves]
            again = replace(plain.model, training=replace(plain.model.training, recompute=recompute))
            self._prices[tp, cp, ep, recompute, halves] = Prices(
                again, self.device, self._practice, scaled=True, flops=plain.flops(1)
            )
        return self._prices[tp, cp, ep, recompute, halves]

    @cached_property
    def experts(self) -> int:
        """The greatest number of replicas that the experts of each layer can be cut over; 1 for a model without."""
        program = self.prices(1, 1, "none").model.program
        sorted_rows, _ = experts(program.graph, infer_axes(program.graph), program.captured.parameters, 1)
        return math.gcd(*(node.args[1] for node in sorted_rows.nodes if node.target is dispatch)) or 1

    def expert_ranks(self, dp: int) -> list[int]:
        """Returns the numbers of replicas that experts may be cut over."""
        return [n for n in range(1, dp + 1) if math.gcd(dp, self.experts) % n == 0]

    def _alike(self, tp: int, ep: int) -> Prices:
        """Returns rough prices of a number of replicas that experts are cut over, without their graph.

        A rank computes as many rows for any number: only the links that these cross, and its weights, are others.
        """
        fewest_replicas = min(n for n in range(2, ep + 1) if ep % n == 0)
        prices = self.prices(tp, 1, "none", ep=fewest_replicas)
        if ep == fewest_replicas:
            return prices
        parameters = {
            name: replace(p, elements=math.ceil(p.elements * fewest_replicas / ep)) if p.of_experts else p
            for name, p in prices.model.parameters.items()
        }
        return prices.of(replace(prices.model, parameters=parameters, training=replace(prices.model.training, ep=ep)))

    def _lowered(self, tp: int, cp: int, ep: int) -> Lowered:
        """Returns the model for numbers of ranks. Its types are not checked: `estimate` and `distribute` check them."""
        pp, sequence_parallel = 1 + self.pipelines, tp > 1
        layout = replace(self.fixed, batch=ep, tp=tp, cp=cp, pp=pp, dp=ep, ep=ep, sequence_parallel=sequence_parallel)
        try:
            return lowered_for(self._call, layout, checked=False)
        except Error:
            if ep > 1:
                raise
            self.pipelines = False  # As `distribute`; without a pipeline it may be that `parallelize` can.
            return lowered_for(self._call, replace(layout, pp=1), checked=False)

    def _halved(self, tp: int, cp: int) -> Lowered:
        """Returns the model for numbers of ranks, with backward in two halves."""
        plain = self.prices(tp, cp, "none").model
        return lowered_again(plain, replace(plain.training, schedule="zero-bubble"))

    def limit(self, layout: StepLayout) -> float:
        """Returns the bytes that tensors of a layout may take: of its budget."""
        return min(self.tensor_limit, tensor_room(self.device, layout.axes))

    def fits(self, est: Estimate) -> bool:
        """Whether an estimate fits, within what the user lets tensors take."""
        return est.fits and est.fullest.total <= self.tensor_limit

    def price(self, layout: StepLayout) -> Estimate:
        """Returns the estimate of a layout; where no choice of a budget fits, that with full recomputation."""
        try:
            return self._price(layout)
        except Error:
            if layout.memory is None:
                raise
        return self._price(replace(layout, memory=None, recompute="full"))

    def _price(self, layout: StepLayout) -> Estimate:
        halves = layout.pp > 1 and engine_of(layout.schedule).halves
        return price(self.prices(layout.tp, layout.cp, layout.recompute, halves, layout.ep), layout)

    def ranks(self, gpus: int) -> list[int]:
        """Returns the numbers of tensor-parallel ranks: up to two nodes."""
        return [n for n in range(1, 2 * self.device.node + 1) if gpus % n == 0]

    def budgets(self, axes: Sequence[int]) -> tuple[Memory, ...]:
        """Returns the budgets that are tried: none, and what tensors may take in a mesh of these sizes."""
        room = tensor_room(self.device, axes)
        if room < self.tensor_limit and self.device.is_gpu:
            return None, "auto"
        return None, _bytes(min(room, self.tensor_limit))

    def contexts(self, ranks: int) -> list[int]:
        """Returns the numbers of context-parallel ranks: several for long sequences of a model with self-attention."""
        arguments = self.prices(1, 1, "none").model.arguments.values()
        length = max((max(x.shape[1:], default=0) for x in arguments), default=0)
        if length < LONG:
            return [1]
        counts = [cp for cp in CONTEXTS if ranks % cp == length % cp == 0]
        if counts[1:]:
            try:
                self.prices(1, CONTEXTS[1], "none")
            except Error:  # There is no sequence to cut.
                return [1]
        return counts

    def closed_forms(self, tp: int, cp: int, ep: int = 1) -> ClosedForms:
        """Returns the closed forms of numbers of ranks; they serve for halves of backward, too."""
        key = tp, cp, ep, self.is_lowered(tp, cp)
        if key not in self._forms:
            prices = self._alike(tp, ep) if ep > 1 else self.prices(tp, cp, "none") if key[-1] else None
            self._forms[key] = self._low(tp, cp) if prices is None else ClosedForms(prices)
        return self._forms[key]

    def _low(self, tp: int, cp: int) -> ClosedForms:
        """Returns closed forms without the graph of these ranks; their prices are low."""
        self.prices(1, CONTEXTS[1], "none")  # Lowers the model for these, if that has not been done.
        local, cut, on_one_rank = (self.closed_forms(n, m) for n, m in ((tp, 1), (1, CONTEXTS[1]), (1, 1)))
        return local.divided(cp, cut, CONTEXTS[1], on_one_rank)

    def is_lowered(self, tp: int, cp: int) -> bool:
        """True if closed forms of these ranks are those of their graph, whose prices are not low."""
        return cp == 1 or (tp, cp, 1, "none", False) in self._prices

    def refine(self, priced: Sequence[tuple[StepLayout, Rough]], tp: int, cp: int) -> list[tuple[StepLayout, Rough]]:
        """Returns the layouts, with the rough prices of the graph of these ranks; without those that are refused."""
        try:
            self.prices(tp, cp, "none")
        except Error:
            return [pair for pair in priced if (pair[0].tp, pair[0].cp) != (tp, cp)]
        return [(x, self.rough(x) if (x.tp, x.cp) == (tp, cp) else r) for x, r in priced]

    def rough(self, layout: StepLayout) -> Rough:
        """Returns the price of a layout whose schedule is a closed form.

        A budget drops the cheapest values first: half of what "full" drops takes a quarter of the time of "full", as in
        the measured steps of docs/memory.md.
        """
        if layout.memory is None:
            return self._rough_of(layout)
        keeping, full = (self._rough_of(replace(layout, memory=None, recompute=how)) for how in ("none", "full"))
        memory = max(full.memory, min(keeping.memory, self.limit(layout)))
        part = (keeping.memory - memory) / max(keeping.memory - full.memory, 1.0)
        return Rough(keeping.seconds + part**2 * (full.seconds - keeping.seconds), memory)

    def _rough_of(self, layout: StepLayout) -> Rough:
        forms = self.closed_forms(layout.tp, layout.cp, layout.ep)
        if (layout, forms) not in self._rough:
            step, prices = forms.simulated(layout), forms.prices
            memory = memory_of_ranks(prices, layout, step)
            rough = Rough(step_seconds(prices, layout, step), max(rank.total for rank in memory))
            self._rough[layout, forms] = rough
        return self._rough[layout, forms]

    def legal(self, gpus: int, batch: int) -> Iterator[StepLayout]:
        """Yields the layouts of a number of devices whose sizes multiply out.

        Those that differ only in the micro-batch come one after the other, the smallest micro-batch first.
        """
        for tp in self.ranks(gpus):
            self.prices(tp, 1, "none")  # Before sequences are cut: see `Captures`.
        for tp, cp in ((n, cp) for n in self.ranks(gpus) for cp in self.contexts(gpus // n)):
            model = self.prices(tp, 1, "none").model
            # Each stage has a block at least.
            blocks = max(1, len(model.order)) if self.pipelines else 1
            for pp in (n for n in range(1, blocks + 1) if gpus // tp // cp % n == 0):
                dp = gpus // tp // cp // pp
                micro_batches = [n for n in MICRO_BATCHES if batch % (dp * n) == 0]
                ways = dict.fromkeys(
                    option for n in micro_batches for option in _schedules(pp, blocks, batch // dp // n)
                )
                budgets = self.budgets((tp, cp, dp, pp))
                choices = itertools.product(self.expert_ranks(dp), ways, _stages(dp, pp), budgets)
                for ep, (schedule, interleave), zero, memory in choices:
                    layout = replace(
                        self.fixed, batch=batch, tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, micro_batch=1, schedule=schedule,
                        interleave=interleave, zero=zero, memory=memory, sequence_parallel=tp > 1,
                    )  # fmt: skip
                    for micro in micro_batches if _cuts_experts(layout) else ():
                        if (schedule, interleave) in _schedules(pp, blocks, batch // dp // micro):
                            yield replace(layout, micro_batch=micro)


def _cuts_experts(layout: StepLayout) -> bool:
    """True unless `distribute` or `estimate` refuses to cut experts over ranks in a layout."""
    try:
        layout.expect_experts()
    except Error:
        return False
    return True


def _stages(dp: int, pp: int) -> tuple[int, ...]:
    """Returns the stages of ZeRO that are tried. In a pipeline 2 and 3 would communicate for each microbatch."""
    return (0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)


def _schedules(pp: int, blocks: int, microbatches: int) -> Iterator[tuple[str, int | None]]:
    """Yields the schedules that torch can run with these numbers."""
    if pp == 1 or microbatches >= pp:
        yield "1F1B", None
    for interleave in INTERLEAVES if pp > 1 else ():
        # torch plays the microbatches in `microbatches // pp` rounds of equal length.
        if pp * interleave <= blocks and microbatches % max(1, microbatches // pp) == 0:
            yield "interleaved", interleave
    # Both schedules have two stages on each rank.
    if 1 < pp <= min(microbatches, blocks // 2):
        yield "zero-bubble-v", None
        if microbatches % (microbatches // pp) == 0:
            yield "zero-bubble", None


def _bytes(limit: float) -> str | int:
    """Returns a number of bytes as a user writes it: whole tenths of a GiB, where it has some."""
    return f"{math.floor(limit / GIB * 10) / 10:g}GiB" if limit >= 10 * GIB else max(2, int(limit))


def _searched(layouts: Layouts, gpus: int, batch: int) -> Search:
    priced, tried = _priced_roughly(layouts, gpus, batch)
    if not priced:
        raise Error(f"a batch of {batch} rows is not divided evenly by any layout of {gpus} devices", fix="batch=gpus")
    best, refined = _fastest(layouts, priced)
    if not best:
        _raise_nothing_fits(layouts, refined)
    lost = _slower(layouts, refined, best)
    return Search(best=tuple(best), lost=tuple(lost), tried=tried)


def _priced_roughly(layouts: Layouts, gpus: int, batch: int) -> tuple[list[tuple[StepLayout, Rough]], int]:
    """Returns rough prices of the legal layouts, and how many are legal. A layout that is far from fitting has no price
    for larger micro-batches, which take more.
    """
    priced, tried, full = list[tuple[StepLayout, Rough]](), 0, None
    for layout in layouts.legal(gpus, batch):
        tried += 1
        if full is not None and layout.equals_but_for_micro_batch(full):
            continue
        rough, limit = layouts.rough(layout), layouts.limit(layout)
        if layout.memory is None or layouts.rough(replace(layout, memory=None)).memory > limit / FAR:
            priced.append((layout, rough))
        full = layout if rough.memory > FAR * limit else None
    return priced, tried


def _fastest(
    layouts: Layouts, rough_prices: Sequence[tuple[StepLayout, Rough]]
) -> tuple[list[Estimate], Sequence[tuple[StepLayout, Rough]]]:
    """Returns the fastest layouts that fit, and all layouts with the rough prices that are known then.

    A rough price is not exact, so more are priced than are wanted. Those with low prices come last: what is refused or
    slower even then is not lowered.
    """
    priced: dict[StepLayout, Estimate] = {}
    ordered = sorted(rough_prices, key=lambda pair: pair[1].seconds)
    while len(priced) < PRICED:
        fitting = _fitting(layouts, priced.values())
        enough = fitting[-1].seconds if len(fitting) == SHOWN else math.inf
        # A tenth more than the slowest that is shown: so much may a rough price be too high.
        near = itertools.takewhile(lambda pair: pair[1].seconds < 1.1 * enough, ordered)  # noqa: B023  Used up here.
        unbudgeted = {est.layout for est in priced.values() if layouts.fits(est)}
        candidates = [
            (layout, rough) for layout, rough in near
            if layout not in priced and rough.memory <= FAR * layouts.limit(layout)
            # A budget is for what does not fit without one.
            and not (layout.memory is not None and replace(layout, memory=None) in unbudgeted)
        ]  # fmt: skip
        lowered = next((x for x, _ in candidates if layouts.is_lowered(x.tp, x.cp)), None)
        low = next((x for x, r in candidates if not layouts.is_lowered(x.tp, x.cp) and r.seconds < enough), None)
        if lowered is not None:
            priced[lowered] = layouts.price(lowered)
        elif low is not None:
            rough_prices = layouts.refine(rough_prices, low.tp, low.cp)
            ordered = sorted(rough_prices, key=lambda pair: pair[1].seconds)
        else:
            break
    return _fitting(layouts, priced.values()), rough_prices


def _fitting(layouts: Layouts, priced: Iterable[Estimate]) -> list[Estimate]:
    """Returns the fastest estimates that fit, the fastest first."""
    return sorted(filter(layouts.fits, priced), key=lambda est: est.seconds)[:SHOWN]


def _raise_nothing_fits(layouts: Layouts, rough_prices: Sequence[tuple[StepLayout, Rough]]) -> None:
    est = layouts.price(min(rough_prices, key=lambda pair: pair[1].memory)[0])
    size, limit = est.fullest.total / GIB, layouts.limit(est.layout) / GIB
    raise Error(
        f"no layout fits: tensors of {est.layout} take {size:.3g} GiB of {limit:.3g} on its fullest device",
        fix="more gpus, or a smaller sequence",
    )


# ---- why the obvious layouts lost


def _slower(
    layouts: Layouts, rough_prices: Sequence[tuple[StepLayout, Rough]], best: Sequence[Estimate]
) -> Iterator[Lost]:
    """Yields the obvious layouts that are not among the best, each in its fastest variant that fits."""
    won, reported = best[0], set[StepLayout]()
    for name, which in _obvious(won.layout, layouts.device.node).items():
        variants = [
            (layout, r) for layout, r in rough_prices if which(layout) and layouts.is_lowered(layout.tp, layout.cp)
        ]
        if not variants or any(which(est.layout) for est in best):
            continue
        fitting = [pair for pair in variants if pair[1].memory <= layouts.limit(pair[0])]
        layout, _ = min(fitting or variants, key=lambda pair: pair[1].seconds if fitting else pair[1].memory)
        # Two descriptions may have one fastest layout.
        if layout in reported:
            continue
        reported.add(layout)
        yield Lost(f"{name}: {layout}", _why(layouts.price(layout), won, layouts))


def _obvious(won: StepLayout, node: int) -> Mapping[str, Any]:
    """Returns name -> whether a layout is of this kind."""
    return {
        "without ZeRO 3": lambda x: x.zero < 3,
        "replicas only": lambda x: x.tp == x.cp == x.pp == 1 and x.zero < 3,
        "ZeRO 3 only": lambda x: x.tp == x.cp == x.pp == 1 and x.zero == 3,
        "tp in a node, and replicas": lambda x: x.tp == node and x.cp == x.pp == 1,
        "a pipeline without tp": lambda x: x.tp == x.cp == 1 < x.pp,
        "tp in a node, and a pipeline": lambda x: x.tp == node and x.cp == 1 < x.pp,
        "cp without tp": lambda x: x.tp == 1 < x.cp,
        "tp across nodes": lambda x: x.tp > node,
        "all experts on each replica": lambda x: x.ep == 1 < won.ep,
        "half the tp": lambda x: 2 * x.tp == won.tp,
        "twice the tp": lambda x: x.tp == 2 * won.tp <= node,
    }


def _why(est: Estimate, won: Estimate, layouts: Layouts) -> str:
    """Returns in a line why a layout lost against the best."""
    fullest = max(range(len(est.memory)), key=lambda i: est.memory[i].total)
    if not layouts.fits(est):
        limit = layouts.limit(est.layout)
        return f"does not fit: {est.fullest.total / GIB:.0f} of {limit / GIB:.0f} GiB on pipeline rank {fullest}"
    more = {name: s - won.spent.get(name, 0.0) for name, s in est.spent.items()}
    row = max(more, key=more.__getitem__)
    crossing = (
        f", tp={est.layout.tp} crosses nodes" if est.layout.tp > layouts.device.node and row.endswith("tp") else ""
    )
    slower = est.seconds - won.seconds
    return f"{_two_digits(slower)} s ({slower / won.seconds:+.0%}): {row} {_two_digits(more[row])} s{crossing}"


def _two_digits(number: float) -> str:
    return f"{float(f'{number:.2g}'):+g}"
