"""step_gathers: a plan says what a step gathers and sums: as many bytes as it sends, and as an estimate says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import gpt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.display.text_table import bytes_text
from autotp.passes.emit.zero.sharded_unit import ShardedUnit

SIZES: dict[str, Any] = {"block_size": 16, "vocab_size": 64, "n_layer": 6, "n_head": 2, "n_embd": 32}
ROWS = 8


def rows() -> dict[str, Tensor]:
    tokens = torch.randint(64, (ROWS, 16), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


class Sent(TorchDispatchMode):
    """Counts the bytes that gathers of parameters return, and those that sums of gradients take; and whole blocks."""

    def __init__(self, units: list[ShardedUnit]) -> None:
        super().__init__()
        self.units, self.gathers, self.gathered, self.summed, self.most, self.ahead = units, 0, 0, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            if name == "all_gather_into_tensor":
                self.gathers += 1
                self.gathered += args[0].nbytes * args[1]
            elif name == "reduce_scatter_tensor":
                self.summed += args[0].nbytes
        blocks = [unit for unit in self.units if unit.room is not None]
        self.most = max(self.most, sum(unit.is_whole or bool(unit._running) for unit in blocks))
        self.ahead = max(self.ahead, sum(bool(unit._running) for unit in blocks))
        return func(*args, **(kwargs or {}))


def stepped(rank: int, n: int, options: dict[str, Any]) -> tuple[str, list[tuple[int, int, int, int, int]]]:
    """The plan after three steps; of each the gathers, bytes, bytes of sums, blocks at a time and on their way."""
    parts, replicas = options.get("microbatches", 1), n // options.get("pp", 1)
    example = {key: x[: ROWS // (parts * replicas)] for key, x in rows().items()}
    trainer = autotp.distribute(gpt(seed=0, **SIZES), dp=replicas, example_inputs=example, **options)
    place, counts = trainer.mesh["dp"].get_local_rank(), []
    for _ in range(3):
        units = [unit for graph in trainer._pipelines[0].stages.values() for unit in graph.units]
        with Sent(units) as sent:
            trainer.step(**{key: x.chunk(replicas)[place] for key, x in rows().items()})
        counts.append((sent.gathers, sent.gathered, sent.summed, sent.most, sent.ahead))
        trainer.zero_grad()
    return str(trainer.plan), counts


@pytest.mark.parametrize(
    ("n", "zero", "memory", "more"),
    [
        (2, 3, None, {"microbatches": 2}),
        (2, 3, 2**28, {"microbatches": 2}),
        (2, 1, None, {"microbatches": 2, "compute_dtype": torch.bfloat16}),
        pytest.param(4, 3, None, {"pp": 2, "microbatches": 4}, marks=pytest.mark.rare),
    ],
    ids=["zero 3", "zero 3 under a budget", "zero 1 in bfloat16", "zero 3 in a pipeline"],
)
def test_a_plan_and_an_estimate_say_what_a_step_sends(n: int, zero: int, memory: Any, more: dict[str, Any]) -> None:
    layout = {"dp": n // more.get("pp", 1), "zero": zero, "pp": more.get("pp", 1)}
    micro = ROWS // (layout["dp"] * more["microbatches"])
    est = autotp.estimate(
        gpt(seed=0, **SIZES), example_inputs={key: x[:2] for key, x in rows().items()}, gpu="cpu-gloo", batch=ROWS,
        micro_batch=micro, dtype=more.get("compute_dtype"), memory=memory, **layout,
    )  # fmt: skip
    for rank, (plan, counts) in enumerate(run_ranks(stepped, n, {**more, "zero": zero, "memory": memory}, timeout=100)):
        gathers, gathered, summed, most, ahead = counts[-1]
        lines = [line for line in plan.splitlines() if line.startswith("zero  ")]
        assert f"{bytes_text(gathered)} in {'bfloat16' if zero == 1 else 'float32'}" in lines[0]
        assert lines[-1] == f"zero        a step sums {bytes_text(summed)} of gradients in float32"
        predicted = est.gathers[rank // layout["dp"]]
        assert predicted.times == gathers and predicted.bytes == pytest.approx(gathered, rel=0.02)
        if zero == 3:
            blocks = 6 // layout["pp"]
            assert f"{blocks} blocks {gathers - 1} times" in lines[0]
            assert f"; with {min(most, blocks)} blocks, " in lines[1]
        if memory is not None:
            # All blocks have room: they are gathered once, up to five ahead. In the first step that is not known.
            assert gathers == 1 + 6 and most == 6 and ahead > 2 and counts[0][0] > gathers and counts[0][3] == 2
