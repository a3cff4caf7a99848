"""torch.func transforms and torch.compile on real ranks: the numbers of one device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks
from small_models import Grouped, assert_values_close, gpt
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import autotp

checks = Checks()
Params = dict[str, Tensor]
TOLERANCE = 1e-12


class LossAndLogits(nn.Module):
    """A GPT that returns both."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gpt = gpt(n_layer=1, n_embd=96, dropout=dropout)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[batch seq], [batch seq] -> [], [batch seq vocab]"""
        logits = self.gpt(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def both(n: int, dropout: float = 0.0, **settings: Any) -> tuple[nn.Module, autotp.ParallelModule]:
    """The model in float64, and its parallel form."""
    torch.manual_seed(0)
    whole = LossAndLogits(dropout).double().train()
    example = dict.fromkeys(("tokens", "labels"), torch.zeros(2, 5, dtype=torch.int64))
    return whole, autotp.parallelize(copy.deepcopy(whole), n, example_inputs=example, **settings)


def tokens(batch: int = 4, seq: int = 6) -> tuple[Tensor, Tensor]:
    """Some, and what should follow them. (Not drawn: they are made inside vmap, too.)"""
    count = torch.arange(batch * seq).view(batch, seq)
    return count * 31 % 97, count * 17 % 97


def expect_equal(found: Params, expected: Params) -> None:
    assert list(found) == list(expected)
    scale = max(float(t.abs().max()) for t in expected.values())
    for name, tensor in expected.items():
        assert_values_close(
            found[name], tensor, rtol=0, atol=TOLERANCE * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


def loss_of(model: nn.Module) -> Callable[[Params, Tensor, Tensor], Tensor]:
    return lambda params, x, y: functional_call(model, params, (x, y))[0]


def beside(model: nn.Module, tensors: Params) -> Params:
    """Tensors on the device of the model."""
    device = next(model.parameters()).device
    return {name: t.to(device) for name, t in tensors.items()}


def parameters(model: nn.Module) -> Params:
    return {name: p.detach() for name, p in model.named_parameters()}


@checks.on(2)
def functional_call_runs_the_given_parameters(rank: int, n: int) -> None:
    """With other parameters: not those that the module holds."""
    whole, parallel = both(n)
    other = {name: p + 0.1 for name, p in parameters(whole).items()}
    expected = functional_call(whole, other, tokens())[0]
    parts = {name: parallel.layouts[name].take(t, rank) for name, t in other.items()}
    mine = {name: p + 0.1 for name, p in parameters(parallel).items()}
    for given in (other, parts, mine):
        found = functional_call(parallel, beside(parallel, given), tokens())[0]
        assert_values_close(found, expected)
        assert not torch.allclose(found.cpu(), whole(*tokens())[0])


@checks.on(2)
def torch_func_grad_equals_one_device(rank: int, n: int) -> None:
    whole, parallel = both(n)
    expected = grad(loss_of(whole))(parameters(whole), *tokens())
    expect_equal(grad(loss_of(parallel))(parameters(parallel), *tokens()), expected)


def transformed(model: nn.Module, given: Params, x: Tensor) -> dict[str, Any]:
    """What each transform makes of parameters: of shapes of the whole."""

    def loss(params: Params, rows: Tensor | None = None) -> Tensor:
        return functional_call(model, params, (x if rows is None else rows,)).square().sum()

    x = x.to(next(iter(given.values())).device)
    direction = {
        name: torch.linspace(-1, 1, p.numel()).double().view(p.shape).to(x.device) for name, p in given.items()
    }
    _, pull = vjp(grad(loss), given)
    return {
        "grad": grad(loss)(given),
        "slope": jvp(loss, (given,), (direction,))[1],
        "curve": jvp(grad(loss), (given,), (direction,))[1],
        "product": pull(direction)[0],
        "of each row": vmap(grad(loss), (None, 0))(given, x[:, None]),
        "of each curve": vmap(lambda v: jvp(grad(loss), (given,), (v,))[1])({k: t[None] for k, t in direction.items()}),
        "mapped": {name: vmap(lambda row: row / (1 + row.norm()))(p) for name, p in given.items()},
    }


@checks.on(2, 4)
@sdpa_kernel(SDPBackend.MATH)
def every_transform_of_parameters_equals_one_device(rank: int, n: int) -> None:
    """Of parameters themselves, and of what is computed of them; four ranks hold two key heads."""
    torch.manual_seed(4)
    whole, x = Grouped(2, 2, "separate").double(), torch.linspace(-1, 2, 2 * 3 * 12).double().sin().view(2, 3, 12)
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x)
    assert parallel.layouts["k.weight"].repeated == (n == 4)
    expected = transformed(whole, parameters(whole), x)
    kinds: dict[str, Callable[[Tensor], Any]] = {
        "itself": lambda p: p,
        "detached": Tensor.detach,
        "computed": lambda p: p * 1,
        "gathered": lambda p: autotp.gather(p.detach()),
    }
    for kind, of in kinds.items():
        found = transformed(parallel, {name: of(p) for name, p in parallel.named_parameters()}, x)
        for what, values in found.items():
            assert_values_close(values, expected[what], msg=lambda m, at=f"{what}, {kind}": f"{at}: {m}")


class Mapped(nn.Module):
    """A model whose forward maps a function over rows; torch's rules for that ask for sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda row: self.down(self.up(row).relu()), out_dims=1)(x)


@checks.on(2)
def vmap_over_a_model_with_vmap_equals_one_device(rank: int, n: int) -> None:
    """Outputs, and the gradients of each sample; the first call of a kind may be within the outer map."""
    whole = Mapped()
    x = torch.linspace(-1, 2, 3 * 4 * 5 * 8, dtype=torch.float64).sin().view(3, 4, 5, 8)
    for seen in (True, False):
        parallel: Any = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x[0] if seen else x[0, :, 0])
        assert_values_close(vmap(parallel)(x), vmap(whole)(x))
        found, expected = (
            vmap(grad(lambda p, x, m=m: functional_call(m, p, (x,)).square().sum()), (None, 0))(parameters(m), x)
            for m in (parallel, whole)
        )
        expect_equal(found, expected)


@checks.on(2)
def vmap_of_grad_gives_per_sample_gradients(rank: int, n: int) -> None:
    """`vmap(grad)` with a batch of one in each sample, which is a signature not met before."""
    whole, parallel = both(n)
    x, y = (t.unsqueeze(1) for t in tokens())
    found, expected = (vmap(grad(loss_of(m)), (None, 0, 0))(parameters(m), x, y) for m in (parallel, whole))
    expect_equal(found, expected)


@checks.on(2, rare=True)
def vmap_of_grad_with_dropout_has_one_mask(rank: int, n: int) -> None:
    """One mask for all samples, the same as on one device."""
    whole, parallel = both(n, dropout=0.2, randomness="exact")
    x, y = (t.unsqueeze(1) for t in tokens())
    found = []
    for model in (parallel, whole):
        parallel(x[0], y[0])
        torch.manual_seed(1)
        found.append(vmap(grad(loss_of(model)), (None, 0, 0), randomness="same")(parameters(model), x, y))
    expect_equal(*found)


@checks.on(2)
@sdpa_kernel(SDPBackend.MATH)  # the one that can be differentiated twice
def hessian_vector_products_equal_one_device(rank: int, n: int) -> None:
    """Reverse over reverse: by torch.func, by torch.autograd, and mapped over several vectors."""
    whole, parallel = both(n)
    torch.manual_seed(2)
    direction = {name: torch.randn_like(p) for name, p in whole.named_parameters()}
    expected = _product(whole, direction)
    direction = beside(parallel, direction)
    expect_equal(_product(parallel, direction), expected)
    expect_equal(_product_by_autograd(parallel, direction), expected)
    rows = {name: torch.stack([t, 2 * t]) for name, t in direction.items()}
    both_rows = vmap(lambda v: _product(parallel, v))(rows)
    for i, times in enumerate((1, 2)):
        expect_equal({k: t[i] for k, t in both_rows.items()}, {k: times * t for k, t in expected.items()})


def _product(model: nn.Module, v: Params) -> Params:
    """H v = gradient of <gradient, v>, v fixed."""

    def slope(params: Params) -> Params:
        return grad(loss_of(model))(params, *tokens())

    _, pull = vjp(slope, parameters(model))
    return pull(v)[0]


def _product_by_autograd(model: nn.Module, v: Params) -> Params:
    loss = model(*tokens())[0]
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return dict(zip(v, torch.autograd.grad(slopes, list(model.parameters()), list(v.values())), strict=True))


@checks.on(2)
@sdpa_kernel(SDPBackend.MATH)
def jvp_of_loss_and_gradient_equals_one_device(rank: int, n: int) -> None:
    """The directional derivative of the loss, the same on every rank, and that of the gradient."""
    whole, parallel = both(n)
    torch.manual_seed(2)
    direction = {name: torch.randn_like(p) for name, p in whole.named_parameters()}
    found = []
    for model in (whole, parallel):
        slope = jvp(
            lambda p, model=model: loss_of(model)(p, *tokens()), (parameters(model),), (beside(model, direction),)
        )[1]
        curve = jvp(
            lambda p, model=model: grad(loss_of(model))(p, *tokens()), (parameters(model),), (beside(model, direction),)
        )[1]
        found.append((slope, curve))
    assert_values_close(found[1][0], found[0][0])
    expect_equal(found[1][1], found[0][1])


@checks.on(2)
def linearize_and_forward_jacobian_are_refused(rank: int, n: int) -> None:
    parallel = autotp.parallelize(Tail().double(), n, example_inputs=torch.ones(2, 8).double())
    x = torch.ones(3, 8).double()
    with pytest.raises(autotp.Error, match=r"torch\.func\.jvp or vjp in place of linearize"):
        torch.func.linearize(parallel, x)
    with pytest.raises(autotp.Error, match=r"torch\.func\.jacfwd"):
        torch.autograd.functional.jacobian(parallel, x, strategy="forward-mode", vectorize=True)


class Tail(nn.Module):
    """Its output is gathered, and the whole is nobody's base."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[batch 8] -> [batch 16]"""
        return nn.functional.gelu(self.up(x))


@checks.on(2, 3)
def gathered_outputs_may_be_written_into(rank: int, n: int) -> None:
    """A gathered output is a tensor as any other: a loss may write into it, or detach it in place."""
    writes: list[Callable[[Tensor], Any]] = [
        lambda z: z.__setitem__((slice(None), 0), 0),
        lambda z: z.mul_(2).add_(1),
        lambda z: z.masked_fill_(z.detach() > 0, -1),
        lambda z: nn.functional.relu_(z[:, 3:]),
    ]
    torch.manual_seed(0)
    whole = Tail().double()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=torch.ones(2, 8).double())
    for write in writes:
        found = []
        for model in (whole, parallel):
            model.zero_grad()
            z = model(torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8))
            write(z)
            (z**2).sum().backward()
            found.append(z.detach())
        assert_values_close(found[1], found[0])
        gradients = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        expect_equal(gradients, {name: p.grad for name, p in whole.named_parameters() if p.grad is not None})
    assert not parallel(torch.ones(2, 8).double()).detach_().requires_grad


