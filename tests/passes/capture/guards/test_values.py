"""values: what Python reads of tensors' values is a guard, in the models that can have one; the others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import line_of, message
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse
from autotp.options import Options
from autotp.passes.capture.capture import capture
from autotp.passes.capture.captured import Attempt, contradicted
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues, Outcome, Place, place_text
from autotp.passes.capture.skeleton import skeleton_of

line = partial(line_of, __file__)
IDS = torch.tensor([[0, 7, 3, 4], [1, 9, 2, 5]])


class Reading(nn.Module):
    """Calls `own(self, ids)`, which reads values."""

    def __init__(self, own: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.e, self.up, self.down = nn.Embedding(10, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.own = own

    def mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out

    def forward(self, ids: Tensor) -> Any:
        return self.own(self, ids)


# ---- of inputs


def an_item(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids[:, : ids.max().item() % 4 + 1]))


def a_list(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids)) * len([x for row in ids.tolist() for x in row if x > 3])


def a_branch(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids)) if (ids > 8).any() else self.e(ids)


def an_int(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids)) * int(ids.max()) + float(ids.float().mean())


def numpys(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids)) * int(ids.numpy().max()) + ids.numpy()[0, 1]


def contained(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids)) if 7 in ids and not torch.equal(ids, ids + 1) else self.e(ids)


def sizes(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids).view(ids.max() - 5, -1, 8)) + torch.zeros((ids.max() - 5, 1, 8))


def bounds(self: Any, ids: Tensor) -> Any:
    x = self.e(ids).clone()
    x[:, : ids[0, 2]] = 0
    return self.mlp(x)[:, : ids[1, 2]]


def of_a_size(self: Any, ids: Tensor) -> Any:
    """A range whose ends are elements of a range of floating numbers: transformers' Funnel."""
    places = torch.arange(0, ids.shape[1], dtype=torch.float32)
    return self.mlp(self.e(ids)) * torch.arange(places[-1], places[0] - 1, -1)[:, None]


def masked(self: Any, ids: Tensor) -> Any:
    kept = self.e(ids)[ids > 3]
    return self.mlp(kept * 2 if len(kept) > 2 else kept).sum()


def nonzero(self: Any, ids: Tensor) -> Any:
    i, j = (ids > 3).nonzero(as_tuple=True)
    found = torch.zeros(len(i), 8)
    return self.mlp(found + self.e(ids)[i, j] if found.numel() else found)


def repeated(self: Any, ids: Tensor) -> Any:
    x = torch.repeat_interleave(self.e(ids)[0], ids[0] % 3, dim=0)
    return self.mlp(x + 1 if len(x) > 3 else x)


def written(self: Any, ids: Tensor) -> Any:
    ends = torch.zeros(len(ids), dtype=torch.long)
    for i in range(len(ids)):
        ends[i] = ids[i].max() % 4
    ends += 1
    return self.mlp(self.e(ids))[:, : int(ends.max())]


def a_changed_list(self: Any, ids: Tensor) -> Any:
    """The list is the model's own."""
    rows = ids.tolist()
    rows[0].append(7)
    rows[1].sort()
    return self.mlp(self.e(ids)) * len(rows[0]) if rows[1][0] < 9 else self.e(ids)


def an_array(self: Any, ids: Tensor) -> Any:
    own = ids.numpy().copy()
    own += 1
    return self.mlp(self.e(ids)) * int(own.sum())


def the_greatest(self: Any, ids: Tensor) -> Any:
    """The exporter has no comparison for max() of tensors."""
    greatest, ordered = max(ids[0, 1], ids[1, 0]), sorted([ids[0, 1], ids[0, 0], ids[0, 2]])
    return self.mlp(self.e(ids)) * greatest + ordered[0] * 10 + ordered[2]


def by_rows(self: Any, ids: Tensor) -> Any:
    """torch.vmap hides where its result comes from."""
    found = torch.vmap(lambda row: row.max() * 2)(ids)
    return self.mlp(self.e(ids)) if (found > 17).any() else self.e(ids)


def one_after_the_other(self: Any, ids: Tensor) -> Any:
    first = int(ids.max()) % 3 + 1
    return self.mlp(self.e(ids))[:, : ids[:, :first].max().item() % 4 + 1]


