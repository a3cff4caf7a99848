"""heartbeat: ranks are killed or stopped in each phase that has collectives; the others end, and name them.

A rank ends itself right before some collective of a phase, so that it is known where it was.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from hugging_face import built, prompt
from ranks import run_ranks
from small_models import gpt
from torch.distributed.device_mesh import DeviceMesh
from trainers import SMALL, batch

import autotp
from autotp.distributed.background_exchange import BackgroundExchange
from autotp.distributed.mesh import new_group
from autotp.distributed.peers import heartbeat
from autotp.distributed.peers.heartbeat import INTERVAL, Heart
from autotp.ops import collectives
from autotp.runtime.torch_hooks import optimizer_guard

pytestmark = pytest.mark.system
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TIMEOUT = timedelta(seconds=8)
Layout = tuple[int, int, int] | tuple[int, int, int, int]
"""The ranks of tp, pp, dp, and cp where sequences are cut."""
Calls = tuple[Callable[[], Any], Callable[[], Any]]
"""What all ranks do first, and the phase: in it one is lost."""


def trainer(layout: Layout) -> autotp.Trainer:
    ranks = sizes(layout)
    example = {name: x[: 4 // (2 * ranks["dp"])] for name, x in batch(0).items()}
    return autotp.distribute(gpt(seed=0, **SMALL), **ranks, microbatches=2, example_inputs=example, timeout=TIMEOUT)


def sizes(layout: Layout) -> dict[str, int]:
    """The number of ranks of each axis, the innermost first."""
    tp, pp, dp, *cp = layout
    return {"tp": tp, "cp": cp[0] if cp else 1, "pp": pp, "dp": dp}


def rows(it: autotp.Trainer) -> Any:
    mesh = it.mesh["dp"]
    return {name: x.chunk(mesh.size())[mesh.get_local_rank()] for name, x in batch(0).items()}


def step(layout: Layout, folder: Path) -> Calls:
    it = trainer(layout)
    return (lambda: it.step(**rows(it))), (lambda: it.step(**rows(it)))


def evaluate(layout: Layout, folder: Path) -> Calls:
    it = trainer(layout)
    return (lambda: it.evaluate(**rows(it))), (lambda: it.evaluate(**rows(it)))


def forward(layout: Layout, folder: Path) -> Calls:
    model, x = parallel(), torch.arange(12).view(2, 6)
    return (lambda: model(x, x)), (lambda: model(x, x))


def backward(layout: Layout, folder: Path) -> Calls:
    model, x = parallel(), torch.arange(12).view(2, 6)
    loss = model(x, x)
    return (lambda: model(x, x)), loss.backward


def stepped(layout: Layout) -> tuple[autotp.Trainer, torch.optim.Optimizer]:
    it = trainer(layout)
    optimizer = torch.optim.AdamW(it.parameters(), lr=0.01)
    it.step(**rows(it))
    return it, optimizer


def optimize(layout: Layout, folder: Path) -> Calls:
    it, optimizer = stepped(layout)
    return (lambda: it.step(**rows(it))), (lambda: (autotp.clip_grad_norm_(it, 1.0), optimizer.step()))


def save(layout: Layout, folder: Path) -> Calls:
    it, optimizer = stepped(layout)
    saves = (lambda i=i: autotp.save_checkpoint(folder / "saved", it, optimizer, i) for i in itertools.count())
    return (lambda: next(saves)()), (lambda: next(saves)())


def load(layout: Layout, folder: Path) -> Calls:
    it, optimizer = stepped(layout)
    autotp.save_checkpoint(folder / "saved", it, optimizer, 1)
    read = functools.partial(autotp.load_checkpoint, folder / "saved", it, optimizer)
    return read, read


def gathered(layout: Layout, folder: Path) -> Calls:
    it = trainer(layout)
    state = autotp.full_state_dict(it)
    return (lambda: autotp.full_state_dict(it)), (lambda: autotp.load_full_state_dict(it, state))


def begin(layout: Layout, folder: Path) -> Calls:
    return (lambda: trainer(layout)), (lambda: trainer(layout))


def read(layout: Layout, folder: Path) -> Calls:
    if dist.get_rank() == 0:
        built("gpt2").save_pretrained(folder / "hf")
    dist.barrier()
    call = functools.partial(autotp.from_pretrained, folder / "hf", tp=layout[0], timeout=TIMEOUT)
    return call, call


def written(layout: Layout, folder: Path) -> Calls:
    model = autotp.parallelize(built("gpt2"), layout[0], timeout=TIMEOUT)
    write = functools.partial(autotp.save_pretrained, model, folder / "out", max_shard_size="20KB")
    return write, write


def generate(layout: Layout, folder: Path) -> Calls:
    model = autotp.parallelize(built("gpt2"), layout[0], timeout=timedelta(seconds=600))
    call = functools.partial(model.generate, **prompt(), max_new_tokens=3, min_new_tokens=3, timeout=TIMEOUT)
    return call, call


def group(layout: Layout, folder: Path) -> Calls:
    trainer(layout)
    return (lambda: new_group(None, TIMEOUT)), (lambda: new_group(None, TIMEOUT))


def parallel() -> Any:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=TIMEOUT, group_desc="tp"), "cpu", mesh_dim_names=("tp",))
    return autotp.parallelize(gpt(seed=0, **SMALL), mesh=mesh)


PHASES = {
    phase.__name__: phase
    for phase in (
        begin,
        group,
        forward,
        backward,
        step,
        evaluate,
        optimize,
        save,
        load,
        gathered,
        read,
        written,
        generate,
    )
}


def losing(
    rank: int, n: int, phase: str, layout: Layout, lost: int, at: int, how: int, folder: str, keeper: int | None
) -> str:
    """What the others are told, once the lost rank was about to start the phase's collective of this number."""
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    if keeper is not None:
        meet(rank, n, keeper, Path(folder))
    before, call = PHASES[phase](layout, Path(folder))
    before()
    if rank == lost:
        _end_at(at, how)
        call()
        os.kill(os.getpid(), how)  # It had fewer collectives.
    return error_of(iter((call, before)), Path(folder, f"pid-{lost}"))  # It may end behind the phase.


