"""inline: one flat graph, with the regions' gradients and dtypes."""

from collections.abc import Callable

import pytest
import torch
from graphs import Function, lines, ops, run, some
from torch import Tensor
from torch._C._functorch import get_interpreter_stack
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from autotp.errors import Error
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.passes.capture import inline
from autotp.passes.capture.capture import capture

X = some(3, 4, dtype=torch.float32)


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.exp()
    return x * y


def with_grad_again(x: Tensor) -> Tensor:
    """A gradient flows through what was made where gradients were on again, and through that alone."""
    with torch.no_grad():
        with torch.enable_grad():
            y = x.exp()
        z = y.sin()
    return x * z + y


def two_values(x: Tensor) -> Tensor:
    """A region with several results, one an integer tensor, which has no gradient to stop."""
    with torch.no_grad():
        value, at = x.max(-1)
    return x.gather(-1, at[:, None]) * value[:, None]


def written_without_grad(x: Tensor) -> Tensor:
    """Of what is written where no gradient is wanted none flows, nor through the zeros that it was written into."""
    y = torch.zeros_like(x)
    with torch.no_grad():
        y[:, 0] = x[:, 0].exp()
        y.mul_(2)
    return x * y


def written_inside(x: Tensor) -> Tensor:
    """What the region makes for itself it may write into."""
    with torch.no_grad():
        y = x.exp()
        y[:, 0].zero_()
    return x * y


def written_to_a_detached_value(x: Tensor) -> Tensor:
    """The value is not read again, but through `detach()`."""
    y = x.exp().detach()
    y.clamp_(max=1.0)
    return x * y


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.T
    return y.float() @ y.float()


def autocast_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = x @ x.T
    return x.T @ y.float()


