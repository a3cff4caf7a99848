"""attention_kernels: the table against torch's own answers, and the kernels of a rank against those of one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from cards.pretend import REAL
from kernel_packages import flash_attn
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.compiler import analyse, flat_graph
from autotp.diagnostics.attention_kernels import DRAWN, SDPA, AttentionCall, attention_table, refusals
from autotp.diagnostics.report import report
from autotp.ops import dropout
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.tools.page.page_data import page_data

# ---- the table


def tensors(call: Mapping[str, Any], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    batch, (heads, groups), (queries, keys), (width, of_values) = (
        call[x] for x in ("batch", "heads", "lengths", "widths")
    )
    shapes = (heads, queries, width), (groups, keys, width), (groups, keys, of_values)
    made = [torch.zeros(*batch, *shape, dtype=dtype, device=device) for shape in shapes]
    if call["transposed"]:
        made = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in made]
    return made[0], made[1], made[2]


CHOICES: dict[str, list[Any]] = {
    "batch": [(2,), ()], "heads": [(4, 4), (4, 2), (4, 3)], "lengths": [(6, 6), (2, 6), (6, 1), (0, 6)],
    "widths": [(8, 8), (6, 6), (16, 8), (192, 192), (288, 288)], "mask": [None, 2, 4, "learns"],
    "dropout": [0.0, 0.125, 0.1], "causal": [False, True], "gqa": [False, True], "transposed": [False, True],
}  # fmt: skip
EVERY = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
CASES = [case for case in EVERY if not (case["mask"] and case["causal"])]


def questions(device: str, dtypes: list[torch.dtype]) -> Iterator[tuple[tuple[Any, ...], AttentionCall]]:
    """What torch is asked, and what the table is asked."""
    for case, dtype in itertools.product(CASES, dtypes):
        q, k, v = tensors(case, dtype, device)
        mask = None
        if case["mask"] is not None:
            mask = torch.zeros(1, 1, q.shape[-2], k.shape[-2], dtype=dtype, device=device)
            mask = mask[0, 0] if case["mask"] == 2 else mask.requires_grad_(case["mask"] == "learns")
        yield (q, k, v, mask, case["dropout"], case["causal"], case["gqa"]), AttentionCall(
            query=q, key=k, value=v, dtype=dtype, mask=mask, dropout=case["dropout"],
            causal="upper left" if case["causal"] else "", enable_gqa=case["gqa"],
            learned_mask=case["mask"] == "learns",
        )  # fmt: skip


def test_the_table_says_what_torch_says_for_cpus() -> None:
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    for (q, k, v, mask, p, causal, gqa), call in questions("cpu", [torch.float32, torch.bfloat16]):
        chosen = torch._fused_sdp_choice(q, k, v, mask, p, causal, enable_gqa=gqa) == flash
        assert chosen == (not refusals(call, "CPU")["flash"]), (str(call), refusals(call, "CPU"))


@pytest.mark.skipif(not REAL, reason="torch answers for GPUs where there is one")
def test_the_table_says_what_torch_says_for_gpus() -> None:
    answers = {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
        "cuDNN": torch.backends.cuda.can_use_cudnn_attention,
    }
    for asked, call in questions("cuda", [torch.float32, torch.bfloat16, torch.float64]):
        params, why = torch.backends.cuda.SDPAParams(*asked), refusals(call, "GPU")
        newer = max(call.query.shape[-1], call.value.shape[-1]) > 128  # Newer cuDNN takes some of them.
        got = {kernel: can_use(params) for kernel, can_use in answers.items() if kernel != "cuDNN" or not newer}
        assert got == {kernel: not why[kernel] for kernel in got}, (str(call), why)


# ---- a rank beside one device


class Attends(nn.Module):
    """An attention, whose queries, keys and values are slices of one product. x: [batch seq 24]"""

    def __init__(self, heads: int, groups: int, width: int = 8, masked: bool = False, **settings: Any) -> None:
        super().__init__()
        self.sizes = heads * width, groups * width, groups * width
        self.width, self.masked, self.settings = width, masked, settings
        self.settings["enable_gqa"] = heads != groups
        self.qkv, self.out = nn.Linear(24, sum(self.sizes)), nn.Linear(heads * width, 24)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        mask = (torch.arange(t) - torch.arange(t)[:, None]).abs() < 3 if self.masked else None
        parts = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qkv(x).split(self.sizes, -1))
        return self.out(F.scaled_dot_product_attention(*parts, mask, **self.settings).transpose(1, 2).flatten(2))


X = torch.zeros(2, 12, 24)
MODELS: dict[str, Any] = {
    "causal": lambda: Attends(4, 4, is_causal=True),
    "uneven-heads": lambda: Attends(5, 5, is_causal=True),
    "grouped": lambda: Attends(8, 4, is_causal=True),
    "uneven-groups": lambda: Attends(6, 3, is_causal=True),
    "one-group": lambda: Attends(6, 1, is_causal=True),
    "wide": lambda: Attends(4, 4, 160, is_causal=True),
    "full": lambda: Attends(4, 2),
    "masked": lambda: Attends(4, 4, masked=True),
    "dropout": lambda: Attends(4, 4, is_causal=True, dropout_p=0.125),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2}, "tp3": {"tp": 3}, "tp8": {"tp": 8}, "cp2": {"tp": 1, "cp": 2}, "tp2-cp2": {"tp": 2, "cp": 2},
    "tp1-cp2-chunks": {"tp": 1, "cp": 2, "without": ("balance",)}, "tp2-sp": {"tp": 2, "sequence_parallel": True},
}  # fmt: skip
OPERATORS = {
    "_scaled_dot_product_flash_attention": "flash", "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_cudnn_attention": "cuDNN", "_scaled_dot_product_efficient_attention": "efficient",
    "_efficient_attention_forward": "efficient",
}  # fmt: skip


class CalledKernels(TorchDispatchMode):
    """Notes which kernels are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called |= {OPERATORS.get(func._schema.name.removeprefix("aten::"), "")} - {""}
        return func(*args, **(kwargs or {}))


