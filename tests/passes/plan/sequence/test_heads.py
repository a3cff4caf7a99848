"""Attention over cp by heads: as on one device, in any layout; the bytes that ranks send are those of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks
from small_models import gpt
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import Report, compare_calls, find_inputs
from autotp.display.text_table import bytes_text
from autotp.ops import collectives
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.program import sequences
from autotp.passes.program.program import Program
from autotp.rules.call import elements_of

checks = Checks()
SIZES = {"block_size": 64, "vocab_size": 61, "n_layer": 2, "n_head": 8, "n_embd": 16}


class Grouped(nn.Module):
    """Attention of grouped heads. x: [rows seq 16] -> the same"""

    def __init__(self, heads: int = 8, kv_heads: int = 4, mask: str = "causal", repeat: bool = False) -> None:
        super().__init__()
        self.mask, self.repeat, self.groups = mask, repeat, heads // kv_heads
        self.q, self.k, self.v = (nn.Linear(16, n * 2) for n in (heads, kv_heads, kv_heads))
        self.out, self.slopes = nn.Linear(heads * 2, 16), nn.Parameter(torch.linspace(0, 1, heads))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        """x: [batch seq 16], documents: int [batch seq]"""
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        back = places[:, None] - places[None]
        mask = None
        if self.mask == "window":
            mask = ((back >= 0) & (back < 3))[None, None]
        elif self.mask == "packed":
            mask = ((documents[:, :, None] == documents[:, None]) & (back >= 0))[:, None]
        elif self.mask == "slopes":
            mask = (self.slopes[:, None, None] * -back.abs())[None]
        if self.repeat:
            k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.mask == "causal", enable_gqa=not self.repeat and self.groups > 1
        )
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def inputs(length: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, length, 16), (torch.arange(length) // 3)[None].repeat(2, 1)


def compared(model: nn.Module, tp: int, cp: int, given: Any = None, **settings: Any) -> Report:
    chosen = {"cp_attention": "heads"} | settings
    return compare_calls(model, find_inputs(model, given), tp, Options(cp=cp, **chosen))


def program(model: nn.Module, tp: int, cp: int, given: Any = None, **settings: Any) -> Program:
    args, kwargs = find_inputs(model, given)
    return analyse(skeleton_of(model), args, kwargs, tp, Options(cp=cp, **settings))


def called(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize(
    "settings", [{}, {"sequence_parallel": True, "recompute": "selective"}, {"overlap": "batch"}], ids=str
)
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (1, 4), (2, 4)])
def test_gpt_by_heads_equals_one_device(tp: int, cp: int, settings: dict[str, Any]) -> None:
    report = compared(gpt(seed=0, **SIZES), tp, cp, **settings)
    assert report.ok and report.worst.error < 1e-12, report


def test_dropout_by_heads_draws_the_masks_of_one_device() -> None:
    report = compared(gpt(seed=0, **SIZES, dropout=0.2), 2, 2)
    assert report.ok and report.worst.error < 1e-12, report


@pytest.mark.parametrize("length", [2, 7, 12])
@pytest.mark.parametrize("mask", ["causal", "full", "window", "packed", "slopes"])
def test_any_mask_and_length_by_heads_equals_one_device(mask: str, length: int) -> None:
    """Lengths that cp does not divide, and ranks without positions; slopes of heads that are learnt."""
    report = compared(Grouped(mask=mask), 1, 4, inputs(length))
    assert report.ok and report.worst.error < 1e-12, report


@pytest.mark.parametrize("repeat", [False, True], ids=["enable_gqa", "repeated"])
def test_grouped_heads_are_exchanged_before_they_are_repeated(repeat: bool) -> None:
    model = Grouped(repeat=repeat)
    report = compared(model, 2, 2, inputs())
    assert report.ok and report.worst.error < 1e-12, report
    moved = called(program(model, 1, 4, inputs(), cp_attention="heads").graph, collectives.all_to_all)
    # Of a fourth of 2 x 8 tokens, 2 numbers for each head: 4 of keys and of values, 8 of queries and results.
    assert sorted(elements_of(node.args[0].meta["val"].shape) for node in moved) == [32, 32, 64, 64]


def test_tp_ranks_keep_the_heads_that_they_have_without_cp() -> None:
    """So a checkpoint, and a further graph in which nothing is cut over cp, have the same parts."""
    model = Grouped()
    plain, exchanged = (program(model, 2, cp, inputs(), cp_attention="heads") for cp in (1, 2))
    assert exchanged.layouts == plain.layouts and exchanged.layouts["k.weight"].dim == 0


# ---- the choice


def test_auto_takes_what_sends_fewer_bytes() -> None:
    """4 exchanges of 1/cp each against 2 gathers: equal at cp=2 without groups, and later with them."""
    for heads, kv_heads, cp, exchanges in ((8, 8, 2, 0), (8, 8, 4, 4), (8, 4, 2, 0), (8, 4, 4, 4), (8, 2, 2, 0)):
        graph = program(Grouped(heads, kv_heads), 1, cp, inputs()).graph
        assert len(called(graph, collectives.all_to_all)) == exchanges, (heads, kv_heads, cp)
        assert len(called(graph, collectives.all_gather)) == (0 if exchanges else 2)


def test_heads_that_do_not_suffice_are_gathered_or_an_error_that_names_them() -> None:
    model = Grouped(8, 4)
    gathered = program(model, 2, 4, inputs())
    assert not called(gathered.graph, collectives.all_to_all)
    assert "8 heads, 4 of keys and values: they do not divide by tp x cp = 2 x 4" in gathered.notes["attention"]
    with pytest.raises(autotp.Error) as caught:
        autotp.explain(gpt(), 1, cp=2, cp_attention="heads")
    assert "the attention of `h.0.attn` has 3 heads: they do not divide by tp x cp = 1 x 2" in str(caught.value)
    assert 'cp_attention="auto"' in str(caught.value) and "scaled_dot_product_attention" in str(caught.value)


class Tiled(Grouped):
    """Each head of keys is read by heads that are not neighbours."""

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        k, v = (t.repeat(1, self.groups, 1, 1) for t in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_heads_that_are_no_axis_are_gathered_or_an_error() -> None:
    assert not called(program(Tiled(), 1, 4, inputs()).graph, collectives.all_to_all)
    with pytest.raises(autotp.Error) as caught:
        program(Tiled(), 1, 4, inputs(), cp_attention="heads")
    reason = "the attention has no heads that are one axis of the model"
    assert str(caught.value).splitlines()[0].endswith(f'cp_attention="heads": {reason}')


class OneBias(Grouped):
    """A bias that is computed from the sequence, the same for all heads."""

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        bias = (x[:, :, None, 0] - x[:, None, :, 0])[:, None] * self.slopes[0]
        return self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("model", "mask_bytes"),
    [(Grouped(8, 8, mask="slopes"), 8 * 64 * 64 * 4 / 4), (OneBias(8, 8), 2 * 64 * 64 * 4), (Grouped(8, 8), 0)],
    ids=["of each head", "of all heads", "none"],
)
def test_a_mask_that_learns_is_counted(model: nn.Module, mask_bytes: float) -> None:
    """It is exchanged, too, or gathered where it has no heads: with a square of the sequence, "auto" gathers keys."""
    plan = autotp.explain(model, 1, cp=4, example_inputs=inputs(64), cp_attention="heads")
    # Of queries, keys, values and the result a rank has 2 x 16 tokens of 16 numbers.
    expected = 2 * 3 / 4 * (4 * 2 * 16 * 16 * 4 + mask_bytes)
    assert f"a rank sends {bytes_text(round(expected))} a step; a gather of keys 24.6 KB" in str(plan)
    sends = [s for s in plan.traffic.over("cp").sends if s.kind == "all-to-all" or s.bytes == 2 * 64 * 64 * 4]
    assert sum(s.bytes for s in sends) * 3 / 4 == expected
    exchanged = called(program(model, 1, 4, inputs(64)).graph, collectives.all_to_all)
    assert bool(exchanged) == (mask_bytes == 0)


class Products(Grouped):
    """Attention that is written as products."""

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_products_are_gathered_and_no_attention_by_heads() -> None:
    model = Products(4, 4)
    assert "attention" not in program(model, 1, 4, inputs()).notes
    with pytest.raises(autotp.Error, match="no attention is one operator"):
        program(model, 1, 4, inputs(), cp_attention="heads")


def test_plan_says_how_attention_reads_whole_sequences() -> None:
    """Of 2 rows of 8 tokens, float32: a key has 2 x 4 heads x 8 x 2 x 4 bytes = 512 B, a query 1,024 B."""
    plans = [
        autotp.explain(Grouped(), 1, cp=4, example_inputs=inputs(), cp_attention=how) for how in ("auto", "gather")
    ]
    # (1,024 + 512 + 512 + 1,024) x 3/16 x 2, and (512 + 512) x 3/4 x 2
    assert "attention   1 exchange heads for the sequence: a rank sends 1.2 KB a step; a gather of keys 1.5 KB" in str(
        plans[0]
    )
    assert "attention   1 gather keys and values: a rank sends 1.5 KB a step; an exchange of heads 1.2 KB" in str(
        plans[1]
    )
    assert plans[0].traffic.over("cp").forward["all-to-all"] == 4 == plans[0].traffic.over("cp").backward["all-to-all"]


def all_to_all_along(graph: fx.Graph, **places: int) -> None:
    """Gives the first exchange other arguments."""
    node, names = called(graph, collectives.all_to_all)[0], {"dim": 2, "size": 3, "to_dim": 4, "to_size": 5}
    for name, value in places.items():
        node.update_arg(names[name], value)


def gathered_along(graph: fx.Graph, dim: int) -> None:
    called(graph, collectives.all_gather)[0].update_arg(2, dim)


EXCHANGES_ANOTHER = "does not exchange the axis that is cut for another"
FAULTS: dict[str, tuple[str, Callable[[fx.Graph], Any], str]] = {
    "batch": ("heads", lambda graph: all_to_all_along(graph, dim=0), EXCHANGES_ANOTHER),
    "width": ("heads", lambda graph: all_to_all_along(graph, to_dim=5), "is not this rank's"),
    "outer heads": ("heads", lambda graph: all_to_all_along(graph, to_dim=1), "is not this rank's"),
    "size": ("heads", lambda graph: all_to_all_along(graph, to_size=4), EXCHANGES_ANOTHER),
    "itself": ("heads", lambda graph: all_to_all_along(graph, to_dim=4), EXCHANGES_ANOTHER),
    "gather along batch": (
        "gather",
        lambda graph: gathered_along(graph, 0),
        "does not move along the axis that is cut",
    ),
    "gather along width": (
        "gather",
        lambda graph: gathered_along(graph, 2),
        "does not move along the axis that is cut",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_refuses_a_collective_over_the_wrong_axis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan#3206: keys were gathered along another dimension than the sequence."""
    (how, fault, told), lower = FAULTS[name], sequences.lower

    def lowered(*arguments: Any) -> fx.Graph:
        graph = lower(*arguments)
        fault(graph)
        return graph

    program(Grouped(), 1, 2, inputs(), cp_attention=how)
    monkeypatch.setattr(sequences, "lower", lowered)
    with pytest.raises(autotp.Error, match=told):
        program(Grouped(), 1, 2, inputs(), cp_attention=how)