OF_INPUTS = (
    an_item, a_list, a_branch, an_int, numpys, contained, sizes, bounds, of_a_size, masked, nonzero, repeated, written,
    a_changed_list, an_array, the_greatest, by_rows, one_after_the_other,
)  # fmt: skip


@pytest.mark.parametrize("own", OF_INPUTS, ids=lambda own: own.__name__)
@pytest.mark.parametrize("tp", [2, 3])
def test_reads_of_inputs_equal_one_device(own: Callable[..., Any], tp: int) -> None:
    report = autotp.verify(Reading(own), tp, example_inputs=IDS)
    assert report.ok, report


# ---- of activations


def all_is_well(self: Any, ids: Tensor) -> Any:
    x = self.e(ids)
    if not torch.isfinite(x).all():
        x = x.clamp(-1, 1)
    assert x.isnan().sum() == 0
    return self.mlp(x).nan_to_num() if self.up(x).isnan().any() else self.mlp(x)


def of_parts(self: Any, ids: Tensor) -> Any:
    h = self.up(self.e(ids))
    return self.down(h.clamp(max=0.1) if (h > 0.1).any() else h)


def of_a_parameter(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids)) if self.up.weight.norm() > 1e-6 else ids * 1.0


def a_draw(self: Any, ids: Tensor) -> Any:
    x = F.dropout(self.mlp(self.e(ids)))
    return x * 2 if torch.rand(()) < 0.5 else F.dropout(x)


def one_of_two(self: Any, ids: Tensor) -> Any:
    """What is assumed first raises an exception."""
    x = self.mlp(self.e(ids))
    if not (x.abs().sum() > 0):
        raise ValueError("nothing")
    return x


