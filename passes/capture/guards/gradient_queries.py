"""Notes during capture whether a model asks for the gradient mode, and answers for the call that is captured.

NOTE [Whether gradients are wanted]
A graph is right with gradients and without, unless the model's own code asks (`torch.is_grad_enabled()`,
`x.requires_grad`) and then computes something else. Such a question is answered for the call that is captured, and
noted: the graph is then used for calls with the same answers only. torch's own code asks very often; it is always told
that gradients are wanted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from autotp import torch_internals as internals
from autotp.errors import Error
from autotp.passes.capture.replacements.everywhere import Pairs
from autotp.source_location import calling_frame, is_users, user_line

ASKING = tuple(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf"))
IN_PLACE_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = tuple(f"__i{name}__" for name in IN_PLACE_NAMES)


@dataclass(frozen=True)
class GradientsWanted:
    """The gradient modes of a call, and the tensors that require a gradient.

    Attributes:
        enabled: whether gradients are enabled.
        inference: whether the call is in inference mode.
        inputs: `requires_grad` of each tensor among the arguments.
        parameters: `requires_grad` of each parameter.

    For a graph, None stands for a question that its model did not ask.
    """

    enabled: bool | None = True
    inference: bool | None = False
    inputs: tuple[bool, ...] | None = ()
    parameters: tuple[bool, ...] | None = ()

    def covers(self, call: GradientsWanted) -> bool:
        """True if a graph that was captured with these answers is right for a call."""
        pairs = zip(vars(self).values(), vars(call).values(), strict=True)
        return all(captured in (None, present) for captured, present in pairs)


NOT_ASKED = GradientsWanted(None, None, None, None)


def wanted_now(tensors: Sequence[Tensor], parameters: Iterable[Tensor]) -> GradientsWanted:
    """Returns the present gradient modes, for a call with these tensors."""
    flags = tuple(x.requires_grad for x in tensors), tuple(p.requires_grad for p in parameters)
    return GradientsWanted(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *flags)


class GradientQueries(TorchFunctionMode):
    """A mode that notes the model's questions about gradients, and answers them for the call that is captured.

    Attributes:
        wanted: the answers.
        inputs: the tensor arguments, whose `requires_grad` is the same in any mode.
        written: constants that the model wrote into, directly or through views (`roots`: a view -> its constant).
        modes, flags: whether the model asked for the mode, or whether a tensor requires a gradient.
    """

    def __init__(self, answers: GradientsWanted) -> None:
        super().__init__()
        self.wanted, self.modes, self.flags = answers, False, False
        self.inputs: list[Tensor] = []
        self.written: list[Tensor] = []
        self.roots: dict[int, tuple[Tensor, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("generator") is not None:
            raise Error(
                "the model draws from a torch.Generator of its own, which a graph cannot use",
                at=user_line(traceback.extract_stack()),
                fix="the default one: no `generator=`",
            )
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], Tensor):
            self._follow(func, args[0], result)
        if func not in ASKING or not is_users(calling_frame()):
            return result
        self.flags = True
        if self.wanted.enabled or args[0].is_leaf or any(args[0] is x for x in self.inputs):
            return result
        return {ASKING[0]: False, ASKING[1]: None, ASKING[2]: True}[func]  # The answers without gradients.

    def _follow(self, func: Any, x: Tensor, result: Any) -> None:
        """Notes views of constants, and writes into them. During capture only constants are no fake tensors."""
        root = x if not isinstance(x, FakeTensor) else self.roots.get(id(x), (None,))[0]
        name = getattr(func, "__name__", "")
        if root is None:
            return
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE:
            self.written.append(root)
        for view in result if isinstance(result, (tuple, list)) else (result,):
            # With the view, which keeps its `id`: another tensor could get it.
            if isinstance(view, FakeTensor) and (view._is_view() or view is x):
                self.roots[id(view)] = root, view

    def answering(self) -> Pairs:
        """Returns what stands for `torch.is_grad_enabled` and the like: it answers for the call that is captured."""
        return [(row.original(), self._answering(row)) for row in internals.GRADIENT_MODES]

    def relevant(self) -> GradientsWanted:
        """Returns the answers that the model asked for."""
        modes = (self.wanted.enabled, self.wanted.inference) if self.modes or self.flags else (None, None)
        flags = (self.wanted.inputs, self.wanted.parameters) if self.flags else (None, None)
        return GradientsWanted(*modes, *flags)

    def _answering(self, row: internals.Replaced) -> Callable[[], bool]:
        """Returns what stands for a function that returns a mode: NOTE [Whether gradients are wanted]"""
        real, is_inference = row.original(), row.name == "is_inference_mode_enabled"

        def answer() -> bool:
            if not is_users(calling_frame()):
                return bool(real())
            self.modes = True
            # `real()` is False in a `no_grad` region of the model itself, also where the call wants gradients.
            return bool(self.wanted.inference if is_inference else real() and self.wanted.enabled)

        return answer
