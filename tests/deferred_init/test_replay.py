"""replay: initialisers that write parts, or read what others wrote, run again; at most one module is in memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Recurrent, Scale, cut, expect_as_built_whole, expect_refused_on_meta, on_meta
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.deferred_init.initialize import initialize
from autotp.models.gpt import GPT, GPTConfig

CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


class Parts(Recurrent):
    """Writes some of the elements, and scales: what the constructor drew is needed again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6, 4))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        with torch.no_grad():
            if isinstance(module, nn.LSTM):
                module.bias_hh_l0[6:12] = 1.0
            if isinstance(module, nn.Embedding):
                module.weight.data[2].zero_()
            if isinstance(module, nn.Linear):
                module.weight.uniform_().mul_(2)
            if module is self:
                self.embedding.weight.div_(3)
                self.head.weight *= torch.rand((), device="cpu")
                for half in self.scale.chunk(2):
                    nn.init.xavier_normal_(half)


class All(nn.Module):
    """One initialiser for all below, in the manner of the annotated transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5))
        self.sizes = nn.ParameterList([torch.empty(n) for n in (2, 3)])
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.xavier_uniform_(p) if p.dim() > 1 else nn.init.normal_(p)


class PartsOfParts(nn.Module):
    """Parts of what one call wrote with others, and of what was made again."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.scale = All(), Scale(5, 2.0, True)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            with torch.no_grad():
                self.all.inner[0].weight[0] = 0
                self.all.inner[2].weight[0] = 0
                self.scale.weight[1:3] *= 2


class Infinite(nn.Linear):
    """Both infinities, as masks and limits have them: their sum is NaN."""

    def __init__(self) -> None:
        super().__init__(5, 4)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2].fill_(torch.inf)
            self.weight[2:].fill_(-torch.inf)
            self.bias.fill_(1)


MODELS: dict[str, Make] = {
    "infinite": lambda: nn.Sequential(Infinite()),
    "parts": Parts,
    "all-at-once": All,
    "parts-of-parts": PartsOfParts,
}


@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MODELS.items()])
def test_as_built_whole(make: Make, tp: int) -> None:
    expect_as_built_whole(make, tp)


# ---- memory


class Live(TorchDispatchMode):
    """The bytes of the floating tensors on the CPU that live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: Counter[int] = Counter()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.device == CPU and x.is_floating_point():
                self._hold(x)
        self.peak = max(self.peak, self.bytes)
        return result

    def _hold(self, x: Tensor) -> None:
        key, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
        self.bytes += 0 if self.holders[key] else size
        self.holders[key] += 1
        weakref.finalize(x, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        self.bytes -= 0 if self.holders[key] else size


def bytes_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


MEMORY: dict[str, tuple[Make, int]] = {  # with the bytes of what lives beside the shards
    "gpt": (lambda: GPT(GPTConfig(64, 1000, n_layer=3, n_head=2, n_embd=64)), 4 * 1000 * 64),
    "all-at-once": (lambda: nn.Transformer(64, 2, 2, 2, 128, batch_first=True), 4 * 3 * 64 * (64 + 1)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_peak_memory_is_the_shards_and_one_module(name: str) -> None:
    make, largest = MEMORY[name]
    model = on_meta(make)
    layouts = {name: cut(p, 0, 4) for name, p in model.named_parameters()}
    with Live() as live:
        got = initialize(model, layouts, 0, CPU)
    shards = bytes_of(got.values())
    assert live.bytes == shards
    assert shards < live.peak <= shards + largest + 256
    assert bytes_of(model.parameters()) > 1.5 * (shards + largest)


# ---- what it refuses


class Half(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2].fill_(1)


class Back(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.a.weight.fill_(1)
        self.b.weight.fill_(1)
        self.a.weight.mul_(2)


class OnTheDevice(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise ValueError("no such device")
        super().reset_parameters()


ERRORS: dict[str, tuple[Make, str]] = {
    "part": (
        lambda: nn.Sequential(Half()),
        """Half.reset_parameters() leaves `0.weight` or a part of it empty
  try      fill self.weight in Half.reset_parameters(self) and call that in the constructor,
  or       in _init_weights(self, module) of the model, applied at the end of its constructor""",
    ),
    "back": (
        Back,
        """Back.reset_parameters() returns to `a.weight` after another module's tensors
  try      initialise the modules one after the other""",
    ),
    "fails": (
        OnTheDevice,
        """OnTheDevice.reset_parameters() failed on cpu: ValueError: no such device
  try      an initialiser that runs on this device, for this module alone""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    expect_refused_on_meta(*ERRORS[name])
