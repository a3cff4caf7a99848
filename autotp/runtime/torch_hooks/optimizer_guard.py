"""Raises Error before an optimizer's step that would be wrong on parts, or that differs between ranks.

Each rank steps its own parameters; a part behaves as the whole (`cut_parameter.py`). This equals the step of one device
if the parameters that several ranks hold, their gradients and the optimizer's settings are the same there. These are
the parameters that tensor-parallel ranks hold whole, all parameters of replicas, and parameters that several ranks of a
pipeline read. For parameters that replicas shard only the settings are compared.

NOTE [When ranks are compared]
Before the first steps of an optimizer and every `EVERY`-th step after, ranks exchange a checksum of everything that
must be the same, through the store (`store_gather.py`), so that the error names a rank that does not step.
Sums over replicas may have another order on each rank (buckets differ if parts differ), and on GPUs so may sums within
a kernel (atomics, kernels that each process tunes for itself). So a difference by round-off is not an Error. Then all
ranks take the first rank's numbers, and a warning says so once.

On a GPU the checksums are computed there. After the first steps the host does not wait for them: ranks exchange them
`LATER` steps on, and if they differ, they compare the values that they have then.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotp.attached import Marks, attached, attached_if_any
from autotp.distributed.agreement import Fact, compare
from autotp.distributed.cut_tensors.cut_parameter import (
    TRIED,
    CutDTensor,
    CutTensor,
    is_elementwise,
    part_like,
    steps_elements,
)
from autotp.distributed.fingerprint import bits_of_all, checksum
from autotp.distributed.live_models import Undo, sorted_by_model
from autotp.distributed.mesh import Mesh, broadcast_from_first
from autotp.distributed.peers.in_step import are_apart, expect_together
from autotp.distributed.peers.store_gather import store_gather
from autotp.errors import Error, within
from autotp.groups.process_group import process_group
from autotp.ops.collectives import reduce
from autotp.runtime.holdings import Holdings, holdings_of
from autotp.runtime.shard_parameters import is_left_behind
from autotp.runtime.torch_hooks.optimizer_state import OwnedStates, watch_state
from autotp.runtime.torch_hooks.optimizer_steps import SteppedModels
from autotp.runtime.torch_hooks.optimizer_trial import expect_alone, expect_elementwise
from autotp.sharding.boxes import local_of
from autotp.sharding.layout import Layout

CHECKED_STEPS, EVERY = 4, 64
"""The number of first steps that are compared, and the interval of later comparisons."""
LATER = 4
"""The number of steps that checksums have to come from a GPU."""


@dataclass
class Watched:
    """The history of an optimizer.

    Attributes:
        steps: number of steps so far.
        size, state: number of its parameters, and `id` of its state, in the last step.
        models: those that have its parameters.
        always: whether each step is compared.
        warned: whether there was a warning about round-off.
        late: the comparisons that wait for checksums from a GPU.
    """

    steps: int = 0
    size: int = -1
    state: int = 0
    models: SteppedModels = field(default_factory=SteppedModels)
    always: bool = False
    warned: bool = False
    late: list[OptimizerComparison] = field(default_factory=list)

    def warn(self, warning: str) -> None:
        """Warns about round-off, once."""
        if warning and not self.warned:
            self.warned = True
            warnings.warn(warning, stacklevel=5)


def install() -> Undo:
    """Checks every optimizer before it steps; returns the undo."""
    return register_optimizer_step_pre_hook(torch.compiler.disable(_before_step)).remove


def _after_load(optimizer: Optimizer) -> None:
    """Has the next step see a state that was loaded: its `id` may be that of an earlier one."""
    attached(optimizer, Watched).state = 0


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # The thread of the heartbeat has found it, where an Error would reach nobody.
    if are_apart():
        within(f"{type(optimizer).__name__}.step", expect_together)
    if attached_if_any(optimizer, Watched) is None:
        optimizer.register_load_state_dict_post_hook(_after_load)
    watched = attached(optimizer, Watched)
    step, size = watched.steps, sum(len(group["params"]) for group in optimizer.param_groups)
    due = watched.always or step < CHECKED_STEPS or step % EVERY == 0
    watched.steps += 1
    if watched.late:
        within(f"{type(optimizer).__name__}.step", partial(_compare_late, watched, step))
    is_unchanged = (watched.size, watched.state) == (size, id(optimizer.state))
    # A CUDA graph that is recorded could wait for nobody, and would repeat what it recorded.
    if (not due and is_unchanged) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        watched.models.count(optimizer)
        return
    is_new_state = watched.state != id(optimizer.state)  # It was loaded, or is new.
    watched.size, watched.state = size, id(optimizer.state)
    within(f"{type(optimizer).__name__}.step", partial(_expect_live, optimizer))
    by_model, _ = sorted_by_model(p for group in optimizer.param_groups for p in group["params"])
    watched.models = SteppedModels(by_model)
    watched.models.count(optimizer)
    for model, parameters in by_model.items():
        parts = holdings_of(model, "step")
        if parts.everyone.size > 1:
            watch_state(optimizer)
            watched.always |= parts.check == "always"
            compares = parts.place.size > 1 and parts.check != "never"
            if is_new_state and compares and not isinstance(optimizer, OwnedStates):
                check = partial(_expect_own_state, optimizer, parts, parameters, step)
                within(f"{type(optimizer).__name__}.step", check)
            begin = partial(_checked, optimizer, parts, parameters, step, due and parts.check != "never")
            within(f"{type(optimizer).__name__}.step", partial(_compare, watched, begin, step))


def _expect_live(optimizer: Optimizer) -> None:
    """Raises Error if an optimizer has parameters of the original model, which have no gradients and are not read."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if originals := [p for p in every if is_left_behind(p)]:
        raise Error(
            f"{len(originals)} of {len(every)} parameters are the original model's, and the parallel model has others",
            fix="make the optimizer of model.parameters() after autotp.parallelize, of trainer.parameters() after "
            "autotp.distribute",
        )


