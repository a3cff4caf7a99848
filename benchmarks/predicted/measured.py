"""Compares `autotp.estimate` with steps that are trained here: seconds, and the memory of each rank.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/predicted/measured.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/predicted/measured.py gpt t5 --rounds 20
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/predicted/measured.py --budgets --rounds 2

glibc gives freed memory back to the system, and a page that comes back is filled with zeros, for two microseconds. No
allocator of a GPU does that. So the script starts itself again with variables with which glibc keeps freed memory.

Two CPU ranks train GPT, BERT, Llama, a mixture of experts and T5, at tp 2, pp 2 and dp 2. The device is `cpu-gloo`, or
what `--gpu` says: no number is fitted to a row.

"Compute" compares the processor time of the thread that trains (the busier rank's; the median of all steps) with the
predicted seconds of products, elementwise operators and optimizer. Other programs on the machine disturb it little, and
gloo has threads of its own. "Wall" compares the fastest step, by the clock, with the predicted step: on a busy machine
it is an upper bound. "Waited" says how busy the machine was: the time in which a thread of these ranks was ready to run
and got no core, divided by the time of the steps. After each step a product is timed, too: "speed" is its median rate,
divided by the device's, which says what the machine gave a thread at the time; it corrects nothing.

"Memory" is the most bytes that torch's allocator has given out at once in a step (torch.profiler, profile_memory), and
those of the parameters and of the optimizer's state before it; of the fullest rank. It is compared with the sum of the
estimate's kinds, so what autograd keeps and transients are in it; gloo's own buffers and Python are not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp
from autotp.costs.hardware import KINDS, hardware_of
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from memory import local_part

ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS, HEADS = 8, 128, 4096, 256, 4, 8
WARM_UP, PROFILED = 2, 8
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**35), "MALLOC_TOP_PAD_": str(2**26)}
"""Variables with which glibc keeps freed memory."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2, "micro_batch": 4},
    "tp 2, sequence parallel": {"tp": 2, "micro_batch": 4, "sequence_parallel": True},
    "tp 2, recompute full": {"tp": 2, "micro_batch": 4, "recompute": "full"},
    "pp 2": {"pp": 2, "micro_batch": 2},
    "pp 2, recompute full": {"pp": 2, "micro_batch": 2, "recompute": "full"},
    "dp 2": {"dp": 2, "micro_batch": 2},
    "dp 2, recompute full": {"dp": 2, "micro_batch": 2, "recompute": "full"},
}
BUDGETED: dict[str, dict[str, Any]] = {
    f"tp 2, memory {part}%": {"tp": 2, "micro_batch": 4, "memory": f"{part}%"} for part in (100, 70, 50, 30)
}
"""Layouts under a budget: the table of docs/memory.md."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout of a model: predicted and measured.

    Attributes:
        wall, compute: seconds, predicted and measured.
        memory: bytes of the fullest rank, predicted and measured.
        quartiles: of the measured seconds of compute.
        waited: seconds without a core, divided by the seconds of the steps.
        speed: the measured rate of a product, divided by the device's.
    """

    model: str
    layout: str
    wall: tuple[float, float]
    compute: tuple[float, float]
    memory: tuple[float, float]
    quartiles: tuple[float, float]
    waited: float
    speed: float


def gpt() -> nn.Module:
    """A GPT of this repository."""
    return GPT(GPTConfig(LENGTH, VOCABULARY, LAYERS, HEADS, WIDTH, dropout=0.0))


def bert() -> nn.Module:
    """A BERT of this repository."""
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH}
    return BERT(BERTConfig(block_size=LENGTH, vocab_size=VOCABULARY, dropout=0.0, **sizes))


def llama() -> nn.Module:
    """A Llama of transformers, with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(), intermediate_size=688, num_key_value_heads=4))


def mixture() -> nn.Module:
    """A mixture of experts: Mixtral, of transformers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"intermediate_size": 512, "num_key_value_heads": 4, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**_sizes(), **sizes))