@pytest.mark.parametrize("own", [all_is_well, of_parts, of_a_parameter, a_draw, one_of_two], ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_reads_of_activations_equal_one_device(own: Callable[..., Any], seed: int) -> None:
    torch.manual_seed(seed)
    report = autotp.verify(Reading(own), 2, example_inputs=IDS)
    assert report.ok, report


def test_draws_that_nothing_reads_stay_in_the_graph() -> None:
    """A layer that is not skipped has drawn a number; the masks of dropout after it must be the same."""

    def skipping(self: Any, ids: Tensor) -> Any:
        if ids.max() > 50:
            raise ValueError("too large")
        x = self.e(ids) if torch.rand(()) < 0 else self.mlp(self.e(ids))
        return F.dropout(x)

    report = autotp.verify(Reading(skipping), 2, example_inputs=IDS)
    assert report.ok, report


def test_data_is_a_detached_tensor() -> None:
    report = autotp.verify(
        Reading(lambda self, ids: (h := self.mlp(self.e(ids))) - h.data.mean() + self.up.weight.data.sum()),
        2,
        example_inputs=IDS,
    )
    assert report.ok, report


# ---- what is listed


def asked(own: Callable[..., Any], values: KnownValues = NO_VALUES, ids: Tensor = IDS) -> list[tuple[str, Any]]:
    """Functions and values of what is read."""
    found = capture(skeleton_of(Reading(own)), (ids,), {}, attempt=Attempt(values=values))
    return [(read.outcome.place.function, read.outcome.value) for read in found.asked]


def test_reads_are_noted_with_the_values_of_the_call() -> None:
    assert asked(a_branch) == [("__bool__", True)]
    assert asked(a_branch, ids=IDS % 3) == [("__bool__", False)]
    assert ("__int__", 9) in asked(an_int)
    assert [value for _, value in asked(masked)] == [4]


def test_reads_of_activations_assume_likely_values() -> None:
    assert asked(all_is_well) == [("__bool__", True), ("__bool__", True), ("__bool__", False)]


def test_outcomes_of_a_run_come_first() -> None:
    """Outcomes of other places are of another run."""
    found = capture(skeleton_of(Reading(all_is_well)), (IDS,), {})
    first = found.asked[0].outcome
    known = KnownValues(found.attempt.values.places, (first._replace(value=False),))
    assert [value for _, value in asked(all_is_well, known)] == [False, True, False]
    other = KnownValues(found.attempt.values.places, (Outcome(Place("other.py", 1, "item"), False),))
    assert [value for _, value in asked(all_is_well, other)] == [True, True, False]


def test_a_size_is_a_symbol_where_a_rank_can_compute_it() -> None:
    """Then the graph is right for all values."""

    def parts(self: Any, ids: Tensor) -> Any:
        return torch.cat([part * 2 for part in self.mlp(self.e(ids)).split((ids[0] % 2 + 1).tolist()[:2])])

    found = analyse(skeleton_of(Reading(parts)), (torch.tensor([[0, 1, 3, 4], [1, 9, 2, 5], [1, 1, 1, 1]]),), {}, 2)
    assert found.captured.asked == ()
    assert len(found.captured.symbolic) == 1
    found = analyse(skeleton_of(Reading(an_item)), (IDS,), {}, 2)
    assert [read.outcome.value for read in found.captured.asked] in ([], [9])


def test_a_number_that_decides_nothing_stays_a_symbol() -> None:
    def scaled(self: Any, ids: Tensor) -> Any:
        return self.mlp(self.e(ids)) * ids.sum().item()

    assert asked(scaled) == []
    assert autotp.verify(Reading(scaled), 2, example_inputs=IDS).ok


def test_shown_place_has_file_and_line() -> None:
    place = Place(__file__, 1, "item")
    assert place_text(place).startswith("test_values.py:1  ")


def test_known_outcomes_come_before_other_values() -> None:
    """Another device's values may differ in the last digit."""

    def rounds(self: Any, ids: Tensor) -> Any:
        return sum(self.mlp(self.e(ids)) for _ in range(ids.max().item()))

    found = capture(skeleton_of(Reading(rounds)), (IDS,), {})
    known = KnownValues(found.attempt.values.places, (found.asked[0].outcome._replace(value=8),))
    assert asked(rounds, known) == [("item", 8)]


def test_what_an_earlier_graph_read_is_not_compared() -> None:
    """Two graphs that round differently would name each other for ever."""
    found = capture(skeleton_of(Reading(all_is_well)), (IDS,), {})
    outputs = [torch.tensor(False)] * 20
    given = [contradicted(found, outputs, first) for first in (0, 1, 2)]
    values = [known and [outcome.value for outcome in known.outcomes] for known in given]
    assert values == [[False], [True, False], None]


# ---- refused


def a_number_of_an_activation(self: Any, ids: Tensor) -> Any:
    return self.mlp(self.e(ids))[:, : int(self.e(ids).abs().max()) + 1]


def a_caught_exception(self: Any, ids: Tensor) -> Any:
    """With values there is no exception."""
    x = self.e(ids)
    try:
        x = x[:, : int(x.abs().sum().item()) + 1]
    except Exception:  # As models catch what does not work in a tracer.
        x = x * 0
    return self.mlp(x)


def a_written_array(self: Any, ids: Tensor) -> Any:
    own = ids.clone()
    own.numpy()[0] = 1
    return self.mlp(self.e(own))


def an_array_of_a_written_tensor(self: Any, ids: Tensor) -> Any:
    own = ids.clone()
    array = own.numpy()  # It sees the write.
    own[0] = 1
    return self.mlp(self.e(own)) * int(array.sum())


def a_loop(self: Any, ids: Tensor) -> Any:
    x = self.mlp(self.e(ids))
    while x.abs().max() > 1:
        x = x / 2
    return x


def an_endless_loop(self: Any, ids: Tensor) -> Any:
    x = self.mlp(self.e(ids))
    for _ in range(1000):
        if (x.abs() > 1).any():
            break
        x = x * 2
    return x


@pytest.mark.parametrize(
    ("own", "what", "at"),
    [
        (a_number_of_an_activation, "makes a Python number of a tensor's values", "int(self.e(ids).abs().max()) + 1]"),
        (a_caught_exception, "makes a Python number of a tensor's values", "x = x[:, : int(x.abs()"),
        (a_written_array, "share memory, and forward writes into it", "own.numpy()[0] = 1"),
        (an_array_of_a_written_tensor, "share memory, and forward writes into it", "array = own.numpy()"),
        (a_loop, "has a loop whose length depends on the values", "while x.abs()"),
        (an_endless_loop, "branches on the values of a tensor", "if (x.abs() > 1).any()"),
    ],
)  # fmt: skip
def test_reads_that_no_graph_can_have_are_refused(own: Callable[..., Any], what: str, at: str) -> None:
    found = message(lambda: autotp.explain(Reading(own), 2, example_inputs=IDS))
    assert what in found
    assert line(at) in found


# ---- numbers with a point are not those of algebra


class Asked(nn.Module):
    """Computes three times as much if `ask` says so of the largest number. x: [rows, 6]"""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.down, self.ask = nn.Linear(6, 12), nn.Linear(12, 6), ask

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(self.up(torch.nan_to_num(x, 0, 1, 1)))
        return hidden * (3 if self.ask(x.max().item()) else 1)


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m != m,
        lambda m: not m == m,  # noqa: SIM201
        lambda m: m - m != 0,
        lambda m: m * 0 != 0,
        lambda m: not m + 1 > m,
        lambda m: m + 1e-17 == m,
        lambda m: 2 * m > m,
        lambda m: (m + 3e16) - 3e16 != m,
        lambda m: (m + m * m) - m * m > 0,
        lambda m: m > 1,
    ],
)
def test_reads_of_infinity_and_round_off_equal_one_device(ask: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    whole = Asked(ask)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1)
    for number in (2.0, float("nan"), float("inf"), 0.5, 1e20, float("nan")):
        x = torch.linspace(-1, 0.5, 18).view(3, 6)
        x[0, 0] = number
        torch.testing.assert_close(parallel(x), whole(x))


