"""The smallest models that are worth cutting: a GPT, MLPs, stacks of blocks, experts, grouped attention."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autotp
from autotp.deferred_init.initialize import initialize
from autotp.models.gpt import GPT, GPTConfig
from autotp.ops.grouped_mm import OPERATOR
from autotp.passes.canonicalize.cse import cse
from autotp.passes.capture.capture import capture
from autotp.passes.capture.captured import Attempt
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.dce import live
from autotp.rules.call import writes
from autotp.rules.traits import draws
from autotp.runtime.module import executable_of
from autotp.sharding.axis import Axis, find
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds
from autotp.source_location import layer_of

assert_values_close = partial(torch.testing.assert_close, check_device=False)
"""`torch.testing.assert_close` of tensors that may lie on other devices."""

# ---- a GPT


VOCAB = 97
SIZES = {"block_size": 16, "vocab_size": VOCAB, "n_layer": 2, "n_head": 3, "n_embd": 48, "dropout": 0.0}


def gpt(seed: int | None = None, **sizes: Any) -> GPT:
    """A GPT whose vocabulary and three heads divide by no number of ranks, but for the sizes that a test gives."""
    if seed is not None:
        torch.manual_seed(seed)
    return GPT(GPTConfig(**SIZES | sizes))


def tokens(batch: int = 3, seq: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and labels of `gpt`. [batch seq] each"""
    count = torch.arange(batch * seq).view(batch, seq)
    return count * 31 * seed % VOCAB, count * 17 % VOCAB


def both(n: int, whole: nn.Module, **settings: Any) -> tuple[nn.Module, autotp.ParallelModule]:
    return whole, autotp.parallelize(copy.deepcopy(whole), n, **settings)


def read_values(parallel: nn.Module) -> list[Any]:
    """What Python reads of tensors, by the model's graphs."""
    entries = executable_of(parallel).graphs.entries
    return [read.outcome.value for _, entry in entries for read in entry.analysis.captured.asked]


def signatures_met(parallel: autotp.ParallelModule) -> int:
    """How many signatures it has met."""
    return len(executable_of(parallel).graphs.entries)


def gradient_differences(whole: nn.Module, parallel: nn.Module) -> list[float]:
    """The largest difference of each gradient from one device; both have it or neither."""
    pairs = [(p.grad, q.grad) for p, q in zip(whole.parameters(), parallel.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    return [largest_difference(a, autotp.gather(b)) for a, b in pairs if a is not None and b is not None]


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; inf where one is NaN, which `max` of a list would pass over."""
    return (a - b).abs().nan_to_num(nan=math.inf).max().item()


def step_differences(
    whole: nn.Module, parallel: nn.Module, sizes: Sequence[tuple[int, int]], backwards: int = 1
) -> list[float]:
    """The largest differences of losses and gradients of two GPTs, in a step of AdamW for each size.

    Args:
        sizes: rows and length of each step.
        backwards: the calls whose gradients a step adds up.
    """
    models = whole, parallel
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in models]
    found = []
    for rows, length in sizes:
        for seed in range(backwards):
            drawn = torch.randint(27, (rows, length), generator=torch.Generator().manual_seed(seed))
            one, other = [each(tokens=drawn, labels=drawn) for each in models]
            found.append(largest_difference(one, other))
            one.backward()
            other.backward()
        found += gradient_differences(whole, parallel)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def expect_gradients(whole: nn.Module, parallel: autotp.ParallelModule, tolerance: float = 1e-12) -> None:
    scale = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    for (name, a), b in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert_values_close(b.grad, a.grad, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")


# ---- MLPs


class Plain(nn.Module):
    """An MLP; what a subclass does around it differs."""

    def __init__(self, hidden: int = 8, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def mlp(self, x: Tensor) -> Tensor:
        """x, result: [... hidden]"""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Negated(torch.autograd.Function):
    """A backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Clamped(torch.autograd.Function):
    """Is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.5, 0.5)


class Tanh(torch.autograd.Function):
    """In two parts, and keeps its output."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y) * 3


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Relu(torch.autograd.Function):
    """Writes into its gradient, as torch's tutorial does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x < 0] = 0
        return grad.mul_(1.5)


class Inside(Plain):
    """A Function between the layers, where all is cut."""

    def __init__(self, function: Any, *more: Any) -> None:
        super().__init__()
        self.function, self.more = function, more

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.function.apply(self.up(x), *self.more))


class WithLoss(nn.Module):
    """A model with its mean squared error."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.model(x) - y) ** 2).mean()


ROWS = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)
MORE_ROWS = torch.linspace(-1, 1, 80, dtype=torch.float64).view(10, 8)


def trained(model: nn.Module, xs: Sequence[Tensor]) -> nn.Module:
    """The model after a step of SGD with momentum on each of these batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x in xs:
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()
    return model


def expect_equal_training(make: Callable[[], nn.Module], n: int, **how: Any) -> None:
    """Three steps at three shapes, the last two not the captured one."""
    xs = ROWS, MORE_ROWS, MORE_ROWS[:5]
    one, mine = _seeded(make), autotp.parallelize(_seeded(make), n, example_inputs=ROWS, **how)
    expect_whole(trained(mine, xs), trained(one, xs))


def expect_whole(mine: nn.Module, one: nn.Module) -> None:
    """A parallel model has the state of the whole one."""
    for name, tensor in autotp.full_state_dict(mine).items():
        assert_values_close(tensor, one.state_dict()[name], rtol=1e-11, atol=1e-12)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


class Mlp(nn.Module):
    """What the others remember something of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 30), nn.Linear(30, 8)

    def inner(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))


