"""gradient_queries: questions about gradients are answered for the call that is captured, and noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from errors import message
from torch import Tensor, nn

from autotp.passes.capture.guards.gradient_queries import (
    NOT_ASKED,
    GradientQueries,
    GradientsWanted,
    wanted_now,
)
from autotp.passes.capture.replacements.everywhere import everywhere

FROZEN = GradientsWanted(enabled=False, inference=False, inputs=(False,), parameters=(True,))


def answered(wanted: GradientsWanted, ask: Callable[[Tensor, Tensor], Any]) -> tuple[Any, GradientsWanted]:
    """What the model's code is told of an input and of a value computed from it, and what is noted."""
    x = torch.ones(2)
    queries = GradientQueries(wanted)
    queries.inputs = [x]
    with queries, everywhere(queries.answering()):
        found = ask(x, x.requires_grad_() * 2)
    return found, queries.relevant()


def test_queries_of_the_mode_are_answered_for_the_call() -> None:
    assert answered(FROZEN, lambda x, y: torch.is_grad_enabled()) == (False, GradientsWanted(False, False, None, None))
    assert answered(GradientsWanted(), lambda x, y: torch.is_grad_enabled())[0] is True


def test_queries_of_flags_are_answered_for_the_call() -> None:
    """Without gradients a computed value has none; an input keeps its own flag."""
    found, noted = answered(FROZEN, lambda x, y: (y.requires_grad, y.grad_fn, y.is_leaf, x.requires_grad))
    assert found == (False, None, True, True)
    assert noted == FROZEN


def test_queries_that_are_not_asked_are_not_noted() -> None:
    assert answered(FROZEN, lambda x, y: (y + 1).shape)[1] == NOT_ASKED


def test_calls_that_a_graph_is_right_for() -> None:
    call = wanted_now([torch.ones(1)], [nn.Parameter(torch.ones(1))])
    assert call == GradientsWanted(True, False, (False,), (True,))
    assert NOT_ASKED.covers(call)
    assert GradientsWanted(True, None, None, None).covers(call)
    assert not GradientsWanted(False, None, None, None).covers(call)
    assert not GradientsWanted(True, None, None, None).covers(FROZEN)
    assert not GradientsWanted(None, None, (True,), None).covers(call)
    with torch.inference_mode():
        assert wanted_now([], []) == GradientsWanted(False, True)


def test_a_generator_of_the_model_is_refused() -> None:
    generator = torch.Generator()
    text = message(lambda: answered(FROZEN, lambda x, y: torch.rand(2, generator=generator)))
    assert text.startswith("the model draws from a torch.Generator of its own, which a graph cannot use\n  at       ")
