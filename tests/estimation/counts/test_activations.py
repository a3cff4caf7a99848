"""The memory of blocks, against the formulas of Korthikanti et al. 2022, table 2."""

import pytest
import torch

from autotp.estimation.counts.activations import stage_memory, transients
from autotp.estimation.counts.pieces import Recorded, recorded, whole_flops
from autotp.estimation.estimate import captured
from autotp.estimation.layout import Layout
from autotp.models.gpt import GPT, GPTConfig
from autotp.options import Recompute

SEQ, ROWS, HIDDEN, HEADS, TP, VOCAB, LAYERS = 64, 3, 256, 16, 4, 512, 5
SBH = SEQ * ROWS * HIDDEN


def found(recompute: Recompute = "none", sequence_parallel: bool = False, layers: int = LAYERS) -> Recorded:
    with torch.device("meta"):
        config = GPTConfig(block_size=SEQ, vocab_size=VOCAB, n_layer=layers, n_head=HEADS, n_embd=HIDDEN)
        model = GPT(config).bfloat16()
    layout = Layout(batch=ROWS, tp=TP, recompute=recompute, sequence_parallel=sequence_parallel)
    return recorded(captured(model, layout, None), ROWS)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "formula"),
    [
        ("none", False, 10 + 24 / TP + 5 * HEADS * SEQ / HIDDEN / TP),
        ("none", True, 34 / TP + 5 * HEADS * SEQ / HIDDEN / TP),
        ("selective", False, 10 + 24 / TP),
        ("selective", True, 34 / TP),
        ("full", False, 2),
    ],
    ids=["tp", "sp", "tp-selective", "sp-selective", "full"],
)
def test_a_block_keeps_what_the_paper_counts(recompute: Recompute, sequence_parallel: bool, formula: float) -> None:
    pieces = found(recompute, sequence_parallel)
    kept = stage_memory(pieces.pieces[2:4], pieces).kept - stage_memory(pieces.pieces[2:3], pieces).kept
    # Norms keep mean and deviation of each row, and attention its mask: they are not in the formula.
    assert kept / SBH == pytest.approx(formula, rel=0.025)


def test_blocks_that_are_alike_are_recorded_once() -> None:
    pieces = found()
    assert [piece.kind for piece in pieces.pieces] == [0, 1, 1, 1, 2] and len(pieces.records) == 3


def test_logits_stand_for_themselves() -> None:
    pieces = found()
    last = stage_memory(pieces.pieces[-1:], pieces)
    assert 2 * SEQ * ROWS * VOCAB / TP <= last.logits < 2 * SEQ * ROWS * (3 * VOCAB / TP + 2 * HIDDEN)
    assert stage_memory(pieces.pieces[1:2], pieces).logits == 0


def test_transients_of_a_recomputed_block_have_what_it_does_not_keep() -> None:
    whole, again = found("none"), found("full")
    kept = sum(whole.records[1].kept.values())
    assert transients(again.records[1])["backward"] > 0.8 * kept
    assert transients(whole.records[1])["backward"] < 0.6 * kept


def test_the_flops_are_those_of_the_whole_model_on_any_number_of_ranks() -> None:
    """Korthikanti et al. 2022, equation 8, of one microbatch."""
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=SEQ, vocab_size=VOCAB, n_layer=LAYERS, n_head=HEADS, n_embd=HIDDEN))
    formula = 72 * ROWS * LAYERS * SEQ * HIDDEN**2 * (1 + SEQ / 6 / HIDDEN + VOCAB / 12 / HIDDEN / LAYERS)
    for tp in (1, 4):
        assert whole_flops(captured(model, Layout(batch=1, tp=tp), None), ROWS) == pytest.approx(formula)
