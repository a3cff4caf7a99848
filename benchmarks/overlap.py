"""Measures how much communication a step waits for, over links of several speeds: "exposed" communication.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/overlap.py --shape llama-30M

Two processes of one machine have a link without a speed of its own. `SlowLink` is gloo behind such a link: a collective
ends when gloo's own ends, and not before the link has carried its bytes. The link carries one collective after the
other. A thread sleeps for this time, so that the link takes no time of a processor.

First autotp's steps run over a link that takes no time ("free"). Their bytes say how fast the link has to be for
communication to take 10, 25, 50 and 100 % of this time; all ways have the same links. Then each round has a step of
each way on each link. The speed of a machine drifts, so what is compared is of one round:

- "beside": a step on the free link, divided by autotp's.
- "hidden": the part of the link's time that a step does not wait for,
  1 - (seconds - seconds with a free link) / seconds of the link. Behind it are the quartiles of the rounds.
- "of ours": the same against autotp's step on the free link, whatever the way: 1 is a step without communication.

All numbers are medians over the rounds. With `--latency 1` each collective takes a millisecond beside the time of its
bytes; a share that is less than the latencies of a step has them alone.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from step import FLOORS, HAND, OURS, SHAPES, LlamaShape, Shape, Step, build, collectives, compare, in_turn, stepper
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

import autotp

BACKEND = "slowlink"
ALL_REDUCE, ALL_TO_ALL = "all_reduce", "all_to_all"
SHARES = (0.1, 0.25, 0.5, 1.0)
"""The time of a step's communication, as a share of the step with a free link."""
WARM_UP = 3


@dataclass
class Link:
    """The link of a process: how fast it is, and what it carried.

    Attributes:
        latency: seconds that each collective takes.
        seconds_per_byte: 0 for a free link.
        only: the collective that takes time, and is counted; "" for all.
        by_processor: whether the link's clock is the processor time of the thread that computes, plus `waited`.
        waited: seconds by this clock for which that thread would have waited for the link.
        until: when the link has carried what it was given up to now.
        bytes, number: what was sent since the last `reset`, and in how many collectives.
    """

    latency: float = 0.0
    seconds_per_byte: float = 0.0
    only: str = ""
    by_processor: bool = False
    waited: float = 0.0
    until: float = 0.0
    bytes: float = 0.0
    number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, collective: str, size: float) -> float:
        """Returns when the link will have carried `size` more bytes."""
        if self.only not in ("", collective):
            return 0.0
        with self.lock:
            self.bytes, self.number = self.bytes + size, self.number + 1
            self.until = max(self.until, self.now()) + self.latency + size * self.seconds_per_byte
            return self.until

    def now(self) -> float:
        """Returns the seconds of the link's clock."""
        return time.thread_time() + self.waited if self.by_processor else time.perf_counter()

    def wait(self, due: float) -> None:
        """Sets a clock of processor time forward to when the link has carried something."""
        self.waited += max(0.0, due - self.now())

    def reset(self, seconds_per_byte: float = 0.0, latency: float = 0.0) -> None:
        """Makes it a link of this speed, with nothing under way."""
        self.seconds_per_byte, self.latency = seconds_per_byte, latency
        self.until, self.bytes, self.number, self.waited = 0.0, 0.0, 0, 0.0


LINK = Link()
"""The link of this process."""


class Carried(dist.Work):
    """A collective on a link with the clock of the processor: nothing sleeps, and a wait sets the clock forward."""

    def __init__(self, work: dist.Work, due: float) -> None:
        super().__init__()
        self.work, self.due = work, due

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.work.wait()
        LINK.wait(self.due)
        return True