def _compare(watched: Watched, begin: Callable[[], list[OptimizerComparison]], step: int) -> None:
    """Begins comparisons, and ends them: now, or later if their checksums are on their way from a GPU."""
    for comparison in begin():
        if comparison.place.device.type == "cuda" and not watched.always and step >= CHECKED_STEPS:
            watched.late.append(comparison)
        else:
            watched.warn(_differing(comparison, late=False))


def _compare_late(watched: Watched, step: int) -> None:
    """Ends the comparisons that were begun `LATER` steps ago."""
    for comparison in list(watched.late):
        comparison.checksums.have_arrived()  # Asked in each step, so that the last step need not wait.
        if step >= comparison.step + LATER:
            watched.late.remove(comparison)
            watched.warn(_differing(comparison, late=True))


def _checked(
    optimizer: Optimizer, parts: Holdings, parameters: Mapping[str, Tensor], step: int, compared: bool
) -> list[OptimizerComparison]:
    """Returns the comparisons to make with other ranks; raises Error if the step would not be that of one device."""
    cut = [name for name in parameters if parts.layout(name).dim is not None and parts.place.size > 1]
    foreign = list[str]()
    if not isinstance(optimizer, OwnedStates):
        _expect_seen(optimizer, parts, parameters, cut)
        for parameter in parameters.values():
            _move_state(optimizer, parameter)
        for name in cut:
            _cut_state(optimizer, parameters[name], parts.layout(name), parts.place.rank)
        foreign = [name for name in cut if _of_another_rank(optimizer, parameters[name], parts.layout(name))]
    begun = list[OptimizerComparison]()
    for place, names in parts.alike if compared else ():
        replicated = {name: p for name, p in parameters.items() if name in names and not p.is_meta}
        # Ranks along tp compare settings also where every parameter is cut; replicas without a parameter here do not.
        if place.size > 1 and (replicated or place is parts.place):
            # Of cut parameters ranks compare all but the values; a part that is empty may be left out of the step.
            filled = [name for name in cut if place is parts.place and all(parts.layout(name).lengths())]
            parts_of = {name: parameters[name] for name in filled}
            foreign_names = foreign if place is parts.place else []
            begun.append(OptimizerComparison.begun(optimizer, replicated, parts_of, place, step, foreign_names))
    return begun


