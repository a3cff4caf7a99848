"""autotp: one line turns an ordinary torch model into one rank of a tensor-parallel model.

    model = autotp.parallelize(model, tp=8)

What may stand here: the public names, and nothing that does work at import. A name is loaded when it is first asked
for, so that `import autotp` costs nothing that a program does not use.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from autotp import extensions, model_library

if TYPE_CHECKING:  # For editors and mypy. A test compares these lines with the table below.
    from autotp.api import explain as explain
    from autotp.api import parallelize as parallelize
    from autotp.checkpoint.save import load_checkpoint as load_checkpoint
    from autotp.checkpoint.save import save_checkpoint as save_checkpoint
    from autotp.checkpoint.state_dict import full_state_dict as full_state_dict
    from autotp.checkpoint.state_dict import load_full_state_dict as load_full_state_dict
    from autotp.diagnostics.plan import Plan as Plan
    from autotp.diagnostics.suggest_rule import suggest_rule as suggest_rule
    from autotp.diagnostics.verify import Report as Report
    from autotp.diagnostics.verify import verify as verify
    from autotp.distributed.gather import gather as gather
    from autotp.distributed.launch import is_first_rank as is_first_rank
    from autotp.errors import Error as Error
    from autotp.experimental.whole_matrices.whole_matrices import whole_matrices as whole_matrices
    from autotp.integrations.transformers.pretrained import from_pretrained as from_pretrained
    from autotp.integrations.transformers.pretrained import save_pretrained as save_pretrained
    from autotp.passes.capture.replacements.opaque import opaque as opaque
    from autotp.rules.registry import rule as rule
    from autotp.runtime.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from autotp.runtime.module import ParallelModule as ParallelModule
    from autotp.tools.estimation.calibrate import Calibration as Calibration
    from autotp.tools.estimation.calibrate import calibrate as calibrate
    from autotp.tools.estimation.estimate import estimate as estimate
    from autotp.tools.estimation.result import Estimate as Estimate
    from autotp.tools.estimation.search import Search as Search
    from autotp.tools.estimation.search import search as search
    from autotp.tools.estimation.throughput import Throughput as Throughput
    from autotp.tools.page.save_page import save_page as save_page
    from autotp.tools.page.save_page import save_trace as save_trace
    from autotp.tools.pass_by_pass.stages import Stages as Stages
    from autotp.tools.pass_by_pass.stages import stages as stages
    from autotp.training.distribute import distribute as distribute
    from autotp.training.low_memory.low_memory import low_memory as low_memory
    from autotp.training.sampler import Sampler as Sampler
    from autotp.training.trainer import Trainer as Trainer
    from autotp.training.weight_decay_groups import weight_decay_groups as weight_decay_groups

__version__ = "0.1.0"  # setup.cfg reads it from here.

_HOMES = {
    "Calibration": "tools.estimation.calibrate",
    "Error": "errors",
    "Estimate": "tools.estimation.result",
    "ParallelModule": "runtime.module",
    "Plan": "diagnostics.plan",
    "Report": "diagnostics.verify",
    "Sampler": "training.sampler",
    "Search": "tools.estimation.search",
    "Stages": "tools.pass_by_pass.stages",
    "Throughput": "tools.estimation.throughput",
    "Trainer": "training.trainer",
    "calibrate": "tools.estimation.calibrate",
    "clip_grad_norm_": "runtime.grad_norm",
    "distribute": "training.distribute",
    "estimate": "tools.estimation.estimate",
    "explain": "api",
    "from_pretrained": "integrations.transformers.pretrained",
    "full_state_dict": "checkpoint.state_dict",
    "gather": "distributed.gather",
    "is_first_rank": "distributed.launch",
    "load_checkpoint": "checkpoint.save",
    "load_full_state_dict": "checkpoint.state_dict",
    "low_memory": "training.low_memory.low_memory",
    "opaque": "passes.capture.replacements.opaque",
    "parallelize": "api",
    "rule": "rules.registry",
    "save_checkpoint": "checkpoint.save",
    "save_page": "tools.page.save_page",
    "save_pretrained": "integrations.transformers.pretrained",
    "save_trace": "tools.page.save_page",
    "search": "tools.estimation.search",
    "stages": "tools.pass_by_pass.stages",
    "suggest_rule": "diagnostics.suggest_rule",
    "verify": "diagnostics.verify",
    "weight_decay_groups": "training.weight_decay_groups",
    "whole_matrices": "experimental.whole_matrices.whole_matrices",
}
"""Public name -> the module that defines it."""

if not TYPE_CHECKING:  # Editors and mypy would take any name of a module with __getattr__ as defined.
    __all__ = [*_HOMES]

    def __getattr__(name: str) -> Any:
        """Loads a public name, or a module such as `autotp.errors`."""
        if name in _HOMES:
            folder = _HOMES[name].partition(".")[0]
            if importlib.util.find_spec(f"autotp.{folder}") is None:
                raise AttributeError(f"autotp.{name} is in autotp/{folder}, and this copy of autotp is without it")
            value = getattr(importlib.import_module(f"autotp.{_HOMES[name]}"), name)
            globals()[name] = value  # The next time Python finds it without this function.
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"autotp.{name}"):
            return importlib.import_module(f"autotp.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _transformers() -> type[model_library.ModelLibrary]:
    from autotp.integrations.transformers.library import Transformers

    return Transformers


def _attention_kernels() -> type[model_library.ModelLibrary]:
    from autotp.integrations.attention_kernels.kernel_table import AttentionKernels

    return AttentionKernels


def _batch_halves() -> extensions.Extension:
    from autotp.experimental.batch_halves.overlap_batch import extension

    return extension()


# A copy of autotp may be without these folders.
if importlib.util.find_spec("autotp.integrations"):
    model_library.register(_transformers)
    model_library.register(_attention_kernels)
if importlib.util.find_spec("autotp.experimental"):
    extensions.register_value("overlap", "batch", _batch_halves, optional=("weight_sums",))
