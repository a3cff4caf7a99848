"""Prices of closed forms are near those of estimate."""

from dataclasses import replace

import pytest
import torch

from autotp.costs.hardware import KINDS
from autotp.models.gpt import GPT, GPTConfig
from autotp.tools.estimation.closed_form import ClosedForms
from autotp.tools.estimation.estimate import captured
from autotp.tools.estimation.layout import AUTOTP, StepLayout
from autotp.tools.estimation.price import Prices, memory_of_ranks, price, step_seconds
from autotp.tools.estimation.search import Layouts

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def prices() -> Prices:
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=1024, vocab_size=8192, n_layer=16, n_head=16, n_embd=2048))
    return Prices(captured(model, StepLayout(batch=1, tp=2, pp=2, dtype=BF16), None), KINDS["a100-80gb"], AUTOTP)


@pytest.mark.parametrize(
    "given", [{}, {"dp": 4}, {"pp": 4}, {"pp": 4, "schedule": "interleaved", "interleave": 2}, {"dp": 4, "zero": 3},
     {"pp": 4, "schedule": "zero-bubble"}, {"pp": 4, "schedule": "zero-bubble-v"}],
    ids=lambda given: "-".join(map(str, given.values())) or "one",
)  # fmt: skip
def test_a_closed_form_is_priced_near_the_played_schedule(prices: Prices, given: dict[str, int]) -> None:
    layout = StepLayout(batch=64, tp=2, micro_batch=2, dtype=BF16, **given)  # type: ignore[arg-type]
    step, full = ClosedForms(prices).simulated(layout), price(prices, layout)
    (memory,) = memory_of_ranks(prices, layout, step)
    assert step_seconds(prices, layout, step) == pytest.approx(full.seconds, rel=0.12)
    assert memory.total == pytest.approx(max(rank.total for rank in full.memory), rel=0.2)


@pytest.mark.parametrize(("tp", "cp"), [(1, 4), (2, 2), (2, 4), (4, 2)])
def test_a_price_without_a_graph_is_low(tp: int, cp: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=2048, vocab_size=8192, n_layer=4, n_head=16, n_embd=2048, dropout=0.0))
    layouts = Layouts(model, KINDS["a100-80gb"], AUTOTP, StepLayout(batch=1, dtype=BF16), None, None)
    base = StepLayout(batch=4, tp=tp, cp=cp, dtype=BF16, sequence_parallel=tp > 1)
    by_rows = {rows: replace(base, batch=rows, micro_batch=rows) for rows in (1, 4)}
    low = {rows: layouts.rough(layout) for rows, layout in by_rows.items()}
    low_rows = {rows: layouts.closed_forms(tp, cp).rows(rows) for rows in by_rows}
    layouts.prices(tp, cp, "none")
    for rows, layout in by_rows.items():
        lowered = layouts.rough(layout)
        assert 0.4 * lowered.seconds < low[rows].seconds < 1.01 * lowered.seconds
        of_graph = layouts.closed_forms(tp, cp).rows(rows)
        assert 0.4 * of_graph.weights <= low_rows[rows].weights <= 1.01 * of_graph.weights
        assert 0.6 * lowered.memory < low[rows].memory < 1.01 * lowered.memory
