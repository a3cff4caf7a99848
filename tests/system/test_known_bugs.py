"""The known bugs of tensor parallelism, one test for each: the right number here, and the bug would be seen.

Each model is right as it is (outputs, every gradient, a step), and wrong where the bug is put into its ranks' graphs.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import Architecture, arguments, model
from errors import message
from faults import apart, bias_before_reduce, calls, drop, on, red, resliced, wrong
from ranks import Checks
from small_models import Plain, assert_values_close, both, expect_gradients, gpt, tokens
from torch import Tensor, fx, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autotp
from autotp.diagnostics.verify import Trial, make_trial, run_and_compare
from autotp.ops import collectives
from autotp.ops.coalesced import together
from autotp.ops.losses import cross_entropy

checks = Checks()
SPREAD = 53  # of token numbers over the vocabulary
ATTENTION = "blocks.0.attention"


@cache
def right(tp: int = 2, **parts: Any) -> Trial:
    """The ranks of a transformer made of these parts, which compute what one device does."""
    arch = Architecture(**parts)
    given = {name: t * SPREAD % arch.vocab for name, t in arguments(arch).items()}
    trial = apart(make_trial(model(arch), (), given, tp))
    report = run_and_compare(trial)
    assert report.ok, report
    return trial


def copies_of(trial: Trial, what: str) -> list[fx.Node]:
    """The copies of what is called so, of parameters that are read together too."""
    several = [(item, item.args[0].args[0][item.args[1]]) for t in calls(trial, together) for item in t.users]  # type: ignore[union-attr,index]
    found = [(node, node.args[0]) for node in calls(trial, collectives.copy)] + several
    return [node for node, read in found if what in str(read)]


# ---- gradients that are sums over ranks


def test_norm_weight_over_cut_heads_sums_its_gradient() -> None:
    """Each rank has the gradient of its heads alone (Qwen3's q_norm and k_norm)."""
    trial = right(qk_norm="head", norm="rms", kv_heads=2, qkv="separate")
    for name in ("q_norm", "k_norm"):
        (node,) = copies_of(trial, f"{name}_weight")
        assert wrong(run_and_compare(trial, on(node.name, drop))) == {f"{ATTENTION}.qkv.{name}.weight"}


def test_multi_query_attention_sums_key_and_value_gradients() -> None:
    """All ranks' queries read the one key and value head, whose gradient is the sum of what they make of it."""
    trial = right(kv_heads=1, qkv="separate")
    for name in ("k.weight", "v.weight", "v.bias"):  # softmax does not feel a key bias
        (node,) = copies_of(trial, f"qkv_{name.replace('.', '_')}")
        assert wrong(run_and_compare(trial, on(node.name, drop))) == {f"{ATTENTION}.qkv.{name}"}


def test_tied_embedding_sums_both_gradients() -> None:
    """The weight has the gradient of the lookup and of the head, and the norm before the head all ranks' rows of it."""
    trial = right(vocab=61, hidden=64)
    (head,) = [node for node in calls(trial, torch.ops.aten.linear.default) if "tokens_weight" in str(node.args[1])]

    def untie(graph: fx.Graph, node: fx.Node, rank: int) -> None:
        with graph.inserting_before(node):
            node.update_arg(1, graph.call_function(torch.ops.aten.detach.default, (node.args[1],)))

    assert wrong(run_and_compare(trial, on(head.name, untie))) == {"tokens.weight"}
    (node,) = copies_of(trial, head.args[0].args[0].name)  # type: ignore[union-attr]
    assert {"norm.weight", "norm.bias"} < wrong(run_and_compare(trial, on(node.name, drop)))


# ---- sums in which something is wrong


def test_a_row_parallel_bias_is_not_counted_once_for_each_rank() -> None:
    """Inside the sum it would be there tp times: the output would be off by (tp - 1) biases."""
    for tp in (2, 3):
        x = torch.linspace(-1, 1, 24).view(3, 8)
        trial = apart(make_trial(Plain(), (x,), {}, tp))
        assert run_and_compare(trial).ok
        (node,) = calls(trial, collectives.reduce)
        (off,) = run_and_compare(trial, on(node.name, bias_before_reduce)).outputs
        largest = [
            float(t.detach().abs().max()) for t in (trial.model.get_parameter("down.bias"), trial.model(x.double()))
        ]
        assert off.error == pytest.approx((tp - 1) * largest[0] / largest[1])


def test_a_fused_qkv_is_not_cut_across_q_k_and_v() -> None:
    """Rank 0 of 2 has half of q, of k and of v, not q and half of k."""
    for qkv in ("split", "three", "slice"):
        trial = right(qkv=qkv)
        name = f"{ATTENTION}.qkv.qkv.weight"
        assert trial.analysis.layouts[name].pieces[0] == ((0, 8), (16, 24), (32, 40))
        assert not run_and_compare(resliced(trial, name, [(0, 24), (24, 48)])).ok


class Checkpointed(nn.Module):
    """Two blocks, each computed again in backward."""

    def __init__(self, again: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Plain(), Plain()])
        self.again, self.reentrant = again, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.reentrant) if self.again else block(x))
        return x