class SlowLink(dist.ProcessGroup):
    """gloo behind `LINK`. Bytes are those of a ring: an all-reduce of n bytes sends 2 n (ranks - 1) / ranks.

    torch asks a process group in Python for the collectives below; `all_gather_into_tensor` and `reduce_scatter_tensor`
    go to gloo directly, so `_sent` refuses a step with them.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._running: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def getBackendName(self) -> str:
        return BACKEND

    def _run(self) -> None:
        """Ends collectives, in order."""
        while True:
            work, due, future, result = self._running.get()
            try:
                work.wait()
                time.sleep(max(0.0, due - time.perf_counter()))
                future.set_result(result)
            except Exception as error:  # The waiting thread gets it.
                future.set_exception(error)

    def _started(self, collective: str, work: Any, size: float, result: Any) -> Any:
        due = LINK.carry(collective, size)
        if LINK.by_processor:
            return Carried(work, due)
        future: Future[Any] = Future()
        self._running.put((work, due, future, result))
        return _create_work_from_future(future)

    def _others(self) -> float:
        return (self.size() - 1) / self.size()

    def allreduce(self, xs: list[Tensor], opts: Any = None) -> Any:
        size = 2 * sum(x.nbytes for x in xs) * self._others()
        return self._started(ALL_REDUCE, self.gloo.allreduce(xs, opts or dist.AllreduceOptions()), size, xs)

    def allreduce_coalesced(self, xs: list[Tensor], opts: Any = None) -> Any:
        size = 2 * sum(x.nbytes for x in xs) * self._others()
        given = opts or dist.AllreduceCoalescedOptions()
        return self._started(ALL_REDUCE, self.gloo.allreduce_coalesced(xs, given), size, xs)

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any = None) -> Any:
        size = sum(x.nbytes for x in outs[0]) * self._others()
        return self._started("all_gather", self.gloo.allgather(outs, xs), size, outs)

    def alltoall_base(self, out: Tensor, x: Tensor, received: list[int], sent: list[int], opts: Any = None) -> Any:
        size = x.nbytes * self._others()
        given = opts or dist.AllToAllOptions()
        return self._started(ALL_TO_ALL, self.gloo.alltoall_base(out, x, received, sent, given), size, out)

    def broadcast(self, xs: list[Tensor], opts: Any = None) -> Any:
        return self._started("broadcast", self.gloo.broadcast(xs, opts or dist.BroadcastOptions()), xs[0].nbytes, xs)

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier(opts or dist.BarrierOptions())


def connect(**given: Any) -> None:
    """Makes the default process group one of `SlowLink`. `given`: arguments of `init_process_group`."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, SlowLink, devices=["cpu"])
    dist.init_process_group(BACKEND, **given)


def ways(config: Shape, batch: int) -> dict[str, nn.Module]:
    """Returns the models to time: by hand, autotp, with the batch in halves, and without the passes that overlap.

    Where ranks share key/value heads, the gradients of their weights are sums over ranks; what is written by hand does
    not know this.
    """
    made = lambda: build(config, batch, "cpu")[0]  # noqa: E731
    shares = isinstance(config, LlamaShape) and (config.n_kv or config.n_head) < dist.get_world_size()
    found = {} if shares else {HAND: FLOORS[type(config)](made(), dist.get_rank(), dist.get_world_size())}
    found[OURS] = autotp.parallelize(made(), device="cpu")
    found["overlap=batch"] = autotp.parallelize(made(), device="cpu", overlap="batch")
    for name in ("overlap", *["late_sums"] * shares):
        found[f"without {name}"] = autotp.parallelize(made(), device="cpu", without=(name,))
    return found


@dataclass(frozen=True)
class Row:
    """One shape, one share and one way.

    Attributes:
        frees, ours: seconds on a link that takes no time, of this way and of autotp; of each round.
        each: seconds on this link, of each round.
        carried: seconds of the link.
    """

    shape: str
    way: str
    share: float
    frees: Sequence[float]
    ours: Sequence[float]
    each: Sequence[float]
    carried: float

    @property
    def free(self) -> float:
        return statistics.median(self.frees)

    @property
    def seconds(self) -> float:
        return statistics.median(self.each)

    @property
    def beside(self) -> float:
        return statistics.median(free / our for free, our in zip(self.frees, self.ours, strict=True))

    @property
    def hidden(self) -> float:
        return self.quartiles(self.frees)[1]

    def quartiles(self, free: Sequence[float]) -> list[float]:
        """Returns the quartiles of what is hidden in a round, against steps on a free link."""
        parts = [1 - (a - b) / self.carried for a, b in zip(self.each, free, strict=True)]
        return statistics.quantiles(parts, n=4, method="inclusive")

    def __str__(self) -> str:
        low, hidden, high = self.quartiles(self.frees)
        return (
            f"{self.shape:<12}{self.way:<17}{self.share:>5.0%}{self.free * 1e3:>9.1f}{self.beside:>8.3f}"
            f"{self.seconds * 1e3:>9.1f}{self.carried * 1e3:>9.1f}{hidden:>8.0%}"
            f"{f'{low:.0%} to {high:.0%}':>15}{self.quartiles(self.ours)[1]:>9.0%}"
        )


