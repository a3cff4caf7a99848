"""recompute and outline: blocks are one module, and computed again in backward; gradients stay what they are."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import message, refusal
from graphs import draft, some
from ranks import Checks
from small_models import gpt
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.options import Recompute
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.emit.kept_values.kept_call import recomputations
from autotp.passes.emit.kept_values.recompute import recompute
from autotp.passes.emit.kept_values.recomputed import Recomputed
from autotp.passes.emit.outline import blocks, outlined

aten = torch.ops.aten
checks = Checks()
HOW: tuple[Recompute, ...] = ("none", "selective", "full")

# ---- blocks


def chain(names: list[str], *scales: float) -> fx.Graph:
    """`x * scale + w` for each name of a block and scale."""

    def make(call: Any, x: Any, w: Any) -> Any:
        for name, scale in zip(names, scales, strict=True):
            for target, args in ((aten.mul.Tensor, (scale,)), (aten.add.Tensor, (w,))):
                x = call(target, x, *args)
                x.meta["nn_module_stack"] = {"m": (f"L['self'].{name}", nn.Module)} if name else {}
        return x

    return draft(make, x=some(2, 3), w=some(3))


@pytest.mark.parametrize(
    ("names", "scales", "kinds", "calls"),
    [
        (["h.0.a", "h.1.a", "h.2.a"], (2.0, 2.0, 2.0), 1, 3),
        (["h.0", "h.1"], (2.0, 3.0), 2, 2),  # Another number is another block.
        (["h.0.a", "h.0.b", "h.1"], (2.0, 2.0, 2.0), 2, 2),
        (["", "h.0", "norm"], (2.0, 2.0, 2.0), 1, 1),
        (["h.0", "", "h.0"], (2.0, 2.0, 2.0), 1, 2),  # One module called twice.
    ],
)
def test_recompute_shares_a_module_of_like_blocks(
    names: list[str], scales: tuple[float, ...], kinds: int, calls: int
) -> None:
    graph = chain(names, *scales)
    module = recompute(graph, "none")
    called = [node.target for node in module.graph.nodes if node.op == "call_module"]
    assert (len(dict(module.named_children())), len(called)) == (kinds, calls)
    values = some(2, 3), some(3)
    torch.testing.assert_close(module(*values), fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*values))


def test_outlined_block_returns_several_results() -> None:
    def make(call: Any, x: Any) -> Any:
        a = call(aten.mul.Tensor, x, 2.0)
        b = call(aten.add.Tensor, a, 1.0)
        for node in (a, b):
            node.meta["nn_module_stack"] = {"m": ("L['self'].h.0", nn.Module)}
        return call(aten.mul.Tensor, a, b)

    graph = draft(make, x=some(3))
    assert [len(region) for region in blocks(graph)] == [2]
    (found,) = outlined(graph, list(blocks(graph)), "block")(some(3))
    torch.testing.assert_close(found, some(3) * 2 * (some(3) * 2 + 1))


# ---- what is kept


class Attention(nn.Module):
    """Scores by hand, with dropout; [b, s, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 3)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        weights = F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.2)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        for block in self.h:
            x = block(x)
        return x


