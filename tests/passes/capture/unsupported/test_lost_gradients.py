"""lost_gradients: what a model computes its own way, and a captured graph does not have, is refused and not lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import line_of, message
from small_models import Plain
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autotp
from autotp.passes.capture.unsupported import lost_gradients
from autotp.passes.capture.unsupported.lost_gradients import BACKWARD_HOOK

X = torch.linspace(-1, 1, 24).view(3, 8)


class Hook(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        y.register_hook(lambda grad: -grad)  # on a gradient
        return y


class Inference(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x * 2  # without a gradient
        return self.mlp(x) + y.clone()


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_full_backward_hook(lambda module, grad, grad_out: (grad[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Checkpointed(Plain):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.mlp, self.mlp(x), use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize(
    ("kind", "what", "at", "instead"),
    [
        (
            Hook, "a hook on a tensor", "# on a gradient",
            "a torch.autograd.Function whose backward does what the hook does",
        ),
        (Inference, "torch.inference_mode", "# without a gradient", "torch.no_grad()"),
        (Hooked, "the backward hook on `up`", "", BACKWARD_HOOK),
    ],
)  # fmt: skip
def test_gradients_that_a_graph_would_lose_are_refused(kind: type[nn.Module], what: str, at: str, instead: str) -> None:
    with pytest.raises(autotp.Error) as raised:
        autotp.explain(kind(), 2, example_inputs=X)
    where = f"  at       {line_of(__file__, at + chr(10))}\n" if at else ""
    assert str(raised.value) == (
        f"explain({kind.__name__}, tp=2): {what} would be lost: a graph of the model does not have it\n"
        f"{where}  try      {instead}"
    )


def freezes(model: Plain, x: Tensor, y: Tensor) -> Any:
    model.down.requires_grad_(False)


def freezes_one(model: Plain, x: Tensor, y: Tensor) -> Any:
    model.down.weight.requires_grad = False


def drops(model: Plain, x: Tensor, y: Tensor) -> Any:
    model.down.weight.grad = None


def clips(model: Plain, x: Tensor, y: Tensor) -> Any:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def zeroes(model: Plain, x: Tensor, y: Tensor) -> Any:
    model.zero_grad()


def retains(model: Plain, x: Tensor, y: Tensor) -> Any:
    y.retain_grad()


def of_autograd(model: Plain, x: Tensor, y: Tensor) -> Any:
    return torch.autograd.grad(y.sum(), model.up.weight, create_graph=True)[0].sum()


def goes_back(model: Plain, x: Tensor, y: Tensor) -> Any:
    y.sum().backward()


def of_func(model: Plain, x: Tensor, y: Tensor) -> Any:
    return torch.func.grad(lambda x: model.mlp(x).sum())(x)


def jacobian(model: Plain, x: Tensor, y: Tensor) -> Any:
    return torch.func.jacrev(model.mlp)(x).sum()


def forward_mode(model: Plain, x: Tensor, y: Tensor) -> Any:
    return torch.func.jvp(model.mlp, (x,), (x,))[1]


def dual_numbers(model: Plain, x: Tensor, y: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.make_dual(y, y)


class Does(Plain):
    """Does something with gradients in forward."""

    def __init__(self, does: Callable[[Plain, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        more = self.does(self, x, y)
        return y if more is None else y + more


CHANGE = "a change of whether a parameter requires gradients"
GRADIENT = "what forward reads or writes of a parameter's `.grad`"
DERIVATIVE = "a derivative that forward takes"


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("does", "what"),
    [
        (freezes, CHANGE), (freezes_one, CHANGE), (drops, GRADIENT), (clips, GRADIENT),
        (zeroes, "`zero_grad` in forward"), (retains, "the gradient of an activation (`retain_grad`)"),
        (of_autograd, DERIVATIVE), (goes_back, DERIVATIVE), (of_func, DERIVATIVE), (jacobian, DERIVATIVE),
        (forward_mode, DERIVATIVE), (dual_numbers, DERIVATIVE),
    ],
)  # fmt: skip
def test_forward_that_works_on_gradients_is_refused(does: Callable[..., Any], what: str, alike: bool) -> None:
    """In a model, and in blocks that are alike."""
    model = nn.Sequential(*(Does(does) for _ in range(3))) if alike else Does(does)
    with pytest.raises(autotp.Error) as raised:
        autotp.parallelize(model, 1, example_inputs=X)
    assert f"{what} would be lost: a graph of the model does not have it\n  at       " in str(raised.value)


def test_gradient_flags_set_unchanged_are_captured() -> None:
    def same(model: Plain, x: Tensor, y: Tensor) -> None:
        model.down.requires_grad_(False)
        model.up.weight.requires_grad = True
        model.up.weight.retain_grad()  # A leaf keeps its gradient anyway.

    model = Does(same)
    model.down.requires_grad_(False)
    assert autotp.verify(model, 2, example_inputs=X).ok


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_torch_checkpoint_in_forward_is_verified(kind: type[nn.Module]) -> None:
    assert autotp.verify(kind(), 2, example_inputs=X).ok


class WithoutGradients(Plain):
    """Under no_grad, what a checkpointed function returns as it got it has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        with torch.no_grad():
            same = checkpoint(lambda z: z, y, use_reentrant=True)
        return self.mlp(y) + same


def test_checkpoint_under_no_grad_is_verified() -> None:
    report = autotp.verify(WithoutGradients(), 2, example_inputs=X)
    assert report.ok, report


@torch.library.custom_op("autotp_tests::reverse", mutates_args=())
def reverse(x: Tensor) -> Tensor:
    return x.clone()


reverse.register_fake(lambda x: torch.empty_like(x))
reverse.register_autograd(lambda ctx, grad: -grad)


class Operator(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(reverse(x))


def test_custom_operators_own_backward_is_verified() -> None:
    assert autotp.verify(Operator(), 2, example_inputs=X).ok


@pytest.mark.parametrize(
    "register",
    ["register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook"],
)
def test_global_module_hooks_are_refused(register: str) -> None:
    """It would run at capture only, and a graph would keep what it did then. torch's own follow what is called."""
    handle = getattr(module, register)(lambda *given: None)
    try:
        assert message(lambda: autotp.verify(Checkpointed(), 2, example_inputs=X)) == (
            "verify(Checkpointed, tp=2): a hook on all modules (`register_module_forward_hook` and its kin) would not "
            "run for parts of the model\n"
            "  try      hooks on single modules, registered before autotp.parallelize, or on the whole parallel model\n"
            "  or       remove the hook while the parallel model is called"
        )
    finally:
        handle.remove()
    parallel = autotp.parallelize(Checkpointed(), 1, example_inputs=X)
    handle = getattr(module, register)(lambda *given: None)
    try:
        with pytest.raises(autotp.Error, match="a hook on all modules"):
            parallel(X)
    finally:
        handle.remove()
    with FlopCounterMode(display=False) as flops:
        parallel(X)
    assert flops.get_total_flops() > 0


@pytest.mark.parametrize("asks", [[], ["forward"], ["forward", "_backward_cls"]])
def test_function_apply_that_skips_its_class_is_an_error(asks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    probe = lost_gradients._Probe
    monkeypatch.setattr(probe, "apply", lambda: [getattr(probe, name) for name in asks])
    lost_gradients._expect_asks.cache_clear()
    with pytest.raises(autotp.Error, match=r"does not ask the class in `.*apply`"):
        autotp.explain(Plain(), 2, example_inputs=X)
    monkeypatch.undo()
    assert autotp.explain(Plain(), 2, example_inputs=X).cuts
