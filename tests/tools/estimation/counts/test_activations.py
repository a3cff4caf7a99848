"""The memory of blocks, against the formulas of Korthikanti et al. 2022, table 2."""

import pytest
import torch

from autotp.costs.operators import Op, Phase, Touch
from autotp.models.gpt import GPT, GPTConfig
from autotp.options import Recompute
from autotp.passes.lower.losses import linear_cross_entropy
from autotp.tools.estimation.counts.activations import own_peaks, stage_memory
from autotp.tools.estimation.counts.pieces import Recorded, recorded, whole_flops
from autotp.tools.estimation.counts.record import Record
from autotp.tools.estimation.estimate import captured
from autotp.tools.estimation.layout import StepLayout

SEQ, ROWS, HIDDEN, HEADS, TP, VOCAB, LAYERS = 64, 3, 256, 16, 4, 512, 5
SBH = SEQ * ROWS * HIDDEN


def found(
    recompute: Recompute = "none", sequence_parallel: bool = False, layers: int = LAYERS, vocab: int = VOCAB
) -> Recorded:
    with torch.device("meta"):
        config = GPTConfig(block_size=SEQ, vocab_size=vocab, n_layer=layers, n_head=HEADS, n_embd=HIDDEN)
        model = GPT(config).bfloat16()
    layout = StepLayout(batch=ROWS, tp=TP, recompute=recompute, sequence_parallel=sequence_parallel)
    return recorded(captured(model, layout, None), ROWS)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "formula"),
    [
        # A GPU's fused attention keeps no weights, with dropout neither: the formulas without their 5as/h.
        ("none", False, 10 + 24 / TP),
        ("none", True, 34 / TP),
        # Where that attention runs again for its mask, its output comes with it.
        ("selective", False, 10 + 22 / TP),
        ("selective", True, 32 / TP),
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


def test_logits_are_counted_by_themselves() -> None:
    pieces = found()
    last = stage_memory(pieces.pieces[-1:], pieces)
    assert 2 * SEQ * ROWS * VOCAB / TP <= last.logits < 2 * SEQ * ROWS * (3 * VOCAB / TP + 2 * HIDDEN)
    assert stage_memory(pieces.pieces[1:2], pieces).logits == 0


def test_what_a_recomputed_block_does_not_keep_lives_in_its_backward() -> None:
    whole, again = found("none").records[1], found("full").records[1]
    kept = sum(whole.kept.values())
    assert sum(again.kept.values()) < kept / 8 < 0.8 * kept < own_peaks(again)["backward"]
    assert own_peaks(whole)["forward"] <= 1.2 * kept and own_peaks(whole)["backward"] < 1.6 * kept


def test_what_a_piece_keeps_lives_until_backward_has_read_it() -> None:
    """forward makes 1 (kept) from an input, and 2; backward reads 1, makes 3, and then makes 4 when 1 is gone."""

    def op(phase: Phase, read: int, written: int) -> Op:
        touched = [Touch(memory=memory, bytes=0) for memory in (read, written)]
        return Op(name="op", kind="pointwise", phase=phase, reads=(touched[0],), writes=(touched[1],))

    ops = op("forward", 0, 1), op("forward", 1, 2), op("backward", 1, 3), op("backward", 3, 4)
    sizes = {0: 1000, 1: 100, 2: 10, 3: 20, 4: 50}
    record = Record(
        ops=ops, kept={1: 100}, head=frozenset(), inputs={0: 0}, bytes=sizes, held=frozenset(), sent=(), sent_memory=()
    )
    assert own_peaks(record) == {"forward": 110, "backward": 120}


@pytest.mark.parametrize("vocab", [512, 65536], ids=["block", "logits"])
def test_recomputed_blocks_run_when_the_logits_are_gone(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fullest moment of the last block and the head is the loss, or the recomputed block; never both."""
    monkeypatch.setattr(linear_cross_entropy, "LEAST", 2 * vocab)  # Logits of all rows.
    pieces = found("full", vocab=vocab)
    logits = stage_memory(pieces.pieces, pieces).logits
    block, head = (own_peaks(pieces.records[i])["backward"] for i in (1, -1))
    assert head == pytest.approx(block if vocab == 512 else 1.5 * logits, rel=0.02)  # Their gradient is in bfloat16.


def test_pieces_behind_the_running_one_keep_nothing_in_backward() -> None:
    pieces = found("full", vocab=8192)
    whole = stage_memory(pieces.pieces, pieces)
    alone = max(own_peaks(record)["backward"] for record in pieces.records)
    assert whole.logits < alone < whole.kept + whole.backward < whole.kept + 0.5 * alone


def test_the_flops_are_those_of_the_whole_model_on_any_number_of_ranks() -> None:
    """Korthikanti et al. 2022, equation 8, of one microbatch."""
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=SEQ, vocab_size=VOCAB, n_layer=LAYERS, n_head=HEADS, n_embd=HIDDEN))
    formula = 72 * ROWS * LAYERS * SEQ * HIDDEN**2 * (1 + SEQ / 6 / HIDDEN + VOCAB / 12 / HIDDEN / LAYERS)
    for tp in (1, 4):
        assert whole_flops(captured(model, StepLayout(batch=1, tp=tp), None), ROWS) == pytest.approx(formula)
