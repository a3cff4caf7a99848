"""The published bugs of parallel trainings, put into our graphs: each is an error that names it.

docs/design.md has the sources: the fourteen bugs of TrainVerify's artifact, and silent bugs of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from architectures import Architecture, arguments, model
from errors import with_sizes_by_order
from faults import CASES, Case, after, changed, decoder, graphs_of, is_item, made, refusal, replace_with
from ranks import ROOT
from torch import fx

from autotp.diagnostics.verify import make_trial
from autotp.errors import Error
from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.options import Options
from autotp.passes.program import sequences
from autotp.passes.program.program import Program

aten = torch.ops.aten
LLAMA = Architecture(norm="rms_by_hand", positions="rotary", qkv="separate", gate="chunk", bias=False)
MODELS: dict[str, Callable[[], Case]] = {
    **CASES,
    "llama": lambda: Case(made(model(LLAMA)), arguments(LLAMA)),
    "joined": lambda: decoder(2),  # Products and the all-reduce of their gradients in one operator.
}


@cache
def analysed(name: str) -> tuple[Case, Program]:
    found = MODELS[name]()
    return found, found.analysed()


Edit = Callable[[fx.Node, int], Any]
"""(node, rank) -> anything: changes a rank's graph at a node."""
ALL = range(8)


@dataclass(frozen=True)
class Bug:
    """A model of `MODELS`, the node that is broken and on which ranks, how; then what the error says."""

    model: str
    at: Callable[[fx.Node], bool]
    edit: Edit
    problem: str
    expected: str
    got: str
    ranks: Collection[int] = ALL


def is_call(target: Any, read: str = "") -> Callable[[fx.Node], bool]:
    """True for a call of `target` that reads a value whose name has `read` in it."""
    return lambda node: node.target is target and any(read in str(x) for x in node.all_input_nodes)


def is_named(name: str) -> Callable[[fx.Node], bool]:
    return lambda node: node.name == name


def omitted(node: fx.Node, rank: int) -> None:
    source: Any = node.args[0]
    replace_with(node, source.args[0][node.args[1]] if is_item(node) else source)


def nobody_computes_it(node: fx.Node, rank: int) -> None:
    with node.graph.inserting_before(next(iter(node.graph.nodes))):
        lost = node.graph.placeholder("lost")
    lost.meta = dict(node.meta)
    replace_with(node, lost)


def called(target: Any, *rest: Any) -> Edit:
    def edit(node: fx.Node, rank: int) -> None:
        node.target, node.args = target, (node.args[0], "tp", *rest)

    return edit


def gathered_alone(node: fx.Node, rank: int) -> None:
    """The same values as an all_gather, without the sum of their gradients."""
    node.target = collectives.gather


def plus(constant: Callable[[int], float]) -> Edit:
    return lambda node, rank: replace_with(node, after(node, aten.add.Scalar, constant(rank)))


def over_another_group(node: fx.Node, rank: int) -> None:
    node.update_arg(1, "dp")


def times(factor: float) -> Edit:
    return lambda node, rank: replace_with(node, after(node, aten.mul.Scalar, factor))


def cubed(node: fx.Node, rank: int) -> None:
    node.update_arg(1, 3)


def reads_the_other(node: fx.Node, rank: int) -> None:
    """The second reader of a value reads what the first one returned."""
    node.replace_input_with(node.all_input_nodes[0], node.all_input_nodes[1])


def swapped(node: fx.Node, rank: int) -> None:
    node.args = (node.args[1], node.args[0], *node.args[2:])


def without_its_all_reduce(node: fx.Node, rank: int) -> None:
    """The joined products one by one: backward does not sum the gradient of what they read."""
    x, weights, biases = node.args[0], *node.args[4:6]  # type: ignore[misc]
    for item in list(node.users):
        at: Any = item.args[1]
        with node.graph.inserting_before(item):
            alone = node.graph.call_function(aten.linear.default, (x, weights[at], biases[at]))  # type: ignore[index]
        alone.meta = dict(item.meta)
        item.replace_all_uses_with(alone)
        node.graph.erase_node(item)
    node.graph.erase_node(node)