def t5() -> nn.Module:
    """An encoder-decoder: T5, of transformers."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_ff": 4 * WIDTH, "num_layers": 3, "num_heads": HEADS, "d_kv": WIDTH // HEADS}
    more = {"dropout_rate": 0.0, "n_positions": LENGTH, "use_cache": False, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **more, vocab_size=VOCABULARY, pad_token_id=0))


def _sizes() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH, "use_cache": False,
    }  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {f.__name__: f for f in (gpt, bert, llama, mixture, t5)}


def rows_for(model: str) -> dict[str, Tensor]:
    """Returns a batch."""
    draws = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(VOCABULARY, (ROWS, LENGTH), generator=draws) for _ in range(2))
    if model == "bert":
        types = torch.randint(2, (ROWS, LENGTH), generator=draws)
        return {"tokens": tokens, "types": types, "mask": torch.ones_like(tokens), "labels": labels}
    return {"tokens" if model == "gpt" else "input_ids": tokens, "labels": labels}


@dataclass(frozen=True)
class Trained:
    """A model that trains: the parameters and the optimizer of this rank, and a step."""

    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]


def trained(name: str, options: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Trained:
    """Returns a model of this name under `distribute`."""
    torch.manual_seed(0)
    given = dict(options)
    micro, tp, dp = given.pop("micro_batch"), given.get("tp", 1), given.get("dp", 1)
    part = {key: x.chunk(dp)[dist.get_rank() // tp % dp] for key, x in batch.items()}
    example = {key: x[:micro] for key, x in batch.items()}
    count = ROWS // dp // micro
    model = autotp.distribute(MODELS[name](), **given, microbatches=count, example_inputs=example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model.step(**part)
        optimizer.step()
        optimizer.zero_grad()

    return Trained(list(model.parameters()), optimizer, step)


def waiting() -> float:
    """Returns the seconds in which this process's threads were ready to run and had no core; 0 where nobody counts."""
    files = Path("/proc/self/task").glob("*/schedstat")
    try:
        return sum(float(file.read_text().split()[1]) for file in files) / 1e9
    except OSError:
        return 0.0


Step = tuple[float, float, float, float]
"""Wall seconds, the training thread's processor seconds, waited seconds; and the FLOP/s of a product after the step."""


def timed(step: Callable[[], Any], rounds: int) -> list[Step]:
    """Returns what each step took."""
    found: list[Step] = []
    x, y = torch.randn(512, 1024), torch.randn(1024, 512)
    for i in range(WARM_UP + rounds):
        dist.barrier()
        began = _now()
        step()
        wall, busy, waited = (b - a for a, b in zip(began, _now(), strict=True))
        start = time.thread_time()
        for _ in range(4):
            torch.mm(x, y)
        if i >= WARM_UP:
            found.append((wall, busy, waited, 4 * 2 * x.numel() * y.shape[1] / (time.thread_time() - start)))
    return found


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), waiting()


