"""late_sums: sums of gradients run beside the backward of other blocks, and nothing reads one that still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import gpt as small
from small_models import gradient_differences, step_differences
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.compiler import analyse, rank_graph
from autotp.extensions import values_of
from autotp.ops import coalesced, collectives
from autotp.ops.coalesced import begin_sums, together
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.bind import bind
from autotp.passes.emit.late_sums import late_sums

TOKENS = torch.randint(27, (4, 8), generator=torch.Generator().manual_seed(0))
CALL = {"tokens": TOKENS, "labels": TOKENS}


def gpt(layers: int = 3) -> nn.Module:
    return small(0, n_layer=layers, n_head=4, n_embd=16, vocab_size=28).double()


def bound(**options: Any) -> fx.Graph:
    program = analyse(skeleton_of(gpt()), (), CALL, 2, Options(**options))
    return bind(rank_graph(program, 0, "fast"), torch.device("cpu"), {"tp": "tp"})


def test_late_sums_keep_operators_and_operands() -> None:
    before = bound(sequence_parallel=True)
    after = late_sums(before)
    nodes = [node for node in after.nodes if node.target is not begin_sums]
    assert len(nodes) == len(after.nodes) - 1
    assert [node.op for node in after.nodes].index("call_function") == list(after.nodes).index(
        next(node for node in after.nodes if node.target is begin_sums)
    )
    sums = 0
    for old, new in zip(before.nodes, nodes, strict=True):
        assert (old.name, old.target, [*map(str, old.all_input_nodes)]) == (
            new.name, new.target, [*map(str, new.all_input_nodes)],
        )  # fmt: skip
        sums += new.target is together
        assert new.args[3:] == (True,) if new.target is together else len(new.args) == len(old.args)
    assert sums == 4  # Three blocks, and the norm behind them.


def test_late_sums_change_nothing_without_parameter_sums() -> None:
    before = bound()
    assert late_sums(before) is before


# ---- when sums run


class Marked(TorchDispatchMode):
    """Records the starts of sums of parameters, products, and waits for such a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.running: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        if "all_reduce_coalesced" in str(op):
            self.seen.append("start")
            self.running |= {x.data_ptr() for x in found}
        elif "wait_tensor" in str(op) and args[0].data_ptr() in self.running:
            self.seen.append("end")
        elif "mm" in str(op):
            self.seen.append("product")
        return found


def marks(rank: int, n: int, given: dict[str, Any]) -> list[str]:
    model = autotp.parallelize(gpt(), sequence_parallel=True, **given)
    loss = model(**CALL)
    with Marked() as marked:
        loss.backward()
    return [mark for mark, before in zip(marked.seen, ["", *marked.seen], strict=False) if mark != before]


@pytest.mark.parametrize("given", [{}, {"recompute": "full"}, {"without": ("outline",)}], ids=str)
def test_late_sums_run_beside_the_block_before_s_backward(given: dict[str, Any]) -> None:
    """That of the last norm and those of three blocks; beside the last one there is no product."""
    blocks = ["start", *["product", "start", "end"] * 3, "end"]
    for seen in run_ranks(marks, 2, given):
        assert seen[seen.index("start") :][: len(blocks) - 1] == blocks[:-1], seen
        assert seen[-1] == "end"


def test_without_late_sums_each_sum_ends_at_once() -> None:
    for seen in run_ranks(marks, 2, {"without": ("late_sums",)}):
        assert [seen[i + 1] for i, mark in enumerate(seen) if mark == "start"] == ["end"] * 4


# ---- numbers, where the tensors of a running sum are full of NaN


def end_late() -> None:
    """Makes the results of each sum of parameters NaN until it is waited for. (In a process of its own.)"""

    def start_all(xs: Sequence[Tensor], group: str) -> Callable[[], list[Tensor]]:
        totals = collectives.communicate_all([x.clone() for x in xs], group)
        for x in xs:
            x.data.fill_(float("nan"))
        return lambda: totals

    coalesced.start_all = start_all


def stepped(rank: int, n: int, given: dict[str, Any], dtype: torch.dtype) -> list[float]:
    """The largest differences from one device, in steps of other sizes, each of two backwards."""
    end_late()
    whole, model = (gpt().to(dtype) for _ in range(2))
    model = autotp.parallelize(model, **{"sequence_parallel": True, **given})
    return step_differences(whole, model, ((4, 8), (3, 6), (1, 6), (5, 4)), backwards=2)


@pytest.mark.parametrize(
    "given",
    [{}, {"recompute": "full"}, {"recompute": "selective"}, {"without": ("overlap",)}, {"without": ("outline",)}],
    ids=str,
)
def test_late_sums_steps_equal_one_device(given: dict[str, Any]) -> None:
    for found in run_ranks(stepped, 2, given, torch.float64, alone=True):
        assert max(found) < 1e-10


def test_late_sums_float32_steps_equal_one_device() -> None:
    for found in run_ranks(stepped, 2, {}, torch.float32, alone=True):
        assert max(found) < 1e-5