def kept(run: Any) -> int:
    """Elements of what backward needs of a forward, each memory counted once."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(found.values())


@checks.on(2)
def recompute_with_sequence_parallel_has_the_same_gradients(rank: int, n: int) -> None:
    """Dropout draws the same numbers again. The more is computed, the less is kept."""
    expect_same_gradients(rank, n, along=True)


@checks.on(2, rare=True)
def recompute_has_the_same_gradients_and_keeps_less(rank: int, n: int) -> None:
    expect_same_gradients(rank, n, along=False)


def expect_same_gradients(rank: int, n: int, along: bool) -> None:
    torch.manual_seed(0)
    whole, x = Blocks().double(), torch.randn(2, 9, 12, dtype=torch.float64)
    grads, sizes = [], []
    for how in HOW:
        cut = autotp.parallelize(
            copy.deepcopy(whole), n, example_inputs=x, randomness="exact", recompute=how, sequence_parallel=along
        )
        torch.manual_seed(1)
        outputs: list[Tensor] = []
        sizes.append(kept(lambda cut=cut, outputs=outputs: outputs.append(cut(x))))
        outputs[0].square().sum().backward()
        grads.append([outputs[0].detach(), torch.rand(()), *(p.grad for p in cut.parameters())])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    torch.testing.assert_close(grads[0], grads[2], rtol=0, atol=0)
    assert sizes[0] > sizes[1] > sizes[2], sizes
    torch.manual_seed(1)
    whole(x).square().sum().backward()
    state = dict(whole.named_parameters())
    for (name, _), grad in zip(cut.named_parameters(), grads[0][2:], strict=True):
        expected = state[name].grad
        assert expected is not None
        torch.testing.assert_close(expected, grad, rtol=0, atol=1e-12)


@checks.on(2)
def recompute_may_be_switched_between_calls(rank: int, n: int) -> None:
    """From one call to the next; torch.func knows no such thing, and keeps all."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12)
    cut = autotp.parallelize(Blocks(), n, example_inputs=x, randomness="exact")
    before = kept(lambda: cut(x))
    cut.recompute = "full"
    cut(x)  # Captures anew.
    assert kept(lambda: cut(x)) < before
    with pytest.raises(autotp.Error, match="recompute='all'"):
        cut.recompute = "all"  # type: ignore[assignment]
    params = dict(cut.named_parameters())
    torch.manual_seed(1)
    found = torch.func.grad(lambda p: torch.func.functional_call(cut, p, (x,)).square().sum())(params)
    torch.manual_seed(1)
    cut(x).square().sum().backward()
    torch.testing.assert_close(autotp.gather(found), {name: p.grad for name, p in params.items()})


@checks.on(2)
def gradient_checkpointing_enable_sets_recompute(rank: int, n: int) -> None:
    """`gradient_checkpointing_enable()`, before and after."""
    transformers = pytest.importorskip("transformers")
    from hugging_face import checkpoint_blocks

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).train()
    checkpoint_blocks(model)
    x = torch.arange(12).view(2, 6)
    cut = autotp.parallelize(model, n, example_inputs={"input_ids": x, "labels": x})
    assert cut.recompute == "full" and cut.is_gradient_checkpointing and cut.is_activation_checkpointing
    cut.gradient_checkpointing_disable()
    assert cut.recompute == "none" and not cut.is_gradient_checkpointing
    loss = cut(input_ids=x, labels=x).loss
    cut.gradient_checkpointing_enable()
    assert cut.recompute == "full"
    torch.testing.assert_close(cut(input_ids=x, labels=x).loss, loss)
    cut.activation_checkpointing_disable()
    assert cut.recompute == "none"
    with pytest.warns(UserWarning, match="every_n_layers and offload have no effect"):
        cut.activation_checkpointing_enable(every_n_layers=2)
    assert cut.recompute == "full"


@checks.on(2, rare=True)
def recomputed_blocks_compile_in_one_graph(rank: int, n: int) -> None:
    """The blocks in one graph, without a break, at a second length too."""
    torch.manual_seed(0)
    cut = autotp.parallelize(gpt(vocab_size=32, n_head=2, n_embd=8), n, sequence_parallel=True)
    assert cut.code.count("def forward") == 3  # The first block reads a sum that is whole.
    fast = torch.compile(cut, fullgraph=True, backend="aot_eager")
    for length in (7, 9):
        tokens = torch.randint(32, (2, length))
        torch.testing.assert_close(fast(tokens, tokens), cut(tokens, tokens))


@checks.on(2)
def like_blocks_are_compiled_once(rank: int, n: int) -> None:
    """However many there are; from the second step on nothing is compiled; a graph to come has its blocks compiled."""
    torch.manual_seed(0)
    whole = gpt(vocab_size=32, n_layer=4, n_head=2, n_embd=8).double()
    cut, compiled = autotp.parallelize(copy.deepcopy(whole), n), []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    cut.compile_blocks(backend=backend, fullgraph=True)
    tokens = torch.randint(32, (2, 7))
    for _ in range(3):
        cut.zero_grad()
        loss = cut(tokens, tokens)
        loss.backward()
        assert len(compiled) == 1
    expected = whole(tokens, tokens)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    grads = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in cut.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)
    cut.eval()
    torch.testing.assert_close(cut(tokens), whole.eval()(tokens))
    assert len(compiled) == 2