def error_of(calls: Iterator[Callable[[], Any]], lost: Path) -> str:
    """The first line of what one of the calls raises. Kills the process of that number, which may be a stopped one."""
    try:
        for call in calls:
            call()
    except autotp.Error as error:
        return str(error).splitlines()[0]
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(lost.read_text()), signal.SIGKILL)
    return "no error"


def meet(rank: int, n: int, keeper: int, folder: Path) -> None:
    """The ranks meet in a store that one of them keeps, as without torchrun."""
    dist.destroy_process_group()
    found = dist.FileStore(str(folder / "meet"), n)
    if rank == keeper:
        store = dist.TCPStore("127.0.0.1", 0, n, True, TIMEOUT, wait_for_workers=False)
        found.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(found.get("port")), n, False, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=TIMEOUT)


def _end_at(at: int, how: int) -> None:
    count = itertools.count()

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if next(count) == at:
                os.kill(os.getpid(), how)
            return run(*args, **kwargs)

        return collective

    collectives._start = counted(collectives._start)
    BackgroundExchange._gather = counted(BackgroundExchange._gather)  # type: ignore[method-assign]
    optimizer_guard.store_gather = counted(optimizer_guard.store_gather)
    for name in TORCHS:
        setattr(dist, name, counted(getattr(dist, name)))


TORCHS = ("all_reduce", "batch_isend_irecv", "broadcast_object_list", "gather_object", "new_group", "recv", "send")
RARE = [
    (phase, layout, 1, at, how)
    for phase, layouts in (
        ("step", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]),
        ("evaluate", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]),
        ("step", [(1, 1, 1, 2), (2, 1, 1, 2)]),
        ("forward", [(2, 1, 1)]),
        ("backward", [(2, 1, 1)]),
    )
    for layout, at, how in itertools.product(layouts, (0, 2, 5), (KILL, STOP))
] + [
    (phase, layout, 1, at, how)
    for phase, layouts in (
        ("begin", [(2, 1, 1), (1, 2, 1)]),
        ("optimize", [(2, 1, 1), (1, 2, 1), (2, 1, 2)]),
        ("save", [(2, 1, 1), (1, 2, 1), (2, 1, 2)]),
        ("load", [(2, 1, 1), (1, 2, 1), (2, 1, 2)]),
        ("gathered", [(2, 1, 1), (1, 2, 1)]),
        ("read", [(2, 1, 1)]),
        ("written", [(2, 1, 1)]),
        ("generate", [(2, 1, 1), (3, 1, 1)]),
    )
    for layout, (at, how) in itertools.product(layouts, ((0, KILL), (3, KILL), (3, STOP)))
]
USUAL = [
    ("step", (1, 2, 1), 1, 3, KILL),
    ("step", (1, 1, 1, 2), 1, 3, KILL),
    ("backward", (2, 1, 1), 1, 2, STOP),
    ("read", (2, 1, 1), 1, 2, KILL),
    pytest.param("generate", (2, 1, 1), 1, 5, KILL, marks=pytest.mark.rare),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("phase", "layout", "lost", "at", "how"),
    [*USUAL, *(pytest.param(*case, marks=pytest.mark.rare) for case in RARE)],
    ids=str,
)
def test_heartbeat_names_the_lost_rank(
    phase: str, layout: Layout, lost: int, at: int, how: int, tmp_path: Path
) -> None:
    n = math.prod(layout)
    found = run_ranks(losing, n, phase, layout, lost, at, how, str(tmp_path), None, timeout=100, may_die=[lost])
    expect_named(found, lost, layout)


