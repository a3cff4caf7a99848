"""text_table: names folded into ranges, rows broken to the width of a page, bytes."""

from __future__ import annotations

import pytest

from autotp.display.text_table import WIDTH, bytes_text, folded, table_cells


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["h.0.a", "h.1.a", "h.2.a"], ["h.{0-2}.a"]),
        (["h.0.a", "h.2.a", "h.3.a", "h.5.a"], ["h.{0,2-3,5}.a"]),
        (["h.0.a.weight", "h.0.a.bias"], ["h.0.a.{weight,bias}"]),
        (["h.0.q.w", "h.0.k.w", "h.1.q.w", "h.1.k.w"], ["h.{0-1}.{q,k}.w"]),
        (["a.0.w", "b.0.w.x"], ["a.0.w", "b.0.w.x"]),
    ],
    ids=["layers", "runs", "last", "before-last", "apart"],
)
def test_folded_joins_names_that_differ_in_one_place(names: list[str], found: list[str]) -> None:
    assert folded([(name, ("[8]", "")) for name in names]) == [(name, "[8]", "") for name in found]


def test_folded_keeps_rows_with_other_values_apart() -> None:
    assert folded([("h.0.a", ("[8]",)), ("h.1.a", ("[4]",))]) == [("h.0.a", "[8]"), ("h.1.a", "[4]")]


def lines(head: tuple[str, ...], rows: list[tuple[str, ...]], width: int = WIDTH) -> list[str]:
    return ["".join(cells).rstrip() for cells in table_cells(head, rows, width)]


def test_table_lines_align_columns() -> None:
    assert lines(("name", "why"), [("a", "one"), ("bcdef", "")]) == ["name   why", "a      one", "bcdef"]


def test_table_lines_break_at_the_page_width() -> None:
    """The widest column is broken: behind a space, a dot or a comma, or anywhere if there is none."""
    long, why = "a_module_of_a_long_name." * 6 + "weight", "every rank needs all of its result " * 5
    every = lines(("name", "why"), [(long, why), ("x" * 150, "")])
    assert max(map(len, every)) <= WIDTH
    found = [line.split("  ")[0].strip() for line in every[1:]]
    assert "".join(found) == long + "x" * 150
    assert all(part.endswith(".") for part in found[:2])


def test_table_lines_keep_words_and_numbers_in_one_piece() -> None:
    """Also those of the head, where the page is narrow: then one space stands between columns."""
    head, row = ("rank", "activations", "transients", "GiB in all"), ("error bar", "±4.7%", "10.33", "56.45 ±0.5")
    assert lines(head, [row], 40) == [
        "rank    activations  transients  GiB in",
        "                                 all",
        "error   ±4.7%        10.33       56.45",
        "bar                              ±0.5",
    ]
    assert lines(head, [row], 35) == [
        "rank  activations transients GiB",
        "                             in all",
        "error ±4.7%       10.33      56.45",
        "bar                          ±0.5",
    ]


def test_bytes_text_has_decimal_units() -> None:
    counts = (0, 999, 1000, 1_250_000, 2.5e9, 7e12, 1e15)
    assert list(map(bytes_text, counts)) == ["0 B", "999 B", "1.0 KB", "1.2 MB", "2.5 GB", "7.0 TB", "1000.0 TB"]
