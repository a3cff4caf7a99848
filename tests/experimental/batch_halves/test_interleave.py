"""interleave: halves take turns, sums run beside the other half, and nothing reads a sum that still runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import both, expect_gradients, gradient_differences, step_differences, tokens
from small_models import gpt as small
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.compiler import analyse, rank_graph
from autotp.experimental.batch_halves import turns
from autotp.experimental.batch_halves.halves import half_of
from autotp.experimental.batch_halves.interleave import interleave
from autotp.experimental.batch_halves.turns import finish, start_reduce, wait_in_backward
from autotp.ops import collectives
from autotp.options import Options
from autotp.passes.builder import PART
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.bind import bind
from autotp.rules.traits import draws
from autotp.source_location import block_of


def gpt(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    return small(0, n_layer=layers, n_head=4, n_embd=16, vocab_size=28, dropout=dropout)


TOKENS = torch.randint(27, (4, 7), generator=torch.Generator().manual_seed(0))
CALL = {"tokens": TOKENS, "labels": TOKENS}


def bound(model: nn.Module, call: dict[str, Any] = CALL, tp: int = 2) -> fx.Graph:
    """The bound graph of the first rank, whose halves are side by side."""
    options = Options(overlap="batch")
    program = analyse(skeleton_of(model), (), call, tp, options)
    return bind(rank_graph(program, 0, "fast"), torch.device("cpu"), {"tp": "tp"})


def test_interleave_keeps_operators_and_operands() -> None:
    before = bound(gpt(dropout=0.1))
    after = interleave(before)
    assert [n.name for n in before.nodes if n.op == "placeholder"] == [
        n.name for n in after.nodes if n.op == "placeholder"
    ]
    new = {node.name: node for node in after.nodes}

    def operands(node: fx.Node) -> list[str]:
        """Names of operands, without the waits between."""
        found = []
        for x in node.all_input_nodes:
            while x.target in (finish, wait_in_backward):
                x = x.args[0]  # type: ignore[assignment]
            found.append(x.name)
        return found

    assert len(new) - len(before.nodes) == sum(n.target in (finish, wait_in_backward) for n in after.nodes) > 0
    for node in before.nodes:
        assert operands(new[node.name]) == operands(node), node


def test_interleave_puts_products_of_the_other_half_beside_sums() -> None:
    """Between the start of a half's sum and its end there is a product of the other half, but for the embedding."""
    nodes = list(interleave(bound(gpt(layers=3))).nodes)
    at = {node: i for i, node in enumerate(nodes)}
    starts = [node for node in nodes if node.target is start_reduce and len(node.args) == 2]
    starts += [node for node in nodes if node.target is start_reduce and len(node.args) == 4 and node.args[2] == "sum"]
    beside = 0
    for start in starts:
        (end,) = start.users
        between = nodes[at[start] : at[end]]
        products = [n for n in between if "linear" in str(n.target) and half_of(n) == 1 - half_of(start)]
        beside += bool(products)
    assert beside >= 2 * (2 * 3)  # Attention and MLP of three blocks, in both halves.


def test_interleave_keeps_blocks_together() -> None:
    nodes = [n for n in interleave(bound(gpt(layers=3))).nodes if half_of(n) is not None]
    names = [block_of(node) for node in nodes]
    changes = [b for a, b in pairwise(names) if a != b]
    assert len(changes) == len(set(changes)) <= 4, changes


def test_interleave_moves_nothing_without_sums() -> None:
    before = bound(gpt(), tp=1)
    assert any(half_of(node) == 1 for node in before.nodes)
    assert interleave(before) is before


def test_interleave_keeps_the_order_of_draws() -> None:
    before = bound(gpt(dropout=0.1))
    for half in (0, 1, None):
        drawn = [[n.name for n in g.nodes if draws(n) and half_of(n) == half] for g in (before, interleave(before))]
        assert drawn[0] == drawn[1]


def test_interleave_keeps_overwriting_sums_behind_other_readers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.linear.default, (x, x))
    z = graph.call_function(torch.ops.aten.mul.Tensor, (y, y))
    w = graph.call_function(collectives.reduce, (y, "0"), {"fresh": True})
    graph.output((z, w))
    for node in (y, z, w):
        node.meta.update({"val": torch.empty(2, 2, device="meta"), PART: (0 if node is not z else 1, 2)})
    order = [node.name for node in interleave(graph).nodes]
    assert order.index(z.name) < order.index(w.name)


