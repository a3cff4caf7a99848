"""options: each option has one of its values, or an Error lists them; passes that are left out have one order."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
import torch
from errors import message

import autotp
from autotp.distributed.launch import TORCHRUN
from autotp.error_file import OURS
from autotp.options import DEFAULTS, OF_STEPS, OPTIONAL, Options, expect_choices, memory_limit
from autotp.tracebacks import TRACEBACK

PASSES = ", ".join(map(repr, OPTIONAL))
TAKE_OPTIONS = [
    name
    for name in ("parallelize", "from_pretrained", "explain", "verify", "stages", "distribute", "estimate")
    if hasattr(autotp, name)  # A copy of autotp may be without a folder.
]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"outputs": "whole"}, "outputs='whole' is not one of its values\n  expected 'auto', 'full', 'local', 'loss'"),
        ({"recompute": "some"}, "recompute='some' is not one of its values\n  expected 'none', 'selective', 'full'"),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes' is not one of its values\n  expected True, False"),
        ({"without": ("lower",)}, f"without=['lower']: there is no such pass\n  expected {PASSES}"),
        (
            {"without": "outline", "recompute": "full"},
            "without=('outline',): recompute needs blocks, which outline makes\n  try      recompute=\"none\"",
        ),
        (
            {"memory": "lots"},
            'memory=\'lots\' is no number of bytes\n  expected "20GiB", "24GB", "50%", "auto", or an int',
        ),
        (
            {"memory": "50%", "recompute": "full"},
            'memory=\'50%\' beside recompute="full": both say what is computed again\n  try      recompute="none"',
        ),
        (
            {"memory": 10**9, "without": "outline"},
            "without=('outline',): memory needs blocks, which outline makes\n  try      memory=None",
        ),
    ],
)
def test_expect_choices_names_the_wrong_option(given: dict[str, Any], text: str) -> None:
    assert message(lambda: expect_choices(Options(**given))) == text


@pytest.mark.parametrize(
    ("memory", "limit"), [("24GB", 24e9), ("20 GiB", 20 * 2**30), ("50%", 0.5), ("0.5KB", 500.0), (10**9, 1e9)]
)
def test_memory_is_a_number_of_bytes_or_a_part(memory: int | str, limit: float) -> None:
    assert memory_limit(memory) == limit


@pytest.mark.parametrize("state_bytes", [-1, True, "8bit", float("inf")])
def test_other_bytes_of_states_are_refused(state_bytes: Any) -> None:
    text = message(lambda: expect_choices(Options(state_bytes=state_bytes)))
    assert f"state_bytes={state_bytes!r} is no number of bytes of a parameter's states" in text


@pytest.mark.parametrize("memory", ["0%", "120%", "GB", "-1GB", 0, True, 1.5, "0B"])
def test_other_budgets_are_refused(memory: Any) -> None:
    assert "is no number of bytes" in message(lambda: expect_choices(Options(memory=memory)))


def test_expect_choices_takes_further_options() -> None:
    assert (
        message(lambda: expect_choices(DEFAULTS, {"summed": (True,)}))
        == "summed=False is not one of its values\n  expected True"
    )
    expect_choices(DEFAULTS)


def test_options_without_is_sorted_and_unique() -> None:
    """One name is a name, and not letters; ranks that spell a set in another order have the same options."""
    assert Options(without="cse").without == ("cse",)
    assert Options(without={"overlap", "cse"}) == Options(without=["cse", "overlap", "cse"])
    assert Options(without=7).without == (7,)  # type: ignore[arg-type]  # Refused by `expect_choices`.
    assert Options(without="cse").optional("overlap")
    assert not Options(without="cse").optional("cse")


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_signatures_list_options_with_the_defaults_of_options(name: str) -> None:
    """A user who asks `help` or an editor sees each; none is in a signature by hand."""
    function, defaults = getattr(autotp, name), {row.name: row.default for row in fields(Options)}
    listed = inspect.signature(function).parameters
    rows = get_type_hints(get_args(get_type_hints(function)["options"])[0])
    assert rows.keys() <= defaults.keys()
    assert {row: (listed[row].default, listed[row].annotation) for row in rows} == {
        row: (defaults[row], hint) for row, hint in rows.items()
    }
    assert "options" not in listed and " options: " not in (function.__doc__ or "")


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_a_wrong_keyword_is_one_error_with_the_nearest(name: str) -> None:
    needed = {"gpu": "h100-80gb", "batch": 2} if name == "estimate" else {}
    function = getattr(autotp, name)
    arguments = (torch.nn.Linear(2, 2), 2)[: 1 if name in ("distribute", "estimate") else 2]
    call, text = message(lambda: function(*arguments, sequenceparallel=True, **needed)).split(": ", 1)
    assert call.startswith(f"{name}(")
    assert text.startswith("there is no argument `sequenceparallel`\n  try      sequence_parallel")
    assert "try      one of " in message(lambda: function(*arguments, zzzz=True, **needed))


@pytest.mark.parametrize("name", OF_STEPS)
def test_an_argument_of_distribute_alone_is_named_with_it(name: str) -> None:
    """Rows of experts travel between ranks with other rows, and replicas of `parallelize` are the loop's."""
    assert name in inspect.signature(autotp.distribute).parameters
    text = message(lambda: autotp.parallelize(torch.nn.Linear(2, 2), 2, **{name: 2}))
    assert text.startswith(f"parallelize(Linear, tp=2): there is no argument `{name}`\n  try      autotp.distribute: ")


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_a_wrong_keyword_is_told_as_other_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher once, and last; with one line of autotp, or in Python 3.10 two."""
    monkeypatch.delenv(TRACEBACK)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for variable in TORCHRUN:
        monkeypatch.setenv(variable, "1")
    needed = {"gpu": "h100-80gb", "batch": 2} if name == "estimate" else {}
    arguments = (torch.nn.Linear(2, 2), 2)[: 1 if name in ("distribute", "estimate") else 2]
    with pytest.raises(autotp.Error, match="no argument") as raised:
        getattr(autotp, name)(*arguments, zzzz=True, **needed)
    assert hasattr(sys.excepthook, OURS)
    assert [line.name for line in raised.traceback[1:]] == [name] + ["within"] * (sys.version_info < (3, 11))