def expect_named(found: list[str], lost: int, layout: Layout) -> None:
    """Every other rank was told who is lost."""
    axis = next(axis for axis, size in sizes(layout).items() if size > 1)  # Of rank 1.
    for rank, text in enumerate(found):
        if rank != lost:
            named = f"{axis} rank {lost} is lost", f"global rank {lost} is lost", f"(global rank {lost}) is lost"
            assert any(name in text for name in named), text


def training(layout: Layout, folder: Path) -> Iterator[Callable[[], Any]]:
    """What a training does, for ever."""
    it, optimizer = stepped(layout)
    for i in itertools.count(1):
        yield lambda: it.step(**rows(it))
        yield lambda: autotp.clip_grad_norm_(it, 1.0)
        yield optimizer.step
        yield lambda: it.evaluate(**rows(it))
        yield lambda i=i: autotp.save_checkpoint(folder / "saved", it, optimizer, i, wait=i % 3 == 0)
        yield lambda: autotp.load_checkpoint(folder / "saved", it, optimizer)
        yield lambda: autotp.load_full_state_dict(it, autotp.full_state_dict(it))


def generating(layout: Layout, folder: Path) -> Iterator[Callable[[], Any]]:
    """What is done with a model of transformers, for ever."""
    model, x = autotp.parallelize(built("gpt2").train(), layout[0], timeout=TIMEOUT), prompt()["input_ids"]
    for i in itertools.count():
        yield lambda: autotp.save_pretrained(model, folder / "out")
        yield lambda: autotp.from_pretrained(folder / "out", tp=layout[0], timeout=TIMEOUT)
        yield lambda: model(x, labels=x).loss.backward()
        yield lambda i=i: model.generate(**prompt(), max_new_tokens=5, do_sample=i % 2 == 1, timeout=TIMEOUT)


def losing_anywhere(rank: int, n: int, layout: Layout, lost: int, how: int, at: int, folder: str) -> str:
    """What the others are told, once the lost rank ended in its `at`-th call of a Python function."""
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    global TIMEOUT
    TIMEOUT = timedelta(seconds=20)  # What is done first has to be done in time on a machine that does much else.
    phases = (training if at % 10 < 7 or layout[0] == 1 else generating)(layout, Path(folder))
    for _ in range(7):
        next(phases)()
    dist.barrier()
    if rank == lost:
        _end_in_call(at, how)
    return error_of(phases, Path(folder, f"pid-{lost}"))


def _end_in_call(at: int, how: int) -> None:
    """This process ends in its `at`-th call of a Python function from here, in whatever thread that is."""
    count = itertools.count(1)

    def called(frame: Any, event: str, given: Any) -> None:
        if event == "call" and next(count) == at:
            os.kill(os.getpid(), how)

    threading.setprofile(called)  # Of threads to come: those that write, and those of backward.
    sys.setprofile(called)


def staying_away(rank: int, n: int, how: str) -> str:
    """What the others are told of the last rank, which lives on without this call."""
    model, x = parallel(), torch.arange(12).view(2, 6)
    for _ in range(3):
        loss = model(x, x)
    with pytest.raises((ValueError, autotp.Error), match="no"):
        autotp.full_state_dict(model, lambda name: rank < n - 1 or fails(name))
    with pytest.raises(autotp.Error, match="another model's"):  # A call of all: the exception before it is forgotten.
        autotp.load_full_state_dict(model, {})
    hurry()
    if rank == n - 1:
        return ""
    return problem_of(loss.backward if how == "backward" else lambda: model(x, x))


def fails(name: str) -> bool:
    raise ValueError("no")