HEADER = (
    f"{'shape':<12}{'way':<17}{'share':>5}{'free ms':>9}{'beside':>8}{'ms':>9}{'link ms':>9}{'hidden':>8}"
    f"{'quartiles':>15}{'of ours':>9}"
)


@dataclass(frozen=True)
class Sent:
    """What a step sends: bytes, in a number of collectives."""

    bytes: float
    number: int

    def seconds(self, seconds_per_byte: float, latency: float) -> float:
        """Returns how long a link takes for it."""
        return self.bytes * seconds_per_byte + self.number * latency

    def speed(self, seconds: float, latency: float) -> float:
        """Returns the seconds for a byte with which a link of this latency takes `seconds`; 0 if none is as fast."""
        return max(0.0, seconds - self.number * latency) / self.bytes


def measure(
    name: str, config: Shape, batch: int, rounds: int, shares: Sequence[float] = SHARES, latency: float = 0.0,
    only: Sequence[str] = (),
) -> list[Row]:  # fmt: skip
    """Returns the rows of a shape.

    Args:
        latency: seconds of each collective, beside the time that its bytes take.
        only: the ways to time beside autotp's; all by default.
    """
    plain, inputs = build(config, batch, "cpu")
    models = {way: model for way, model in ways(config, batch).items() if not only or way in (OURS, *only)}
    LINK.reset()
    compare(plain, models, inputs)
    steps = {way: stepper(model, inputs) for way, model in models.items()}
    sent = {way: _sent(step) for way, step in steps.items()}
    first = statistics.median(one.wall for one in in_turn({OURS: steps[OURS]}, max(3, rounds // 3), "cpu")[OURS])
    speeds = {share: _agreed(sent[OURS].speed(share * first, latency)) for share in shares}
    links = {0.0: (0.0, 0.0), **{share: (speed, latency) for share, speed in speeds.items()}}
    turns = in_turn(
        {(way, s): _on(link, step) for s, link in links.items() for way, step in steps.items()}, rounds, "cpu"
    )
    LINK.reset()
    times = {key: [one.wall for one in each] for key, each in turns.items()}
    return [
        Row(
            name, way, share, times[way, 0.0], times[OURS, 0.0], times[way, share],
            sent[way].seconds(speed, latency),
        )
        for share, speed in speeds.items()
        for way in steps
    ]  # fmt: skip


def _on(link: tuple[float, float], step: Step) -> Step:
    """Returns a step on a link of this speed: seconds per byte, and of latency."""

    def on_link() -> Tensor:
        LINK.reset(*link)
        return step()

    return on_link


def _sent(step: Step) -> Sent:
    """Returns what a step sends.

    Raises:
        RuntimeError: the link did not carry all collectives of the step.
    """
    for _ in range(WARM_UP):
        step()
    LINK.reset()
    made = collectives(step).number
    if made > LINK.number:  # What dist.all_reduce sends is not seen there.
        raise RuntimeError(f"a step has {made} collectives, and the link carried {LINK.number}")
    return Sent(LINK.bytes, LINK.number)


def _agreed(number: float) -> float:
    """Returns the number of the first rank."""
    agreed = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(agreed, 0)
    return agreed.item()


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="gpt-30M", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="how many steps of each way to time, on each link")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="parts of a step that the link takes")
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds that each collective takes")
    parser.add_argument("--only", nargs="+", default=(), help="the ways to time beside autotp's; by default all")
    parser.add_argument("--kv-heads", type=int, help="key/value heads of a Llama; ranks share them if they are fewer")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.kv_heads is not None:
        if not isinstance(shape, LlamaShape):
            parser.error(f"--kv-heads is for Llamas, and --shape is {args.shape}")
        shape = replace(shape, n_kv=args.kv_heads)
    connect(timeout=timedelta(minutes=5))
    rows = measure(args.shape, shape, args.batch, args.rounds, args.shares, args.latency / 1e3, args.only)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, batch {args.batch}, {args.rounds} rounds, "
              f"latency {args.latency:g} ms",
              HEADER, *rows, sep="\n")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