# ---- torch.compile


@checks.on(2, rare=True)
def compiled_step_equals_eager_without_recompiling(rank: int, n: int) -> None:
    """One graph, forward and backward equal to eager, and no compilation after the first step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # The functions of this file run in one process.
    counters.clear()
    _, parallel = both(n, dropout=0.1, randomness="exact")
    fast = torch.compile(parallel, fullgraph=True, backend="aot_eager")
    for step in range(3):
        expected, found = (_step(model, step) for model in (parallel, fast))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert counters["stats"]["unique_graphs"] == 1
    torch.manual_seed(9)
    logits = fast(*tokens())[1]
    assert logits.shape == (4, 6, 97)
    torch.manual_seed(9)
    assert_values_close(autotp.gather(logits), autotp.gather(parallel(*tokens())[1]))
    with pytest.raises(Exception, match="make one such call of the parallel model before the compiled one"):
        fast.eval()(*tokens())


@checks.on(2)
def compiled_calls_are_captured_from_the_first_one(rank: int, n: int) -> None:
    """Each kind of call is captured where it is first made, and so is a model with another layer."""
    whole, parallel = both(n, dropout=0.1, randomness="exact")
    fast = torch.compile(parallel, backend="eager")
    for step in ("train", "longer", "eval", "another layer"):
        for model in (whole, parallel):
            model.train(step != "eval").zero_grad()
            if step == "another layer":
                model.gpt.h[0].ln_2 = nn.Identity()  # type: ignore[union-attr,index]
        given, results = tokens(seq=9 if step == "longer" else 6), []
        for model in (whole, fast):
            torch.manual_seed(9)
            results.append(model(*given))
        expected, found = results
        assert_values_close(autotp.gather(found[1]), expected[1])
        expected[0].backward()
        found[0].backward()
        gradients, known = ({k: p.grad for k, p in m.named_parameters()} for m in (parallel, whole))
        expect_equal(gradients, known)  # type: ignore[arg-type]


def _step(model: Any, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(*tokens())[0]
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(())]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
