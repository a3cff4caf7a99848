"""write_counts: which of two tied tensors keeps its value is known; a write that no initialiser makes is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small_models import Bare, Recurrent, expect_as_built_whole, expect_refused_on_meta, on_meta
from torch import nn

import autotp
from autotp.deferred_init.initialize import initialize

CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


class PlainTie(nn.Module):
    """The head has the embedding's weight: a normal one, not the uniform one of a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight


class PlainTieBack(nn.Module):
    """The other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.embedding.weight = self.head.weight


class TieBefore(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.weight = self.head.weight
        self.apply(self._init_weights)


class TieBeforeBack(Recurrent):
    """The head is initialised last, though the weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)


class TieAfter(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)
        self.head.weight = self.embedding.weight


class TieAfterBack(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)
        self.embedding.weight = self.head.weight


class TieAfterPadded(TieAfter):
    """As many writes as if the tie had been made before, of the head's weight."""

    padding = 3


class Data(TieBefore):
    """Writes through `.data`, which leaves no count."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02 if isinstance(module, nn.Linear) else 0.5)


MODELS: dict[str, Make] = {
    "plain-tie": PlainTie,
    "plain-tie-back": PlainTieBack,
    "tie-before": TieBefore,
    "tie-before-back": TieBeforeBack,
    "tie-after": TieAfter,
    "tie-after-back": TieAfterBack,
    "tie-after-padded": TieAfterPadded,
    "data": Data,
}


@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MODELS.items()])
def test_write_counts_tell_which_tied_tensor_keeps_its_value(make: Make, tp: int) -> None:
    expect_as_built_whole(make, tp)


class Rope(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(dim) / dim)


class Token(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.token = nn.Parameter(torch.randn(size))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.normal_(self.token)


class Afterwards(nn.Module):
    """nanoGPT's constructor: it scales some weights after applying `_init_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(3, 5), nn.Linear(5, 3)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.01)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class Unclear(Recurrent):
    """The tie does not show in the source, and both ways give as many writes."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)
        setattr(self.head, "weight", self.embedding.weight)  # noqa: B010


ERRORS: dict[str, tuple[Make, str]] = {
    "parameter": (
        lambda: nn.Sequential(nn.Linear(2, 2), Bare(3)),
        """nothing initialises the parameter `1.scale`, whose values are lost on meta
  try      fill self.scale in Bare.reset_parameters(self) and call that in the constructor,
  or       in _init_weights(self, module) of the model, applied at the end of its constructor""",
    ),
    "buffer": (
        lambda: nn.Sequential(nn.Linear(2, 2), Rope(3)),
        """nothing initialises the buffer `1.angles`, whose values are lost on meta
  try      fill self.angles in Rope.reset_parameters(self) and call that in the constructor,
  or       in _init_weights(self, module) of the model, applied at the end of its constructor
  or else  make it with device="cpu": tensors that are not on meta keep their values""",
    ),
    "draws": (
        lambda: nn.Sequential(Token(3)),
        """the constructor of Token, `0`, draws random numbers itself: randn
  try      draw them in Token.reset_parameters(self), and call that in the constructor""",
    ),
    "afterwards": (
        Afterwards,
        """the constructors wrote `c_proj.weight` differently from its initialisers
  expected 2 writes: Linear.reset_parameters(), Afterwards._init_weights(Linear)
  got      3 writes
  try      fill self.weight in Linear.reset_parameters(self) and call that in the constructor,
  or       in _init_weights(self, module) of the model, applied at the end of its constructor""",
    ),
    "copy": (
        lambda: copy.deepcopy(nn.Linear(2, 3)),
        """the constructors wrote `weight` differently from its initialisers
  expected 1 writes: Linear.reset_parameters()
  got      0 writes
  try      the model built under torch.device("meta") itself, not a copy of it""",
    ),
    "unclear-tie": (
        Unclear,
        """`embedding.weight` is tied to `head.weight`, and it is not clear which was initialised last
  try      tie them in the constructor that has both: self.head.weight = self.embedding.weight""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_writes_outside_of_initialisers_are_refused(name: str) -> None:
    expect_refused_on_meta(*ERRORS[name])


def test_a_refused_initialize_leaves_the_random_state() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Bare(3)))
    before = torch.get_rng_state()
    with pytest.raises(autotp.Error):
        initialize(model, {}, 0, CPU)
    assert torch.equal(torch.get_rng_state(), before)
