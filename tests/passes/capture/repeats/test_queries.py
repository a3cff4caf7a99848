"""queries: blocks that are given an object, as a key-value cache, are captured once; its own code runs for each."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import RAN, ZEROS, Block, runs, told
from torch import Tensor, nn

from autotp.passes.capture.capture import capture
from autotp.passes.capture.repeats.queries import BlockNumber, as_integer, is_queryable
from autotp.passes.capture.skeleton import skeleton_of


class Part:
    """What a cache has of one layer."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None


class Cache:
    """Rows by layer, as transformers' key-value caches have them."""

    size = 3

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.count = 0
        self.last: Any = None
        self.inner = Part()

    def update(self, rows: Tensor, layer: int) -> Tensor:
        while len(self.parts) <= layer:
            self.parts.append(Part())
        part = self.parts[layer]
        part.rows = rows if part.rows is None else torch.cat([part.rows, rows], 1)
        return part.rows

    def both(self, rows: Tensor, layer: int) -> tuple[Tensor, tuple[Tensor, int]]:
        return rows * 2, (self.update(rows, layer), 2)

    def sum(self, one: Tensor, two: Tensor, layer: int) -> Tensor:
        return self.update(one + two, layer)[:, :5] * one

    def counted(self) -> int:
        self.count += 1
        return self.count

    def part(self, rows: Tensor, layer: int) -> Part:
        self.update(rows, layer)
        return self.parts[layer]

    def of(self, given: dict[str, Tensor], layer: int) -> Tensor:
        return self.update(given["rows"], layer)

    def labelled(self, rows: Tensor, label: Any) -> Tensor:
        return rows if label is None else rows * (label + 1)

    def written(self, rows: Tensor, layer: int) -> Tensor:
        return self.update(rows.add_(1), layer)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, layer: int) -> Any:
        return self.parts[layer].rows

    @property
    def twice(self) -> int:
        return 2 * self.size


class Cached(nn.Module):
    """Blocks behind one another that are given one cache and know their numbers."""

    def __init__(self, does: Callable[..., Any], n: int = 3, cache: Callable[[], Any] = Cache) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(does, index=i) for i in range(n))
        self.cache = cache

    def forward(self, x: Tensor) -> Any:
        x, cache = self.first(x), self.cache()
        for block in self.blocks:
            x = block(x, cache)
        return x, [part.rows for part in getattr(cache, "parts", ())], cache.last


