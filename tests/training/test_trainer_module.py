"""Modules of a trainer are of the model's classes: what is decided by class is decided as on the model."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from small_models import gpt, tokens
from torch import Tensor, nn

import autotp


def by_class(rank: int, n: int, sizes: dict[str, int], zero: int) -> None:
    whole = gpt().double()
    trainer = autotp.distribute(gpt().double(), **sizes, microbatches=2, zero=zero, example_inputs=tokens(2))  # type: ignore[arg-type]
    kinds = {path: type(module) for path, module in whole.named_modules()}
    mine = {path: module for path, module in trainer.named_modules() if path}
    assert mine and all(isinstance(module, kinds[path]) for path, module in mine.items())
    assert all(type(m).__name__.removeprefix("FSDP") == kinds[path].__name__ for path, m in mine.items())
    norms = {path for path, module in mine.items() if isinstance(module, nn.LayerNorm)}
    assert norms == {path for path in mine if path.endswith(("ln_1", "ln_2", "ln_f"))}
    for path in norms:
        trainer.get_submodule(path).requires_grad_(False)
    assert torch.isfinite(trainer.step(*(x.chunk(sizes["dp"])[0] for x in tokens(4))))
    for name, p in trainer.named_parameters():
        assert p.requires_grad != (name.rpartition(".")[0] in norms)
    told: Any = mine[sorted(norms)[0]]
    told.eps = told.eps
    with pytest.raises(autotp.Error, match="`eps` is 1e-05 in the graphs of the trainer, and setting it would change"):
        told.eps = 0.5
    with pytest.raises(autotp.Error, match="a part of a trainer, a LayerNorm, is not called by itself"):
        told(torch.ones(48))
    drops = [module for module in trainer.modules() if isinstance(module, nn.Dropout)]
    assert drops
    with pytest.raises(autotp.Error, match=r"`p` is 0.0 in the graphs of the trainer, and setting it would change"):
        drops[0].p = 0.5
    name = next(key for key, value in vars(whole).items() if not key.startswith("_") and key != "training")
    with pytest.raises(autotp.Error, match=f"`{name}` is .* in the graphs of the trainer, and setting it would change"):
        setattr(trainer, name, None)
    for part in (trainer, told):
        with pytest.raises(autotp.Error, match="a hook on a trainer, or on a part of it, would never run"):
            part.register_forward_hook(print)
        with pytest.raises(autotp.Error, match="a trainer cannot be copied or pickled"):
            copy.deepcopy(part)
    before = {key: p.detach().clone() for key, p in trainer.named_parameters()}
    wrong = {key: torch.ones(*p.shape, 2) if i else p for i, (key, p) in enumerate(whole.state_dict().items())}
    with pytest.raises(autotp.Error, match=r"is not this rank's part, as trainer.state_dict"):
        trainer.load_state_dict(wrong)
    assert all(torch.equal(p, before[key]) for key, p in trainer.named_parameters())
    trainer.load_state_dict({key: 2 * p for key, p in before.items()}, strict=False)
    assert all(torch.equal(p, 2 * before[key]) for key, p in trainer.named_parameters())


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ({"tp": 1, "pp": 2, "dp": 1}, 0),
        pytest.param({"tp": 1, "pp": 1, "dp": 2}, 2, marks=pytest.mark.rare),
        pytest.param({"tp": 2, "pp": 1, "dp": 1}, 0, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_trainer_modules_keep_the_model_s_classes_and_refuse_changes(sizes: dict[str, int], zero: int) -> None:
    run_ranks(by_class, 2, sizes, zero, timeout=100)


class Scaled(nn.Module):
    """Has a graph for each number that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        loss: Tensor = (self.head(x) * scale).square().mean()
        return loss


def many_numbers(rank: int, n: int) -> None:
    """A training whose calls differ again and again would hold the graphs of all."""
    model, x = Scaled(), torch.ones(2, 4)
    expected = copy.deepcopy(model)
    trainer = autotp.distribute(model, example_inputs={"x": x, "scale": 1.0})
    with patch("autotp.training.trainer.MOST", 3):
        for scale in (1.0, 2.0, 3.0, 4.0, 5.0, 2.0, 1.0):
            torch.testing.assert_close(trainer.evaluate(x, scale=scale).cpu(), expected(x, scale).detach())
            assert len(trainer._pipelines) <= 3


def test_trainer_keeps_a_number_of_graphs() -> None:
    run_ranks(many_numbers, 1)
