"""lost_gradients: what a model computes its own way, and a captured graph does not have, is refused and not lost."""

import pytest
import torch
from errors import line_of
from small_models import Plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotp

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
        (Hooked, "the backward hook on `up`", "", "remove it, or register it on what autotp.parallelize returns"),
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
