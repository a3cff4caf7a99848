"""What the tests of kept values share: a block, fates of its operators, operands, a step, and budgets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from graphs import draft, some
from torch import Tensor, fx, nn

from autotp.costs.hardware import CPU_GLOO
from autotp.ops.dropout import fast_dropout
from autotp.passes.emit.kept_values.fates import Fate, Fates
from autotp.passes.emit.memory.block_table import BlockTable, BlockValue
from autotp.passes.emit.memory.budget import Allowance, Budget, budget_of
from autotp.passes.emit.memory.cheapest import Choice, choice_of
from autotp.passes.emit.memory.under_budget import under_budget

aten = torch.ops.aten


def layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Attention of one head with dropout, and a gated MLP that chooses columns; x: [batch seq 8], w, v: [8 8]."""
    normed = aten.layer_norm.default(x, [8])
    query, key = aten.linear.default(normed, w), aten.linear.default(normed, v)
    scores = aten.matmul.default(query, aten.transpose.int(key, 1, 2))
    masked = aten.masked_fill.Scalar(scores, aten.gt.Scalar(scores, 2.0), 0.5)
    weights = aten.dropout.default(aten.softmax.int(masked, -1), 0.3, True)
    mixed = aten.add.Tensor(aten.matmul.default(weights, aten.view.default(normed, x.shape)), x)
    gate = fast_dropout(aten.gelu.default(aten.linear.default(mixed, w)), 0.2, 1)
    best = aten.topk.default(gate, 5)
    up = aten.mul.Tensor(best[0], aten.gather.default(aten.linear.default(mixed, v), -1, best[1]))
    again = aten.dropout.default(aten.sigmoid.default(up), 0.1, True)
    return aten.cat.default([aten.add.Tensor(again, up), aten.narrow.default(mixed, -1, 5, 3)], -1)


fx.wrap("fast_dropout")
GRAPH = fx.symbolic_trace(layer)
NAMES = [node.name for node in GRAPH.graph.nodes if node.op == "call_function"]


def every(fate: Fate, *names: str) -> Fates:
    """The fate for all operators, or for those whose name starts like this."""
    return {name: fate for name in NAMES if not names or name.startswith(names)}


CASES: Mapping[str, Fates] = {
    "full": every("recompute"),
    "host": every("host"),
    "bits": every("bits"),
    "none": {},
    "scores": every("recompute", "matmul", "masked", "softmax", "dropout", "gt"),
    "between": every("recompute", "gelu", "sigmoid", "mul", "layer_norm"),
    "last dropout": every("recompute", "dropout_default_1"),
    "first dropout": every("recompute", "dropout_default", "softmax"),
    "masks as seeds": every("bits", "dropout", "fast_dropout"),
    "three ways": every("host", "linear") | every("recompute", "gelu", "softmax") | every("bits", "gt", "topk"),
    "host and again": every("host", "linear_default", "layer_norm") | every("recompute", "gelu", "softmax", "matmul"),
    "alternately": {name: ("recompute", "keep", "host", "bits")[i % 4] for i, name in enumerate(NAMES)},
    "alternately, otherwise": {name: ("keep", "recompute", "bits", "host")[i % 4] for i, name in enumerate(NAMES)},
}  # fmt: skip


def operands(*sizes: int, dtype: torch.dtype = torch.float64, frozen: bool = False) -> list[Tensor]:
    torch.manual_seed(sum(sizes))
    xs = [torch.randn(*shape, dtype=dtype) for shape in (sizes, (8, 8), (8, 8))]
    return [x.requires_grad_(not frozen or i != 1) for i, x in enumerate(xs)]


def step(run: Callable[..., Tensor], xs: list[Tensor]) -> list[Any]:
    """The result, the gradients, and the next random number."""
    torch.manual_seed(3)
    y = run(*xs)
    torch.rand(2)  # Others draw between forward and backward.
    grads = torch.autograd.grad(y.square().sum(), [x for x in xs if x.requires_grad])
    return [y.detach(), *grads, torch.rand(())]


# ---- blocks under a budget of memory


def kept_of(draw: random.Random, made: int) -> dict[str, Any]:
    """What autograd keeps of a value: its memory, something internal, or nothing."""
    kept = draw.choice([made, 0, 3 * 10**6])
    return {"kept": kept, "smaller": kept, "inside": kept != made}


def random_table(seed: int, count: int = 9) -> BlockTable:
    """A block of random values, each of which reads up to two earlier ones."""
    draw, graph, values = random.Random(seed), fx.Graph(), {}
    for i in range(count):
        reads = tuple(f"v{j}" for j in draw.sample(range(i), min(i, draw.randint(0, 2))))
        made = draw.choice([1, 2, 4, 8]) * 10**6
        values[f"v{i}"] = BlockValue(
            name=f"v{i}", node=graph.placeholder(f"v{i}"), reads=reads, inputs=() if reads else ("x",),
            seconds=draw.choice([5, 20, 300]) * 1e-6, made=made, **kept_of(draw, made), fixed=draw.random() < 0.1,
        )  # fmt: skip
    return BlockTable(values=values, inputs=frozenset(), results=())


def every_choice(table: BlockTable) -> list[Choice]:
    """Every set of values that may be computed again."""
    names = [name for name, value in table.values.items() if not value.fixed]
    sets = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))
    return [choice_of(table, dict.fromkeys(names, "recompute"), CPU_GLOO) for names in sets]


def two_blocks() -> fx.Graph:
    """`gelu(linear(x, w))`, twice."""

    def make(call: Any, x: Any, w: Any) -> Any:
        for i in range(2):
            for target, args in ((aten.linear.default, (w,)), (aten.gelu.default, ())):
                x = call(target, x, *args)
                x.meta["nn_module_stack"] = {"m": (f"L['self'].h.{i}", nn.Module)}
        return x

    return draft(make, x=some(4, 6), w=some(6, 6))


def budgeted(memory: str, kept_calls: int = 1) -> tuple[fx.GraphModule, Budget]:
    held = {"w": some(6, 6).requires_grad_()}
    allowance = Allowance(memory=memory, calls=kept_calls)
    module = under_budget(two_blocks(), (), allowance, torch.device("cpu"), held, {})
    budget = budget_of(module)
    assert budget is not None
    return module, budget