@checks.on(2, rare=True)
def recomputed_compiled_blocks_draw_the_same_numbers(rank: int, n: int) -> None:
    """Compiled blocks that backward computes again draw the same numbers again, fast ones too.

    In "exact" mode these are those of eager code. Fast ones are hashed in compiled code, and are others.
    """
    torch.manual_seed(0)
    whole, x = Blocks().double(), torch.randn(2, 9, 12, dtype=torch.float64)
    for randomness in ("fast", "exact"):
        gradients = []
        for how in ("none", "selective", "full"):
            cut = autotp.parallelize(
                copy.deepcopy(whole), n, example_inputs=x, recompute=how, randomness=randomness, sequence_parallel=True
            )
            eager = stepped(cut, x)
            cut.compile_blocks(backend="aot_eager")
            cut(x)
            gradients.append(stepped(cut, x))
            torch.testing.assert_close(gradients[0], gradients[-1])
            if randomness == "exact":
                torch.testing.assert_close(eager, gradients[-1])


def stepped(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The gradients of a call with the seed 1."""
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


@checks.on(2)
def ten_blocks_of_ten_sizes_are_each_compiled(rank: int, n: int) -> None:
    """Each once, and none too many: Dynamo compiles one code for eight kinds of arguments only."""
    torch.manual_seed(0)
    whole, x = Chain(*(Wide(4 * i + 4) for i in range(10))), torch.randn(3, 8)
    for how in ("none", "full"):
        compiled: list[fx.GraphModule] = []

        def backend(graph: fx.GraphModule, inputs: Any, compiled: list[fx.GraphModule] = compiled) -> Any:
            compiled.append(graph)
            return graph.forward

        cut = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x, recompute=how)
        cut.compile_blocks(backend=backend, fullgraph=True)
        for _ in range(2):
            cut(x).sum().backward()
        assert len(compiled) == 10
        torch.testing.assert_close(cut(x), whole(x))


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.h = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n 8]"""
        found: Tensor = self.h(x)
        return found


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n 8]"""
        return x + self.down(self.up(x).relu())


class Averaging(Wide):
    """Adds a buffer that follows the mean of what it has seen, after it has read it; norms by a running variance."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(8) if width > 8 else nn.Identity()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """x: [n 8]"""
        y = super().forward(self.norm(x) * (1 + self.seen))
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.5)
        return y


@checks.on(2)
def recomputed_blocks_write_buffers_once(rank: int, n: int) -> None:
    """Running statistics and averages: backward computes from what they were, and leaves them alone."""
    torch.manual_seed(0)
    whole, x = Chain(*(Averaging(4 * i + 8) for i in range(3))).double(), torch.randn(4, 8).double()
    for compiles in (False, True):
        alone = copy.deepcopy(whole)
        cut = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x, recompute="full")
        if compiles:
            cut.compile_blocks(backend="aot_eager")
        for _ in range(2):
            for model in (alone, cut):
                model.zero_grad()
                model(x).square().sum().backward()
        torch.testing.assert_close(dict(cut.named_buffers()), dict(alone.named_buffers()))
        for name, p in cut.named_parameters():
            expected = alone.get_parameter(name).grad
            assert expected is not None
            torch.testing.assert_close(expected, p.grad)


@checks.on(2)
def recompute_and_compile_blocks_need_the_outline_pass(rank: int, n: int) -> None:
    """Where blocks are left out, nothing can be computed again or compiled block by block, and the user hears it."""
    torch.manual_seed(0)
    whole, x = Blocks(), torch.randn(2, 5, 12)
    cut = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x, without="outline", randomness="exact")
    assert "block" not in cut.code
    found = []
    for model in (cut, whole):
        torch.manual_seed(1)
        found.append(model(x))
    torch.testing.assert_close(*found)
    assert message(cut.compile_blocks) == (
        "compile_blocks: without=('outline',) left no blocks\n  try      torch.compile(model)"
    )
    again = "without=('outline',): recompute needs blocks, which outline makes\n  try      recompute=\"none\""
    assert message(lambda: setattr(cut, "recompute", "full")) == again
    assert refusal(whole, n, example_inputs=x, without="outline", recompute="selective").endswith(again)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_selective_recompute_covers_attention_scores_only() -> None:
    """Of a block's operators, from one product to the other; a softmax without products is none."""

    def make(call: Any, q: Any, k: Any, v: Any) -> Any:
        scores = call(aten.mul.Tensor, call(aten.matmul.default, q, k), 0.5)
        weights = call(aten.dropout.default, call(aten.softmax.int, scores, -1), 0.1, True)
        outs = call(aten.relu.default, call(aten.matmul.default, weights, v)), call(aten.softmax.int, v, -1)
        for node in outs[0].graph.nodes:
            if node.op == "call_function":
                node.meta["nn_module_stack"] = {"m": ("L['self'].h.0", nn.Module)}
        return outs

    module = recompute(draft(make, q=some(2, 3), k=some(3, 4), v=some(4, 3)), "selective")
    (block,) = module.children()
    assert isinstance(block, Recomputed)
    # The last product is not: its result is kept.
    assert block.fates == dict.fromkeys(("matmul_default", "mul_tensor", "softmax_int", "dropout_default"), "recompute")


