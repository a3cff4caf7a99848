"""Strategies with which Lightning's Trainer and Fabric train a parallel model.

NOTE [One device for Lightning]
A strategy of Lightning takes each process for a replica with rows of its own (DDPStrategy), or knows of no other
process (SingleDeviceStrategy). The ranks of one tensor-parallel model have the same rows, and only one of them writes.
So all processes that hold one model together are one device for Lightning: no wrapper, no sampler, no sum over
processes; the first rank writes, and all wait for it. A checkpoint is gathered before, so it is one device's: any
strategy and any number of ranks goes on from it.

Lightning loads the two functions for callbacks by their entry points, in setup.cfg. These callbacks raise Error for a
parallel model with another strategy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
import zlib
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.checkpoint.whole_optimizer import whole_state_dict
from autotp.distributed.agreement import agree
from autotp.distributed.fingerprint import checksum
from autotp.distributed.mesh import broadcast_from_first, gather_ints
from autotp.errors import Error
from autotp.integrations.loops.replicas import is_one_replica, own_ranks, parallel_models, whole_for_file, whole_state

TRAINERS = ("lightning.pytorch", "pytorch_lightning")
"""The two names of the package with Trainer; a program may import both."""
FABRICS = ("lightning.fabric", "lightning_fabric")
WHERE = "from autotp.integrations.lightning import trainer_strategy, fabric_strategy"


def trainer_strategy(package: str | None = None) -> Any:
    """Returns a strategy for `Trainer(strategy=...)`, which trains one parallel model on all processes.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning", that of the Trainer; None means the one that is imported.

    Example:
        trainer = lightning.Trainer(strategy=trainer_strategy())      # under torchrun
    """
    return _strategy_class(package or _imported(TRAINERS), _OfTrainer)(_device())


def fabric_strategy(package: str | None = None) -> Any:
    """Returns a strategy for `Fabric(strategy=...)`, which trains one parallel model on all processes.

    Args:
        package: "lightning.fabric" or "lightning_fabric", that of Fabric; None means the one that is imported.
    """
    return _strategy_class(package or _imported(FABRICS), _OfFabric)(_device())


def _imported(names: tuple[str, ...]) -> str:
    """Returns which of two names of a package the program has imported; of several, the last that was."""
    imported = [name for name in sys.modules if name in names]
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
    if not imported and not installed:
        raise Error(f"none of {', '.join(names)} is installed", fix="pip install lightning")
    return (imported or installed)[-1]


def _device() -> torch.device:
    # A strategy is made before the model is parallel: the launcher alone knows the card.
    number = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", number) if torch.cuda.is_available() else torch.device("cpu")


@cache
def _strategy_class(package: str, methods: type) -> Any:
    base = importlib.import_module(f"{package}.strategies").SingleDeviceStrategy
    return type("OneModelStrategy", (methods, base), {"__module__": __name__})


class _OneDevice:
    """What both strategies do. One process alone, and a model that is not parallel, are Lightning's own one device."""

    _root_device: torch.device

    @property
    def root_device(self) -> torch.device:
        return own_ranks().device if is_one_replica() else self._root_device

    @property
    def is_global_zero(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if is_one_replica():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not is_one_replica():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(self.broadcast(bool(decision)))


class _OfTrainer(_OneDevice):
    """Methods of Trainer's strategy."""

    lightning_module: Any

    def setup(self, trainer: Any) -> None:
        _begin(self.lightning_module)
        super().setup(trainer)  # type: ignore[misc]

    def lightning_module_state_dict(self) -> Any:
        if not parallel_models(self.lightning_module):
            return super().lightning_module_state_dict()  # type: ignore[misc]
        return whole_state(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> Any:
        return _whole_optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        write = super().save_checkpoint  # type: ignore[misc]
        if not is_one_replica():
            return write(checkpoint, *args, **kwargs)
        whole = _expect_no_parts(whole_for_file(checkpoint, own_ranks()))
        return agree(own_ranks(), lambda: write(whole, *args, **kwargs))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the content of a file. A rank that does not see it would leave the others waiting."""
        read = super().load_checkpoint  # type: ignore[misc]
        return agree(own_ranks(), lambda: read(*args, **kwargs)) if is_one_replica() else read(*args, **kwargs)


class _OfFabric(_OneDevice):
    """Methods of Fabric's strategy."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        _begin(module)
        made: nn.Module = super().setup_module(module)  # type: ignore[misc]
        return made

    def get_module_state_dict(self, module: nn.Module) -> Any:
        if not parallel_models(module):
            return super().get_module_state_dict(module)  # type: ignore[misc]
        return whole_state(module)

    def get_optimizer_state(self, optimizer: Any) -> Any:
        return _whole_optimizer_state(optimizer)

    def save_checkpoint(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        write = super().save_checkpoint  # type: ignore[misc]
        if not is_one_replica():
            return write(path, state, *args, **kwargs)
        whole = _expect_no_parts(whole_for_file(state, own_ranks()))
        return agree(own_ranks(), lambda: write(path, whole, *args, **kwargs))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads a file into models, which ranks do together: so a rank that does not see it must be known before."""
        if is_one_replica():
            agree(own_ranks(), lambda: _expect_file(path))
        return super().load_checkpoint(path, *args, **kwargs)  # type: ignore[misc]


def _begin(module: nn.Module) -> None:
    """Prepares a module with parallel models: only the first rank prints, and what is not parallel has its values.

    Raises:
        Error: the ranks of these models are not all processes.
    """
    models = parallel_models(module)
    if not models:
        return
    mesh = models[0][1].mesh.everyone
    if not is_one_replica():
        raise Error(
            f"tp={mesh.size} of {dist.get_world_size()} processes: Lightning trains one model on all of its processes",
            fix="autotp.parallelize over all processes",
            alternative="autotp.distribute(model, tp=..., dp=...), in a loop of your own",
        )
    # A metric is the same on all ranks.
    warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
    sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = dist.get_rank()
    parallel = {id(x) for _, model in models for x in (*model.parameters(), *model.buffers())}
    for tensor in (x for x in (*module.parameters(), *module.buffers()) if id(x) not in parallel):
        tensor.data = broadcast_from_first(tensor.data.to(mesh.device), mesh)


def _whole_optimizer_state(optimizer: Any) -> Any:
    """Returns the whole state of an optimizer, on the first rank."""
    whole = whole_state_dict(optimizer)
    return optimizer.state_dict() if whole is None else whole


def _expect_file(path: Any) -> None:
    if "://" not in str(path) and not os.path.exists(path):
        raise Error(f"there is no checkpoint {path}", fix="a folder that all machines share, or the same files")


def _expect_no_parts(checkpoint: Any) -> Any:
    """Returns a checkpoint; raises Error, on every rank, if some rank has a tensor that the first has not: a part."""
    mesh = own_ranks()
    leaves = pytree.tree_leaves_with_path(checkpoint)
    tensors = {pytree.keystr(path): x for path, x in leaves if isinstance(x, Tensor) and x.dim()}
    numbers = {zlib.crc32(f"{name} {x.dtype} {checksum(x)}".encode()): name for name, x in tensors.items()}
    of_first = set(gather_ints(list(numbers), mesh)[0])
    agree(mesh, lambda: _expect_same([name for number, name in numbers.items() if number not in of_first]))
    return checkpoint


def _expect_same(parts: list[str]) -> None:
    if parts:
        raise Error(
            f"checkpoint{parts[0]} is another tensor on each rank, as parts of weights are, and Lightning writes "
            "the first rank's",
            fix="autotp.gather(tensor), on all ranks, or the cut tensor itself, in place of `tensor.to_local()`",
        )


# ---- callbacks that Lightning loads by their entry points


def trainer_callbacks() -> list[Any]:
    """Returns a callback for Trainer that raises Error for a parallel model with another strategy."""
    return [_callback_class(TRAINERS[0])()]


def standalone_trainer_callbacks() -> list[Any]:
    """Returns the same for Trainer of `pytorch_lightning`."""
    return [_callback_class(TRAINERS[1])()]


def fabric_callbacks() -> list[Any]:
    """Returns a callback for Fabric that raises Error for a parallel model with another strategy."""
    return [_ExpectFabricStrategy()]


@cache
def _callback_class(package: str) -> Any:
    base = sys.modules[package].Callback
    return type("ExpectStrategy", (_ExpectStrategy, base), {"__module__": __name__})


class _ExpectStrategy:
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        _expect_strategy(trainer.strategy, pl_module, "Trainer(strategy=trainer_strategy())")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """`configure_model` may have made the model parallel meanwhile."""
        _expect_strategy(trainer.strategy, pl_module, "Trainer(strategy=trainer_strategy())")


class _ExpectFabricStrategy:
    def on_after_setup(self, fabric: Any, module: Any) -> None:
        _expect_strategy(fabric.strategy, module, "Fabric(strategy=fabric_strategy())")


def _expect_strategy(strategy: Any, module: Any, instead: str) -> None:
    if parallel_models(module) and not isinstance(strategy, _OneDevice):
        raise Error(
            f"{type(strategy).__name__} does not know that its processes hold one parallel model together",
            fix=f"{WHERE}; {instead}",
        )