def updated(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
    return y * cache.update(y.exp(), block.index).sin()


def with_both(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
    twice, (rows, n) = cache.both(rows=y, layer=block.index)
    return twice * rows * n


def with_parts(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
    """Two that lie in one storage, and `x` itself."""
    one, two = torch.cat([y, y], -1).split(8, -1)
    return cache.sum(one, two, block.index) * cache.sum(one, x, block.index)


def with_an_object(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
    part = cache.part(y.exp(), block.index)
    part.rows = part.rows + y
    return y * part.rows if isinstance(part, Part) and cache.inner is not part else y


def setting(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
    before, cache.last = cache.last, y.mean()
    return y if before is None else y * before


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        pytest.param(updated, 1, id="method"),
        pytest.param(with_both, 1, id="tuples"),
        pytest.param(with_parts, 1, id="parts"),
        pytest.param(with_an_object, 1, id="object"),
        pytest.param(lambda b, x, y, c: y * (c.size + len(c) + c.twice), 1, id="plain"),
        pytest.param(lambda b, x, y, c: (c.update(y, b.index), y * c[b.index])[1], 1, id="item"),
        pytest.param(lambda b, x, y, c: y if isinstance(c, Cache) and type(c) is Cache else x, 1, id="class"),
        pytest.param(lambda b, x, y, c: y * c.update(b.drop(y), b.index), 1, id="draws"),
        pytest.param(lambda b, x, y, c: (c.update(y, b.index), y)[1], 1, id="answer-unread"),
    ],
)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_blocks_given_a_cache_are_captured_once(does: Any, expected: int, train: bool) -> None:
    assert runs(Cached(does).train(train), ZEROS) == expected


def test_objects_that_answer_otherwise_let_all_blocks_run() -> None:
    """After the first layer there is a mean: what was asked already cannot be taken back, so all run."""
    assert runs(Cached(setting), ZEROS) == 1 + 3
    assert runs(Cached(lambda b, x, y, c: y * c.counted()), ZEROS) == 1 + 3
    assert runs(Cached(lambda b, x, y, c: y * c.update(y, 0)[:, :5]), ZEROS) == 1 + 3


def missing(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
    try:
        return y * cache.missing
    except AttributeError:
        return cache.update(y, block.index)


def kept(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
    k = y.exp()
    rows = cache.update(k, block.index)
    return y * rows * k.mul_(2)


@pytest.mark.parametrize(
    "does",
    [
        pytest.param(lambda b, x, y, c: y * (len(c.parts) + 1), id="list"),
        pytest.param(lambda b, x, y, c: y * (vars(c)["count"] + 1), id="vars"),
        pytest.param(lambda b, x, y, c: y * Cache.update(c, y, b.index), id="of-the-class"),
        pytest.param(lambda b, x, y, c: y * c.update(rows=b.up.weight[:1, :1], layer=b.index), id="weight"),
        pytest.param(lambda b, x, y, c: y * c.of({"rows": y}, b.index), id="dict"),
        pytest.param(missing, id="error"),
    ],
)
def test_queries_not_understood_let_all_blocks_run(does: Any) -> None:
    """The model is captured anew, and as if blocks with objects were never alike."""
    assert runs(Cached(does), ZEROS) == 1 + 3


@pytest.mark.parametrize(
    "does",
    [
        pytest.param(lambda b, x, y, c: y * c.written(y.exp(), b.index), id="object-writes"),
        pytest.param(lambda b, x, y, c: y * c.written(x, b.index), id="object-writes-into-the-input"),
        pytest.param(kept, id="block-writes"),
        pytest.param(lambda b, x, y, c: y * c.update(x.view(-1, 8).view(x.shape), b.index), id="view"),
    ],
)
def test_memory_shared_with_an_object_lets_all_blocks_run(does: Any) -> None:
    """Either side would not see what the other writes."""
    assert runs(Cached(does), ZEROS) == 1 + 3


def test_an_answer_written_to_later_lets_all_blocks_run() -> None:
    class Doubling(Cached):
        def forward(self, x: Tensor) -> Any:
            x, cache = self.first(x), self.cache()
            for i, block in enumerate(self.blocks):
                x = block(x, cache)
                cache.parts[i].rows.mul_(2)
            return x, [part.rows for part in cache.parts]

    assert runs(Doubling(lambda b, x, y, c: y * c.update(y.exp(), b.index)), ZEROS) == 1 + 3


class Attention(nn.Module):
    """A part that asks, within a block."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, y: Tensor, cache: Any) -> Tensor:
        return y * cache.both(y.exp(), self.index)[0]


def test_queries_by_a_part_of_a_block_are_followed() -> None:
    model = Cached(lambda b, x, y, c: b.attention(y, c))
    for i, block in enumerate(model.blocks):
        block.attention = Attention(i)
    assert runs(model, ZEROS) == 1


class Mixed(Cached):
    """Blocks that are given no object, before those that are."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__(does)
        self.others = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.others(self.first(x)))


def test_blocks_without_objects_run_once_beside_others() -> None:
    assert runs(Mixed(updated), ZEROS) == 1 + 1
    assert runs(Mixed(lambda b, x, y, c: y * (len(c.parts) + 1)), ZEROS) == (1 + 1) + (1 + 3)


def without_grad(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        rows = cache.update(y, block.index)
    return y * rows


def test_queries_under_no_grad_let_all_blocks_run() -> None:
    """A later one would be made in other modes."""
    assert runs(Cached(without_grad), ZEROS) == 1 + 3


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        pytest.param(lambda b, x, y, c: y * (b.index + 1), 3, id="value"),
        pytest.param(lambda b, x, y, c: y if b.index < 2 else y * 2, 3, id="comparison"),
        pytest.param(lambda b, x, y, c: y if b.index else y * 2, 3, id="truth"),
        pytest.param(lambda b, x, y, c: y * [1, 2, 3][b.index], 3, id="index"),
        pytest.param(lambda b, x, y, c: y * float(f"{b.index}"), 3, id="text"),
        pytest.param(lambda b, x, y, c: (y, b.index)[0] if isinstance(b.index, int) else x, 1, id="kind"),
    ],
)
def test_layer_numbers_are_compared_where_code_uses_them(does: Any, expected: int) -> None:
    assert runs(Cached(lambda b, x, y, c: does(b, x, c.update(y, b.index), c)), ZEROS) == expected


def test_blocks_that_return_their_number_all_run() -> None:
    class Numbered(Cached):
        def forward(self, x: Tensor) -> Any:
            x, cache = self.first(x), self.cache()
            for block in self.blocks:
                x, n = block(x, cache)
                x = x * (n + 1)
            return x

    assert runs(Numbered(lambda b, x, y, c: (c.update(y, b.index), b.index)), ZEROS) == 3


def test_a_block_whose_number_is_none_runs_itself() -> None:
    model = Cached(lambda b, x, y, c: c.labelled(y, b.index) if isinstance(b.index, int) else y)
    model.blocks[2].index = None
    assert runs(model, ZEROS) == 2


KEPT: list[Any] = []


def test_layer_numbers_used_later_let_all_blocks_run() -> None:
    """By then other blocks have been said to do the same."""

    class Scaled(Cached):
        def forward(self, x: Tensor) -> Any:
            x, cache = self.first(x), self.cache()
            for block in self.blocks:
                x = block(x, cache)
            return x * (KEPT[-1] + 1)

    def does(block: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
        KEPT.append(block.index)
        return cache.labelled(y, block.index)

    assert runs(Scaled(does), ZEROS) == 1 + 3


def test_a_number_does_what_an_integer_does() -> None:
    used = []
    number: Any = BlockNumber(6, ("", "index"), lambda: used.append(1))
    binary = [operator.add, operator.mul, operator.floordiv, operator.mod, operator.pow, operator.lt, operator.eq]
    for f in [*binary, operator.sub, operator.and_, operator.lshift, divmod, operator.truediv, operator.ne]:
        used.clear()
        assert (f(number, 4), f(4, number)) == (f(6, 4), f(4, 6)) and len(used) >= 2
        assert f(number, number) == f(6, 6)
    for one in (bool, int, float, str, repr, hash, operator.index, operator.neg, abs, range, [*range(9)].__getitem__):
        used.clear()
        assert one(number) == one(6) and used
    assert number.bit_length() == 3 and as_integer(number) == 6 and isinstance(number, int)
    assert f"{number:03d}" == "006" and {6: "a"}[number] == "a"


class Open:
    def __getattr__(self, name: str) -> int:
        return 1


class Slotted(Part):
    __slots__ = ("seen",)


class Listed(list[int]):
    """What it holds is not behind its methods."""


class Locked:
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError


@pytest.mark.parametrize(
    "value", [Open(), Slotted(), Listed(), Locked(), [], {}, object(), torch.zeros(1), nn.Linear(1, 1), len, Part, 1]
)
def test_is_queryable_refuses_open_or_builtin_objects(value: Any) -> None:
    """It could be got around its methods."""
    assert not is_queryable(value) and is_queryable(Cache())


def test_blocks_with_caches_of_their_own_run_once() -> None:
    class Several(Cached):
        def forward(self, x: Tensor) -> Any:
            x, caches = self.first(x), [Cache() for _ in self.blocks]
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, cache)
            return x, [part.rows for cache in caches for part in cache.parts]

    assert runs(Several(updated), ZEROS) == 1
    assert runs(Several(lambda b, x, y, c: y * c.update(y, 0)), ZEROS) == 1


def test_queries_compare_which_object_is_asked() -> None:
    class Two(Cached):
        def forward(self, x: Tensor) -> Any:
            x, caches = self.first(x), (Cache(), Cache())
            for i, block in enumerate(self.blocks):
                x = block(x, caches[0], caches[i > 1])
            return x, [part.rows for cache in caches for part in cache.parts]

    def does(block: Any, x: Tensor, y: Tensor, one: Any, other: Any) -> Tensor:
        return one.update(y, block.index) * (1 if one is other else other.update(y * 2, block.index))

    assert runs(Two(does, 4), ZEROS) == 2


def test_queries_leave_the_object_s_class_unchanged() -> None:
    before = dict(vars(Cache))
    runs(Cached(updated), ZEROS)
    assert dict(vars(Cache)) == before
    with pytest.raises(RuntimeError, match="does not run"):
        capture(skeleton_of(Cached(lambda b, x, y, c: c.update(y, b.index) @ y)), (ZEROS,), {})
    assert dict(vars(Cache)) == before


def test_an_object_s_code_runs_for_each_block() -> None:
    class Noting(Cache):
        def update(self, rows: Tensor, layer: int) -> Tensor:
            RAN.append(f"layer {layer}")
            return super().update(rows, layer)

    RAN.clear()
    graph = capture(skeleton_of(Cached(updated, cache=Noting)), (ZEROS,), {}).graph
    assert RAN == ["block", "layer 0", "layer 1", "layer 2"]
    assert told(graph) == told(capture(skeleton_of(Cached(updated)), (ZEROS,), {}).graph)
