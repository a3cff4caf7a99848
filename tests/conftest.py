"""How hypothesis draws (the same cases in each `make test`, new ones with `--deep`), and which tests are left out.

`make test` runs the tests of the parts. `make test-rest` runs those marked `system` (of whole models and families of
models, of processes that end, of the examples and the benchmarks), and those marked `costly`, which `seconds.txt` lists
with COSTLY seconds or more, but for those marked `each_time`. With `--share 2/4` it runs the second of four shares,
which take about as long.
A test marked `rare` runs with `--all` only (`make test-all`): of many cases, those that a few others stand for.
A test marked `not_on_cards`, with the reason, is skipped with `--cards`; all are where no cards can be pretended.
What tests the examples and the benchmarks runs where it is named, or with `--all`.
With `--budget` a test that is not `rare` fails if it takes longer. On a slower machine it may take longer by as much,
and so may a test before it counts as hanging.
`--seconds` writes what the tests took into `seconds.txt`.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from cards.build import NoCompiler
from cards.pretend import DEVICES, pretend
from hypothesis import Phase, settings
from ranks import BILL, RUNNING, SELECTED
from seconds import COSTLY, Written, costs, listed, shares, slowness

from autotp.tracebacks import TRACEBACK

HERE = Path(__file__).parent
NAMES = ("examples", "benchmarks")
NAMED_ONLY = [HERE / name for name in NAMES]
SYSTEM = [HERE / name for name in ("system", "integrations/transformers", "integrations/loops", *NAMES)]
NO_CARDS = pytest.StashKey[str]()
"""Why there are none, if `--cards` asks for some."""
CAPTURES = "AUTOTP_TESTS_CAPTURES"
"""Names the folder where the processes of a run share what they captured."""
BUSY = 2
"""A core that others use as well, or its cache, gives so many seconds for one of an idle core."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the rare cases, too: every family in every way; an hour")
    parser.addoption("--deep", action="store_true", help="5,000 random architectures instead of 24; takes two hours")
    parser.addoption("--cards", action="store_true", help="on NVIDIA cards: those of the machine, or pretended ones")
    parser.addoption(
        "--share", help="2/4: the second of four shares of the files of make test-rest, or of all with --cards"
    )
    parser.addoption("--seconds", action="store_true", help="write the seconds of the tests that ran into seconds.txt")
    parser.addoption("--budget", type=float, help="the seconds of CPU that a test may take that is not rare")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(TRACEBACK, "full")
    if config.getoption("cards"):
        _use_cards(config)
    config.addinivalue_line("markers", "rare: a case for --all only")
    config.addinivalue_line("markers", "system: of whole models, or of processes that end; for make test-rest")
    config.addinivalue_line("markers", "not_on_cards(reason): skipped with --cards")
    config.addinivalue_line("markers", "costly: listed in seconds.txt; for make test-rest")
    config.addinivalue_line("markers", "each_time: for make test, however long it takes: laws of the whole tree")
    if config.getoption("seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Written(), "seconds")
    if not config.getoption("all"):
        RUNNING.captures_in = Path(os.environ.get(CAPTURES) or tempfile.mkdtemp(prefix="autotp-captures-"))
        if CAPTURES not in os.environ:  # the first process: its workers have the same environment
            os.environ[CAPTURES] = str(RUNNING.captures_in)
            atexit.register(shutil.rmtree, RUNNING.captures_in, ignore_errors=True)
    found = (Phase.explicit, Phase.reuse, Phase.generate)  # a failing model takes minutes to shrink: --deep does
    settings.register_profile("default", deadline=None, derandomize=True, max_examples=200, phases=found)
    settings.register_profile("deep", deadline=None, max_examples=5000, print_blob=True)
    settings.register_profile("all", settings.get_profile("default"))
    settings.load_profile(next((name for name in ("deep", "all") if config.getoption(name)), "default"))


def _use_cards(config: pytest.Config) -> None:
    """Gives this process cards, and the processes that it starts."""
    try:
        pretend()
    except NoCompiler as error:
        config.stash[NO_CARDS] = str(error)
        return
    os.environ.setdefault(DEVICES, "8")
    folders = [str(HERE / "support" / "cards" / "site"), str(HERE / "support"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


def pytest_report_header(config: pytest.Config) -> str:
    return f"all tests are skipped: {config.stash[NO_CARDS]}" if NO_CARDS in config.stash else ""


def _skip_without_cards(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what `--cards` asks for and cannot run."""
    for item in items if config.getoption("cards") else ():
        marker = item.get_closest_marker("not_on_cards")
        if reason := config.stash.get(NO_CARDS, marker.args[0] if marker else ""):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path in SYSTEM and "not system" in config.getoption("markexpr"):
        return True  # They need not be imported.
    if collection_path not in NAMED_ONLY or config.getoption("all"):
        return None
    named = [Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args]
    return True if not any(path.is_relative_to(collection_path) for path in named) else None


@pytest.hookimpl(tryfirst=True)  # before pytest asks for `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_cards(config, items)
    seconds, limit = listed(), float(config.getoption("timeout") or config.getini("timeout")) * slowness()
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit))
        if any(item.path.is_relative_to(folder) for folder in SYSTEM):
            item.add_marker("system")
        if seconds.get(item.nodeid, 0) >= COSTLY and not item.get_closest_marker("each_time"):
            item.add_marker("costly")
    runs, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (left if item.get_closest_marker("rare") and not config.getoption("all") else runs).append(item)
    if share := config.getoption("share"):
        shared = [item for item in runs if item.get_closest_marker("system") or item.get_closest_marker("costly")]
        rest = runs if config.getoption("cards") else shared
        mine = shares([item.nodeid for item in rest], share)
        left += [item for item in runs if item.nodeid.partition("::")[0] not in mine]
        runs = [item for item in runs if item.nodeid.partition("::")[0] in mine]
    config.hook.pytest_deselected(items=left)
    places = {file: place for place, file in enumerate(costs([item.nodeid for item in runs]))}
    # The longest files come first, so that two workers are done at the same time.
    items[:] = sorted(runs, key=lambda item: places[item.nodeid.partition("::")[0]])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """With `--all` each test captures its models itself."""
    RUNNING.file = item.path
    with RUNNING.captures():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """CPU is counted, that of pytest's process and of the busiest rank: waiting for a core costs nothing.

    What the tests of a file share (a launch of ranks, or fixtures) is nobody's; programs that a test starts, such as
    torchrun, are not counted.
    """
    BILL.ranks, began = 0.0, time.process_time()
    yield
    spent = time.process_time() - began + BILL.ranks
    item.user_properties.append(("seconds of CPU", round(spent, 2)))
    budget = item.config.getoption("budget")
    if budget is None or item.get_closest_marker("rare") or spent <= BUSY * budget:
        return
    if spent > BUSY * budget * (slower := slowness()):
        pytest.fail(
            f"{spent:.1f} s of CPU, and the budget is {budget:g} s of an idle core (this machine is {slower:.1f} times "
            "slower): ask less of it, or mark it rare"
        )


@pytest.fixture(scope="session", autouse=True)
def without_colours() -> Iterator[None]:
    """Texts are plain, also with `-s` on a terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        yield


@pytest.fixture(autouse=True)
def without_a_group() -> Iterator[None]:
    """`parallelize` and `distribute` make one process a world of one: that of a test ends with it."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()


@pytest.fixture
def in_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable says whether texts have colours."""
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def registry() -> Iterator[None]:
    """The rules are, after the test, what they were; users have none before it."""
    from autotp.rules.registry import RULES, USER_RULES

    before, users = dict(RULES), set(USER_RULES)
    USER_RULES.clear()
    yield
    for rules, old in ((RULES, before), (USER_RULES, users)):
        rules.clear()
        rules.update(old)


def pytest_collection_finish(session: pytest.Session) -> None:
    """`Checks` are told which of their cases run.

    What is there by now lives on, and graphs are made of many small objects: looking through all again is slow.
    """
    for item in session.items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if given.keys() >= {"n", "name"} and not any(marker.name == "skip" for marker in item.iter_markers()):
            SELECTED.add((item.path, given["n"], given["name"]))
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