class Marked(TorchDispatchMode):
    """Records the starts and ends of sums, and the work of blocks that is not a product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        marks = {"all_reduce": "start", "wait_tensor": "end", "gelu": "work", "attention": "work"}
        self.seen += [mark for part, mark in marks.items() if part in str(op)][:1]
        return op(*args, **(kwargs or {}))


def exposed(seen: list[str]) -> int:
    """How many sums have no such work between their start and their end; sums end in order."""
    running: list[bool] = []
    found = 0
    for mark in seen:
        if mark == "start":
            running.append(False)
        elif mark == "end" and running:
            found += not running.pop(0)
        elif mark == "work":
            running = [True] * len(running)
    return found


def traced(rank: int, n: int, layers: int, given: dict[str, Any], rows: int = 4) -> list[str]:
    model = autotp.parallelize(gpt(layers), **given)
    with Marked() as marked:
        model(**{name: value[:rows] for name, value in CALL.items()}).backward()
    return marked.seen


@pytest.mark.parametrize("layers", [2, 4])
def test_interleaved_sums_run_beside_the_other_half_both_ways(layers: int) -> None:
    """Two sums of the blocks have nothing beside them: the last one of forward, and the last one of backward."""
    seen, plain = (run_ranks(traced, 2, layers, {"overlap": how})[0] for how in ("batch", "none"))
    assert seen.count("start") == 2 * plain.count("start") == 2 * 4 * layers
    assert exposed(plain) == 4 * layers
    assert exposed(seen) == 2


def test_interleaved_halves_of_one_row_expose_their_key_sums() -> None:
    """Two of the eight sums of a block have nothing beside them but products; and the last of backward."""
    seen = run_ranks(traced, 2, 4, {"overlap": "batch"}, 1)[0]
    assert seen.count("start") == 2 * 4 * 4 and exposed(seen) == 2 * 4 + 1


def test_recomputation_sends_only_the_attention_sum_again() -> None:
    """Of the sums of forward, it sends again that of attention only."""
    for how, halves in (("batch", 2), ("none", 1)):
        seen = run_ranks(traced, 2, 2, {"overlap": how, "recompute": "full"})[0]
        assert seen.count("start") == halves * (4 * 2 + 2)


# ---- numbers, where the tensor of a running sum is full of NaN


def end_late() -> None:
    """Makes the result of each sum NaN until it is waited for. (In a process of its own.)"""
    sums: dict[int, Tensor] = {}

    def sent(name: str, x: Tensor, op: str, group: str) -> Tensor:
        total = collectives.communicate("all_reduce", x, op, group)
        out = x if name.endswith("_") else torch.empty_like(x)
        out.data.fill_(float("nan"))
        sums[out.data_ptr()] = total
        return out

    def received(x: Tensor) -> Tensor:
        if x.data_ptr() in sums:
            x.data.copy_(sums.pop(x.data_ptr()))
        return x

    turns._sent, turns._received = sent, received


def stepped(rank: int, n: int, given: dict[str, Any], dtype: torch.dtype) -> list[float]:
    """The largest differences of loss and gradients from one device, in five steps of other sizes."""
    end_late()
    whole, model = (gpt(layers=2).to(dtype) for _ in range(2))
    model = autotp.parallelize(model, overlap="batch", **given)
    return step_differences(whole, model, ((4, 7), (3, 5), (1, 6), (5, 3), (2, 8)))


@pytest.mark.parametrize(
    "given",
    [{}, {"recompute": "full"}, {"recompute": "selective"}, {"without": ("overlap",)}, {"without": ("outline",)}],
    ids=str,
)
def test_interleaved_steps_equal_one_device(given: dict[str, Any]) -> None:
    for found in run_ranks(stepped, 2, given, torch.float64, alone=True):
        assert max(found) < 1e-10


def test_interleaved_float32_steps_equal_one_device() -> None:
    for found in run_ranks(stepped, 2, {}, torch.float32, alone=True):
        assert max(found) < 1e-5


class Block(nn.Module):
    """An MLP beside a residual stream. It can be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]