def test_checkpointed_graphs_keep_every_collective() -> None:
    """None is lost inside a nested graph: there are as many, and each counts."""
    x = torch.linspace(-1, 1, 24).view(3, 8)
    plain, *nested = (apart(make_trial(Checkpointed(*how), (x,), {}, 2)) for how in ((False,), (True,), (True, True)))
    for trial in nested:
        assert run_and_compare(trial).ok
        assert trial.plan.traffic == plain.plan.traffic
        nodes = calls(trial, collectives.copy, collectives.reduce)
        assert len(nodes) == 4
        assert [node.name for node in nodes if not red(trial, on(node.name, drop))] == []


# ---- sizes that do not divide


def test_vocabulary_of_511_is_cut_unevenly_on_two_ranks() -> None:
    for tied in (True, False):
        trial = right(vocab=511, hidden=64, tied=tied)
        for name in ("tokens.weight",) if tied else ("tokens.weight", "head.weight"):
            assert trial.analysis.layouts[name].lengths() == [256, 255]
        (node,) = calls(trial, cross_entropy.class_terms)

        def padded(graph: fx.Graph, node: fx.Node, rank: int) -> None:
            node.update_arg(4, 255 * rank)  # as if all ranks had 255 rows

        assert not run_and_compare(trial, on(node.name, padded)).ok


def test_six_heads_and_width_341_are_cut_on_four_ranks() -> None:
    trial = right(4, heads=6, kv_heads=6, hidden=24, width=341, qkv="separate")
    layouts = trial.analysis.layouts
    assert layouts["blocks.0.attention.out.weight"].lengths() == [8, 8, 8, 0]
    assert layouts["blocks.0.mlp.down.weight"].lengths() == [86, 86, 86, 83]


# ---- on real ranks


@checks.on(2)
def global_gradient_norm_counts_replicated_parameters_once(rank: int, n: int) -> None:
    """Neither a rank's own norm nor the sum over ranks, in which the replicated ones count n times."""
    whole, split = both(n, gpt().double().train())
    for one in (whole, split):
        one(*tokens()).backward()
    gradients = [p.grad for p in split.parameters()]
    own = torch.stack([getattr(g, "to_local", lambda g=g: g)().norm() for g in gradients]).square().sum()
    summed = own.clone()
    dist.all_reduce(summed)
    by_hand = torch.stack([g.norm() for g in gradients]).square().sum().sqrt()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    assert own.sqrt() < 0.95 * expected and summed.sqrt() > 1.05 * expected
    assert_values_close(by_hand, expected, rtol=1e-12, atol=0)
    assert_values_close(autotp.clip_grad_norm_(split, 0.1), expected, rtol=1e-12, atol=0)
    expect_gradients(whole, split)


@checks.on(2)
def gradients_accumulated_over_several_backwards_equal_one_device(rank: int, n: int) -> None:
    """Three backwards: a sum over ranks taken of the accumulated gradient would count the first three times over."""
    arch = Architecture(qk_norm="head", norm="rms", qkv="separate")
    whole = model(arch).double()
    split = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=arguments(arch))
    for batch in (2, 3, 4):
        for one in (whole, split):
            one(**arguments(arch, batch)).backward()
        expect_gradients(whole, split)


@checks.on(2)
def ranks_fed_different_batches_are_an_error(rank: int, n: int) -> None:
    """An error on every rank; unasked, a loss that is neither batch's."""
    x, y = tokens()
    mine = (x + rank) % 97
    whole, split = both(n, gpt().double().train())
    assert message(lambda: split(mine, y)) == (
        "GPT.forward: tp rank 1 got other inputs than rank 0\n"
        "  try      the same batch for all ranks of one model: no DistributedSampler, one seed for shuffling"
    )
    unasked = autotp.parallelize(copy.deepcopy(whole), n, check_inputs="never")
    losses = [whole((x + other) % 97, y) for other in range(n)]
    assert all(abs(unasked(mine, y) - loss) > 1e-3 for loss in losses)
    assert_values_close(split(x, y), losses[0])


@checks.on(2)
def selective_checkpointing_keeps_sums_from_being_overwritten(rank: int, n: int) -> None:
    """It keeps the products of forward: a sum over ranks that overwrote them would be summed once more in backward.

    It takes what it kept in the order of the operators, among which are none of the comparisons in the first calls.
    """
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    for settings in ({}, {"overlap": "batch"}):
        for keeps in (products, None):

            def policy(_: Any, op: Any, *args: Any, keeps: Any = keeps, **given: Any) -> CheckpointPolicy:
                kept = keeps is None or op in keeps
                return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

            contexts = partial(create_selective_checkpoint_contexts, policy)
            whole, split = both(n, gpt().double().train(), **settings)
            for given in (tokens(), tokens(1)):
                whole(*given).backward()
                checkpoint(split, *given, use_reentrant=False, context_fn=contexts).backward()
                expect_gradients(whole, split)


@checks.on(2)
def comm_debug_mode_counts_every_sum(rank: int, n: int) -> None:
    """It has hooks on all modules, which are not for those that are captured; and it counts every sum over ranks."""
    whole, split = both(n, Checkpointed(again=False).double())
    x = torch.linspace(-1, 1, 24).double().view(3, 8).requires_grad_()
    for _ in range(2):
        with CommDebugMode() as mode:
            split(x).sum().backward()
        assert mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 4
        whole(x).sum().backward()
        expect_gradients(whole, split)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