NOT_COMPUTED = "is not what the model computes"
HIDDEN, LOW = "f64[s95, s85, 32]", "f64[s95, s85, 12]"
BUGS = {
    "a missing all-reduce": Bug(
        "decoder", is_named("reduce_1"), omitted, "`add_tensor_1` reads `linear_default_1`",
        f"Replicate {HIDDEN}", f"Partial {HIDDEN}{{+tp}}",
    ),
    "a missing all-reduce, whose result nobody computes": Bug(
        "decoder", is_named("reduce_1"), nobody_computes_it, "`lost` is not what the model reads here",
        "p_model_tokens_weight", "",
    ),
    "an all-gather in place of an all-reduce": Bug(
        "decoder", is_named("reduce_1"), called(collectives.gather, 2, 32), "`reduce_1` reads `linear_default_1`",
        "Shard f64[s95, s85, 32@tp]", f"Partial {HIDDEN}{{+tp}}",
    ),
    "an all-reduce in place of an all-gather": Bug(
        "sequence", is_call(collectives.all_gather), called(collectives.reduce),
        "`all_gather` reads `layer_norm_default`", f"Partial {HIDDEN}{{+tp}}", "Shard f64[s95, s85@tp, 32]",
    ),
    "a joined product that does not sum its gradient": Bug(
        "joined", is_call(async_linear), without_its_all_reduce, "`linear_default` reads `layer_norm`",
        f"Copied {HIDDEN}{{tp}}", f"Replicate {HIDDEN}",
    ),
    "a constant added on one rank": Bug(
        "decoder", is_named("add_1"), plus(lambda rank: 0.5), f"`add_scalar` {NOT_COMPUTED}",
        "", "aten.add.Scalar(add_1, 0.5)", ranks=(1,),
    ),
    "another power on one rank": Bug(
        "llama", is_call(aten.pow.Tensor_Scalar), cubed, "`pow_1` is not this rank's part",
        "aten.pow.Tensor_Scalar(to, 2)", "aten.pow.Tensor_Scalar(to, 3)", ranks=(1,),
    ),
    "another constant added on each rank": Bug(
        "decoder", is_named("add_1"), plus(lambda rank: rank + 1.0), f"`add_scalar` {NOT_COMPUTED}",
        "", "aten.add.Scalar(add_1, 1.0)",
    ),
    "the wrong one of several readers on one rank": Bug(
        "decoder", is_named("add_1"), reads_the_other, f"`add_1` {NOT_COMPUTED}",
        "", "aten.add.Tensor(dropout_1, dropout_1)", ranks=(1,),
    ),
    "rotated queries and keys exchanged on one rank": Bug(
        "llama", is_call(aten.scaled_dot_product_attention.default), swapped,
        f"`scaled_dot_product_attention_default` {NOT_COMPUTED}",
        "", "aten.scaled_dot_product_attention.default(add_tensor_1, add_tensor, transpose_int_2, None, 0.0, True)",
        ranks=(1,),
    ),
    "a sum that is scaled on one rank": Bug(
        "decoder", is_named("reduce_1"), times(0.5), f"`mul_scalar` {NOT_COMPUTED}",
        "", "aten.mul.Scalar(reduce_1, 0.5)", ranks=(1,),
    ),
    "a sum over another group of ranks": Bug(
        "decoder", is_named("reduce_1"), over_another_group, f"`reduce_1` {NOT_COMPUTED}",
        "", "reduce(linear_default_1, dp)",
    ),
    "a router whose gradient is not summed": Bug(
        "experts", is_call(collectives.copy, "reshape_1"), omitted, "`mul` reads `reshape_1`",
        "Copied f64[2*s95, 1]{tp}", "Replicate f64[2*s95, 1]",
    ),
    "a last norm whose gradient is not summed over parts of a sequence": Bug(
        "sequence", lambda node: is_item(node) and "layer_norm_default_2" in map(str, node.users), omitted,
        "`layer_norm_default_2` reads `p_model_norm_weight`", "Copied f64[32]{tp}", "Replicate f64[32]",
    ),
    "key and value heads on several ranks, each with a gradient of its own": Bug(
        "grouped-local", is_item, omitted, "`linear_default` reads `tensors_0`",
        f"Copied {LOW}{{tp}}", f"Replicate {LOW}",
    ),
}  # fmt: skip


