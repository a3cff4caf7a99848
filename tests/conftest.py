"""How hypothesis draws (the same cases in each `make test`, new ones with `--deep`), and which tests are left out.

A test marked `rare` runs with `--all` only (`make test-all`): of many cases, those that a few others stand for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the rare cases, too: every family in every way; an hour")
    parser.addoption("--deep", action="store_true", help="5,000 random architectures instead of 24; takes two hours")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rare: a case for --all only")
    found = (Phase.explicit, Phase.reuse, Phase.generate)  # a failing model takes minutes to shrink: --deep does
    settings.register_profile("default", deadline=None, derandomize=True, max_examples=200, phases=found)
    settings.register_profile("deep", deadline=None, max_examples=5000, print_blob=True)
    settings.register_profile("all", settings.get_profile("default"))
    settings.load_profile(next((name for name in ("deep", "all") if config.getoption(name)), "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if item.get_closest_marker("rare") and not config.getoption("all")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


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
    """What is there by now lives on, and graphs are made of many small objects: looking through all again is slow."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