def test_late_sums_of_shared_key_heads_equal_one_device() -> None:
    """Their weights are summed among those ranks, in the block's sum."""
    for found in run_ranks(shared_heads, 4):
        assert found < 1e-6  # transformers computes norms in float32.


def shared_heads(rank: int, n: int) -> float:
    transformers = pytest.importorskip("transformers")
    end_late()
    config = transformers.LlamaConfig(
        vocab_size=28, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(config).double()
    torch.manual_seed(0)
    model = autotp.parallelize(transformers.LlamaForCausalLM(config).double())
    given = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
    for each in (whole, model):
        each(**given).loss.backward()
    return max(gradient_differences(whole, model))


# ---- what others do with gradients


def in_units(rank: int, n: int, whole_model: bool) -> list[str]:
    """`fully_shard` on the blocks and the model, or on the model alone; the input has a gradient, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, model = (Rows().double() for _ in range(2))
    x = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model = autotp.parallelize(model, mesh=mesh["tp"], example_inputs=x, sequence_parallel=True)
    for unit in [] if whole_model else list(model.blocks):
        fully_shard(unit, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for each in (whole, model):
        for _ in range(2):
            each(x).square().sum().backward()
    wrong = []
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        if not torch.allclose(q.grad.full_tensor(), p.grad, rtol=1e-10):  # type: ignore[arg-type, union-attr]
            wrong.append(name)
    return wrong


class Rows(nn.Module):
    """Three blocks, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (part(y).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("whole_model", [False, True])
def test_late_sums_end_before_fully_shard_s_units(whole_model: bool) -> None:
    assert run_ranks(in_units, 4, whole_model) == [[]] * 4


def noted(rank: int, n: int) -> tuple[int, int, bool]:
    """How often hooks of gradients run, with a whole sum; then a backward that fails, and one after it."""
    model = autotp.parallelize(gpt(), sequence_parallel=True)
    found = dict[str, Tensor]()
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        p.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: p.grad.clone()}))
    model(**CALL).backward()
    same = sum(torch.equal(found[name], p.grad) for name, p in parameters.items())
    handle = model.wte.weight.register_hook(lambda grad: 1 / 0)
    model.zero_grad()
    with pytest.raises(ZeroDivisionError):
        model(**CALL).backward()
    handle.remove()
    model.zero_grad()
    model(**CALL).backward()
    return same, len(parameters), all(torch.equal(found[name], p.grad) for name, p in parameters.items())


def test_late_sums_reach_hooks_also_after_a_failed_backward() -> None:
    for same, number, again in run_ranks(noted, 2):
        assert same == number and again


def odd_backwards(rank: int, n: int, given: dict[str, Any]) -> list[str]:
    """A backward inside of another, one after a failed one on the same graph, a map: what differs from one device."""
    whole, model = gpt(), autotp.parallelize(gpt(), **given)
    whole(**CALL).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    parameters = dict(model.named_parameters())
    wrong = []

    def compare(what: str) -> None:
        for name, p in parameters.items():
            if not torch.allclose(autotp.gather(p.grad), expected[name], rtol=1e-9):  # type: ignore[arg-type]
                wrong.append(f"{what}: {name}")
        model.zero_grad()

    for at in ("h.1.mlp.c_proj.bias", "h.0.ln_2.weight", "wte.weight"):
        loss, some = model(**CALL), [parameters["h.0.ln_1.weight"], parameters["h.2.ln_2.bias"]]
        handle = parameters[at].register_hook(
            lambda grad, loss=loss, some=some: torch.autograd.grad(loss, some, retain_graph=True) and None
        )
        loss.backward(retain_graph=True)
        handle.remove()
        compare(f"inside of another, at {at}")
        handle = parameters[at].register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        handle.remove()
        model.zero_grad()
        with pytest.warns(match="Anomaly"), torch.autograd.detect_anomaly():
            loss.backward()
        compare(f"after a failure at {at}")
    torch.vmap(lambda rows: model(tokens=rows, labels=rows))(TOKENS[:, None]).mean().backward()
    compare("in a map")
    return wrong


@pytest.mark.parametrize(
    "given", [{"sequence_parallel": True}, *({"overlap": value} for value in values_of("overlap"))], ids=str
)
def test_late_sums_in_odd_backwards_equal_one_device(given: dict[str, Any]) -> None:
    assert run_ranks(odd_backwards, 2, given) == [[], []]


def failing(rank: int, n: int) -> list[int]:
    """How many sums torch keeps after each of three backwards that fail, and after one that does not."""
    model = autotp.parallelize(gpt(), sequence_parallel=True)
    found = []
    for fails in (True, True, True, False):
        loss = model(**CALL)
        handle = model.wte.weight.register_hook(lambda grad: 1 / 0)
        if fails:
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        handle.remove()
        if not fails:
            loss.backward()
        found.append(torch._C._distributed_c10d._get_work_registry_size())
    return found


def test_late_sums_of_failed_backwards_are_waited_for() -> None:
    for first, *others, last in run_ranks(failing, 2):
        assert all(number <= first for number in others) and last == 0