# ---- numbers of buffers and activations that decide


class Counted(nn.Module):
    """Calls `own(self, hidden)`; buffers count the calls. x: [rows, 6]"""

    steps: Tensor
    started: Tensor
    on: Tensor

    def __init__(self, own: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.own = nn.Linear(6, 12), nn.Linear(12, 6), own
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("started", torch.tensor(0, dtype=torch.uint8))
        self.register_buffer("on", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.own(self, self.up(x)))


def warms_up(self: Any, hidden: Tensor) -> Tensor:
    self.steps += 1
    return hidden if self.steps.item() > 2 else hidden * 2


def reads_before_it_counts(self: Any, hidden: Tensor) -> Tensor:
    steps = self.steps.item()
    self.steps += 1
    return hidden if steps > 2 else hidden * 2


def each_second(self: Any, hidden: Tensor) -> Tensor:
    self.steps += 1
    return hidden if self.steps.item() % 2 == 0 else hidden * 2


def each_third(self: Any, hidden: Tensor) -> Tensor:
    self.steps += 1
    return hidden * 2 if self.steps.item() % 3 else hidden * (3 if self.steps.item() // 2 > 1 else 1)


def starts(self: Any, hidden: Tensor) -> Tensor:
    """As the ActNorm of flows does."""
    first = self.started.item() == 0
    if first:
        self.started.fill_(1)
    return hidden * 2 if first else hidden


def is_switched_on(self: Any, hidden: Tensor) -> Tensor:
    found = hidden if self.on.item() else hidden * 2
    self.on.fill_(True)
    return found


def of_an_activation(self: Any, hidden: Tensor) -> Tensor:
    largest = hidden.abs().max().item()
    if 0.5 < largest < 1.5 or largest > 4:
        hidden = hidden / largest
    return hidden


def is_true(self: Any, hidden: Tensor) -> Tensor:
    return hidden * 2 if (hidden.max() > 1).item() is True else hidden


@pytest.mark.parametrize(
    "own",
    [warms_up, reads_before_it_counts, each_second, each_third, starts, is_switched_on, of_an_activation, is_true],
    ids=lambda own: own.__name__,
)  # fmt: skip
def test_numbers_that_decide_are_read_in_each_call(own: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    whole = Counted(own)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1)
    for size in (1, 3, 0.1, 5, 0.5, 10):
        x = torch.randn(4, 6) * size
        torch.testing.assert_close(parallel(x), whole(x))
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(parallel.get_buffer(name), buffer)
    report = autotp.verify(Counted(own), 2, example_inputs=torch.randn(4, 6))
    assert report.ok, report


# ---- numpy


@pytest.mark.parametrize(
    "own",
    [
        lambda self, ids: self.mlp(self.e(ids)) / np.sqrt(ids.shape[1]),
        lambda self, ids: self.mlp(self.e(ids)) * float(np.log(ids.shape[0] + 1)),
        lambda self, ids: self.mlp(self.e(ids))[:, : int(np.ceil(ids.shape[1] / 2))],
        lambda self, ids: self.mlp(self.e(ids)) / np.sqrt(ids.max().item()),
        lambda self, ids: self.mlp(self.e(ids)) * np.float64(2) * float(np.maximum(ids.shape[1], 3)),
    ],
)
def test_functions_of_numpy_are_read_in_each_call(own: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    whole = Reading(own)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1)
    for length in (4, 3, 2):
        torch.testing.assert_close(parallel(IDS[:, :length]), whole(IDS[:, :length]))


# ---- what the model catches


@pytest.mark.parametrize(
    "read",
    [
        lambda ids: float(ids.numpy().mean()),
        lambda ids: float(np.asarray(ids).mean()),
        lambda ids: float(np.sqrt(ids.max().item())),
        lambda ids: abs(torch.complex(ids.float(), ids.float()).sum().item()),
        lambda ids: float(ids[0].tolist()[2]),
    ],
)
def test_a_read_that_a_model_catches_is_still_captured(read: Callable[[Tensor], float]) -> None:
    """Only a capture raises these exceptions, so the model does not go on as if its own read had failed."""

    def own(self: Any, ids: Tensor) -> Any:
        try:
            number = read(ids)
        except Exception:
            number = 9.0
        return self.mlp(self.e(ids)) * number

    torch.manual_seed(0)
    whole = Reading(own)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1)
    for ids in (IDS, IDS.flip(1)):
        torch.testing.assert_close(parallel(ids), whole(ids))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: int(x),
        lambda x: 1.0 if x else 3.0,
        lambda x: float("a" in x),
    ],
)
def test_a_read_that_fails_on_one_device_too(read: Callable[[Tensor], float]) -> None:
    """The model's own way on is the graph's."""

    def own(self: Any, ids: Tensor) -> Any:
        try:
            number = read(ids)
        except (RuntimeError, TypeError, ValueError):
            number = 2.0
        return self.mlp(self.e(ids)) * number

    torch.manual_seed(0)
    whole = Reading(own)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=IDS)
    torch.testing.assert_close(parallel(IDS), whole(IDS))


