"""lost_gradients: what a model computes its own way, and a captured graph does not have, is refused and not lost."""

import pytest
import torch
from errors import line_of
from small_models import Plain
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autotp
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
def test_refused(kind: type[nn.Module], what: str, at: str, instead: str) -> None:
    with pytest.raises(autotp.Error) as raised:
        autotp.explain(kind(), 2, example_inputs=X)
    where = f"  at       {line_of(__file__, at + chr(10))}\n" if at else ""
    assert str(raised.value) == (
        f"explain({kind.__name__}, tp=2): {what} would be lost: a graph of the model does not have it\n"
        f"{where}  try      {instead}"
    )


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_not_lost(kind: type[nn.Module]) -> None:
    assert autotp.verify(kind(), 2, example_inputs=X).ok


@torch.library.custom_op("autotp_tests::reverse", mutates_args=())
def reverse(x: Tensor) -> Tensor:
    return x.clone()


reverse.register_fake(lambda x: torch.empty_like(x))
reverse.register_autograd(lambda ctx, grad: -grad)


class Operator(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(reverse(x))


def test_an_operators_own_backward_is_not_lost() -> None:
    assert autotp.verify(Operator(), 2, example_inputs=X).ok


@pytest.mark.parametrize(
    "register",
    ["register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook"],
)
def test_a_hook_on_all_modules(register: str) -> None:
    """It would run at capture only, and a graph would keep what it did then. torch's own follow what is called."""
    handle = getattr(module, register)(lambda *given: None)
    try:
        with pytest.raises(autotp.Error) as error:
            autotp.verify(Checkpointed(), 2, example_inputs=X)
        assert str(error.value) == (
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
