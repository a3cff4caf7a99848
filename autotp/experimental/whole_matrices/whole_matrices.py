"""whole_matrices: an optimizer that steps whole matrices, on parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotp.distributed.agreement import tried
from autotp.distributed.cut_tensors.cut_parameter import CutTensor
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.live_models import sorted_by_model
from autotp.errors import Error, within
from autotp.experimental.whole_matrices.matrices import Matrices
from autotp.runtime.holdings import holdings_of
from autotp.runtime.torch_hooks.optimizer_state import OF_RANK, OwnedStates
from autotp.runtime.torch_hooks.optimizer_trial import (
    expect_nothing_kept,
    plain_stepper,
    steps_alone,
    unhooked_step,
)

Kind = TypeVar("Kind", bound=Optimizer)
ALTERNATIVE = "autotp.distribute with tp=1, pp=1 and zero=0, where each rank steps all parameters, whole"


def whole_matrices(kind: type[Kind]) -> type[Kind]:
    """Returns a class like `kind` that steps whole parameters where ranks hold parts of them.

    The step equals that of one device. Each parameter has an owner, one of the ranks that hold it. In a step, the
    owner gets the whole gradient, and `kind` itself steps the whole parameter there. Then all ranks get their parts.
    The work is divided among the ranks, and also among replicas of `autotp.distribute`. The state of a parameter is
    whole, and only its owner has it. Checkpoints are as those of any optimizer, also of `kind` on one device.

    Use it for optimizers that look at a matrix, its rows or its norm, such as torch.optim.Muon and
    torch.optim.Adafactor. Elementwise ones, such as AdamW, need no such class.

    Args:
        kind: a class of optimizers that steps each parameter by itself, in one call of `step` without a closure.

    Raises:
        Error: `kind` is not a class of optimizers. The class that is returned raises it for an optimizer that steps a
            parameter in another way beside other ones, or that needs a closure, such as LBFGS.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16, bias=False), nn.GELU(), nn.Linear(16, 4, bias=False))
        >>> model = autotp.parallelize(model, tp=1, example_inputs=torch.ones(2, 4))
        >>> optimizer = autotp.whole_matrices(torch.optim.Muon)(model.parameters(), lr=0.02)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """
    return within("whole_matrices", lambda: _class_of(kind))


def _class_of(cls: Any) -> Any:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        text = repr(cls) if not isinstance(cls, Optimizer) else f"an object of {type(cls).__name__}"
        raise Error(f"{text} is not a class of optimizers", fix="autotp.whole_matrices(torch.optim.Muon)(parameters)")
    return cls if issubclass(cls, WholeMatrices) else _made(cast(Any, cls))


@cache
def _made(cls: Any) -> Any:
    names = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "kind": cls}
    return type(cls.__name__, (WholeMatrices, cls), names)


class WholeMatrices(OwnedStates, Optimizer):
    """What `whole_matrices` adds to a class of optimizers, its `kind`.

    Its groups have this rank's parts. In a step, an object of the class itself gets groups with the whole matrices that
    this rank owns, and their states; it shares all other attributes.
    """

    kind: type[Optimizer]

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self.state.clear()  # What a constructor makes has the shapes of the parts.
        self._step_supports_amp_scaling = False  # The scaler then divides the parts' gradients itself.
        self.register_state_dict_post_hook(_note_rank)
        stepper = plain_stepper(self, self.kind)
        within(f"whole_matrices({self.kind.__name__})", lambda: _expect_alone(stepper))
        self._stepper = stepper
        self._models: WeakKeyDictionary[nn.Module, Matrices] = WeakKeyDictionary()
        self._identities: list[Any] = []
        self._loaded_of: list[int] | None = None

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters, each on its owner; call it on every rank.

        Args:
            closure: computes the loss and the gradients; it is called once, before the step.

        Raises:
            Error: on every rank: ranks have other parameters, gradients or states.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        within(f"{type(self).__name__}.step", self._step)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_models" not in vars(self):
            raise Error(
                f"a {type(self).__name__} of whole matrices cannot be copied or pickled",
                fix="a new optimizer of the copied model's parameters, and load_state_dict",
            )
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: the whole, on all ranks, or what `state_dict()` returned on this rank."""
        super().load_state_dict(state_dict)
        self._loaded_of = state_dict.get(OF_RANK)

    def owner(self, parameter: Tensor) -> int | None:
        """Returns the rank that owns a parameter's state; None if no owner is chosen."""
        for matrices in self._models.values():
            for name in (name for name, part in matrices.parameters.items() if part is parameter):
                return matrices.plan.owners.get(name) if matrices.plan else None
        return None

    def choose_owners(self) -> None:
        """Chooses the owners, if the parameters are others than in the last step. Call it on every rank."""
        identities = [[(id(p), p.dtype, p.device) for p in group["params"]] for group in self.param_groups]
        stale, before = identities != self._identities, self._models
        if stale:
            self._models = self._by_model()
        for model, matrices in self._models.items():
            if not self._agree(matrices, stale):
                plan = before[model].plan if model in before else None
                matrices.assign(plan.owners if plan else {})
                self._agree(matrices, stale=False)
        self._identities = identities

    def _by_model(self) -> WeakKeyDictionary[nn.Module, Matrices]:
        """Returns the parameters of each parallel model; raises Error for a part of no model."""
        numbers = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        by_model, unassigned = sorted_by_model(p for group in self.param_groups for p in group["params"])
        for part in (part for part in unassigned if isinstance(part, CutTensor)):
            raise Error(
                f"`{part.autotp_cut.name}` is a part of a parameter, and of no parallel model: a copy, or its model is "
                "gone",
                fix="a new optimizer of model.parameters()",
            )
        matrices_by_model = WeakKeyDictionary[nn.Module, Matrices]()
        for model, parameters in by_model.items():
            groups = {name: numbers[id(p)] for name, p in parameters.items()}
            matrices_by_model[model] = Matrices(holdings_of(model, "step"), parameters, groups)
        return matrices_by_model

    def _agree(self, matrices: Matrices, stale: bool) -> bool:
        states = [(name, self.state[p]) for name, p in matrices.parameters.items() if self.state.get(p)]
        last = {name: self._stepper.state.get(matrix) for name, matrix in matrices.wholes.items()}
        loaded = [name for name, state in states if state is not last.get(name)]
        return matrices.agree(stale, loaded, tried(lambda: self._expect_steppable(matrices, loaded))[1])

    def _expect_steppable(self, matrices: Matrices, loaded: Sequence[str]) -> None:
        """Raises Error if this rank cannot step. loaded: the parameters whose state was loaded"""
        if any(group.get("differentiable") for group in self.param_groups):
            raise Error("a step of whole matrices is not differentiable", fix="differentiable=False")
        mesh, of = matrices.mesh, self._loaded_of
        if of is not None and list(of) != [mesh.rank, mesh.size]:
            raise Error(
                f"the state that was loaded is of rank {of[0]} of {of[1]}, and this is rank {mesh.rank} of {mesh.size}",
                fix="each rank loads the optimizer's state that it saved; or autotp.save_checkpoint, with "
                "autotp.distribute, saves the whole for any layout",
            )
        for name, parameter in matrices.parameters.items():
            _expect_gradient(name, parameter)
        for name in loaded:
            parameter, shape = matrices.parameters[name], torch.Size(matrices.parts.shapes[name])
            _expect_whole(name, self.state[parameter], parameter.shape, shape)

    def _step(self) -> None:
        self.choose_owners()
        for matrices in self._models.values():
            matrices.gather()
        self._step_wholes()
        for matrices in self._models.values():
            matrices.scatter()
        self._loaded_of = None

    def _step_wholes(self) -> None:
        """Steps the matrices that this rank owns, and parameters of no parallel model."""
        stepper, owned = self._stepper, {p: p for group in self.param_groups for p in group["params"]}
        for matrices in self._models.values():
            for name, p in matrices.parameters.items():
                owned[p] = matrices.wholes.get(name)
        owned = {p: matrix for p, matrix in owned.items() if matrix is not None}
        stepper.param_groups = [
            {**group, "params": [owned[p] for p in group["params"] if p in owned] or [_placeholder(group["params"])]}
            for group in self.param_groups
        ]
        stepper.state = defaultdict(dict, {owned[p]: self.state[p] for p in owned if self.state.get(p)})
        unhooked_step(self.kind)(stepper)
        for group, stepped in zip(self.param_groups, stepper.param_groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        self.state.clear()
        self.state.update({p: stepper.state[matrix] for p, matrix in owned.items() if stepper.state.get(matrix)})


def _placeholder(parameters: Sequence[Tensor]) -> nn.Parameter:
    """Returns what a rank steps in a group of which it owns nothing: groups may count steps, or stack gradients."""
    first = parameters[0] if parameters else torch.ones(1, 1)
    matrix = nn.Parameter(torch.ones((2,) * first.dim(), device=first.device))
    matrix.grad = torch.ones_like(matrix)
    return matrix


def _note_rank(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Notes in a state dict the rank that it is of, if this rank does not have the whole state."""
    assert isinstance(optimizer, WholeMatrices)
    for matrices in optimizer._models.values():
        rank = matrices.mesh.rank
        if matrices.plan and any(owner != rank for owner in matrices.plan.owners.values()):
            state[OF_RANK] = [rank, matrices.mesh.size]


def _expect_alone(stepper: Optimizer) -> None:
    """Raises Error unless an optimizer steps each parameter of its groups by itself."""
    name = type(stepper).__name__
    try:
        alone = steps_alone(stepper)
    except Error as error:
        fix = "an optimizer that uses each gradient once, such as torch.optim.Muon"
        raise Error(error.problem, fix=fix, alternative=ALTERNATIVE) from error
    if not alone:
        raise Error(
            f"{name} steps a parameter in another way beside other parameters than alone: it uses the gradients of "
            "several parameters at once, or random numbers",
            fix="an optimizer of each parameter by itself, such as torch.optim.Muon; for the norm of all gradients "
            "autotp.clip_grad_norm_",
            alternative=ALTERNATIVE,
        )
    expect_nothing_kept(stepper, ALTERNATIVE)


def _expect_gradient(name: str, parameter: Tensor) -> None:
    """Raises Error if a gradient cannot be gathered."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout is not torch.strided:
        raise Error(f"the gradient of `{name}` is sparse, and a whole matrix is not", fix="sparse=False in its layer")
    if gradient is not None and gradient.dtype != parameter.dtype:
        raise Error(
            f"the gradient of `{name}` is {gradient.dtype}, and the parameter {parameter.dtype}",
            fix="gradients of the parameters' dtype",
        )


def _expect_whole(name: str, state: Mapping[str, Any], part: torch.Size, shape: torch.Size) -> None:
    """Raises Error for a state that is cut, or has the shape of this rank's part."""
    for key, value in state.items():
        value = value.part if isinstance(value, Sharded) else value
        if isinstance(value, Tensor) and value.dim() and value.shape == part != shape:
            raise Error(
                f"`{key}` of `{name}` is {list(value.shape)}, as this rank's part, and the state of a whole matrix "
                f"{list(shape)}",
                fix="a state that this class, or the class that it steps with, saved on one device",
                alternative="autotp.save_checkpoint and autotp.load_checkpoint, with autotp.distribute",
            )
