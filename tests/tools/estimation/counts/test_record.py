"""What a run on meta writes down."""

import torch
from graphs import recorded_run as run
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.sharding.partition import chunk_size
from autotp.tools.estimation.counts.record import Record, fused_zigzag_rows


def names(found: Record, *phases: str) -> list[str]:
    return [op.name for op in found.ops if op.phase in phases]


def test_a_product_has_shape_and_flops_forward_and_backward() -> None:
    found = run(lambda x, w: torch.ops.aten.linear(x, w), (6, 4), (8, 4))
    assert names(found, "forward") == ["mm"] and sorted(names(found, "backward")) == ["mm", "mm"]
    assert found.ops[0].shape == (1, 6, 8, 4) and sum(op.flops for op in found.ops) == 3 * 2 * 6 * 8 * 4
    assert list(found.kept.values()) == [6 * 4 * 4] and set(found.kept) == set(
        found.inputs
    )  # The input, not the weight.


def test_views_are_free_and_memory_counts_once() -> None:
    found = run(lambda x: torch.ops.aten.relu(x.view(3, 8).t()), (6, 4))
    assert names(found, "forward") == ["relu"]
    assert [touch.bytes for touch in found.ops[0].reads] == [96]


def test_dropout_keeps_a_byte_for_each_element() -> None:
    found = run(lambda x: torch.ops.aten.dropout.default(x, 0.1, True), (6, 4))
    assert names(found, "forward") == ["native_dropout"] and list(found.kept.values()) == [24]


def test_attention_is_one_operator_where_it_is_fused() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True)

    found = run(attention, (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8))
    assert names(found, "forward") == ["_scaled_dot_product_flash_attention"]
    (forward,) = [op for op in found.ops if op.phase == "forward"]
    assert forward.flops == 2 * 2 * 8 * 16 * 16 * 8 and forward.share == 0.5
    assert sum(op.flops for op in found.ops if op.phase == "backward") == 2 * forward.flops


def test_values_of_another_width_need_the_memory_efficient_operator() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True)

    found = run(attention, (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 6))
    assert names(found, "forward") == ["_scaled_dot_product_efficient_attention"]
    (forward,) = [op for op in found.ops if op.phase == "forward"]
    assert forward.flops == 2 * 8 * 16 * 16 * (8 + 6)
    assert sum(op.flops for op in found.ops if op.phase == "backward") == 2 * forward.flops


def test_what_backward_of_attention_computes_is_what_torch_counts() -> None:
    """Five products, of which that of the scores is computed again: three have the width of keys, two of values."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention.default(q, k, v)

    found = run(attention, (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 6))
    (backward,) = [op for op in found.ops if op.kind == "attention" and op.phase == "backward"]
    assert backward.flops * backward.share == 2 * 8 * 16 * 16 * (3 * 8 + 2 * 6)


def test_a_convolution_is_a_product_for_each_position() -> None:
    found = run(lambda x, w: torch.ops.aten.conv1d.default(x, w), (2, 8, 10), (6, 8, 3))
    forward, backward = (op for op in found.ops if op.kind == "product")
    assert forward.shape == (1, 2 * 8, 6, 8 * 3) and forward.flops == 2 * 2 * 8 * 6 * 8 * 3
    assert backward.flops == 2 * forward.flops


def test_causal_attention_of_a_balanced_part_reads_half_of_the_keys() -> None:
    """The same for each rank; also where a rank has no rows, or a piece is empty."""

    def flops(rank: int, length: int, parts: int) -> float:
        q, k, v = (torch.empty(2, 4, n, 8, device="meta") for n in (chunk_size(length, parts, rank), length, length))
        with FlopCounterMode(display=False) as counter:
            fused_zigzag_rows(q, k, v, parts, rank, None, False)
        return counter.get_total_flops()

    assert [flops(rank, 32, 4) for rank in range(4)] == [2 * 2 * 8 * 8 * 16 * 8] * 4
    assert [flops(rank, 3, 4) > 0 for rank in range(4)] == [True, True, True, False]


def test_a_cpu_has_its_own_attention_and_views_take_time() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention.default(q.transpose(1, 2), k, v, None, 0.0, True)

    found = run(attention, (2, 1024, 4, 8), (2, 4, 1024, 8), (2, 4, 1024, 8), on_gpu=False)
    assert names(found, "forward")[:2] == ["transpose", "_scaled_dot_product_flash_attention_for_cpu"]
    view, forward = found.ops[:2]
    assert (view.kind, view.reads, view.writes) == ("view", (), ())
    assert forward.flops == 2 * 2 * 8 * 1024 * 1024 * 8 and forward.arithmetic > 0
    assert forward.share == 0.75  # Of two blocks of keys, the first half of the queries reads one.
    assert sum(op.flops for op in found.ops if op.phase == "backward") == 2 * forward.flops
    assert sorted(found.kept.values()) == [2**15, 2**18, 2**18]  # Queries, the result, its logarithms: no scores.


def test_a_cpu_computes_attention_with_dropout_step_by_step() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, None, 0.1, True)

    found = run(attention, (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8), on_gpu=False)
    assert {"bmm", "_safe_softmax"} <= set(names(found, "forward"))


def test_gelu_has_two_costs() -> None:
    exact, tanh = (
        run(lambda x, way=way: torch.ops.aten.gelu.default(x, approximate=way), (6, 4)).ops[0].arithmetic
        for way in ("none", "tanh")
    )
    assert 0 < exact < tanh


def test_collectives_are_those_of_both_directions() -> None:
    found = run(lambda x: collectives.reduce(collectives.copy(x, "g") * 2, "g"), (6, 4), groups={"g": 4})
    kinds = [(op.name, op.axis, op.size) for op in found.ops if op.kind == "collective"]
    assert kinds == [("all-reduce", "g", 96), ("all-reduce", "g", 96)]


def test_a_sum_runs_beside_the_products_between_start_and_wait() -> None:
    def column(x: Tensor, w: Tensor) -> Tensor:
        return async_linear(x, "g", None, None, (w,), (None,), (False,))[0]

    found = run(column, (6, 4), (8, 4), groups={"g": 4})
    assert names(found, "backward") == ["mm", "all-reduce", "mm", "wait"]
    assert found.ops[found.ops[-1].waits].name == "all-reduce"


def test_what_waits_reads_the_memory_that_was_sent() -> None:
    found = run(lambda x: collectives.reduce(x * 2, "g").exp(), (6, 4), groups={"g": 4})
    sent = next(op for op in found.ops if op.kind == "collective")
    assert next(op for op in found.ops if op.name == "exp").reads[0].memory == sent.writes[0].memory


def test_groups_of_a_record_are_gone_afterwards() -> None:
    run(lambda x: collectives.copy(x, "autotp_test_group"), (6, 4), groups={"autotp_test_group": 4})
    try:
        torch._C._distributed_c10d._resolve_process_group("autotp_test_group")  # type: ignore[arg-type]
    except Exception:
        return
    raise AssertionError("the group is still there")