def broken(bug: Bug, graph: fx.Graph, rank: int) -> fx.Graph:
    at = next(i for i, node in enumerate(graph.nodes) if bug.at(node))
    return changed(graph, at, lambda node: bug.edit(node, rank)) if rank in bug.ranks else graph


def expect_named(bug: Bug, error: Error | None) -> None:
    assert error is not None
    said = error.problem.partition(": ")[2], error.facts.get("expected", ""), error.facts.get("got", "")
    assert [with_sizes_by_order(x) for x in said] == [
        with_sizes_by_order(x) for x in (bug.problem, bug.expected, bug.got)
    ]


@pytest.mark.parametrize("name", BUGS)
def test_check_names_a_published_bug(name: str) -> None:
    bug = BUGS[name]
    found, program = analysed(bug.model)
    graphs = graphs_of(found, program, apart=bug.model != "joined")
    assert refusal(found, program, graphs) is None
    expect_named(bug, refusal(found, program, [broken(bug, graph, rank) for rank, graph in enumerate(graphs)]))


OF_CUT_SEQUENCES = {
    "attention does not sum the gradients of keys that it gathered": Bug(
        "llama", is_call(collectives.all_gather), gathered_alone, "`zigzag_rows` reads `in_order`",
        "Copied f64[s87, 4, s85, 4]{cp}", "Replicate f64[s87, 4, s85, 4]",
    ),
    "a loss that is scaled by the number of parts": Bug(
        "llama", is_call(aten.div.Tensor, "cross_entropy"), times(2.0), f"`mul_scalar` {NOT_COMPUTED}",
        "", "aten.mul.Scalar(div_tensor, 2.0)",
    ),
    "a mean over the labels of one part": Bug(
        "llama", is_call(collectives.reduce, "sum"), omitted, "`div_tensor` reads `cross_entropy_loss_default`",
        "Replicate f64[]", "Partial f64[]{+cp}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CUT_SEQUENCES)
def test_check_names_a_published_bug_of_cut_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, lower = OF_CUT_SEQUENCES[name], sequences.lower

    def lowered(graph: fx.Graph, axes: Any, decision: Any, differentiable: Any, to: Any, *rest: Any) -> fx.Graph:
        right = lower(graph, axes, decision, differentiable, to, *rest)
        return broken(bug, right, to.rank) if to.axis == "cp" else right

    given = made(model(LLAMA)), (), arguments(LLAMA), 1, Options(cp=2)
    make_trial(*given)
    monkeypatch.setattr(sequences, "lower", lowered)
    with pytest.raises(Error) as raised:
        make_trial(*given)
    expect_named(bug, raised.value)


def test_check_refuses_gate_and_up_cut_as_one() -> None:
    """Rank 0 of 2 would hold the whole gate, and rank 1 what the gate is multiplied with."""
    found, program = analysed("llama")
    name = "blocks.0.mlp.up.weight"
    layout = program.layouts[name]
    rows = layout.shape[0]
    assert layout.pieces == (((0, 16), (32, 48)), ((16, 32), (48, 64)))
    as_one = replace(layout, pieces=(((0, rows // 2),), ((rows // 2, rows),)))
    error = refusal(found, replace(program, layouts=program.layouts | {name: as_one}), graphs_of(found, program))
    assert error is not None
    assert error.problem == "tp rank 0 of 2: `p_model_blocks_0_mlp_up_weight` is not held as one of its axes is cut"
    assert (error.facts["expected"], error.facts["got"]) == ("[(32 | 32), 16]", "[64@tp, 16]")


def test_design_md_lists_every_published_bug() -> None:
    """Each bug of this file is in docs/design.md, and each test that the table names is there."""
    rows = [line.split("|") for line in (ROOT / "docs" / "design.md").read_text().splitlines() if "| `test_" in line]
    said = [cell for row in rows for cell in row if "`test_" in cell]
    assert {name for name in (*BUGS, *OF_CUT_SEQUENCES) if f'"{name}"' not in " ".join(said)} == set()
    for cell in said:
        for file, function in re.findall(r"`(test_\w+)::(\w+)", cell):
            (path,) = ROOT.glob(f"tests/**/{file}.py")
            assert f"def {function}(" in path.read_text(), cell
