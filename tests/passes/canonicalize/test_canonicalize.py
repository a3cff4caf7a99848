"""canonicalize: each thing in its one form, and the numbers it had."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import canonical, draft, expect_same, lines, ops, run, some
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp
from autotp.passes.canonicalize.canonicalize import canonicalize

aten = torch.ops.aten
VALUES = {"x": some(2, 3, 4), "m": some(3, 4), "w": some(4, 4), "b": some(4)}
NOTHING = math.nan * torch.ones(3, 4, dtype=torch.float64)


def calls(target: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The call of `target` where an argument that is an input's name is the input."""

    def make(call: Any, **places: Any) -> Any:
        given = [places.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
        return call(target, *given, **kwargs)

    return make


def of_size(call: Any, x: Any, **_: Any) -> Any:
    """A view to the sizes that the value has, as a model computes them."""
    return call(aten.view.default, x, [2, call(aten.sym_size.int, x, 1), 4])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(calls(aten.linear.default, "x", "w", "b"), ["linear(x, w)", "add(linear, b)"], id="linear"),
        pytest.param(calls(aten.linear.default, "x", "w"), ["linear(x, w)"], id="linear-without-bias"),
        pytest.param(calls(aten.linear.default, "x", "b"), ["matmul(x, b)"], id="linear-of-a-vector"),
        pytest.param(calls(aten.addmm.default, "b", "m", "w"), ["mm(m, w)", "add(mm, b)"], id="addmm"),
        pytest.param(
            calls(aten.addmm.default, "b", "m", "w", beta=2, alpha=3),
            ["mm(m, w)", "mul(mm, 3)", "mul_1 = mul(b, 2)", "add(mul, mul_1)"],
            id="addmm-scaled",
        ),
        pytest.param(calls(aten.addmm.default, "nan", "m", "w", beta=0), ["mm(m, w)"], id="addmm-beta-0-ignores-nan"),
        pytest.param(calls(aten.baddbmm.default, "b", "x", "y"), ["bmm(x, y)", "add(bmm, b)"], id="baddbmm"),
        pytest.param(calls(aten.dropout.default, "x", 0.1, True), ["dropout(x, 0.1, True)"], id="dropout"),
        pytest.param(calls(aten.dropout.default, "x", 0.1, False), [], id="dropout-in-evaluation"),
        pytest.param(calls(aten.dropout.default, "x", 0.0, True), [], id="dropout-of-nothing"),
        pytest.param(calls(aten.to.dtype, "x", torch.float64), [], id="to-its-dtype"),
        pytest.param(calls(aten.to.dtype, "x", torch.float32), ["to(x, float32)"], id="to-another-dtype"),
        pytest.param(
            calls(aten.to.dtype, "x", torch.float64, False, True), ["to(x, float64, False, True)"], id="to-a-copy"
        ),
        pytest.param(calls(aten.to.device, "x", torch.device("cpu"), torch.float64), [], id="to-its-device"),
        pytest.param(calls(aten.slice.Tensor, "x", 1, 0, 2**63 - 1), [], id="slice-of-all"),
        pytest.param(calls(aten.slice.Tensor, "x", 1, None, 3), [], id="slice-up-to-the-length"),
        pytest.param(calls(aten.slice.Tensor, "x", 1, 0, 2), ["slice(x, 1, 0, 2)"], id="slice-of-some"),
        pytest.param(calls(aten.slice.Tensor, "x", 1, 1), ["slice(x, 1, 1)"], id="slice-from-one"),
        pytest.param(calls(aten.slice.Tensor, "x", 1, 0, 3, 2), ["slice(x, 1, 0, 3, 2)"], id="slice-every-other"),
        pytest.param(calls(aten.view.default, "x", [6, 4]), ["reshape(x, [6, 4])"], id="view"),
        pytest.param(calls(aten._unsafe_view.default, "x", [6, 4]), ["reshape(x, [6, 4])"], id="unsafe-view"),
        pytest.param(calls(aten.view.default, "x", [2, 3, 4]), [], id="view-of-the-same-shape"),
        pytest.param(calls(aten.reshape.default, "x", [2, -1, 4]), [], id="reshape-to-the-same-shape"),
        pytest.param(calls(aten.reshape.default, "x", [3, 2, 4]), ["reshape(x, [3, 2, 4])"], id="reshape-swapped"),
        pytest.param(calls(aten.reshape.default, "x", [-1]), ["reshape(x, [-1])"], id="reshape-to-one-dimension"),
        pytest.param(of_size, ["sym_size(x, 1)"], id="view-to-computed-sizes"),
    ],
)
def test_canonicalize_gives_the_expected_form(make: Callable[..., Any], expected: list[str]) -> None:
    values = VALUES | {"y": some(2, 4, 4), "nan": NOTHING}
    graph = draft(make, **values)
    found = lines(canonicalize(graph))
    assert found[:-1] == expected
    assert expected or found == ["return x"]
    expect_same(graph, canonicalize(graph), list(values.values()))


