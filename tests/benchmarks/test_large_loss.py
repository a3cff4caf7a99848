"""benchmarks/calls/large_loss: in chunks, the loss over a large vocabulary needs little memory."""

import pytest
from calls import large_loss


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("reader", large_loss.READERS)
def test_chunks_need_less_than_the_goal(reader: str, tp: int) -> None:
    """Also than one GPU's in chunks: under tensor parallelism torchtitan's needed more (torchtitan#3412)."""
    counted = large_loss.most_bytes("chunks", tp, "meta", reader=reader).bytes
    assert counted < large_loss.GOAL * 2**30
    assert counted <= large_loss.most_bytes("chunks", 1, "meta", reader=reader).bytes


def test_all_logits_need_more() -> None:
    assert large_loss.most_bytes("logits", 8, "meta").bytes > large_loss.GOAL * 2**30


def test_what_is_counted_on_meta_is_what_a_cpu_has() -> None:
    rows = [large_loss.most_bytes("chunks", 2, device, 20_000, 1_800, 8) for device in ("meta", "cpu")]
    assert rows[0] == rows[1]


def test_a_step_is_timed_and_equal_to_plain_torch() -> None:
    assert large_loss.ratio(words=16_384, tokens=8, width=4, rounds=1) > 0
