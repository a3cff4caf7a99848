"""loading: code of the model that changes what is loaded sees whole tensors, and each rank takes its parts after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.runtime.torch_hooks.loading import own_loading

checks = Checks()


class Normalizing(nn.Module):
    """Normalizes a weight as it is loaded, in a hook, renames another one, and doubles a third."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 40, bias=False)
        self.register_load_state_dict_pre_hook(self.normalize)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).relu()))

    @staticmethod
    def normalize(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}up.weight"] = state[f"{prefix}up.weight"] / state[f"{prefix}up.weight"].norm()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if (old := f"{prefix}old.weight") in state_dict:
            state_dict[f"{prefix}down.weight"] = state_dict.pop(old)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({**state_dict, "head.weight": state_dict["head.weight"] * 2}, *args, **kwargs)


@checks.on(3)
def loading_code_of_the_model_sees_whole_tensors(rank: int, n: int) -> None:
    """The user's code sees whole tensors; parts behave as wholes there."""
    torch.manual_seed(5)
    whole, x = Normalizing().double(), torch.ones(3, 8, dtype=torch.float64)
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x)
    state = {name.replace("down.w", "old.w"): tensor * 1.5 for name, tensor in whole.state_dict().items()}
    for around in (lambda model: model, lambda model: nn.ModuleDict({"a": model})):
        prefix = "" if around(whole) is whole else "a."
        for model in (whole, parallel):
            given = {f"{prefix}{name}": tensor for name, tensor in state.items()}
            around(model).load_state_dict(given)
        torch.testing.assert_close(parallel(x), whole(x), rtol=1e-12, atol=0)
    for model in (whole, parallel):
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    torch.testing.assert_close(parallel(x), whole(x), rtol=1e-12, atol=0)
    with pytest.raises(autotp.Error, match=r"Normalizing\.load_state_dict` changes what the model loads"):
        autotp.load_full_state_dict(parallel, whole.state_dict())


class Doubling(Normalizing):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: 2 * tensor for name, tensor in super().state_dict(*args, **kwargs).items()}


@checks.on(2)
def full_state_dict_refuses_saving_code_of_the_model(rank: int, n: int) -> None:
    """The whole tensors would not be what the model saves on one device."""
    x = torch.ones(3, 8, dtype=torch.float64)
    parallel = autotp.parallelize(Doubling().double(), n, example_inputs=x)
    with pytest.raises(
        autotp.Error, match=r"`up.weight` in the model's state_dict\(\) is not a dense parameter or buffer"
    ):
        autotp.full_state_dict(parallel)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_own_loading_names_only_the_model_s_code() -> None:
    """torch's own methods and hooks, such as those of weight_norm and batch norms, are none of the model's."""
    assert own_loading(Normalizing()) == "Normalizing.load_state_dict"
    torchs = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    assert own_loading(torchs) == ""
    torchs[1].register_load_state_dict_pre_hook(lambda *_: None)
    assert own_loading(torchs).endswith("<lambda>")