def test_canonicalize_drops_views_of_the_same_symbolic_shape() -> None:
    """`x.view(batch, seq, 4)` of `[batch seq 4]` is nothing, of `[seq batch 4]` it is not."""

    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            batch, seq, _ = x.shape
            return x.view(batch, seq, 4).exp(), x.transpose(0, 1).reshape(batch, seq, 4)

    _, graph = canonical(Views(), some(2, 3, 4))
    assert [kind for kind in ops(graph) if kind != "sym_size"] == ["exp", "transpose", "reshape"]


def test_canonicalize_keeps_the_source_line() -> None:
    """What a rewrite makes is where the model's operator was, for the messages."""
    graph = draft(calls(aten.linear.default, "x", "w", "b"), **VALUES)
    graph.find_nodes(op="call_function", target=aten.linear.default)[0].meta["stack_trace"] = "here"
    made = [node for node in canonicalize(graph).nodes if node.op == "call_function"]
    assert [node.meta["stack_trace"] for node in made] == ["here", "here"]


FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda x: F.group_norm(x, 2),
    "group_norm_scaled": lambda x: F.group_norm(x, 2, x[0, :, 0], x[0, :, 1]),
    "instance_norm": lambda x: F.instance_norm(x),
    "convolution": lambda x: F.conv1d(x, torch.ones(x.shape[1], 1, 3, dtype=x.dtype), groups=x.shape[1]),
    "transposed": lambda x: F.conv_transpose1d(x, torch.ones(x.shape[1], 1, 3, dtype=x.dtype), groups=x.shape[1]),
    "repeated": lambda x: x.repeat_interleave(x.shape[1], 1),
    "viewed": lambda x: x.view(x.shape[0], x.shape[1] // 2, -1),
    "of_numel": lambda x: x / x.numel(),
    "of_its_shape": lambda x: x.new_zeros(x.shape),
    "weight_norm": lambda x: torch._weight_norm(x, x.norm(dim=(1, 2), keepdim=True), 0),
}


class First(nn.Module):
    """Computes with an input before any parameter says how many channels it has. x: [rows channels length]"""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x)


@pytest.mark.parametrize("name", FIRST)
def test_canonicalize_leaves_no_symbolic_size_as_argument(name: str) -> None:
    """An input's sizes are symbols, and a node of a graph takes numbers and nodes."""
    model = First(FIRST[name])
    captured, graph = canonical(model, some(3, 6, 5))
    given = [leaf for node in graph.nodes for leaf in pytree.tree_leaves((node.args, node.kwargs))]
    assert not [leaf for leaf in given if isinstance(leaf, torch.SymInt)]
    for shape in ((3, 6, 5), (2, 4, 7)):
        x = some(*shape)
        (found,) = run(graph, [*(captured.constants[key] for key in captured.constants), x])
        torch.testing.assert_close(found, model(x))


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 6), nn.InstanceNorm1d(6), nn.InstanceNorm1d(6, affine=True)])
def test_models_that_begin_with_a_norm_are_verified(norm: nn.Module) -> None:
    model = nn.Sequential(norm, nn.Conv1d(6, 12, 1), nn.Conv1d(12, 6, 1))
    assert autotp.verify(model, 2, example_inputs=torch.randn(3, 6, 5)).ok