def test_estimate_prices_the_exchange() -> None:
    """An all-to-all of a rank's part of each operand, and nothing that the gather waits for."""
    with torch.device("meta"):
        model = gpt(**SIZES | {"block_size": 2048, "n_embd": 256}, dropout=0.0)
    spent = {
        how: autotp.estimate(model, gpu="h100-80gb", batch=1, cp=4, cp_attention=how).spent
        for how in ("auto", "gather", "heads")
    }
    assert spent["auto"] == spent["heads"] and spent["heads"]["all-to-all cp"] > 0
    assert "all-to-all cp" not in spent["gather"] and "reduce-scatter cp" not in spent["heads"]


class Two(nn.Module):
    """Causal attention of heads that suffice, and of heads that do not. x: [rows seq 16] -> the same"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Grouped(8, 8), Grouped(3, 3)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return self.second(self.first(x, documents), documents)


def test_one_sequence_may_have_both_and_keeps_its_order() -> None:
    given = inputs(9)
    both = program(Two(), 1, 4, given)
    assert len(called(both.graph, collectives.all_to_all)) == 4 and len(called(both.graph, collectives.all_gather)) == 2
    assert both.sequences.unbalanced == ("another attention exchanges heads for it",)
    report = compared(Two(), 1, 4, given, cp_attention="auto")
    assert report.ok and report.worst.error < 1e-12, report


# ---- on ranks


@checks.on(2, 4)
def steps_by_heads_equal_one_device(rank: int, n: int) -> None:
    """Other lengths than at capture: odd ones, and one that is shorter than there are ranks."""
    whole, parallel = (gpt(seed=0, **SIZES).double() for _ in range(2))
    parallel = autotp.parallelize(parallel, tp=1, cp=n, cp_attention="heads")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (whole, parallel)]
    for length in (8, 7, 3, 16):
        tokens = torch.arange(2 * length).view(2, length) * 31 % 61
        losses = [model(tokens, tokens * 17 % 61) for model in (whole, parallel)]
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-10, atol=1e-10)
        for loss in losses:
            loss.backward()
        for (name, p), plain in zip(parallel.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, plain.grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@checks.on(2, rare=True)
def a_compiled_model_by_heads_equals_one_device(rank: int, n: int) -> None:
    whole, parallel = (gpt(seed=0, **SIZES | {"n_layer": 1}).double() for _ in range(2))
    parallel = autotp.parallelize(parallel, tp=1, cp=n, cp_attention="heads")
    tokens = torch.arange(2 * 9).view(2, 9) % 61
    parallel(tokens, tokens)
    losses = [model(tokens, tokens) for model in (whole, torch.compile(parallel, backend="aot_eager"))]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-10, atol=1e-10)
    for p, plain in zip(parallel.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, plain.grad, rtol=1e-10, atol=1e-10)


@checks.on(4)
def bfloat16_on_a_mesh_by_heads_is_near_one_device(rank: int, n: int) -> None:
    """tp x cp of a mesh of the user's, as under `srun`, in bfloat16."""
    whole, parallel = (gpt(seed=0, **SIZES).bfloat16() for _ in range(2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    parallel = autotp.parallelize(parallel, mesh=mesh, cp_attention="heads", sequence_parallel=True)
    tokens = torch.arange(2 * 9).view(2, 9) % 61
    losses = [model(tokens, tokens) for model in (whole, parallel)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=2e-2, atol=2e-2)
    grads = parallel.get_parameter("ln_f.weight").grad, whole.get_parameter("ln_f.weight").grad
    torch.testing.assert_close(*grads, rtol=5e-2, atol=2e-2)


@checks.on(4)
def distributed_steps_by_heads_equal_one_device(rank: int, n: int) -> None:
    """A pipeline of two stages, each over two cp ranks; then two replicas that divide the optimizer's state."""
    tokens = torch.arange(4 * 8).view(4, 8) * 7 % 61
    for layout in ({"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 1}):
        whole, parallel = (gpt(seed=0, **SIZES).double() for _ in range(2))
        rows = 4 // (layout.get("microbatches", 1) * layout.get("dp", 1))
        trainer = autotp.distribute(
            parallel, cp=2, cp_attention="heads", **layout, example_inputs=(tokens[:rows], tokens[:rows])
        )
        replicas = trainer.mesh["dp"]
        mine = tokens.chunk(replicas.size())[replicas.get_local_rank()]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (whole, trainer)]
        for _ in range(3):
            loss = whole(tokens, tokens)
            loss.backward()
            torch.testing.assert_close(trainer.step(mine, mine), loss.detach(), rtol=1e-10, atol=1e-10)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@checks.on(2, 4)
def ranks_send_the_bytes_of_the_formula(rank: int, n: int) -> None:
    """Counted at the collectives: what a rank keeps is not sent."""
    sent = dict[str, float]()
    run = collectives.communicate

    def counted(name: str, x: Tensor, *rest: Any) -> Tensor:
        if name == "all_to_all_single":
            kept = rest[1][rank]
            sent["heads"] = sent.get("heads", 0) + (x.numel() - kept) * x.element_size()
        if name == "all_gather_into_tensor" and x.shape[-1] == 8:  # Keys and values, and not the output.
            sent["gather"] = sent.get("gather", 0) + x.nbytes * (n - 1)
        if name == "all_reduce" and x.dim() == 3 and x.shape[-1] == 8:  # gloo's reduce-scatter: a ring would send this.
            sent["gather"] = sent.get("gather", 0) + x.nbytes * (n - 1) / n
        return run(name, x, *rest)

    given = inputs(32)
    query, key = 2 * 8 * 32 * 2 * 4, 2 * 4 * 32 * 2 * 4
    expected = {"heads": 2 * (2 * query + 2 * key) * (n - 1) / n**2, "gather": 2 * 2 * key * (n - 1) / n}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "communicate", counted)
        for how in expected:
            model = autotp.parallelize(Grouped(), tp=1, cp=n, cp_attention=how, example_inputs=given)
            model(*given).square().sum().backward()
            assert sent == pytest.approx({how: expected[how]}, rel=0.02), how
            sent.clear()


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
