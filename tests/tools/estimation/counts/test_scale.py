"""Records of many rows, made of those of two and of three."""

import torch

from autotp.models.gpt import GPT, GPTConfig
from autotp.tools.estimation.counts.pieces import recorded
from autotp.tools.estimation.counts.scale import scaled
from autotp.tools.estimation.estimate import captured
from autotp.tools.estimation.layout import StepLayout


def test_the_record_is_the_one_that_a_run_gives() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=32, vocab_size=128, n_layer=3, n_head=4, n_embd=64))
    lowered = captured(model, StepLayout(batch=1, tp=2, sequence_parallel=True), None)
    two, three, five = (recorded(lowered, rows).records for rows in (2, 3, 5))
    for a, b, run in zip(two, three, five, strict=True):
        made = scaled(a, b, 5)
        assert made is not None and made.ops == run.ops and made.sent == run.sent
        assert dict(made.kept) == dict(run.kept) and made.inputs == run.inputs


def test_other_operators_are_not_scaled() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=32, vocab_size=128, n_layer=3, n_head=4, n_embd=64))
    lowered = captured(model, StepLayout(batch=1), None)
    first, middle, _ = recorded(lowered, 1).records
    assert scaled(first, middle, 5) is None
