"""Compares `autotp.estimate` with the tables of the papers; prints each row with its error.

    python benchmarks/estimates.py            # all tables: minutes
    python benchmarks/estimates.py table5     # some of them
    python benchmarks/estimates.py --fit      # fits the A100's sustained parts to table 4, and prints them

The model is `peers/megatron_gpt.py`; autotp cuts it. Only two sustained parts of the A100 are fitted, to the times
of one layer (Korthikanti et al. 2022, table 4). All other rows are predictions with the same constants. `Practice` says
what the software of a paper did beside the graph.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from peers.megatron_gpt import MegatronGPT, Size
from torch import Tensor, nn

import autotp
from autotp.costs.hardware import GIB, KINDS, Hardware
from autotp.models.gpt import GPT, GPTConfig
from autotp.options import Overlap, Recompute
from autotp.tools.estimation.counts.activations import stage_memory
from autotp.tools.estimation.counts.pieces import Lowered
from autotp.tools.estimation.estimate import captured
from autotp.tools.estimation.layout import AUTOTP, COMPILED, Practice, StepLayout
from autotp.tools.estimation.price import Prices, behind_pipeline, price, savings, timed_schedule
from autotp.tools.estimation.result import Estimate
from autotp.tools.estimation.search import search
from autotp.tools.estimation.seconds.times import piece_times

F16 = torch.float16
# Megatron-LM with mixed precision. Bytes for each parameter in a step: Adam reads four numbers in 32 bits and writes
# three (28); gradients are divided by the loss's scale (8), their norm is taken (4), they are clipped (8); the weights
# are copied to 16 bits (6), the gradients set to zero (4). Gradients in 16 bits are copied to 32 before (6).
# Checkpoints run again all of what they recompute.
MEGATRON = {"casts": False, "early_stop": False, "buckets": False, "overlapped": False, "ahead": False}
WIDE, NARROW = 28.0 + 8 + 4 + 8 + 6 + 4, 28.0 + 8 + 4 + 8 + 6 + 2 + 6
# Products add their result to a gradient in 32 bits themselves, while they compute. Norms' gradients are summed last.
KORTHIKANTI = Practice(**MEGATRON, optimizer=WIDE, fused=True, accumulation=0.0, gradient=4, without=("late_sums",))
# Gradients in 16 bits are added by a kernel of its own; no sums beside products yet.
NARAYANAN = Practice(
    **MEGATRON,
    optimizer=NARROW,
    fused=True,
    accumulation=6.0,
    gradient=2,
    scattered=True,
    without=("overlap", "late_sums"),
)
SHOEYBI = Practice(
    **{**MEGATRON, "overlapped": True}, optimizer=NARROW, accumulation=6.0, gradient=2, without=("overlap", "late_sums")
)
# Hooks around modules gather one parameter after the other, in forward, in recomputation, and in backward: by
# `all_gather` of a list (deepspeed/runtime/zero/partition_parameters.py, 0.3.15), as torch 1.8 had no other.
DEEPSPEED = Practice(
    **MEGATRON, optimizer=NARROW, fused=True, accumulation=0.0, gradient=2, units="parameter", gathers=3,
    listed=True, without=("overlap", "late_sums"),
)  # fmt: skip
A100, V100 = KINDS["a100-80gb"], KINDS["v100-32gb"]


@dataclass(frozen=True)
class Row:
    """A row of a table: what it is about, the published number, and ours."""

    name: str
    published: float
    ours: float
    note: str = ""
    points: bool = False  # The error is a difference of percentages.

    @property
    def error(self) -> float:
        """The difference in percentage points, or in percent of the published number."""
        return self.ours - self.published if self.points else 100 * (self.ours / self.published - 1)


def relative(row: Row) -> float:
    """Returns the error of a row in percent of the published number; of Shoeybi's rows that of the TFLOP/s."""
    if row.points:
        return 100 * (float(row.note.split()[0]) / (39 * row.published / 100) - 1)
    return row.error


def show(title: str, rows: Sequence[Row], goal: str, kind: str = "") -> None:
    """Prints a table, and the mean and the largest error. kind: the error bar that the rows test"""
    print(f"\n{title}")
    for row in rows:
        unit = "points" if row.points else "%"
        print(f"  {row.name:<44}{row.published:>9.4g}{row.ours:>10.4g}{row.error:>+8.1f} {unit:<7}{row.note}")
    errors = [abs(row.error) for row in rows]
    print(f"  mean {statistics.mean(errors):.1f}, worst {max(errors):.1f}; {goal}", flush=True)
    if kind:  # For autotp/tools/estimation/error_bars.py.
        print(f"  {kind}: {', '.join(f'{relative(row):.1f}' for row in rows)}")