def checked(x: Tensor) -> Tensor:
    """`to` leaves assertions about the tensor's metadata in the graph."""
    return x.to(torch.float64).sum()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(without_grad, ["exp", "detach", "mul"], id="no-grad"),
        pytest.param(with_grad_again, ["exp", "sin", "detach", "mul", "add"], id="enable-grad-inside"),
        pytest.param(two_values, None, id="two-values"),
        pytest.param(
            autocast,
            ["enter_autocast", "numpy_T", "matmul", "exit_autocast", "to", "to", "matmul"],
            id="autocast",
        ),
        pytest.param(autocast_without_grad, None, id="autocast-without-grad"),
        pytest.param(checked, ["to", "sum"], id="assertions"),
    ],
)
def test_inline_keeps_numbers_and_gradients(function: Callable[[Tensor], Tensor], expected: list[str] | None) -> None:
    graph = capture(Function(function), (X,), {}).graph
    assert all(node.op in ("placeholder", "call_function", "output") for node in graph.nodes)
    assert expected is None or ops(graph) == expected
    outputs, gradients = [], []
    for call in (function, lambda x: run(graph, [x])[0]):
        x = X.clone().requires_grad_()
        outputs.append(call(x))
        gradients.append(torch.autograd.grad(outputs[-1].sum(), x)[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_inline_detaches_floating_results_only() -> None:
    graph = capture(Function(two_values), (X,), {}).graph
    found = [line for line in lines(graph) if "detach" in line]
    assert len(found) == 2 and all("getitem" in line for line in found[:1]), found


@pytest.mark.parametrize("function", [written_without_grad, written_inside, written_to_a_detached_value])
def test_inlined_writes_under_no_grad_keep_gradients(function: Callable[..., Tensor]) -> None:
    graph, _ = functionalize(capture(Function(function), (X,), {}).graph, [])
    outputs, gradients = [], []
    for call in (function, lambda x: run(graph, [x])[0]):
        x = X.clone().requires_grad_()
        outputs.append(call(x))
        gradients.append(torch.autograd.grad(outputs[-1].sum(), x)[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def written_value(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.clamp_(max=1.0)
    return y


def written_view(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y[:, 0].zero_()
    return y


def written_and_returned(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = (x * 2).add_(1)
        with torch.enable_grad():
            z = x * 3
        z.mul_(2)
    return y + z


@pytest.mark.parametrize("function", [written_value, written_view, written_and_returned])
def test_inlined_no_grad_writes_to_values_with_gradient_are_refused(function: Callable[..., Tensor]) -> None:
    """torch gives the new value the gradient of the old one, which no graph of values can."""
    graph = capture(Function(function), (X,), {}).graph
    with pytest.raises(Error, match=r"autograd does not see what is written under torch.no_grad or through detach\(\)"):
        functionalize(graph, [])


def mapped(x: Tensor) -> Tensor:
    """Of each row, what a function of one row gives."""
    return torch.vmap(lambda row: (row * row.sum()).exp())(x)


def mapped_twice(x: Tensor) -> Tensor:
    """Two levels, whose indices read a tensor from outside, as the masks of transformers are made."""
    inner = torch.vmap(lambda i, j: (i > j) & (j % 2 == 0), in_dims=(None, 0))
    outer = torch.vmap(inner, in_dims=(0, None))
    allowed = outer(torch.arange(x.shape[0]), torch.arange(x.shape[1]))
    return torch.where(allowed, x.exp(), x)


def mapped_with_tensors_as_indices(x: Tensor) -> Tensor:
    """A tensor is indexed by elements of another one, which vmap cannot do without torch's own help."""
    padding = torch.arange(x.shape[1]) != 1

    def allowed(i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & padding[j]

    with TransformGetItemToIndex():
        rows = torch.vmap(torch.vmap(allowed, in_dims=(None, 0)), in_dims=(0, None))
        mask = rows(torch.arange(x.shape[0]), torch.arange(x.shape[1]))
    return torch.where(mask, x.exp(), x)


def mapped_without_gradient(x: Tensor) -> Tensor:
    def scaled(row: Tensor) -> Tensor:
        with torch.no_grad():
            total = row.sum()
        return row * total

    return torch.vmap(scaled)(x)


def mapped_with_new_tensors(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * torch.arange(row.shape[0]) + torch.ones(row.shape[0]))(x)


def mapped_to_columns(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.outer(row).exp(), out_dims=1)(x)


def mapped_to_the_last(x: Tensor) -> Tensor:
    """Of two results each has its own dimension; a level within a level has one, too."""

    def both(row: Tensor) -> tuple[Tensor, Tensor]:
        return torch.vmap(lambda a: a * row, out_dims=1)(row), row.sin()

    first, second = torch.vmap(both, out_dims=(-1, 1))(x)
    return first.sum(1).t() * second.t()


def mapped_over_weights(x: Tensor) -> Tensor:
    """A product whose weights differ: vmap's rule for it asks for sizes that nothing reads."""
    weights = torch.stack([x.t() @ x, x.t() @ x.cos()])
    return torch.vmap(lambda w: torch.nn.functional.linear(x[None], w, w[0])[0])(weights)


@pytest.mark.parametrize(
    "function",
    [
        mapped, mapped_twice, mapped_with_tensors_as_indices, mapped_without_gradient, mapped_with_new_tensors,
        mapped_to_columns, mapped_to_the_last,
    ],
)  # fmt: skip
def test_inlined_vmap_equals_vmap(function: Callable[[Tensor], Tensor]) -> None:
    graph = capture(Function(function), (X,), {}).graph
    targets = [str(node.target) for node in graph.nodes]
    assert not [target for target in targets if "vmap" in target or target == "aten.size.default"]
    outputs, gradients = [], []
    for call in (function, lambda x: run(graph, [x])[0]):
        x = some(5, 6, dtype=torch.float32).requires_grad_()
        outputs.append(call(x))
        gradients.append(torch.autograd.grad(outputs[-1].sum(), x)[0])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_vmap_over_weights_fixes_their_sizes() -> None:
    """torch's rule makes numbers of these sizes: the graph has no sizes that nothing reads, and fits these only."""
    captured = capture(Function(mapped_over_weights), (X,), {})
    assert not [node for node in captured.graph.nodes if str(node.target) == "aten.size.default"]
    torch.testing.assert_close(run(captured.graph, [X])[0], mapped_over_weights(X))
    assert captured.fits([(3, 4)]) and not captured.fits([(5, 4)]) and not captured.fits([(3, 6)])


def mapped_autocast(x: Tensor) -> Tensor:
    def product(row: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return row @ row

    return torch.vmap(product)(x)


def test_vmap_that_switches_autocast_is_refused() -> None:
    told = r"torch\.vmap of a function that switches autocast[^\n]*\n  at       graphs\.py:\d+  "
    with pytest.raises(Error, match=told):
        capture(Function(mapped_autocast), (X,), {})
    assert not get_interpreter_stack()  # An open level would change what torch computes later.


def test_vmap_that_torch_cannot_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object) -> None:
        raise NotImplementedError("no rule for an operator\nand more")

    monkeypatch.setattr(inline, "make_fx", fail)
    with pytest.raises(Error, match=r"torch\.vmap of a function that cannot be in a graph: no rule for an operator\n"):
        capture(Function(mapped), (X,), {})


def test_vmap_that_torch_cannot_export_is_refused() -> None:
    def dropped(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.nn.functional.dropout(row, 0.5), randomness="different")(x)

    told = (
        r"torch\.vmap of a function that torch\.export cannot trace: RuntimeError: .*\n  at       test_inline\.py:\d+  "
    )
    with pytest.raises(Error, match=told):
        capture(Function(dropped), (X,), {})


def test_vmap_that_draws_draws_as_torch_does() -> None:
    """The rows' numbers are drawn together, as torch's vmap draws them."""

    def noisy(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * torch.rand(row.shape[0]), randomness="different")(x)

    graph = capture(Function(noisy), (X,), {}).graph
    found = []
    for call in (noisy, lambda x: run(graph, [x])[0]):
        torch.manual_seed(0)
        found.append(call(some(5, 6, dtype=torch.float32)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