def test_an_address_is_refused() -> None:
    def own(self: Any, ids: Tensor) -> Any:
        try:
            at = ids.data_ptr()
        except RuntimeError:
            at = 0
        return self.mlp(self.e(ids)) * (at > 0)

    with pytest.raises(autotp.Error, match="Cannot access data pointer"):
        autotp.parallelize(Reading(own), 1, example_inputs=IDS)


def test_a_model_that_fails_on_these_values() -> None:
    def short(self: Any, ids: Tensor) -> Any:
        return self.mlp(self.e(ids)[..., : ids.max().item() % 8])

    found = message(lambda: autotp.explain(Reading(short), 2, example_inputs=IDS))
    assert "the model does not run on these inputs" in found


def test_a_model_that_fails_only_while_it_is_captured() -> None:
    """It runs on one device: the exception speaks of a class that only a capture has."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)
            return padded

    given = torch.ones(3, 5, 16), torch.tensor([5, 2, 3])
    assert Packed()(*given).shape == (3, 5, 16)
    found = message(lambda: autotp.explain(Packed(), 2, example_inputs=given))
    assert "torch.export cannot trace the model: TypeError" in found
    assert line("padded, _ = nn") in found


def test_parts_of_a_batch_are_refused() -> None:
    """One microbatch may branch otherwise than another."""

    def loss(self: Any, ids: Tensor) -> Any:
        x = self.mlp(self.e(ids))
        return x.mean() if x.isfinite().all() else x.sum()

    found = message(lambda: analyse(skeleton_of(Reading(loss)), (IDS,), {}, 2, Options(summed=True)))
    assert "Python reads values of tensors in forward" in found
    assert line("return x.mean() if") in found