def _expect_seen(optimizer: Optimizer, parts: Holdings, parameters: Mapping[str, Tensor], cut: Sequence[str]) -> None:
    """Raises Error if a step needs elements that this rank cannot see: of other stages, or of shards of parts."""
    if is_elementwise(optimizer):
        return
    if parts.pipeline is not None:
        expect_alone(optimizer, "a rank of the pipeline has some of the parameters")
    if sharded := [name for name in cut if type(parameters[name]) is CutDTensor]:
        expect_elementwise(optimizer, f"each rank has a shard of a part of `{sharded[0]}`")
        attached(optimizer, Marks).add(TRIED)


def _cut_state(optimizer: Optimizer, parameter: Tensor, layout: Layout, rank: int) -> None:
    """Cuts an optimizer's state that has the whole's shape: it is from before the parameter was cut, or from a file.

    It behaves as the whole, as the parameter does.
    """
    state = optimizer.state.get(parameter, {}) if parameter.shape != layout.shape else {}
    whole_keys = [key for key, x in state.items() if type(x) is Tensor and x.shape == layout.shape]
    parts = {key: layout.take(state[key], rank).to(parameter.device) for key in whole_keys}
    if isinstance(parameter, CutTensor):
        parts = {key: part_like(part, parameter) for key, part in parts.items()}
    state.update(parts)


def _move_state(optimizer: Optimizer, parameter: Tensor) -> None:
    """Moves an optimizer's state to its parameter: it is from before `parallelize` moved this to a GPU.

    An optimizer that is not torch's may want its state on the CPU.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    state = optimizer.state.get(parameter, {})
    # Counts of steps have no dimension, and may be on the CPU.
    elsewhere = [key for key, x in state.items() if type(x) is Tensor and x.dim() > 0 and x.device != parameter.device]
    state.update({key: state[key].to(parameter.device) for key in elsewhere})


def _of_another_rank(optimizer: Optimizer, parameter: Tensor, layout: Layout) -> bool:
    """True if all state of a parameter's dimensions has the shape of another rank's part: it is from that rank's file.

    torch would raise an error for a broadcast that does not fit, on this rank alone. A plain state of an optimizer that
    computes with wholes is whole: it may have this shape by chance, as Adafactor's means of columns do.
    """
    if not steps_elements(optimizer):
        return False
    shapes = [tuple(x.shape) for x in optimizer.state.get(parameter, {}).values() if type(x) is Tensor and x.dim() > 0]
    other_shapes = {layout.local_shape(rank) for rank in range(len(layout.pieces))} - {tuple(parameter.shape)}
    return bool(shapes) and other_shapes.issuperset(shapes)


def _expect_own_state(optimizer: Optimizer, parts: Holdings, parameters: Mapping[str, Tensor], step: int) -> None:
    """Raises Error on every rank if several ranks have loaded the same state for different parts: it is one rank's."""
    state_sums, cut_parameters = list[int | str](), list[Tensor]()
    for name, p in parameters.items():
        layout = parts.layout(name)
        state = optimizer.state.get(p, {}).values() if steps_elements(optimizer) else ()
        states_of_part = [x for x in state if isinstance(x, Tensor) and x.shape == p.shape]
        if layout.dim is not None and not layout.repeated and p.shape != layout.shape:
            locals_ = [local_of(x.detach()) for x in states_of_part if x.layout is torch.strided]
            # A constant state, such as zeros, is the same on all ranks without any mistake.
            state_sums += _checksums(x for x in locals_ if x.numel() and bool((x != x.flatten()[0]).any()))
            cut_parameters.append(p)
    text = json.dumps([state_sums, _checksums(cut_parameters)])
    every = [json.loads(answer) for answer in _exchanged(LOADED, text, parts.place, step)]
    # Ranks whose parts are equal, too, may well have equal states.
    twins = [[peer_row[0] for peer_row in every if peer_row[0] == row[0] and peer_row[1] != row[1]] for row in every]
    if duplicates := [rank for rank, row in enumerate(every) if row[0] and twins[rank]]:
        raise Error(
            f"{parts.place.named(duplicates)} have the same state, which is of one rank's parts",
            fix="each rank loads the optimizer's state that it saved; or autotp.save_checkpoint, with "
            "autotp.distribute, saves the whole for any layout",
        )