def hurry() -> None:
    """Collectives from here wait for two seconds."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)


def problem_of(call: Callable[[], Any]) -> str:
    """The end of the first line of the Error that a call raises."""
    return message(call).splitlines()[0].partition("): ")[2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("n", "how"), [(3, "forward"), pytest.param(2, "backward", marks=pytest.mark.rare)])
def test_a_rank_that_stays_away_is_named(n: int, how: str) -> None:
    """It answers, so it is not lost; its answer says that it is in no call."""
    *others, _ = run_ranks(staying_away, n, how, timeout=60, alone=True)
    told = f"tp rank {n - 1} (global rank {n - 1}) is alive, but did not come to this call"
    assert others == [told] * (n - 1)


def in_another_call(rank: int, n: int) -> str:
    it = trainer((2, 2, 1))
    it.step(**rows(it))
    hurry()
    calls = (lambda: autotp.full_state_dict(it)) if rank == 3 else (lambda: autotp.clip_grad_norm_(it, 1.0))
    return problem_of(calls)


@pytest.mark.rare
@pytest.mark.timeout(120)
def test_heartbeat_names_the_rank_in_another_call() -> None:
    """In groups of two, most of the ranks do not meet the one that makes the other call."""
    *others, _ = run_ranks(in_another_call, 4, timeout=60, alone=True)
    assert all(
        "rank 3) called full_state_dict" in text or "global rank 3 called full_state_dict" in text for text in others
    ), others


def interrupted(rank: int, n: int, phase: str, folder: str) -> str:
    """What the first rank is told of the last, whose user stops a call."""
    before, call = PHASES[phase]((2, 1, 1), Path(folder))
    before()
    hurry()
    if rank == 0:
        return problem_of(call)

    def stops(*given: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    collectives._start = stops
    for name in TORCHS:
        setattr(dist, name, stops)
    with pytest.raises(KeyboardInterrupt):
        call()
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "phase",
    ["step", *(pytest.param(it, marks=pytest.mark.rare) for it in ("evaluate", "save", "load", "generate", "read"))],
)
def test_heartbeat_tells_of_an_interrupted_call(phase: str, tmp_path: Path) -> None:
    """A KeyboardInterrupt is no Exception; the process may live on, or be busy with its end."""
    told, _ = run_ranks(interrupted, 2, phase, str(tmp_path), timeout=60, alone=True)
    assert told.replace(")", "").endswith("rank 1 raised KeyboardInterrupt"), told


CALLED = 150_000
"""Python functions that a training calls in two rounds of `training`, which has one of each phase."""


class Busy:
    """A store that takes its time."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def clone(self) -> Any:
        return self

    def set(self, key: str, value: str) -> None:
        """Nothing is kept."""

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        time.sleep(2.5 * INTERVAL)
        return False


def test_no_thread_is_in_the_store_when_python_ends() -> None:
    store = Busy()
    heart = Heart(store, 0, 2)
    assert store.asked.wait(60)
    heart.stop()
    assert not heart.thread.is_alive() and not heart.meeting.is_alive()


class Counted:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store, self.requests = dist.HashStore(), 0

    def clone(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


def test_the_store_is_asked_for_nothing_once_ranks_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.01)
    store = Counted()
    hearts = [Heart(store, rank, 10) for rank in range(10)]
    try:
        for heart in hearts:
            heart.meeting.join(60)
            assert set(heart.links.by_rank) == heart.node.neighbours()
        asked = store.requests
        for heart in hearts:
            last, census = dict(heart.node.heard), heart.census()
            assert census is not None and len(census.by_rank()) == 10
            assert all(heart.node.heard[neighbour] >= last[neighbour] for neighbour in last)
        assert store.requests == asked <= 10 * 12
    finally:
        for heart in hearts[::-1]:
            heart.stop()
    assert not any(heart.node.lost for heart in hearts), "they took leave"


@pytest.mark.rare
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(50))
def test_heartbeat_names_the_rank_that_is_lost_in_a_random_call(seed: int, tmp_path: Path) -> None:
    """Real processes, each with a hash seed of its own; a rank ends in any function, one that saves beside it, too."""
    draw = random.Random(seed)
    layout = draw.choice([(2, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
    lost, how, at = draw.randrange(2), draw.choice((KILL, STOP)), draw.randrange(1, CALLED)
    given = layout, lost, how, at, str(tmp_path)
    expect_named(run_ranks(losing_anywhere, 2, *given, timeout=120, may_die=[lost], fresh=True), lost, layout)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("phase", "layout", "lost", "how"),
    [
        ("forward", (2, 1, 1), 0, KILL),
        ("group", (2, 1, 1), 0, STOP),
        *(
            pytest.param(phase, layout, lost, how, marks=pytest.mark.rare)
            for phase, layout in (
                *(("forward", (2, 1, 1)), ("step", (1, 2, 1)), ("step", (3, 1, 1))),
                *(("optimize", (2, 1, 1)), ("save", (2, 1, 1)), ("load", (3, 1, 1))),
            )
            for lost, how in itertools.product((0, 1), (KILL, STOP))
        ),
    ],
    ids=str,
)
def test_the_rank_that_keeps_the_store(phase: str, layout: Layout, lost: int, how: int, tmp_path: Path) -> None:
    """Where the first rank keeps the store it is named as any other is, and nobody else is blamed."""
    n = math.prod(layout)
    found = run_ranks(losing, n, phase, layout, lost, 2, how, str(tmp_path), 0, timeout=100, may_die=[lost])
    expect_named(found, lost, layout)
