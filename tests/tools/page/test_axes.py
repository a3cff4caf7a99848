"""The axes of a page: their names, and shapes as cells that belong to them."""

from __future__ import annotations

from autotp.sharding.axis import Axis, Size
from autotp.tools.page.axes import PageAxes
from autotp.tools.page.subject import Subject


def test_axes_have_the_names_of_the_field(axes: PageAxes) -> None:
    found = {axis["label"]: (axis["length"], axis["cut"]) for axis in axes.data()}
    assert found["batch"] == (1, False) and found["sequence"] == (64, True)
    assert found["hidden"] == (64, False) and found["width"] == (256, True)
    assert found["heads"] == (4, True) and found["head size"] == (16, False)
    assert found["vocab"] == (512, True)


def test_a_fused_weight_is_heads_and_head_sizes_side_by_side(axes: PageAxes, subject: Subject) -> None:
    place = next(n for n in subject.types if subject.names.get(n.name) == "h.1.attn.c_attn.weight")
    axes.block = "h.1"
    shape = axes.shape(subject.types[place][0])
    labels = [axis["label"] for axis in axes.data()]
    rows, columns = ([(labels[cell["axis"]], cell["text"], cell["joint"]) for cell in dim] for dim in shape["dims"])
    assert rows == [
        ("heads", "4", ""), ("head size", "16", "·"), ("heads", "4", "+"), ("head size", "16", "·"),
        ("heads", "4", "+"), ("head size #2", "16", "·"),
    ]  # fmt: skip
    assert columns == [("hidden", "64", "")] and shape["dtype"] == "bf16" and shape["mark"] == ""
    assert [cell["cut"] for cell in shape["dims"][0]] == [True, False] * 3


def test_alike_blocks_have_the_same_axes(axes: PageAxes, subject: Subject) -> None:
    found = []
    for block in ("h.0", "h.3"):
        place = next(n for n in subject.types if subject.names.get(n.name) == f"{block}.mlp.c_fc.weight")
        axes.block = block
        found.append(axes.shape(subject.types[place][0]))
    assert found[0] == found[1]


def test_a_sum_over_ranks_has_its_mark(axes: PageAxes, subject: Subject) -> None:
    marks = {n.name: axes.shape(types[0])["mark"] for n, types in subject.types.items() if types}
    assert set(marks.values()) == {"", "copied", "partial"}


def test_labels_are_unique_also_where_blocks_differ(axes: PageAxes) -> None:
    hidden = Axis(Size(7))
    first, second = Axis(Size(7)), Axis(Size(9))
    axes.block = "h.0"
    numbers = [axes.number(leaf) for leaf in (hidden, first)]
    axes.block = "h.1"
    numbers += [axes.number(leaf) for leaf in (Axis(Size(7)), second, hidden)]
    axes.block = ""
    labels = [axis["label"] for axis in axes.data()]
    assert len(labels) == len(set(labels))
    assert [labels[n] for n in numbers if n is not None] == [
        "axis of 7", "axis of 7 #2", "axis of 7", "axis of 9", "axis of 7",
    ]  # fmt: skip
