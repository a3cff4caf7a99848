"""experts: rows in the order of the experts that they chose, and each rank with experts of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import canonical, ops
from ranks import Checks
from small_models import Mixture
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.model_library import library
from autotp.ops.experts import rows as routing
from autotp.ops.grouped_mm import OPERATOR
from autotp.passes.plan.experts.experts import experts
from autotp.passes.plan.infer_axes import infer_axes

pytest.importorskip("transformers.integrations.moe")  # It brings the product of groups in every dtype.

from support.hf_families import FAMILIES

checks = Checks()
PRODUCTS = {"rows": None, "groups": torch.ops.transformers.grouped_mm_fallback, "own": OPERATOR}
each_product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())


def rewritten(model: nn.Module, x: Tensor, tp: int) -> list[str]:
    library().add_operators()  # As a compilation does: that of transformers has a rule then.
    captured, graph = canonical(model, x)
    return ops(experts(graph, infer_axes(graph), captured.parameters, tp)[0])


# ---- what is rewritten


@each_product
def test_experts_sends_rows_to_their_experts(product: Any) -> None:
    found = rewritten(Mixture(product), torch.randn(3, 8), 2)
    kinds = [kind for kind in found if kind in ("dispatch", "counts", "spread", "grouped_mm", "combine")]
    products = ["grouped_mm", "spread"] * 2 if product else ["spread"] * 4
    assert kinds == ["dispatch", "counts", *products, "combine"]


def test_experts_keeps_torch_s_grouped_mm_fused() -> None:
    model = Mixture(lambda x, weight, ends: F.grouped_mm(x, weight, offs=ends), width=16).bfloat16()
    captured, graph = canonical(model, torch.randn(3, 8, dtype=torch.bfloat16))
    routed, _ = experts(graph, infer_axes(graph), captured.parameters, 2)
    assert [node.args[-1] for node in routed.nodes if node.target is routing.grouped_mm] == [True, True]


@each_product
def test_experts_leaves_experts_that_do_not_divide(product: Any) -> None:
    assert "dispatch" not in rewritten(Mixture(product), torch.randn(3, 8), 3)


class Table(nn.Module):
    """Rows of a table that no product reads: these are no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x: [rows 8], chosen: [rows]"""
        return torch.tanh(x * self.table[chosen])


def test_experts_leaves_a_table_that_is_no_mixture() -> None:
    captured, graph = canonical(Table(), torch.randn(5, 8), torch.arange(5) % 4)
    assert "dispatch" not in ops(experts(graph, infer_axes(graph), captured.parameters, 2)[0])


# ---- equal to one device


@pytest.mark.parametrize("tp", [2, 4])
@each_product
def test_mixture_cut_by_experts_equals_one_device(product: Any, tp: int) -> None:
    torch.manual_seed(0)
    report = autotp.verify(Mixture(product), tp, example_inputs=torch.randn(5, 8), experts="expert")
    assert report.ok, report
    assert {row.name for row in report.plan.cuts if "4 experts" in row.why} == {"up", "up_bias", "down", "down_bias"}


@pytest.mark.system
@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.rare),
    pytest.param("mixtral-batched", marks=pytest.mark.rare), pytest.param("qwen3_moe", marks=pytest.mark.rare),
    pytest.param("gpt_oss", marks=pytest.mark.rare)])  # fmt: skip
def test_families_cut_by_experts_equal_one_device(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    report = autotp.verify(model, 2, example_inputs=inputs, experts="expert")
    assert report.ok, report
    stacked = [row for row in report.plan.cuts if "experts." in row.name and "shared" not in row.name]
    assert stacked and all("experts: dispatch" in row.why for row in stacked)
    assert not report.plan.traffic.forward.keys() - {"all-reduce"}, report


# ---- other ways of writing it


class Written(nn.Module):
    """Four experts with biases; how they are chosen and used is the test's."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.router, self.written = nn.Linear(8, 4), forward
        self.up, self.down = nn.Parameter(torch.empty(4, 8, 12)), nn.Parameter(torch.empty(4, 12, 8))
        self.up_bias, self.more = nn.Parameter(torch.empty(4, 12)), nn.Parameter(torch.empty(8, 12, 8))
        for parameter in (self.up, self.down, self.up_bias, self.more):
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens 8]"""
        return self.written(self, x, *self.router(x).softmax(-1).topk(2))

    def mlp(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x: [rows 8], chosen: [rows]"""
        h = F.gelu(torch.bmm(x.unsqueeze(1), self.up[chosen]).squeeze(1) + self.up_bias[chosen])
        return torch.bmm(h.unsqueeze(1), self.down[chosen]).squeeze(1)

    def groups(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: [rows 8], ends: [experts] where each expert's rows end"""
        return GROUPS(F.gelu(GROUPS(x, self.up, ends)), self.down, ends)


GROUPS = torch.ops.transformers.grouped_mm_fallback


def ends_of(chosen: Tensor) -> Tensor:
    return torch.histc(chosen.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)


def in_two_layers(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    """The rows of the second choose by what the first made of them."""
    x = x + p[:, :1] * m.mlp(x, i[:, 0])
    q, j = m.router(x).softmax(-1).max(-1)
    return x + q[:, None] * m.mlp(x, j)


def twice_alike(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    """The same rows to the same experts again, with a residual and something else between."""
    x = x + p[:, :1] * m.mlp(x, i[:, 0])
    return x + m.mlp(x - x.mean(0), i[:, 0])


def one_slot_after_the_other(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    for slot in range(2):
        x = x + p[:, slot : slot + 1] * m.mlp(x, i[:, slot])
    return x


def two_choices_of_one_row(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    h = F.gelu(torch.bmm(x.unsqueeze(1), m.up[i[:, 0]]))
    return x + torch.bmm(h, m.down[i[:, 1]]).squeeze(1) * p[:, :1]


def two_numbers_of_experts(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    chosen = i[:, 0]
    h = F.gelu(torch.bmm(x.unsqueeze(1), m.up[chosen]) + m.up_bias[chosen].unsqueeze(1))
    return x + torch.bmm(h, m.more[chosen]).squeeze(1)


def counted_from_the_end(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    return x + m.mlp(x, i[:, 0] - 4)


def clamped_here_and_not_there(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    """-1 is the first expert for one, the last for the other."""
    chosen = i[:, 0] - 1
    return x + torch.bmm((torch.bmm(x.unsqueeze(1), m.up[chosen.clamp(min=0)]) + m.up_bias[chosen].unsqueeze(1)),
                         m.down[chosen.clamp(min=0)]).squeeze(1)  # fmt: skip


def counted_before_they_are_sorted(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    order = i[:, 0].argsort()
    return x + m.groups(x[order], ends_of(i[:, 0]))[order.argsort()]


def sorted_by_another(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    """The choice in an order that is not its own."""
    order = i[:, 1].argsort()
    return x + m.groups(x[order], ends_of(i[:, 0][order]))[order.argsort()]


def read_in_their_order(m: Written, x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    order = i[:, 0].argsort()
    return x + m.groups(x[order], ends_of(i[:, 0][order]))[order.argsort()]


ROUTED = {in_two_layers, twice_alike, one_slot_after_the_other, two_choices_of_one_row, two_numbers_of_experts,
          counted_from_the_end, clamped_here_and_not_there, read_in_their_order}  # fmt: skip


@pytest.mark.parametrize(
    "written", [*sorted(ROUTED, key=str), counted_before_they_are_sorted, sorted_by_another], ids=lambda f: f.__name__
)
def test_experts_recognises_other_spellings_of_routing(written: Any) -> None:
    """What is not seen to be routing is cut by width."""
    torch.manual_seed(3)
    x = torch.randn(9, 8)
    report = autotp.verify(Written(written), 2, example_inputs=x, experts="expert")
    assert report.ok, report
    assert any("experts: dispatch" in row.why for row in report.plan.cuts) == (written in ROUTED)


def test_experts_falls_back_to_width() -> None:
    torch.manual_seed(0)
    report = autotp.verify(Mixture(), 3, example_inputs=torch.randn(5, 8), experts="expert")
    assert report.ok, report
    assert {row.name for row in report.plan.cuts if "10 width" in row.why} == {"up", "up_bias", "down"}


@pytest.mark.parametrize("experts", ["width", "expert"])
def test_torch_s_grouped_mm_cut_by_experts_is_verified(experts: Any) -> None:
    """It has no float64: another stands in for it."""
    torch.manual_seed(0)
    model = Mixture(lambda x, weight, ends: F.grouped_mm(x, weight, offs=ends))
    report = autotp.verify(model, 2, example_inputs=torch.randn(5, 8), experts=experts)
    assert report.ok, report
    assert any(("experts" if experts == "expert" else "width") in row.why for row in report.plan.cuts)


@each_product
def test_unchosen_experts_have_zero_gradients(product: Any) -> None:
    """Its weights have a gradient, of zero, as they have on one device."""
    torch.manual_seed(0)
    model = Mixture(product)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([100.0, 90.0, 0.0, 0.0]))
    report = autotp.verify(model, 2, example_inputs=torch.randn(5, 8), experts="expert")
    assert report.ok, report


@pytest.mark.parametrize("call", [autotp.parallelize, autotp.explain, autotp.verify])
def test_unknown_experts_choice_is_refused(call: Any) -> None:
    with pytest.raises(autotp.Error) as error:
        call(Mixture(), 1, example_inputs=torch.randn(5, 8), experts="experts")
    assert "experts='experts'" in str(error.value) and "'width', 'expert'" in str(error.value)


# ---- real ranks


@checks.on(2)
def mixture_cut_by_experts_trains_as_one_device(rank: int, n: int) -> None:
    """Five steps of AdamW; each rank works on the rows of its own experts."""
    for product in PRODUCTS.values():
        torch.manual_seed(0)
        whole, x = Mixture(product), torch.randn(6, 8)
        parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x, experts="expert")
        assert [p.to_local().shape[0] for name, p in parallel.named_parameters() if "router" not in name] == [2] * 4
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (whole, parallel)]
        for step in range(5):
            batch = torch.randn(4 + step, 8, generator=torch.Generator().manual_seed(step))
            losses = []
            for model, optimizer in zip((whole, parallel), optimizers, strict=True):
                optimizer.zero_grad()
                loss = F.mse_loss(model(batch), batch.flip(0))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        state = autotp.full_state_dict(parallel)
        for key, tensor in whole.state_dict().items() if rank == 0 else ():
            torch.testing.assert_close(state[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
