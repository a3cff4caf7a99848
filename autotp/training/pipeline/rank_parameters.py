"""rank_parameters: registers in a trainer the parts of a model's tensors that its rank holds, by the model's names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.distributed.mesh import Mesh
from autotp.passes.emit.attach_parameters import Owner, module_at
from autotp.passes.pipeline.stages import Stage
from autotp.passes.program.program import Program
from autotp.rules.call import placeholders
from autotp.runtime.fsdp import as_dtensors
from autotp.runtime.shard_parameters import leave_behind, shard_parameters
from autotp.runtime.torch_hooks.gradient_hooks import move_hooks
from autotp.sharding.layout import Layout
from autotp.source_location import block_in
from autotp.training.trainer_module import as_module_of

ReadsParts = Callable[[Mapping[str, Layout], Mesh, Collection[str]], Mapping[str, Tensor]]
"""(layouts, tensor-parallel mesh, names of what this rank holds) -> its parts of what files have."""


def tensors_of_stages(analysis: Program, every: Sequence[Stage], mine: Collection[int]) -> list[str]:
    """Returns the names of the tensors that a rank holds: those that its stages read, and those that no stage reads.

    Args:
        every: all stages.
        mine: the numbers of this rank's stages.
    """
    names = analysis.captured.parameters | analysis.captured.buffers
    read = {placeholder for i in mine for placeholder in placeholders(every[i].graph)}
    read |= set(placeholders(analysis.totals.counts)) if analysis.totals is not None else set()
    unread = set(names) - {placeholder for stage in every for placeholder in placeholders(stage.graph)}
    return list(dict.fromkeys(name for placeholder, name in names.items() if placeholder in read | unread))


def hold_parts_of_rank(
    trainer: nn.Module,
    model: nn.Module,
    skeleton: nn.Module,
    blocks: Iterable[str],
    names: Sequence[str],
    layouts: Mapping[str, Layout],
    read_folder: ReadsParts | None,
    place: Mesh,
    everyone: Mesh,
) -> None:
    """Registers this rank's parts of a model's tensors in the trainer; a block becomes an `Owner`.

    Args:
        trainer: gets modules of the model's names.
        model: has the tensors, or is on `meta`: then `read_folder` reads them.
        skeleton: the model on `meta`, whose modules give the classes and the order.
        blocks: the names of the blocks in this rank's stages.
        names: of the tensors.
        place: this rank among its tensor-parallel ranks.
        everyone: this rank among all ranks.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parameters = {name for name, _ in model.named_parameters()}
    for name in blocks:
        module_at(trainer, name, Owner)
    of_files = read_folder(layouts, place, names) if read_folder is not None else {}
    for name, tensor in shard_parameters(model, layouts, place.rank, everyone, of_files, names).items():
        path, _, key = name.rpartition(".")
        module = module_at(trainer, path)
        if name in parameters:
            # Of a model on `meta` a part is a plain tensor.
            parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, name not in frozen)
            module._parameters[key] = parameter
        else:
            module._buffers[key] = tensor
    _take_places(trainer, dict(skeleton.named_modules(remove_duplicate=False)))


def _take_places(trainer: nn.Module, originals: Mapping[str, nn.Module]) -> None:
    """Gives a trainer's modules the classes and the order of the model's."""
    for path, original in originals.items():  # Parts without tensors, such as a dropout in a block of this rank.
        has_tensors = bool([*original.parameters(), *original.buffers()])
        if not has_tensors and path.rpartition(".")[0] in dict(trainer.named_modules()):
            module_at(trainer, path)
    for path, module in [(path, module) for path, module in trainer.named_modules() if path]:
        as_module_of(module, originals[path])
    for path, module in trainer.named_modules():  # Parameters come in the model's order, as for its optimizers.
        for table in ("_modules", "_parameters", "_buffers"):
            entries, order = vars(module)[table], vars(originals[path])[table]
            for key in (key for key in order if key in entries):
                entries[key] = entries.pop(key)


def readers_of(trainer: nn.Module, analysis: Program, stages: Mapping[int, Stage]) -> dict[nn.Module, set[int]]:
    """Returns module -> the stages that read its tensors: for a tensor in a block, the module is the block.

    Args:
        stages: number of a stage of this rank -> the stage.
    """
    names = analysis.captured.parameters | analysis.captured.buffers
    readers: dict[nn.Module, set[int]] = {}
    for i, stage in stages.items():
        for name in (names[x] for x in placeholders(stage.graph) if x in names):
            block = block_in(name) if block_in(name) in stage.blocks else name.rpartition(".")[0]
            readers.setdefault(module_at(trainer, block), set()).add(i)
    return readers


def divide_rows(
    trainer: nn.Module, gathered: Collection[str], mesh: DeviceMesh, whole: Mapping[str, nn.Parameter]
) -> None:
    """Makes parameters DTensors, in place of the ones that this rank had first (`whole`).

    With ZeRO it leaves this replica's rows of the parameters in `gathered`. A parameter without dimensions, or without
    elements on this rank, stays whole on all ranks: nothing of it can be divided.
    """
    parameters = dict(trainer.named_parameters())
    divided = {p for name, p in parameters.items() if name in gathered and p.dim() and p.numel()}
    as_dtensors(trainer, mesh, divided)
    now = dict(trainer.named_parameters())
    # New parameters are in the place of the old ones, which the user's hooks are on.
    for name, parameter in whole.items():
        move_hooks(parameter, now[name])
    leave_behind(parameter for name, parameter in whole.items() if now[name] is not parameter)