class Rows(nn.Module):
    """Two blocks. The last one ends with sums whose results backward does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Net(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean()


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


X = torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def penalty(model: nn.Module) -> None:
    """A gradient penalty: backward of a backward."""
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
    grad.pow(2).sum().backward()


def offloaded(model: nn.Module) -> None:
    with torch.autograd.graph.save_on_cpu():
        model(X).backward()


def in_anomaly_mode(model: nn.Module) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        model(X).backward()


def twice(model: nn.Module) -> None:
    loss = model(X)
    loss.backward(retain_graph=True)
    loss.backward()


def two_calls(model: nn.Module) -> None:
    (model(X) + model(X[:3])).backward()


def frozen(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    model(X).backward()


def with_input_gradient(model: nn.Module) -> None:
    model(X.clone().requires_grad_()).backward()


def after_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)
    model(X).backward()


WAYS: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f
    for f in (penalty, offloaded, in_anomaly_mode, twice, two_calls, frozen, with_input_gradient, after_no_grad)
}


def differences(rank: int, n: int, given: dict[str, Any]) -> dict[str, float]:
    end_late()
    warnings.simplefilter("ignore")  # of the anomaly mode
    found = {}
    for name, way in WAYS.items():
        whole, model = net(), autotp.parallelize(net(), overlap="batch", example_inputs=X, **given)
        for each in (whole, model):
            with sdpa_kernel(SDPBackend.MATH):
                way(each)
        found[name] = max(gradient_differences(whole, model))
    return found


@pytest.mark.parametrize("given", [{}, {"recompute": "full"}], ids=str)
def test_interleaved_gradients_in_all_ways_equal_one_device(given: dict[str, Any]) -> None:
    for found in run_ranks(differences, 2, given, alone=True):
        assert {name: d for name, d in found.items() if not d < 1e-12} == {}


def unwaited(rank: int, n: int) -> int:
    """How many sums nobody waited for after two steps that recompute."""
    model = autotp.parallelize(Rows().double(), overlap="batch", recompute="full", example_inputs=X)
    for _ in range(2):
        model(X).sum().backward()
    return int(torch._C._distributed_c10d._get_work_registry_size())


def test_interleaved_sums_are_all_waited_for() -> None:
    """A recomputation ends when backward has what it needs."""
    assert run_ranks(unwaited, 2) == [0, 0]


def hooked(rank: int, n: int) -> None:
    whole, parallel = both(n, small().double().train(), overlap="batch", recompute="full")
    for seed in (1, 2, 3):
        whole(*tokens(seed=seed)).backward()
        with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
            parallel(*tokens(seed=seed)).backward()
        expect_gradients(whole, parallel)


def test_saved_tensor_hooks_never_see_an_unfinished_sum() -> None:
    """A block keeps its inputs: one that the ranks are still summing is no value yet."""
    run_ranks(hooked, 2)


def for_some(rank: int, n: int) -> list[int]:
    """How many sums nobody waited for after a backward for one weight, and after backwards that raised errors."""
    model = autotp.parallelize(Rows().double(), overlap="batch", example_inputs=X)
    weight = model.blocks[1].up.weight  # type: ignore[index, union-attr]
    torch.autograd.grad(model(X).sum(), weight)
    found = [int(torch._C._distributed_c10d._get_work_registry_size())]

    def fails(grad: Tensor) -> None:
        raise ValueError

    for _ in range(2):
        hook = weight.register_hook(fails)
        with pytest.raises(ValueError):
            model(X).sum().backward()
        hook.remove()
    model(X).sum().backward()
    return [*found, int(torch._C._distributed_c10d._get_work_registry_size())]


def test_interleaved_backward_that_ends_early_waits_for_its_sums() -> None:
    assert run_ranks(for_some, 2) == [[0, 0], [0, 0]]


def compiled(rank: int, n: int) -> list[float]:
    whole, model = (gpt(layers=2).double() for _ in range(2))
    model = autotp.parallelize(model, overlap="batch")
    model.compile_blocks(backend="aot_eager")
    found = []
    for rows in (4, 4, 3):
        tokens = TOKENS[:rows]
        for each in (whole, model):
            each(tokens=tokens, labels=tokens).backward()
        found += gradient_differences(whole, model)
        for each in (whole, model):
            each.zero_grad()
    return found


def test_compiled_blocks_wait_for_sums_started_by_others() -> None:
    for found in run_ranks(compiled, 2):
        assert max(found) < 1e-12