_captured: dict[object, Prices] = {}


def prices_of(
    size: Size, tp: int, practice: Practice, recompute: Recompute, sequence_parallel: bool = False,
    device: Hardware = A100, pp: int = 2,
) -> Prices:  # fmt: skip
    """Returns the prices of a model on `tp` ranks, captured once."""
    key = size, tp, practice, recompute, sequence_parallel, device
    if key not in _captured:
        layout = StepLayout(batch=1, tp=tp, pp=pp, recompute=recompute, sequence_parallel=sequence_parallel, dtype=F16)
        _captured[key] = Prices(model_of(size, layout, practice), device, practice)
    return _captured[key]


def model_of(size: Size, layout: StepLayout, practice: Practice) -> Lowered:
    """Returns a model of this size, captured."""
    with torch.device("meta"):
        model = MegatronGPT(size)
    tokens = torch.zeros(2, size.seq, dtype=torch.int64)
    return captured(model, layout, None, (tokens, tokens), practice.without)


# ---- Korthikanti et al. 2022 (2205.05198)

ONE_LAYER: dict[tuple[Recompute, bool], tuple[float, float]] = {
    ("none", False): (7.7, 11.9), ("none", True): (7.2, 11.8), ("full", False): (7.7, 19.5),
    ("selective", False): (7.7, 13.2), ("selective", True): (7.2, 13.1),
}  # fmt: skip
"""Table 4: (recompute, sequence parallel) -> milliseconds forward, and backward, of a layer of 22B."""
SIZES = {
    "22B": Size(48, 6144, 64),
    "175B": Size(96, 12288, 96),
    "530B": Size(105, 20480, 128),
    "1T": Size(128, 25600, 160),
}
STEPS = {  # Table 5: pp, interleave, batch, micro-batch; seconds with full recomputation, and with both techniques.
    "22B": (1, None, 4, 4, 1.42, 1.10), "175B": (8, 3, 64, 1, 18.13, 13.75),
    "530B": (35, 3, 280, 1, 49.05, 37.83), "1T": (64, None, 512, 1, 94.42, 71.49),
}  # fmt: skip
KEPT = {  # Figure 7: percent of tensor parallelism alone: sequence parallel, selective, both, full.
    "22B": (66.84, 49.42, 16.18, 7.64), "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42), "1T": (58.31, 62.04, 20.27, 9.42),
}  # fmt: skip
WAYS: tuple[tuple[str, Recompute, bool], ...] = (
    ("sequence parallel", "none", True), ("selective", "selective", False), ("both", "selective", True),
    ("full", "full", False),
)  # fmt: skip
GIBIBYTES = {  # Figure 1: parameters and optimizer; activations without and with both techniques.
    "22B": (45.56, 59.25, 9.56), "175B": (45.56, 66.84, 12.35),
    "530B": (31.64, 114.02, 23.08), "1T": (32.96, 131.25, 26.56),
}  # fmt: skip
FITTED = {"matrix_sustained": (0.6, 1.0), "memory_sustained": (0.6, 0.95)}
"""The constants that are fitted, with the bounds of their meaning."""


def layer(recompute: Recompute, sequence_parallel: bool, device: Hardware) -> Callable[[Hardware], tuple[float, float]]:
    """Returns device -> milliseconds forward and backward of one layer of 22B."""
    small = replace(SIZES["22B"], layers=3)
    found = prices_of(small, 8, KORTHIKANTI, recompute, sequence_parallel, device).pieces(4).records[1]

    def milliseconds(device: Hardware) -> tuple[float, float]:
        times = piece_times(found, device, 8)
        return times.forward * 1e3, times.backward * 1e3

    return milliseconds


def table4() -> None:
    """One layer of 22B: what the constants are fitted to."""
    rows = []
    for (recompute, parallel), published in ONE_LAYER.items():
        ours = layer(recompute, parallel, A100)(A100)
        for name, theirs, own in zip(("forward", "backward"), published, ours, strict=True):
            rows.append(Row(f"{recompute}{' + sequence parallel' * parallel}, {name}, ms", theirs, own))
    show("Korthikanti 2022, table 4: one layer of 22B (fitted)", rows, "two constants are fitted to these ten numbers")


Layers = Mapping[tuple[Recompute, bool], Callable[[Hardware], tuple[float, float]]]


def loss(layers: Layers, device: Hardware) -> float:
    """Returns the sum of the squared relative errors of table 4."""
    pairs = [(layers[key](device), ONE_LAYER[key]) for key in layers]
    return sum((x / y - 1) ** 2 for ours, theirs in pairs for x, y in zip(ours, theirs, strict=True))