# ---- a block that runs again


def products(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """x: [n 4], w: [4 4], v: [4 4] -> [n 4]"""
    return x + F.linear(F.linear(x, w).tanh(), v)


class Operators(TorchDispatchMode):
    """Counts operators, and Python's calls of functions, in a region."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(op)] += 1
        return op(*args, **(kwargs or {}))


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def again(function: Callable[..., Tensor] = products) -> Recomputed:
    return Recomputed(fx.symbolic_trace(function))


def test_recomputed_block_has_first_and_second_derivatives() -> None:
    """First and second ones, of all inputs and of some, and twice by one graph."""
    xs = inputs()
    for how in (products, again()):
        y = how(*xs).square().sum()
        first = torch.autograd.grad(y, xs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), xs, retain_graph=True)
        some = torch.autograd.grad(y, xs[1:2], retain_graph=True)
        found = [*first, *second, *some, *torch.autograd.grad(y, xs)]
        if how is products:
            expected = found
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_recompute_runs_only_what_backward_needs() -> None:
    """Of two products the second has a reader that keeps nothing: three products forward and again, four backward."""
    xs, block = inputs(), again()
    with Operators() as seen:
        block(*xs).sum().backward()
    assert seen.counts["aten.mm.default"] == 2 + 1 + 4
    assert seen.counts["aten.tanh.default"] == 2


def test_a_region_of_a_checkpoint_ends_with_the_readers_of_what_it_drops() -> None:
    """As software that marks attention computes it: its last product, whose result nobody needs, runs again, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(torch.matmul(q, k), -1), v).sin()

    def make(call: Any, q: Any, k: Any, v: Any) -> Any:
        weights = call(aten.softmax.int, call(aten.matmul.default, q, k), -1)
        out = call(aten.sin.default, call(aten.matmul.default, weights, v))
        for node in out.graph.nodes:
            if node.op == "call_function":
                node.meta["nn_module_stack"] = {"m": ("L['self'].h.0", nn.Module)}
        return out

    products_again = []
    for ends_early in (True, False):
        module = recompute(draft(make, q=some(3, 2), k=some(2, 3), v=some(3, 2)), "selective")
        (block,) = module.children()
        assert isinstance(block, Recomputed)
        block.ends_early = ends_early
        operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (2, 3), (3, 2))]
        (y,) = module(*operands)
        with Operators() as operators:
            gradients = torch.autograd.grad(y.sum(), operands)
        assert all(map(torch.equal, gradients, torch.autograd.grad(attend(*operands).sum(), operands)))
        products_again.append(operators.counts["aten.mm.default"] - 4)
    assert products_again == [1, 2]


