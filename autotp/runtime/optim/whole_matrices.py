"""whole_matrices: an optimizer that steps whole matrices, on parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from autotp.runtime.holdings import holdings_of
from autotp.runtime.optim.alone import expect_alone, step_groups
from autotp.runtime.optim.matrices import Matrices, Told, problem_of

Kind = TypeVar("Kind", bound=Optimizer)

OF_RANK = "of_rank"
"""The entry of a state dict with the rank that it is of, and the number of ranks."""
PARAMETERS = ("params", "param_names")
"""The entries of a group with its parameters."""


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


class WholeMatrices(Optimizer):
    """What `whole_matrices` adds to a class of optimizers.

    Its groups have this rank's parts. Another optimizer, of the class itself, has groups with the whole matrices that
    this rank owns. Options go from the first to the second before each step, and back after it. States are in both.

    Attributes:
        kind: the class of optimizers.
    """

    kind: type[Optimizer]
    _step_supports_amp_scaling = False  # The scaler then divides the parts' gradients itself.

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._options: list[dict[str, Any]] = []
        self._arguments = args, kwargs
        self._known: list[Any] = []
        self._models: WeakKeyDictionary[nn.Module, Matrices] = WeakKeyDictionary()
        self._kept: dict[Tensor, Any] = {}
        self._loaded_of: list[int] | None = None
        self._whole: Any = None
        super().__init__(params, *args, **kwargs)
        self.state.clear()  # What a constructor makes has the shapes of the parts.
        self.register_state_dict_post_hook(_note_rank)
        groups = [(group["params"][0].dim() if group["params"] else 2, options) for group, options in self._groups()]
        devices = [p.device for group in self.param_groups for p in group["params"] if not p.is_meta]
        device = devices[0] if devices else torch.device("cpu")
        self._takes_empty = within(
            f"whole_matrices({self.kind.__name__})", lambda: expect_alone(self.kind, groups, args, kwargs, device)
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does; the next step chooses owners for its parameters.

        Args:
            param_group: as for the class.
        """
        super().add_param_group(param_group)
        self._options.append(_without_parameters(self.param_groups[-1]))

    def _groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yields each group, and the options that it had when it was added: constructors may accept no others."""
        for i, group in enumerate(self.param_groups):
            yield group, self._options[i] if i < len(self._options) else _without_parameters(group)

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
        if "_options" not in self.__dict__:
            raise Error(
                f"a {type(self).__name__} of whole matrices cannot be copied or pickled",
                fix="a new optimizer of the copied model's parameters, and load_state_dict",
            )
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: the whole, on all ranks, or what `state_dict()` returned on this rank.

        Args:
            state_dict: of this class, or of the class that it steps with.
        """
        super().load_state_dict(state_dict)
        self._loaded_of = state_dict.get(OF_RANK)

    # ---- owners

    def owns(self, parameter: Tensor) -> bool | None:
        """Returns whether this rank has the state of a parameter; None if no owners are chosen yet.

        Args:
            parameter: a parameter of the optimizer.
        """
        for matrices in self._models.values():
            for name, part in matrices.parameters.items():
                if part is parameter:
                    return None if matrices.owners is None else name in matrices.wholes
        return None if self._whole is None else True

    def choose_owners(self) -> None:
        """Chooses the owners, if the parameters are others than in the last step. Call it on every rank."""
        self._told()

    def _told(self) -> list[tuple[Matrices, Told]]:
        """Returns for each model what all ranks tell of its parameters."""
        identities = [[(id(p), p.dtype, p.device) for p in group["params"]] for group in self.param_groups]
        stale, before = identities != self._known, self._models
        if stale:
            self._models = self._by_model()
        result = []
        for model, matrices in self._models.items():
            observed = self._agreed(matrices, stale)
            if observed is None:
                earlier = before[model].owners if model in before else None
                matrices.assign(earlier.owners if earlier else {})
                stale, observed = True, self._agreed(matrices, False)
            assert observed is not None
            result.append((matrices, observed))
        if stale or self._whole is None:
            self._make_whole()
        self._known = identities
        return result

    def _by_model(self) -> WeakKeyDictionary[nn.Module, Matrices]:
        """Returns the parameters of each parallel model; raises Error for a part of no model."""
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        by_model, unassigned = sorted_by_model(every)
        for part in (part for part in unassigned if isinstance(part, CutTensor)):
            raise Error(
                f"`{part.autotp_cut.name}` is a part of a parameter, and of no parallel model: a copy, or its model is "
                "gone",
                fix="a new optimizer of model.parameters()",
            )
        matrices_by_model = WeakKeyDictionary[nn.Module, Matrices]()
        for model, named in by_model.items():
            groups = {name: numbers[id(p)] for name, p in named.items()}
            matrices_by_model[model] = Matrices(holdings_of(model, "step"), named, groups)
        return matrices_by_model

    def _agreed(self, matrices: Matrices, stale: bool) -> Told | None:
        _, problem = tried(lambda: self._expect_steppable(matrices))
        return matrices.tell(stale, lambda name: self._is_foreign(matrices.parameters[name]), problem)

    def _is_foreign(self, parameter: Tensor) -> bool:
        state = self.state.get(parameter)
        return bool(state) and state is not self._kept.get(parameter)

    def _expect_steppable(self, matrices: Matrices) -> None:
        """Raises Error if this rank cannot step."""
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
            problem_of(name, parameter)
            if self._is_foreign(parameter):
                _expect_whole(name, self.state[parameter], parameter.shape, matrices.parts.shapes[name])

    def _make_whole(self) -> None:
        """Makes the optimizer of the whole matrices that this rank owns."""
        wholes = {id(m.parameters[name]): whole for m in self._models.values() for name, whole in m.wholes.items()}
        part_ids = {id(p) for matrices in self._models.values() for p in matrices.parameters.values()}
        groups, self._pairs = [], list[tuple[Tensor, Tensor]]()
        for group, options in self._groups():
            pairs = [(p, wholes.get(id(p)) if id(p) in part_ids else p) for p in group["params"]]
            some = [(p, whole) for p, whole in pairs if whole is not None]
            self._pairs += some
            groups.append({**options, "params": [whole for _, whole in some]})
        args, kwargs = self._arguments
        cls: Any = self.kind
        self._whole = cls(groups, *args, **kwargs)

    # ---- a step

    def _step(self) -> None:
        observations = self._told()
        for matrices, observed in observations:
            matrices.gather(observed)
        self._give()
        step_groups(self.kind, self._whole, self._takes_empty)
        self._take()
        for matrices, observed in observations:
            matrices.scatter(observed)
        self._loaded_of = None

    def _give(self) -> None:
        """Gives the optimizer of whole matrices the options and the states."""
        for group, whole in zip(self.param_groups, self._whole.param_groups, strict=True):
            whole.update(_without_parameters(group))
        self._whole.state.clear()
        for parameter, whole in self._pairs:
            if self.state.get(parameter):
                self._whole.state[whole] = self.state[parameter]

    def _take(self) -> None:
        """Takes its options and states back."""
        for group, whole in zip(self.param_groups, self._whole.param_groups, strict=True):
            group.update(_without_parameters(whole))
        self.state.clear()
        for parameter, whole in self._pairs:
            if self._whole.state.get(whole):
                self.state[parameter] = self._kept[parameter] = self._whole.state[whole]

    def missing(self) -> str:
        """Returns what this rank does not have of the state, as text; "" if it has all."""
        for matrices in self._models.values():
            if matrices.owners is not None:
                missing_names = [name for name in matrices.owners.owners if name not in matrices.wholes]
                if missing_names:
                    owner = matrices.mesh.named([matrices.owners.owners[missing_names[0]]])
                    more = f", and {len(missing_names) - 1} more are on other ranks" if missing_names[1:] else ""
                    return f"the state of `{missing_names[0]}` is on {owner}{more}"
        return ""


def _note_rank(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Notes in a state dict the rank that it is of, if this rank does not have the whole state."""
    assert isinstance(optimizer, WholeMatrices)
    for matrices in optimizer._models.values():
        if optimizer.missing():
            state[OF_RANK] = [matrices.mesh.rank, matrices.mesh.size]


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in PARAMETERS}


def _expect_whole(name: str, state: Mapping[str, Any], part: torch.Size, whole: tuple[int, ...]) -> None:
    """Raises Error for a state that is cut, or has the shape of this rank's part."""
    for key, value in state.items():
        value = value.part if isinstance(value, Sharded) else value
        if isinstance(value, Tensor) and value.dim() and value.shape == part != torch.Size(whole):
            raise Error(
                f"`{key}` of `{name}` is {list(value.shape)}, as this rank's part, and the state of a whole matrix "
                f"{list(whole)}",
                fix="a state that this class, or the class that it steps with, saved on one device",
                alternative="autotp.save_checkpoint and autotp.load_checkpoint, with autotp.distribute",
            )