def fit() -> None:
    """Prints the constants that fit table 4 best, by a random search."""
    layers = {key: layer(*key, A100) for key in ONE_LAYER}

    draws, best, step = random.Random(0), A100, 0.2
    for i in range(2000):
        chosen = [name for name in FITTED if draws.random() < 0.5]
        values = {name: getattr(best, name) * (1 + draws.gauss(0, step)) for name in chosen}
        new = replace(best, **{k: min(max(v, FITTED[k][0]), FITTED[k][1]) for k, v in values.items()})
        best = min(best, new, key=lambda device: loss(layers, device))
        step *= 0.6 if i % 250 == 249 else 1
    print({name: float(f"{getattr(best, name):.3g}") for name in FITTED}, f"loss {loss(layers, best):.2g}")


def fig7() -> None:
    """What a layer keeps, as a part of what it keeps with tensor parallelism alone."""
    rows = []
    for name, published in KEPT.items():
        size = replace(SIZES[name], layers=4)
        rows_of = STEPS[name][3]

        def kept(recompute: Recompute, parallel: bool, size: Size = size, rows_of: int = rows_of) -> int:
            found = prices_of(size, 8, KORTHIKANTI, recompute, parallel).pieces(rows_of)
            return stage_memory(found.pieces[1:3], found).kept - stage_memory(found.pieces[1:2], found).kept

        whole = kept("none", False)
        for (way, recompute, parallel), theirs in zip(WAYS, published, strict=True):
            rows.append(Row(f"{name}, {way}", theirs, 100 * kept(recompute, parallel) / whole, points=True))
    show(
        "Korthikanti 2022, figure 7: activations of a layer, % of tensor parallelism alone",
        rows,
        "goal 0.5 points each",
    )


def step5(name: str, recompute: Recompute, parallel: bool, dp: int = 1) -> Estimate:
    """Returns the estimate of a row of table 5."""
    pp, interleave, batch, micro, *_ = STEPS[name]
    layout = StepLayout(
        batch=batch * dp, tp=8, pp=pp, dp=dp, micro_batch=micro, schedule="interleaved" if interleave else "1F1B",
        interleave=interleave, recompute=recompute, sequence_parallel=parallel, dtype=F16,
    )  # fmt: skip
    return price(prices_of(SIZES[name], 8, KORTHIKANTI, recompute, parallel), layout)


def table5() -> None:
    """Seconds of a step."""
    rows = []
    for name, (*_, full, both) in STEPS.items():
        for way, recompute, parallel, theirs in (("full", "full", False, full), ("both", "selective", True, both)):
            est = step5(name, recompute, parallel)
            rows.append(Row(f"{name}, {way}, s", theirs, est.seconds, f"pipeline {est.spent.get('pipeline', 0):.2f} s"))
    show(
        "Korthikanti 2022, table 5: seconds of a step",
        rows,
        "goal mean 3, worst 6; Calculon mean 3.7, worst 8.9",
        "step a100",
    )


SHARES_OF_PEAK = {"22B": (41.5, 43.7), "175B": (51.4, 52.8), "530B": (56.0, 57.0), "1T": (56.3, 57.0)}
"""Table 5, both techniques: percent of the peak for the model's FLOPs, and for those that the GPU computes."""


def peak() -> None:
    """Shares of the peak; with eight replicas, too, as the text has for 530B."""
    rows = []
    for name, (model, gpu) in SHARES_OF_PEAK.items():
        est = step5(name, "selective", True)
        rows.append(Row(f"{name}, the model's FLOPs, %", model, 100 * est.mfu, points=True))
        share = 100 * est.hardware_tflops / (A100.matrix_flops / 1e12)
        rows.append(Row(f"{name}, the GPU's FLOPs, %", gpu, share, points=True))
    est = step5("530B", "selective", True, dp=8)
    rows.append(Row("530B, 8 replicas, the model's FLOPs, %", 54.2, 100 * est.mfu, points=True))
    show("Korthikanti 2022, table 5: shares of the peak", rows, "no goal")