def most_bytes(run: Trained) -> float:
    """Returns the most bytes that tensors of this rank take in a step.

    A thread of gloo may be the last to hold a tensor, and the profiler does not see what it frees: such a tensor counts
    to the end of the step. So of several steps the one counts in which fewest bytes stay.
    """
    state = [x for entry in run.optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
    held = sum(local_part(x).nbytes for x in (*run.parameters, *state))
    return held + min(_profiled(run) for _ in range(PROFILED))[1]


def _profiled(run: Trained) -> tuple[float, float]:
    """Returns the bytes that a step leaves, and the most that it takes at once, as the profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run.step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0.0
    for _, change in changes:
        now += change
        most = max(most, now)
    return abs(now), most


def compared(name: str, layout: str, gpu: str, rounds: int) -> Row:
    """Returns a row of the table."""
    options, batch = (LAYOUTS | BUDGETED)[layout], rows_for(name)
    run = trained(name, options, batch)
    times, most = timed(run.step, rounds), most_bytes(run)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (times, most))
    with torch.device("meta"):
        model = MODELS[name]()
    micro = {key: x[:2] for key, x in batch.items()}
    est = autotp.estimate(model, gpu=gpu, batch=ROWS, **options, example_inputs=micro, sequence=LENGTH)
    busy = [[step[1] for step in rank] for rank, _ in everyone]
    cpu = max(busy, key=statistics.median)
    lowest, _, highest = statistics.quantiles(cpu, n=4)
    whole = sum(step[0] for rank, _ in everyone for step in rank)
    speed = statistics.median(step[3] for rank, _ in everyone for step in rank)
    device = hardware_of(gpu)
    computing = sum(est.spent.get(kind, 0.0) for kind in ("products", "elementwise", "optimizer"))
    return Row(
        model=name, layout=layout,
        wall=(est.seconds, min(max(rank[i][0] for rank, _ in everyone) for i in range(rounds))),
        compute=(computing, statistics.median(cpu)),
        memory=(max(rank.total for rank in est.memory), max(most for _, most in everyone)),
        quartiles=(lowest, highest), waited=sum(step[2] for rank, _ in everyone for step in rank) / whole,
        speed=speed / (device.vector_flops * device.matrix_sustained),
    )  # fmt: skip


def ratio(pair: tuple[float, float]) -> float:
    """Returns predicted / measured."""
    return pair[0] / pair[1]


def table(rows: list[Row]) -> Iterator[str]:
    """Yields the lines of the table, and the errors."""
    head = f"{'predicted, measured, ratio':<38}{'compute, ms':>24}{'wall, ms':>24}"
    yield f"{head}{'memory, MB':>22}{'waited':>8}{'speed':>7}"
    for row in rows:
        cells = [f"{a * 1e3:.1f} {b * 1e3:.1f} {a / b:.2f}" for a, b in (row.compute, row.wall)]
        memory = f"{row.memory[0] / 1e6:.1f} {row.memory[1] / 1e6:.1f} {ratio(row.memory):.2f}"
        head = f"{f'{row.model}, {row.layout}':<38}{cells[0]:>24}{cells[1]:>24}"
        yield f"{head}{memory:>22}{row.waited:>8.0%}{row.speed:>7.2f}"
    for kind in ("compute", "wall", "memory"):
        errors = [abs(ratio(getattr(row, kind)) - 1) for row in rows]
        goal = 0.05 if kind == "memory" else 0.10
        within = sum(error <= goal for error in errors)
        yield (
            f"{kind}: mean error {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}, worst "
            f"{max(errors):.1%}; {within} of {len(errors)} within {goal:.0%}"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="the models; by default all")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS | BUDGETED, default=list(LAYOUTS), help="the layouts")
    parser.add_argument("--budgets", action="store_true", help="the layouts under a budget in place of these")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each row")
    parser.add_argument("--gpu", default="cpu-gloo", help=f"{', '.join(KINDS)}, a line, or a file of calibrate")
    parser.add_argument("--out", help="a file for the rows, as JSON")
    given = parser.parse_args()
    hardware_of(given.gpu)
    if MALLOC.keys() - os.environ.keys():  # glibc reads them when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"})
    dist.init_process_group("gloo")
    rows: list[Row] = []
    for name in given.models or MODELS:
        for layout in BUDGETED if given.budgets else given.layouts:
            try:
                rows.append(compared(name, layout, given.gpu, given.rounds))
            except autotp.Error as error:
                if dist.get_rank() == 0:
                    print(f"{name}, {layout}: refused: {error.problem}", flush=True)
                continue
            if dist.get_rank() == 0:
                print(list(table(rows[-1:]))[1], flush=True)
                if given.out:
                    Path(given.out).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if dist.get_rank() == 0:
        print("", *table(rows), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
