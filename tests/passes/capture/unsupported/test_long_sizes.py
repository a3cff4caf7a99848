"""Sizes that are too long to reason about become numbers; the graph is right for these sizes, and says so."""

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import autotp
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.capture.unsupported.long_sizes import LongSize, asks_too_much


class Growing(nn.Module):
    """Each round doubles the terms of a length."""

    def __init__(self, rounds: int, caught: bool = False) -> None:
        super().__init__()
        self.rounds, self.caught = rounds, caught
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch seq 12]
        for _ in range(self.rounds):
            x = torch.cat([x[:, ::2], x[:, ::3]], 1)
        y = self.down(self.up(x).relu())
        try:
            return y.view(x.shape)
        except Exception:
            if not self.caught:
                raise
            return y


def inputs(batch: int, seq: int) -> Tensor:
    return torch.randn(batch, seq, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("rounds", "caught", "symbols"), [
    (1, False, "all"), (6, False, "first"), (6, True, "first"),
], ids=["short", "long", "caught"])  # fmt: skip
def test_capture_makes_numbers_of_long_sizes(rounds: int, caught: bool, symbols: str) -> None:
    captured = capture(skeleton_of(Growing(rounds, caught)), (inputs(2, 8),), {})
    assert captured.attempt.symbols == symbols
    assert captured.fits([[3, 8, 12]])  # The batch is a symbol in any case.
    assert captured.fits([[2, 9, 12]]) == (symbols == "all")


def test_long_sizes_have_a_graph_for_each_length() -> None:
    torch.manual_seed(0)
    whole = Growing(6)
    model = autotp.parallelize(whole, 1, example_inputs=inputs(2, 8))
    plain = Growing(6)
    plain.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="Growing.forward is captured for the 9th time, since its inputs had other"):
        for seq in range(8, 17):
            torch.testing.assert_close(model(inputs(3, seq)), plain(inputs(3, seq)))
    assert autotp.verify(plain, 2, example_inputs=inputs(2, 8)).ok


def test_asks_too_much_knows_exceptions_of_sympy() -> None:
    with pytest.raises(TypeError) as raised:
        sympy.Symbol("n") < sympy.I  # noqa: B015
    assert asks_too_much(raised.value)
    assert asks_too_much(LongSize())
    assert not asks_too_much(TypeError())


def test_capture_without_symbols_follows_sympy_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in VOLO, where the text of sympy's error names another symbol on each rank."""

    def unsolved(*args: Any, **kwargs: Any) -> None:
        sympy.Symbol("n") < sympy.I  # noqa: B015

    monkeypatch.setattr(ShapeEnv, "evaluate_expr", unsolved)
    captured = capture(skeleton_of(Growing(1)), (inputs(2, 8),), {})
    assert captured.attempt.symbols == "none"
    assert captured.fits([[2, 8, 12]]) and not captured.fits([[3, 8, 12]])