class StandIn(TorchFunctionMode):
    """A GPU on which torch's attention takes the first kernel that can: the table answers, as torch does with CUDA."""

    def __init__(self, called: set[str]) -> None:
        super().__init__()
        self.called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ones:  # Of a mask: without CUDA torch writes on no card.
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        params = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
        params = SimpleNamespace(**params | dict(zip(names, args, strict=False)) | (kwargs or {}))
        self.called |= {*[kernel for kernel in OPERATORS.values() if can_use(kernel, params)][:1]}
        return params.query.new_empty(*params.query.shape[:-1], params.value.shape[-1])


def can_use(kernel: str, params: Any, debug: bool = False) -> bool:
    """What torch's functions `can_use_..._attention` answer on a GPU."""
    call = AttentionCall(
        query=params.query, key=params.key, value=params.value, dtype=params.query.dtype, mask=params.attn_mask,
        dropout=getattr(params, "dropout_p", getattr(params, "dropout", 0.0)),
        causal="upper left" if params.is_causal else "", enable_gqa=params.enable_gqa,
    )  # fmt: skip
    return not refusals(call, "GPU")[kernel]


def called(node: fx.Node, device: str, dtype: torch.dtype) -> set[str]:
    """The kernels that torch calls for an operator of a graph on a device; none if it computes products."""

    def example(x: Any) -> Any:
        x = x.meta["val"] if isinstance(x, fx.Node) else x
        if not isinstance(x, Tensor):
            return x if not isinstance(x, torch.SymInt) else x.node.hint
        sizes = ([n if isinstance(n, int) else n.node.hint for n in numbers] for numbers in (x.shape, x.stride()))
        return torch.empty_strided(*sizes, dtype=dtype if x.is_floating_point() else x.dtype, device=device)

    is_plain = node.target is torch.ops.aten.scaled_dot_product_attention.default
    target: Any = F.scaled_dot_product_attention if is_plain else node.target
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(FakeTensorMode())
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), example)  # type: ignore[misc]
        noted = stack.enter_context(CalledKernels())
        if device == "cuda":
            stack.enter_context(StandIn(noted.called))
            for kernel, name in (("flash", "flash"), ("efficient", "mem_efficient")):
                stack.enter_context(patch.object(torch._C, f"_can_use_{name}_attention", partial(can_use, kernel)))
            stack.enter_context(patch.object(dropout, "runs_at_once", lambda x: True))
            stack.enter_context(patch.object(dropout, "own_stream", lambda *_: nullcontext()))
        target(*args, **kwargs)
    return noted.called


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_calls_a_fused_kernel_where_one_device_does(name: str, layout: dict[str, Any]) -> None:
    settings = dict(layout)
    tp = settings.pop("tp")
    model = skeleton_of(MODELS[name]())
    plan = autotp.explain(MODELS[name](), tp, example_inputs=X, **settings)
    program = analyse(model, (X,), {}, tp, Options(**settings))
    graphs = analyse(model, (X,), {}, 1, Options()).graph, flat_graph(program, 0, "fast")
    (one,), (of_rank,) = ([node for node in graph.nodes if node.target in SDPA] for graph in graphs)
    (row,) = plan.attention
    for device, where, dtype in (
        ("GPU in bf16", "cuda", torch.bfloat16), ("GPU", "cuda", torch.float32), ("CPU", "cpu", torch.float32),
    ):  # fmt: skip
        kernels = called(of_rank, where, dtype)
        assert kernels <= {*row.kernels[device]}
        assert bool(kernels) == bool(row.kernels[device])
        if called(one, where, dtype):
            assert kernels, (device, row)