def _checksums(tensors: Iterable[Tensor]) -> list[int | str]:
    return list(Checksums(dict(enumerate(tensors))).read().values())


ONE_DECISION = "decide by a value that is the same on all ranks: a loss, not a value of one rank"
LOADED, COMPARED = "loaded", "compared"
"""What an exchange is for: a rank that has loaded a state makes one more."""


def _exchanged(topic: str, text: str, place: Mesh, step: int) -> list[str]:
    """Returns every rank's `text`, by rank; raises Error if a rank does not step, or has loaded a state alone."""
    try:
        every = [answer.partition(" ") for answer in store_gather(f"{topic} {text}", place)]
    except Error as error:
        raise Error(
            f"step {step} is not taken by all ranks: {error.problem}",
            fix="call step on all ranks: decide by a value that is the same on all whether to step",
        ) from error
    if len({answer[0] for answer in every}) > 1:
        loaded = [rank for rank, answer in enumerate(every) if answer[0] == LOADED]
        raise Error(
            f"only {place.named(loaded)} loaded a state into the optimizer",
            fix="optimizer.load_state_dict on all ranks",
        )
    return [text for _, _, text in every]


# ---- NOTE [When ranks are compared]


class Checksums:
    """Checksums of tensors by key. Those of tensors on a GPU are computed there, and copied to the CPU together.

    Attributes:
        arrived: tells whether they have come from the GPU; None if none has to.
    """

    def __init__(self, tensors: Mapping[Any, Tensor]) -> None:
        local = {key: local_of(tensor.detach()) for key, tensor in tensors.items()}
        dense = {key: x if x.layout is torch.strided else x.to_dense() for key, x in local.items()}
        self._here: dict[Any, int | str] = {key: 0 if x.is_cuda else checksum(x) for key, x in dense.items()}
        self._of_gpu = [key for key, x in dense.items() if x.is_cuda]
        self._bits, self.arrived = torch.empty(0, 2), None
        if self._of_gpu:
            # torch takes pinned memory for such a copy, so the host does not wait.
            self._bits = bits_of_all([dense[key] for key in self._of_gpu]).to("cpu", non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def have_arrived(self) -> bool:
        """Returns whether all have come from the GPU."""
        return self.arrived is None or self.arrived.query()

    def read(self) -> dict[Any, int | str]:
        """Returns the checksums; those of a GPU have to come first."""
        if self.arrived is not None and not self.have_arrived():
            self.arrived.synchronize()
        return self._here | dict(zip(self._of_gpu, map(str, self._bits.tolist()), strict=True))


@dataclass(frozen=True, eq=False)
class OptimizerComparison:
    """What a rank compares with others before a step.

    Attributes:
        place: the ranks.
        step: the number of steps taken so far.
        same: the parameters that all ranks hold.
        foreign: the parameters whose state on this rank is another rank's.
        settings: those of the optimizer.
        names: of these, and of the parameters of which each rank has a part.
        without: the parameters without a gradient.
        checksums: by name and what it is of: "values" or "gradients".
    """

    place: Mesh
    step: int
    same: Mapping[str, Tensor]
    foreign: Sequence[str]
    settings: Sequence[str]
    names: Sequence[str]
    without: frozenset[str]
    checksums: Checksums

    @staticmethod
    def begun(
        optimizer: Optimizer,
        replicated: Mapping[str, Tensor],
        cut: Mapping[str, Tensor],
        place: Mesh,
        step: int,
        foreign: Sequence[str],
    ) -> OptimizerComparison:
        """Returns a comparison, whose checksums may be on their way.

        Args:
            cut: the parameters of which each rank has a part.
        """
        every_one = {**replicated, **cut}
        sharded = {name for name, p in replicated.items() if _is_sharded(p, place)} | set(cut)
        compared = {name: p for name, p in every_one.items() if name not in sharded}
        tensors = {(name, "values"): p for name, p in compared.items()}
        tensors |= {(name, "gradients"): p.grad for name, p in compared.items() if p.grad is not None}
        without = frozenset(name for name, p in every_one.items() if p.grad is None)
        settings = _settings_of(optimizer, every_one)
        return OptimizerComparison(
            place, step, replicated, foreign, settings, tuple(every_one), without, Checksums(tensors)
        )

    def facts(self) -> list[Fact]:
        """Returns what the ranks compare."""
        sums = self.checksums.read()
        values = {name: sums.get((name, "values"), 0) for name in self.names}
        gradients = {name: None if name in self.without else sums.get((name, "gradients"), 0) for name in self.names}
        return [
            Fact("foreign", [self.place.rank, *self.foreign] if self.foreign else []),  # So no two ranks have it alike.
            Fact("step", self.step, "the steps taken so far differ", ONE_DECISION, wording="values"),
            Fact("settings", self.settings, "the settings differ", ONE_DECISION, wording="values"),
            Fact("values", values),
            Fact("gradients", gradients),
        ]


def _differing(comparison: OptimizerComparison, late: bool) -> str:
    """Compares ranks; returns a warning about differences by round-off, which it has removed, or "".

    Args:
        late: whether the ranks have taken steps since.

    Raises:
        Error: on every rank, if parameters, gradients or the optimizer's settings differ, or if state is foreign.
    """
    place = comparison.place
    exchange = partial(_exchanged, COMPARED, place=place, step=comparison.step)
    _, rows = compare(place, comparison.facts(), exchange=exchange)
    _expect_same_parameters(rows, place)
    return _expect_close(comparison.same, rows, place, late) if rows else ""


def _is_sharded(tensor: Tensor, place: Mesh) -> bool:
    """True for a tensor that `fully_shard` has sharded over the ranks of this axis."""
    if not isinstance(tensor, DTensor) or place.group is None:
        return False
    # Compared by ranks, not by name: torch reuses the group of an equal mesh, which may have an older name.
    ranks = dist.get_process_group_ranks(process_group(place.group))
    mesh = tensor.device_mesh
    return any(dist.get_process_group_ranks(mesh.get_group(dim)) == ranks for dim in range(mesh.ndim))


def _settings_of(optimizer: Optimizer, replicated: Mapping[str, Tensor]) -> list[str]:
    """Returns the settings of the parameter groups with these parameters; of all groups if there are none."""
    ids = {id(p) for p in replicated.values()}
    groups = [group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"])]
    return [_settings(group) for group in groups or optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> str:
    """Returns the settings of a parameter group that are numbers, texts or tuples."""
    plain = {key: float(x) if isinstance(x, Tensor) and x.numel() == 1 else x for key, x in group.items()}
    return repr({key: x for key, x in plain.items() if isinstance(x, bool | int | float | str | tuple | None)})


def _expect_same_parameters(rows: Sequence[Mapping[str, Any]], place: Mesh) -> None:
    """Raises Error if the ranks step different parameters, or with foreign state. rows: the facts of each rank"""
    if foreign_ranks := [rank for rank, row in enumerate(rows) if row["foreign"]]:
        raise Error(
            f"the state of `{rows[foreign_ranks[0]]['foreign'][1]}` has the shape of another rank's part",
            on=place.named(foreign_ranks),
            fix="each rank loads the optimizer's state that it saved; or autotp.save_checkpoint, with "
            "autotp.distribute, saves the whole for any layout",
        )
    stepped = partial(Fact, "stepped", None, fix="give all ranks' optimizers all parameters", wording="values")
    learning = partial(Fact, "learning", None, fix="one backward for all ranks", wording="values")
    for name in dict.fromkeys(name for row in rows for name in row["values"]):
        where = ["stepped" if name in row["values"] else "left out" for row in rows]
        stepped(f"`{name}` is not stepped on all ranks").expect(dict(enumerate(where)), place)
        where = ["none" if row["gradients"][name] is None else "one" for row in rows]
        learning(f"`{name}` does not have a gradient on all ranks").expect(dict(enumerate(where)), place)


def _expect_close(replicated: Mapping[str, Tensor], every: Sequence[Mapping[str, Any]], place: Mesh, late: bool) -> str:
    """Gives all ranks the first rank's values and gradients if they differ by round-off; raises Error if by more.

    Args:
        late: whether gradients that differed are in the values by now.
    """
    different = {
        quantity: [name for name in replicated if len({row[quantity][name] for row in every}) > 1]
        for quantity in ("values", "gradients")
    }
    if late:
        different = {"values": list(dict.fromkeys([*different["values"], *different["gradients"]])), "gradients": []}
    notes = []
    for quantity, prefix in (("values", ""), ("gradients", "the gradient of ")):
        for name in different[quantity]:
            tensor = replicated[name] if quantity == "values" else replicated[name].grad
            assert tensor is not None
            off, first = _off(local_of(tensor.detach()), place)
            # sqrt(eps): half of the digits agree.
            if not off <= torch.finfo(tensor.dtype).eps ** 0.5:
                raise _apart(f"{prefix}`{name}`", off, place)
            if not tensor.is_sparse:
                local_of(tensor.detach()).copy_(first)
            notes.append(f"{prefix}`{name}` differed between ranks by {off:.1e} of its largest element")
    if not notes:
        return ""
    return (
        f"{notes[0]}. This is round-off and no error: sums over replicas, and sums within kernels of GPUs, may have "
        "another order on each rank. All ranks go on with the first rank's numbers (this is said once)"
    )


def _apart(subject: str, off: float, place: Mesh) -> Error:
    problem = f"{subject} differs between ranks by {off:.1e} of its largest element: they would drift apart"
    if place.axis == "replica":
        return Error(
            problem,
            likely="nobody averaged the gradients of the replicas that `tp` below the number of processes makes",
            fix="transformers.Trainer or Accelerator.prepare, which average them",
            alternative="in a loop of your own: parallelize(model, mesh=mesh) with the dimensions ('dp', 'tp'), and "
            "DistributedDataParallel(model, process_group=mesh['dp'].get_group())",
        )
    return Error(
        problem,
        likely="each rank changed it by another number: the norm of its own gradients, its batch, noise",
        fix="autotp.clip_grad_norm_(model, ...); a number that all ranks share, from one all_reduce",
    )


def _off(tensor: Tensor, place: Mesh) -> tuple[float, Tensor]:
    """Returns the largest difference of a rank's tensor from the first rank's, relative to its largest element.

    Also returns the first rank's tensor.
    """
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    # A copy, as a rank's own values are compared with it.
    first = broadcast_from_first(dense.clone(), place)
    wide = torch.float64 if dense.device.type != "mps" else torch.float32
    # A tensor of zeros must not divide by 0.
    largest = first.to(wide).abs().max().clamp(min=torch.finfo(wide).tiny)
    difference = (dense.to(wide) - first.to(wide)).abs().max() / largest
    # NaN counts as the largest difference: a maximum over ranks may lose a NaN.
    return reduce(torch.nan_to_num(difference, nan=torch.inf), place.group, "max").item(), first