def fig1() -> None:
    """Memory of the first pipeline rank; the paper's bars of parameters are those of layers, without embeddings."""
    states, activations = [], []
    for name, (state, none, both) in GIBIBYTES.items():
        ests = [step5(name, "none", False), step5(name, "selective", True)]
        first, model = ests[0].memory[0], prices_of(SIZES[name], 8, KORTHIKANTI, "none").model
        embeddings = sum(p.elements for name, p in model.parameters.items() if "embeddings" in name)
        kept = first.weights + first.copies + first.gradients + first.optimizer - 18 * embeddings
        states.append(Row(f"{name}, parameters and optimizer, GiB", state, kept / GIB))
        for way, theirs, est in (("none", none, ests[0]), ("both", both, ests[1])):
            memory = est.memory[0]
            ours = (memory.activations + memory.logits) / GIB
            activations.append(Row(f"{name}, activations, {way}, GiB", theirs, ours))
    figure = "Korthikanti 2022, figure 1: memory of the first rank"
    show(f"{figure}, parameters and optimizer", states, "no goal", "memory state")
    goal = "Calculon's activations: mean 2.1, worst 8.7"
    show(f"{figure}, activations", activations, goal, "memory activations")


# ---- Narayanan et al. 2021 (2104.04473)

SCALING = (  # Table 1: billions, heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148), (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163), (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)  # fmt: skip
AGAINST_ZERO = (  # Table 2: billions, way, pp, batch, GPUs, micro-batch, TFLOP/s
    (174.6, "ZeRO-3", 1, 1536, 384, 4, 144), (174.6, "ZeRO-3", 1, 1536, 768, 2, 88),
    (174.6, "ZeRO-3", 1, 1536, 1536, 1, 44), (529.6, "ZeRO-3", 1, 2560, 640, 4, 138),
    (529.6, "ZeRO-3", 1, 2240, 1120, 2, 98), (529.6, "ZeRO-3", 1, 2240, 2240, 1, 48),
    (174.6, "PTD-P", 12, 1536, 384, 1, 153), (174.6, "PTD-P", 12, 1536, 768, 1, 149),
    (174.6, "PTD-P", 12, 1536, 1536, 1, 141), (529.6, "PTD-P", 35, 2240, 560, 1, 171),
    (529.6, "PTD-P", 35, 2240, 1120, 1, 167), (529.6, "PTD-P", 35, 2240, 2240, 1, 159),
)  # fmt: skip
GPT3, GPT530 = Size(96, 12288, 96), Size(105, 20480, 128)


def layouts(size: Size, tp: int, pp: int, gpus: int, batch: int) -> Iterator[StepLayout]:
    """Yields a row's layouts: micro-batch and interleaving are not given."""
    dp = gpus // tp // pp
    for micro in (1, 2, 4, 8, 16):
        for interleave in (1, 2, 3, 4, 5) if pp > 1 else (1,):
            count, rest = divmod(batch, dp * micro)
            if (
                rest
                or size.layers % (pp * interleave)
                or (pp > 1 and count % pp)
                or (interleave == 1 < pp and count < pp)
            ):
                continue
            yield StepLayout(
                batch=batch, tp=tp, pp=pp, dp=dp, micro_batch=micro, recompute="full", dtype=F16,
                schedule="interleaved" if interleave > 1 else "1F1B", interleave=interleave if interleave > 1 else None,
            )  # fmt: skip


def fastest(size: Size, tp: int, pp: int, gpus: int, batch: int, practice: Practice = NARAYANAN) -> Estimate:
    """Returns the fastest layout that fits, with micro-batch and interleaving chosen."""
    prices = prices_of(size, tp, practice, "full")
    found = [price(prices, layout) for layout in layouts(size, tp, pp, gpus, batch)]
    return min((est for est in found if est.fits), key=lambda est: est.seconds, default=found[0])


def chosen(est: Estimate) -> str:
    """Returns what the estimator chose."""
    return f"micro-batch {est.layout.micro_batch}, {est.layout.interleave or 1} stages a rank"


def table1() -> None:
    """TFLOP/s of a GPU."""
    rows = []
    for billions, heads, hidden, layers_, tp, pp, gpus, batch, theirs in SCALING:
        est = fastest(Size(layers_, hidden, heads), tp, pp, gpus, batch)
        rows.append(
            Row(f"{billions}B, tp {tp}, pp {pp}, {gpus} GPUs, TFLOP/s", theirs, est.hardware_tflops, chosen(est))
        )
    show(
        "Narayanan 2021, table 1: weak scaling",
        rows,
        "goal mean 5, worst 10; Calculon mean 7.9, worst 13.5",
        "step a100",
    )


def won_by(est: Estimate, other: Estimate) -> str:
    """Returns the layout of an estimate, and what it gains over another one: the two largest rows that are smaller."""
    less = {name: other.spent[name] - est.spent.get(name, 0.0) for name in other.spent}
    most = sorted(((gain, name) for name, gain in less.items() if gain > 0), reverse=True)[:2]
    gains = ", ".join(f"{name} -{gain:.2g} s" for gain, name in most)
    return f"{est.layout}: {gains}" if est.layout != other.layout else "the published layout"


def search1() -> None:
    """Seconds of a step: the published layouts, and those that `autotp.search` finds, both by autotp's own estimate."""
    rows = []
    for billions, heads, hidden, layers_, tp, pp, gpus, batch, _ in SCALING:
        size = Size(layers_, hidden, heads)
        with torch.device("meta"):
            model = MegatronGPT(size)
        tokens = torch.zeros(2, size.seq, dtype=torch.int64)
        best = search(model, gpus=gpus, gpu=A100, batch=batch, dtype=F16, example_inputs=(tokens, tokens)).best[0]
        theirs = fastest(size, tp, pp, gpus, batch, AUTOTP)
        note = won_by(best, theirs)
        rows.append(Row(f"{billions}B, tp {tp}, pp {pp}, {gpus} GPUs, seconds", theirs.seconds, best.seconds, note))
    show("Narayanan 2021, table 1: what search finds, against the published layouts", rows, "goal: none is slower")


def table2() -> None:
    """TFLOP/s of a GPU: ZeRO-3 and a pipeline."""
    found: dict[str, list[Row]] = {"ZeRO-3": [], "PTD-P": []}
    for billions, way, pp, batch, gpus, micro, theirs in AGAINST_ZERO:
        size = GPT3 if billions < 500 else GPT530
        if way == "ZeRO-3":
            layout = StepLayout(batch=batch, dp=gpus, micro_batch=micro, zero=3, recompute="full", dtype=F16)
            est, note = price(prices_of(size, 1, DEEPSPEED, "full", pp=1), layout), ""
        else:
            prices = prices_of(size, 8, NARAYANAN, "full")
            ways = [x for x in layouts(size, 8, pp, gpus, batch) if x.micro_batch == micro]
            est = min((price(prices, layout) for layout in ways), key=lambda est: est.seconds)
            note = chosen(est)
        found[way].append(Row(f"{billions}B, {way}, {gpus} GPUs, TFLOP/s", theirs, est.hardware_tflops, note))
    show("Narayanan 2021, table 2: PTD-P", found["PTD-P"], "goal mean 6; Calculon mean 11.5, worst 14.3", "step a100")
    show("Narayanan 2021, table 2: ZeRO-3", found["ZeRO-3"], "goal 15 each, in the right order", "step zero 3")


def splits() -> None:
    """161B on 64 GPUs: the throughput of each split into pipeline and tensor ranks, batches of 32 and of 128."""
    size, rows = Size(32, 20480, 128), []
    for batch in (128, 32):
        found = {}
        for tp in (2, 4, 8, 16, 32):
            layout = StepLayout(batch=batch, tp=tp, pp=64 // tp, micro_batch=1, recompute="full", dtype=F16)
            found[tp] = price(prices_of(size, tp, NARAYANAN, "full"), layout).hardware_tflops
        best = max(found, key=lambda tp: found[tp])
        ways = ", ".join(f"({64 // tp}, {tp}) {tflops:.0f}" for tp, tflops in found.items())
        rows.append(Row(f"batch {batch}: tensor ranks of the best split", 8, best, f"(p, t) and TFLOP/s: {ways}"))
    ratio = found[best] / min(found.values())
    rows.append(Row("batch 32: TFLOP/s of the best / of the worst", 2, ratio, "published: up to 2"))
    show("Narayanan 2021, figure 13: pipeline against tensor ranks, 161B on 64 GPUs", rows, "no goal")


# ---- Shoeybi et al. 2019 (1909.08053)

WEAK = (  # Figure 5: billions, hidden, heads, layers, tp, percent with tp, percent with 64 replicas
    (1.2, 1536, 16, 40, 1, 100, 96), (2.5, 1920, 20, 54, 2, 95, 83), (4.2, 2304, 24, 64, 4, 82, 79),
    (8.3, 3072, 32, 72, 8, 77, 74),
)  # fmt: skip


def weak() -> None:
    """Weak scaling on V100s: throughput of a GPU, as a part of that of one GPU."""
    rows, base = [], 0.0
    for billions, hidden, count, layers_, tp, alone, replicas in WEAK:
        size = Size(layers_, hidden, count, seq=1024)
        for dp, theirs in ((1, alone), (64, replicas)):
            est = shoeybi(size, tp, dp)
            base = base or est.hardware_tflops
            note = f"{est.hardware_tflops:.1f} TFLOP/s" + " (39 published)" * (tp == dp)
            rows.append(
                Row(f"{billions}B on {tp * dp}, %", theirs, 100 * est.hardware_tflops / base, note, points=True)
            )
    show("Shoeybi 2019, figure 5: weak scaling on V100", rows, "goal 3 points at 8 and 512 GPUs", "step v100")


STRONG = {1: 1.00, 2: 1.64, 4: 2.34, 8: 2.98}
"""GPUs -> how many times as fast as one a step of 1.2B with 8 rows is."""
HEADS = {16: 82, 24: 80, 32: 77}
"""Heads of 8.3B -> percent of the throughput of 1.2B on one GPU."""
EPOCHS = ((0.355, 1024, 16, 24, 1, 64, 0.86), (2.5, 1920, 20, 54, 2, 128, 2.27), (8.3, 3072, 24, 72, 8, 512, 2.10))
"""Billions, hidden, heads, layers, tp, GPUs -> days of an epoch of ITERATIONS steps with 512 rows."""
ITERATIONS = 68_507
NODE = {1: 100, 2: 91.7, 4: 84.5, 8: 74.7}
"""The sizes of WEAK on GPUs of one A100 node: percent of the throughput of one (Megatron-LM's repository, 2020)."""


def shoeybi(size: Size, tp: int, dp: int = 1, *, rows: int = 8, device: Hardware = V100) -> Estimate:
    """Returns the estimate of a step with `rows` rows for each replica; on another device than the V100 with the
    software of 2021.
    """
    practice = SHOEYBI if device is V100 else NARAYANAN
    prices = prices_of(size, tp, practice, "full", device=device, pp=1)
    return price(prices, StepLayout(batch=rows * dp, tp=tp, dp=dp, micro_batch=rows, recompute="full", dtype=F16))


def strong() -> None:
    """Strong scaling: how many times as fast as one GPU several are."""
    size = Size(40, 1536, 16, seq=1024)
    one = shoeybi(size, 1).seconds
    rows = [
        Row(f"1.2B on {tp}, times as fast", theirs, one / shoeybi(size, tp).seconds) for tp, theirs in STRONG.items()
    ]
    show("Shoeybi 2019: strong scaling of 1.2B on V100, batch 8", rows, "no goal")


def heads() -> None:
    """More heads of fewer numbers: throughput of a GPU, as a part of that of 1.2B on one GPU."""
    base, rows = shoeybi(Size(40, 1536, 16, seq=1024), 1).hardware_tflops, []
    for count, theirs in HEADS.items():
        est = shoeybi(Size(72, 3072, count, seq=1024), 8)
        rows.append(Row(f"8.3B on 8, {count} heads, %", theirs, 100 * est.hardware_tflops / base, points=True))
    show("Shoeybi 2019: heads of 8.3B on V100", rows, "no goal")


def epochs() -> None:
    """Days of an epoch."""
    rows = []
    for billions, hidden, count, layers_, tp, gpus, theirs in EPOCHS:
        est = shoeybi(Size(layers_, hidden, count, seq=1024), tp, gpus // tp, rows=512 * tp // gpus)
        rows.append(Row(f"{billions}B on {gpus}, days", theirs, est.seconds * ITERATIONS / 86400))
    show("Shoeybi 2019: days of an epoch on V100", rows, "no goal")


def node() -> None:
    """Weak scaling on the GPUs of an A100 node: throughput of a GPU, as a part of that of one GPU."""
    rows, base = [], 0.0
    for billions, hidden, count, layers_, tp, *_ in WEAK:
        est = shoeybi(Size(layers_, hidden, count, seq=1024), tp, device=A100)
        base = base or est.hardware_tflops
        note = f"{est.hardware_tflops:.0f} TFLOP/s"
        rows.append(Row(f"{billions}B on {tp}, %", NODE[tp], 100 * est.hardware_tflops / base, note, points=True))
    show("Megatron-LM 2020: weak scaling in an A100 node", rows, "no goal")


# ---- Megatron-Core r0.8.0 (the table in Megatron-LM's repository, 2024)

CORE = (  # Billions, heads, hidden, layers, tp, pp, batch, TFLOP/s; 48 replicas, sequences of 4,096, 131,072 words.
    (1.7, 16, 2048, 24, 1, 1, 192, 408.8), (7.1, 32, 4096, 30, 2, 1, 192, 465.9), (16, 48, 6144, 32, 4, 1, 192, 489.1),
    (32, 56, 7168, 48, 8, 1, 192, 459.6), (70, 64, 8192, 84, 8, 2, 384, 419.7), (119, 80, 10240, 92, 8, 4, 768, 420.5),
    (177, 96, 12288, 96, 8, 6, 1152, 432.8), (314, 128, 16384, 96, 8, 8, 1536, 474.4),
    (462, 144, 18432, 112, 8, 16, 3072, 459.9),
)  # fmt: skip
REPLICAS = 48
BEHIND = replace(AUTOTP, overlapped=False, ahead=False)
"""autotp before it summed gradients under backward and gathered ahead."""


class CoreGPT(GPT):
    """A GPT whose head is not the token embedding: so the table's numbers of parameters come out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the mean loss, computed in float32. tokens, labels: [batch seq]"""
        assert labels is not None
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).float().flatten(0, 1), labels.flatten())


def core_layouts(tp: int, pp: int, layers: int, batch: int, zeros: Sequence[int]) -> Iterator[StepLayout]:
    """Yields what `distribute` offers for a row: micro-batch, schedule, ZeRO and overlap are not published."""
    schedules: list[tuple[str, int | None]] = [("1F1B", None)]
    if pp > 1:
        schedules += [("zero-bubble-v", None), *(("interleaved", rounds) for rounds in range(2, layers // pp + 1))]
    overlaps: tuple[Overlap, ...] = ("none", "batch") if tp > 1 else ("none",)
    ways = itertools.product((1, 2, 4), schedules, overlaps, zeros)
    for micro, (schedule, interleave), overlap, zero in ways:
        rest = batch % (REPLICAS * micro) or (schedule == "interleaved" and batch // REPLICAS // micro % pp)
        if rest or (overlap == "batch" and (micro == 1 or schedule == "zero-bubble-v")):
            continue
        yield StepLayout(
            batch=batch, tp=tp, pp=pp, dp=REPLICAS, micro_batch=micro, schedule=schedule, interleave=interleave,
            overlap=overlap, sequence_parallel=tp > 1 and overlap == "none", zero=zero, dtype=torch.bfloat16,
        )  # fmt: skip


def core(size: tuple[int, int, int], layouts: Iterable[StepLayout], practice: Practice) -> Estimate:
    """Returns the fastest estimate of a row that fits; of those that do not, if none does.

    Args:
        size: heads, hidden, layers.
    """
    heads, hidden, layers = size
    config = GPTConfig(block_size=4096, vocab_size=131072, n_layer=layers, n_head=heads, n_embd=hidden, dropout=0.0)
    with torch.device("meta"):
        model = CoreGPT(config)
    prices, found = dict[Any, Prices](), []
    for layout in layouts:
        key = layout.overlap, layout.schedule == "zero-bubble-v"
        if key not in prices:
            prices[key] = Prices(captured(model, layout, None), KINDS["h100-80gb"], practice)
        with suppress(autotp.Error):  # More stages than blocks, or fewer microbatches than ranks.
            found.append(price(prices[key], layout))
    best = min((est for est in found if est.fits), key=lambda est: est.seconds, default=None)
    best = best or min(found, key=lambda est: est.seconds)
    return replace(best, savings=savings(best.source, best))


def mcore() -> None:
    """TFLOP/s of a GPU: Megatron-Core on H100s, beside autotp's own practice, now and before it hid anything."""
    now, before, brings = [], [], []
    for billions, heads, hidden, layers_, tp, pp, batch, theirs in CORE:
        size, name = (heads, hidden, layers_), f"{billions}B, tp {tp}, pp {pp}, {REPLICAS * tp * pp} GPUs, TFLOP/s"
        est = core(size, core_layouts(tp, pp, layers_, batch, (1,) if pp > 1 else (1, 2)), AUTOTP)
        chosen = est.layout
        way = f"micro-batch {chosen.micro_batch}" + f", {chosen.schedule} x{chosen.interleave}" * (pp > 1)
        way += f", overlap={chosen.overlap}, zero={chosen.zero}"
        now.append(Row(name, theirs, est.tflops, f"{est.tflops / theirs:.0%}; {way}"))
        brings.append((billions, {x.name: (x.without / x.seconds - 1, x.used) for x in est.savings}))
        plain = [layout for layout in core_layouts(tp, pp, layers_, batch, (0,)) if layout.overlap == "none"]
        old = core(size, plain, BEHIND)
        note = f"{old.tflops / theirs:.0%}{', does not fit' * (not old.fits)}"
        before.append(Row(name, theirs, old.tflops, note))
    show("Megatron-Core r0.8.0: weak scaling on H100s, autotp with zero=1 or 2", now, "goal: 95 % of each row")
    show("the same, zero=0, sums behind backward", before, "as it was")
    print("\nwhat it brings: a step without it is longer by (in brackets: not counted above)")
    names = dict.fromkeys(name for _, found in brings for name in found)
    for name in names:
        cells = (found.get(name, (0.0, True)) for _, found in brings)
        row = "".join(f"{f'{gain:.1%}' if used else f'({gain:.1%})':>9}" for gain, used in cells)
        print(f"  {name:<34}{row}")


H800 = "989TF 3.35TB/s 80GB node=8x200GB/s net=50GB/s"
HOURS = 180.0
"""Thousand GPU hours for a trillion tokens of DeepSeek-V3 (2024, arXiv 2412.19437, section 1), on 2,048 H800."""


NODES, CHOSEN = 4, 8
"""Of DeepSeek-V3, section 2.1.2: a token chooses eight experts, on four nodes at most."""
FP8 = 0.75
"""Section 3.3.3: rows go to experts in FP8, and come back in BF16, in backward too."""
SENDERS, UNITS = 20, 132
"""Section 3.2.2: the units of an H800 that send, and all of them."""
THEIRS = replace(COMPILED, products=torch.float8_e4m3fn, exchange=FP8 * NODES / CHOSEN)
"""Sections 3.3.1 and 3.2.2: products are in FP8; a token goes once to a node, and on by NVLink beside that."""


def dual_pipe(prices: Prices, layout: StepLayout) -> float:
    """Returns the seconds of a step under DualPipe, which hides the exchange beside computation (section 3.2.1).

    Of table 2 it has the bubble: (pp / 2 - 1) * (F&B + B - 3 W), with F&B of a forward and a backward together.
    """
    step, pairs = timed_schedule(prices, layout), []
    for stage in step.stages:
        times = stage.times
        exchange = times.spent.get("all-to-all ep", 0.0)  # The first layers have no experts.
        computing = (times.forward + times.backward - exchange) * UNITS / (UNITS - SENDERS)
        pairs.append((max(computing, exchange), times.backward, times.weights))
    both, backward, weights = max(pairs)
    bubble = (layout.pp / 2 - 1) * (both + backward - 3 * weights)
    return layout.microbatches * both + bubble + sum(behind_pipeline(prices, layout, step).values())


def deepseek() -> None:
    """Hours of DeepSeek-V3: 671B parameters, 256 experts over ep=64, sixteen stages; 15,360 rows of 4,096 tokens.

    What is public of its practice is counted, each with its section of the report. Not counted are the casts to FP8,
    the prediction of a second token, what it computes again, that its head stays in BF16, and uneven rows of experts.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False)).train()
    model.set_experts_implementation("grouped_mm")
    tokens = torch.ones(2, 4096, dtype=torch.long)
    est = autotp.estimate(
        model, gpu=H800, pp=16, dp=128, ep=64, batch=15_360, dtype=torch.bfloat16, compiled=True,
        example_inputs={"input_ids": tokens, "labels": tokens},
    )  # fmt: skip
    thousands = est.layout.devices / est.tokens * 1e12 / 3600 / 1000  # Of hours, for each second of a step.
    prices, layout = est.source, est.layout
    theirs = prices.under(THEIRS)
    four = prices.under(replace(COMPILED, exchange=NODES / CHOSEN))
    limited, narrow = price(four, layout), price(theirs, layout)
    rows = [
        Row("autotp: bfloat16, 1F1B, zero=0", HOURS, est.seconds * thousands),
        Row("and tokens on four nodes at most", HOURS, limited.seconds * thousands, "section 2.1.2"),
        Row("and products and half of the sending in FP8", HOURS, narrow.seconds * thousands, "sections 3.3.1, 3.3.3"),
        Row("and DualPipe", HOURS, dual_pipe(theirs, layout) * thousands, "section 3.2.1"),
    ]
    show("DeepSeek-V3 on 2,048 H800: thousand hours for a trillion tokens", rows, "published: all of these together")
    print("  a step spends " + ", ".join(f"{s:.3g} s: {name}" for name, s in est.spent.items()))


TABLES = {
    f.__name__: f
    for f in (
        table4, fig7, table5, peak, fig1, table1, splits, search1, table2, weak, strong, heads, epochs, node, mcore,
        deepseek,
    )
}  # fmt: skip


def main() -> None:
    """Prints the tables, or fits the A100's sustained parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="the tables; by default all")
    parser.add_argument("--fit", action="store_true", help="fit the A100's sustained parts to table 4")
    given = parser.parse_args()
    if given.fit:
        fit()
        return
    start = time.perf_counter()
    print(f"autotp {autotp.__version__}; published, ours, error")
    for name in given.tables or TABLES:
        TABLES[name]()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