def x(call: int = 0) -> Tensor:
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(call))


def twins(model: nn.Module, n: int, **given: Any) -> tuple[nn.Module, Any]:
    return model.double(), autotp.parallelize(copy.deepcopy(model.double()), n, example_inputs=(x(),), **given)


def expect_same(whole: nn.Module, parallel: Any, context: object = "") -> None:
    for (name, mine), p in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        assert_values_close(p.grad, mine.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{context} {n}: {m}")


def as_gathered(value: Any) -> Any:
    return autotp.gather(value) if type(value).__name__ == "Sharded" else value


STEPS = 10
X = {dtype: torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
     for dtype in (torch.float32, torch.float64)}  # fmt: skip


class Normed(Plain):
    """Cut weights, and replicated ones: a bias, a norm's."""

    def __init__(self) -> None:
        super().__init__(8, 30)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.norm(x + self.mlp(x)) - x.roll(1, -1)) ** 2).mean()


@cache
def _made(n: int, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    whole = Normed().to(dtype)
    return whole, autotp.parallelize(copy.deepcopy(whole), n, example_inputs=X[dtype])


def pair(n: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    """One device's model, and a rank of it."""
    whole, parallel = _made(n, dtype)
    return copy.deepcopy(whole), copy.deepcopy(parallel)


def expect_equal_state(whole: nn.Module, parallel: Any, tolerance: float) -> None:
    for (name, mine), theirs in zip(parallel.named_parameters(), whole.parameters(), strict=True):
        assert_values_close(
            mine.detach(), theirs.detach(), rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


class Branches(nn.Module):
    """`x + mlp(before(x))` for each branch, all of the same `x`, as GPT-NeoX has it."""

    def __init__(
        self, *before: Callable[[nn.Module, Tensor], Tensor], returned: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.before, self.returned, self.scale = before, returned, nn.Parameter(torch.ones(16))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in before)
        self.ups = nn.ModuleList(nn.Linear(16, 64) for _ in before)
        self.downs = nn.ModuleList(nn.Linear(64, 16) for _ in before)

    def forward(self, x: Tensor) -> Any:
        """x: [batch seq 16]"""
        x = torch.tanh(x * self.scale)
        read = [before(norm, x) for before, norm in zip(self.before, self.norms, strict=True)]
        pairs = zip(self.ups, self.downs, read, strict=True)
        y = x + torch.stack([down(F.gelu(up(n))) for up, down, n in pairs]).sum(0)
        return y if self.returned is None else (y, *map(self.returned, read))


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x)


# ---- blocks, and how many of them run while they are captured once


RAN: list[str] = []
"""A word for each block that ran."""
ZEROS = torch.zeros(3, 5, 8)


def told(graph: fx.Graph) -> list[str]:
    """Every operator that matters: what it reads, what it gives and the module that it is from; draws in their order.

    Values are named for all that they are made of, so that nothing depends on the order of what may come in any.
    """
    if not any(map(writes, graph.nodes)):
        graph = cse(graph)  # A size is computed once for all layers, or in each.
    needed, names, found, drawn = live(graph), dict[fx.Node, str](), list[str](), 0

    for node in reversed(graph.nodes):
        if node in needed or writes(node):
            needed.update([node, *node.all_input_nodes])

    def spelled(a: Any) -> str:
        return names[a] if isinstance(a, fx.Node) else f"{type(a).__name__} {a}"

    for node in graph.nodes:
        if "lift" in node.name or (node.all_input_nodes and names.get(node.all_input_nodes[0]) == "constant"):
            names[node] = "constant"  # One for each time its line ran.
        elif node in needed:
            val = node.meta.get("val")
            several = val if isinstance(val, tuple | list) else [val]
            gives = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in several]
            args = fx.node.map_aggregate((node.args, node.kwargs), spelled)
            drawn += draws(node)
            line = f"{node.op} {node.target} {args} {gives} {layer_of(node)} {drawn if draws(node) else ''}"
            if isinstance(val, torch.SymInt):  # Computed again by a block, or not.
                line = f"{node.target} {args}"
                found = [it for it in found if it != line]
            found.append(line)
            names[node] = f"{node.name.rstrip('_0123456789')}-{zlib.crc32(line.encode()):x}"
    return sorted(found)


def runs(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """How many blocks ran while the model was captured, of which the graph is as if all had."""
    graphs, counts = [], []
    for blocks in ("each", "by objects"):
        RAN.clear()
        graphs.append(told(capture(skeleton_of(model), args, kwargs, attempt=Attempt(blocks=blocks)).graph))
        counts.append(len(RAN))
    assert graphs[0] == graphs[1]
    return counts[1]


class Block(nn.Module):
    """x + dropout(down(up(x))), and whatever a test has it do besides."""

    def __init__(self, does: Callable[..., Any] | None = None, width: int = 16, **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.drop = nn.Dropout(0.1)
        self.does = does
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        RAN.append("block")
        y = x + self.drop(self.down(self.up(x)))
        return y if self.does is None else self.does(self, x, y, *args, **kwargs)


class Stack(nn.Module):
    """Blocks behind one another, each called as `call(model, i, block, x)` says."""

    def __init__(self, *blocks: nn.Module, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if self.call is None else self.call(self, i, block, x)
        return x


def stack(n: int = 4, does: Callable[..., Any] | None = None, call: Callable[..., Any] | None = None) -> Stack:
    return Stack(*(Block(does) for _ in range(n)), call=call)


def scaled(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return y / (block.index + 1)


class Noted:
    """An object that a block may leave something in."""


# ---- experts


class Mixture(nn.Module):
    """Two of four experts for each token, with biases."""

    def __init__(self, grouped: Callable[..., Any] | None = None, number: int = 4, width: int = 10) -> None:
        """`grouped`: the product of rows in groups; without it, each row has weights of its own."""
        super().__init__()
        self.grouped, self.number = grouped, number
        self.router = nn.Linear(8, number)
        self.up, self.up_bias = nn.Parameter(torch.empty(number, 8, width)), nn.Parameter(torch.empty(number, width))
        self.down = nn.Parameter(torch.empty(number, width, 8))
        self.down_bias = nn.Parameter(torch.empty(number, 8))
        for parameter in (self.up, self.up_bias, self.down, self.down_bias):
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens 8]"""
        weights, chosen = self.router(x).softmax(-1).topk(2)  # [tokens 2]
        rows = self._groups if self.grouped else self._rows
        y = rows(x.repeat_interleave(2, 0), chosen.reshape(-1), weights.reshape(-1, 1))
        return x + y.view(-1, 2, 8).sum(1)

    def _rows(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x: [rows 8], chosen: [rows], weights: [rows 1]"""
        h = F.gelu(torch.bmm(x.unsqueeze(1), self.up[chosen]).squeeze(1) + self.up_bias[chosen])
        return (torch.bmm(h.unsqueeze(1), self.down[chosen]).squeeze(1) + self.down_bias[chosen]) * weights

    def _groups(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        assert self.grouped is not None
        ordered, places = chosen.sort()
        ends = torch.histc(ordered.float(), self.number, 0, self.number - 1).cumsum(0, dtype=torch.int32)
        h = F.gelu(self.grouped(x[places], self.up, ends) + self.up_bias[ordered])
        y = (self.grouped(h, self.down, ends) + self.down_bias[ordered]) * weights[places]
        return y[places.argsort()]


class CentredMixture(Mixture):
    """Weights of experts that depend on those of all experts."""

    def _groups(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        assert self.grouped is not None
        ordered, places = chosen.sort()
        ends = torch.histc(ordered.float(), self.number, 0, self.number - 1).cumsum(0, dtype=torch.int32)
        up = self.up + self.up.mean(0, keepdim=True)
        h = F.gelu(self.grouped(x[places], up, ends) + self.up_bias[ordered])
        y = (self.grouped(h, self.down, ends) + self.down_bias[ordered]) * weights[places]
        return y[places.argsort()]


class AttendingMixtures(nn.Module):
    """Attention and two layers of experts; its loss balances these, as Fedus et al. 2021, section 2.2."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.Linear(8, 24), nn.Linear(8, 3)
        self.first, self.second = Mixture(OPERATOR), Mixture()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq 8], y: [batch seq 3]"""
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.attention(x).split(8, -1))
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        rows, balance = x.flatten(0, 1), x.new_zeros(())
        for layer in (self.first, self.second):
            probabilities = layer.router(rows).softmax(-1)
            shares = F.one_hot(probabilities.argmax(-1), 4).to(x.dtype).mean(0)
            balance = balance + 0.3 * 4 * (shares * probabilities.mean(0)).sum()
            rows = layer(rows)
        return F.mse_loss(self.head(rows), y.flatten(0, 1)) + balance


# ---- attention with fewer key/value heads than query heads


class Regression(nn.Module):
    """Returns its loss, as a trainer needs it. x: [rows 4]"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


class Grouped(nn.Module):
    """Attention with key/value heads that several query heads share, in the layouts that models have."""

    def __init__(
        self, kv: int, group: int, layout: str, cache: bool = False, dropout: float = 0.0, repeated: bool = True
    ) -> None:
        """`cache`: whether the keys are returned, too; `dropout`: of the keys; `repeated`: for the query heads."""
        super().__init__()
        self.repeated = repeated
        self.kv, self.group, self.layout, self.cache, self.p, heads = kv, group, layout, cache, dropout, kv * group
        self.q, self.k, self.v = nn.Linear(12, 4 * heads), nn.Linear(12, 4 * kv), nn.Linear(12, 4 * kv)
        self.fused = nn.Linear(12, 4 * (heads + 2 * kv))
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4 * heads, 12)

    def forward(self, x: Tensor) -> Any:
        """x: [batch seq 12]"""
        q, k, v = (y.transpose(1, 2) for y in self._heads(x))
        k = F.dropout(self.norm(k), self.p, self.training)
        if self.repeated:
            k_of_each, v = (z.repeat_interleave(self.group, 1) for z in (k, v))
            y = F.scaled_dot_product_attention(q, k_of_each, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return (x, k) if self.cache else x

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """[batch seq heads 4], and of keys and values [batch seq kv 4]."""
        if self.layout == "separate":
            return tuple(f(x).unflatten(-1, (-1, 4)) for f in (self.q, self.k, self.v))
        y, heads = self.fused(x), self.kv * self.group
        if self.layout == "q|k|v":
            return tuple(z.unflatten(-1, (-1, 4)) for z in y.split([4 * heads, 4 * self.kv, 4 * self.kv], -1))
        y = y.unflatten(-1, (self.kv, self.group + 2, 4))
        return y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]


def places(of: Axis, leaf: Axis) -> torch.Tensor:
    """The oracle: for each position of an axis, where it lies along `leaf` (-1: nowhere). [size]"""
    of = find(of)
    if of is find(leaf):
        return torch.arange(of.size.number)
    if of.kind == "leaf":
        return torch.full((of.size.number,), -1)
    parts = [places(part, leaf) for part in of.parts]
    if of.kind == "concat":
        return torch.cat(parts)
    grids = torch.meshgrid(*parts, indexing="ij")
    return torch.stack(grids).amax(0).flatten()


# ---- models on meta


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def named_tensors(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    yield from model.named_buffers(remove_duplicate=remove_duplicate)


def cut(tensor: Tensor, dim: int, tp: int) -> Layout:
    """The layout of a tensor that is cut into equal chunks."""
    n = tensor.shape[dim]
    return Layout(tuple(tensor.shape), dim, tuple(((chunk_bounds(n, tp, rank)),) for rank in range(tp)), "n")


def expect_as_built_whole(make: Callable[[], nn.Module], tp: int) -> None:
    """Each rank's shards, whole tensors, and the random state afterwards, against the model built whole."""
    torch.manual_seed(5)
    whole = make()
    after = torch.get_rng_state()
    model = on_meta(make)
    before = {name: id(t) for name, t in named_tensors(model, remove_duplicate=False)}
    layouts = {name: cut(p, i % p.dim(), tp) for i, (name, p) in enumerate(model.named_parameters()) if p.dim()}
    for rank in range(tp):
        torch.manual_seed(5)
        got = initialize(model, layouts, rank, torch.device("cpu"))
        assert torch.equal(torch.get_rng_state(), after)
        want = {name: layouts[name].take(t, rank) if name in layouts else t for name, t in named_tensors(whole)}
        assert got.keys() == want.keys()
        assert [name for name in want if got[name].dtype != want[name].dtype or not want[name].equal(got[name])] == []
    assert {name: id(t) for name, t in named_tensors(model, remove_duplicate=False)} == before
    assert all(t.is_meta for _, t in named_tensors(model))


def expect_refused_on_meta(make: Callable[[], nn.Module], text: str) -> None:
    """`initialize` fails with this text, and puts the model's own tensors back."""
    model = on_meta(make)
    before = {name: id(t) for name, t in named_tensors(model, remove_duplicate=False)}
    with pytest.raises(autotp.Error) as raised:
        initialize(model, {}, 0, torch.device("cpu"))
    assert str(raised.value) == text
    assert {name: id(t) for name, t in named_tensors(model, remove_duplicate=False)} == before


class Scale(nn.Module):
    """No initialiser of its own, but it can be made again from its attributes."""

    def __init__(self, size: int, std: float, bias: bool) -> None:
        super().__init__()
        self.size, self.std = size, std
        self.weight = nn.Parameter(std * torch.randn(size))
        self.bias = nn.Parameter(torch.ones(size)) if bias else None
        self.register_buffer("rank", torch.arange(size))


class Recurrent(nn.Module):
    """Ordinary parts; what a subclass ties and how it initialises them differs."""

    padding: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, self.padding)
        self.rnn = nn.LSTM(6, 6)
        self.head = nn.Linear(6, 11, bias=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Linear) else 0.5)


class Bare(nn.Module):
    """Nothing initialises its parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))


class TwoStreams(nn.Module):
    """Two causal streams, and a table of both that each of them reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 12), nn.Linear(4, 12)

    def forward(self, x: Tensor, y: Tensor, table: Tensor) -> Tensor:
        """x: [batch heads s 4], y: [batch heads t 4], table: [batch heads s t]"""
        p = F.scaled_dot_product_attention(*self.a(x).chunk(3, -1), is_causal=True)
        q = F.scaled_dot_product_attention(*self.b(y).chunk(3, -1), is_causal=True)
        scores = torch.einsum("bhsd,bhtd->bhst", p, q) * table
        return scores.square().mean() + (p.mean(-1) * table.sum(-1)).sum() + (q.mean(-1) * table.sum(-2)).sum()


def two_streams() -> tuple[Tensor, ...]:
    """Inputs of `TwoStreams`."""
    return tuple(torch.randn(1, 2, *sizes, dtype=torch.float64) for sizes in ((6, 4), (9, 4), (6, 9)))