def test_the_plan_says_what_a_rank_has_and_what_it_loses() -> None:
    plan = autotp.explain(Attends(4, 4, is_causal=True), 2, example_inputs=X, cp=2)
    lines = [line.removeprefix("kernels     ") for line in str(plan).splitlines() if line.startswith("kernels")]
    assert lines == [
        "1 x causal float32, 2 heads of 8: GPU efficient, in bf16 flash, efficient; CPU flash",
        "GPU in bf16 loses cuDNN: it has no causal mask for some of the queries",
    ]
    (row,) = plan.to_dict()["attention"]
    assert row["kernels"] == {"GPU": ["efficient"], "GPU in bf16": ["flash", "efficient"], "CPU": ["flash"]}
    assert row["lost"] == {"GPU in bf16": "cuDNN: it has no causal mask for some of the queries"}


LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "heads": ("uneven-groups", {"tp": 2}, {}),
    "exchanged": ("causal", {"tp": 1, "cp": 2, "cp_attention": "heads"}, {}),
    "masked": ("masked", {"tp": 2, "cp": 2}, {}),
    "dropout over cp": (
        "dropout", {"tp": 1, "cp": 2}, {"GPU in bf16": "cuDNN: it has no causal mask for some of the queries"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_the_plan_says_what_is_lost(case: str) -> None:
    name, layout, lost = LOSSES[case]
    settings = dict(layout)
    (row,) = autotp.explain(MODELS[name](), settings.pop("tp"), example_inputs=X, **settings).attention
    assert row.lost == lost


def test_attentions_that_are_alike_are_a_row_of_the_page() -> None:
    plan = autotp.explain(nn.Sequential(MODELS["causal"](), MODELS["causal"]()), 2, example_inputs=X, cp=2)
    table = attention_table(plan.attention)
    assert table.rows == (
        ("2 x causal float32, 2 heads of 8", "efficient", "flash, efficient", "flash",
         "GPU in bf16 loses cuDNN: it has no causal mask for some of the queries"),
    )  # fmt: skip
    assert page_data(plan)["attention"]["rows"] == [list(row) for row in table.rows]


def test_exact_dropout_is_computed_by_products() -> None:
    program = analyse(skeleton_of(MODELS["dropout"]()), (X,), {}, 2, Options(randomness="exact"))
    (row,) = report(program, "Attends").attention
    assert str(row) == "causal float32 with dropout, 2 heads of 8: GPU products, in bf16 products; CPU products"
    assert row.lost["GPU"] == f"efficient: {DRAWN}"


def test_a_kernel_of_its_own_is_named() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flex_attention(x, x, x)

    (row,) = autotp.explain(Own(), 2, example_inputs=torch.zeros(2, 4, 8, 8)).attention
    assert str(row) == "flex_attention: a kernel of its own" and row.kernels == {}

    class Flash(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flash_attn.flash_attn_func(x, x, x, causal=True)

    (row,) = autotp.explain(Flash(), 2, example_inputs=torch.zeros(2, 8, 4, 8)).attention
    assert str(row) == "FlashAttnFunc: a kernel of its own"