def test_recompute_ends_what_its_second_run_has_begun() -> None:
    """Once, although the second run stops at the last tensor that backward needs."""
    ended: list[str] = []

    def begin(x: Tensor) -> Tensor:
        if recomputations:
            recomputations[-1].callback(ended.append, "ended")
        return x.clone()

    graph = fx.Graph()
    begun = graph.call_function(begin, (graph.placeholder("x"),))
    graph.output(graph.call_function(torch.neg, (graph.call_function(torch.tanh, (begun,)),)))
    result = Recomputed(fx.GraphModule(nn.Module(), graph))(inputs()[0])
    assert ended == []
    result.sum().backward()
    assert ended == ["ended"] and recomputations == []


class Later(torch.autograd.Function):
    """The identity. As of a running sum, its node says how to wait for the values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: Callable[[Tensor], None]) -> Tensor:
        ctx.wait_for_value = wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_recompute_waits_for_an_operand_that_hooks_will_read() -> None:
    """Only then: without hooks the block itself waits where it reads the operand."""
    waited: list[Tensor] = []
    y, block = Later.apply(inputs()[0], waited.append), again(lambda x: x.tanh())
    block(y)
    assert waited == []
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        block(y)
    assert len(waited) == 1 and waited[0] is y


def test_recompute_refuses_a_changed_input() -> None:
    """As for what autograd itself keeps."""
    xs, block = inputs(), again()
    y = block(*xs).sum()
    with torch.no_grad():
        xs[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_recompute_frees_its_inputs_after_backward() -> None:
    """Without the garbage collector: a cycle through autograd's memory would stay for ever."""
    xs, block = inputs(), again()
    x = (xs[0] * 2).requires_grad_()
    seen = weakref.ref(x)
    gc.disable()
    try:
        y = block(x, *xs[1:])
        y.sum().backward()
        del x, y
        assert seen() is None
    finally:
        gc.enable()


def test_recompute_draws_the_numbers_of_forward() -> None:
    """And the stream goes on where it was before backward."""

    def noisy(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return products(torch.ops.aten.dropout.default(x, 0.5, True), w, v).tanh()

    grads, rest = [], []
    for how in (noisy, again(noisy)):
        xs = inputs()
        torch.manual_seed(1)
        y = how(*xs).sum()
        torch.rand(3)
        y.backward()
        grads.append([x.grad for x in xs])
        rest.append(torch.rand(()))
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert rest[0] == rest[1]


def test_recompute_runs_in_the_autocast_of_forward() -> None:
    """And the rest of backward has its own."""
    xs = [x.detach().float().requires_grad_() for x in inputs()]
    for forward, backward in ((True, False), (False, True)):
        found = []
        for how in (products, again()):
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                y = how(*xs)
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                found.append(torch.autograd.grad(y.float().sum(), xs))
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_recompute_leaves_the_autocast_region_of_a_block() -> None:
    """A run that ended inside of it would leave torch's cache of casts, which an optimizer makes wrong."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    region = graph.call_function(enter_autocast, ("cpu", torch.bfloat16, True, True))
    y = graph.call_function(aten.linear.default, (x, w))
    graph.call_function(exit_autocast, (region,))
    graph.output(y)
    xs = [x.detach().float().requires_grad_() for x in inputs()[:2]]
    Recomputed(fx.GraphModule(nn.Module(), graph))(*xs).sum().backward()
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_recompute_keeps_a_tensor_in_one_python_call() -> None:
    """When backward asks for it: hooks in Python are slower than small kernels."""
    assert [more - less for less, more in zip(python_calls(1), python_calls(11), strict=True)] == [0, 10]


def python_calls(count: int) -> list[int]:
    """Returns how many frames of Python forward and backward have of a block that keeps `count` tensors and some."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x.tanh()
        return x

    block, x = again(chain), inputs()[0]
    frames = [0, 0]

    def number(of: int, run: Callable[[], Any]) -> Any:
        def seen(frame: Any, event: str, _: Any) -> None:
            frames[of] += event == "call"

        sys.setprofile(seen)
        try:
            return run()
        finally:
            sys.setprofile(None)

    block(x)  # The first run of these sizes looks at each operator.
    y = number(0, lambda: block(x))
    number(1, y.sum().backward)
    return frames
