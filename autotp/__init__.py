"""autotp: one line turns an ordinary torch model into one rank of a tensor-parallel model.

    model = autotp.parallelize(model, tp=8)

What may stand here: the public names, and nothing that does work at import.
"""

from pathlib import Path

__version__ = "0.1.0"  # setup.cfg reads it from here.

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "setup.cfg").is_file():  # A checkout that is not installed: passes/ and models/ are beside autotp/.
    __path__ = [*__path__, str(_checkout)]

from autotp.api import explain, parallelize  # noqa: E402  The path above comes first.
from autotp.checkpoint.save import load_checkpoint, save_checkpoint  # noqa: E402
from autotp.checkpoint.state_dict import full_state_dict, load_full_state_dict  # noqa: E402
from autotp.diagnostics.plan import Plan  # noqa: E402
from autotp.diagnostics.stages import Stages, stages  # noqa: E402
from autotp.diagnostics.verify import Report, verify  # noqa: E402
from autotp.distributed.gather import gather  # noqa: E402
from autotp.errors import Error  # noqa: E402
from autotp.hf.library import Transformers  # noqa: E402
from autotp.hf.pretrained import from_pretrained, save_pretrained  # noqa: E402
from autotp.model_library import register  # noqa: E402
from autotp.rules.registry import rule  # noqa: E402
from autotp.runtime.grad_norm import clip_grad_norm_  # noqa: E402
from autotp.runtime.module import ParallelModule  # noqa: E402
from autotp.training.distribute import distribute  # noqa: E402
from autotp.training.sampler import Sampler  # noqa: E402
from autotp.training.trainer import Trainer  # noqa: E402
from autotp.training.weight_decay_groups import weight_decay_groups  # noqa: E402

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
