"""options: each option has one of its values, or an Error lists them; passes that are left out have one order."""

from __future__ import annotations

from typing import Any

import pytest
from errors import message

from autotp.options import DEFAULTS, OPTIONAL, Options, expect_choices

PASSES = ", ".join(map(repr, OPTIONAL))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"outputs": "whole"}, "outputs='whole' is not one of its values\n  expected 'auto', 'full', 'local'"),
        ({"recompute": "some"}, "recompute='some' is not one of its values\n  expected 'none', 'selective', 'full'"),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes' is not one of its values\n  expected True, False"),
        ({"without": ("lower",)}, f"without=['lower']: there is no such pass\n  expected {PASSES}"),
        (
            {"without": "outline", "recompute": "full"},
            "without=('outline',): recompute needs blocks, which outline makes\n  try      recompute=\"none\"",
        ),
    ],
)
def test_expect_choices_names_the_wrong_option(given: dict[str, Any], text: str) -> None:
    assert message(lambda: expect_choices(Options(**given))) == text


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
