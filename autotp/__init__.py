"""autotp: one line turns an ordinary torch model into one rank of a tensor-parallel model.

    model = autotp.parallelize(model, tp=8)

What may stand here: the public names, and nothing that does work at import.
"""

__version__ = "0.1.0"  # setup.cfg reads it from here.

from autotp.api import explain, parallelize
from autotp.checkpoint.save import load_checkpoint, save_checkpoint
from autotp.checkpoint.state_dict import full_state_dict, load_full_state_dict
from autotp.diagnostics.plan import Plan
from autotp.diagnostics.stages import Stages, stages
from autotp.diagnostics.verify import Report, verify
from autotp.distributed.gather import gather
from autotp.errors import Error
from autotp.hf.library import Transformers
from autotp.hf.pretrained import from_pretrained, save_pretrained
from autotp.model_library import register
from autotp.rules.registry import rule
from autotp.runtime.grad_norm import clip_grad_norm_
from autotp.runtime.module import ParallelModule
from autotp.training.distribute import distribute
from autotp.training.sampler import Sampler
from autotp.training.trainer import Trainer
from autotp.training.weight_decay_groups import weight_decay_groups

register(Transformers())

__all__ = [
    "Error",
    "ParallelModule",
    "Plan",
    "Report",
    "Sampler",
    "Stages",
    "Trainer",
    "clip_grad_norm_",
    "distribute",
    "explain",
    "from_pretrained",
    "full_state_dict",
    "gather",
    "load_checkpoint",
    "load_full_state_dict",
    "parallelize",
    "rule",
    "save_checkpoint",
    "save_pretrained",
    "stages",
    "verify",
    "weight_decay_groups",
]
