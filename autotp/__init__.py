"""autotp: one line turns an ordinary torch model into one rank of a tensor-parallel model.

    model = autotp.parallelize(model, tp=8)

What may stand here: the public names, and nothing that does work at import.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "setup.cfg").is_file():  # A checkout that is not installed: autotp.passes and autotp.models lie beside.
    __path__ = [*__path__, str(_checkout)]

from autotp.api import explain, parallelize  # noqa: E402  The path above comes first.
from autotp.errors import Error  # noqa: E402
from autotp.hf.pretrained import from_pretrained, save_pretrained  # noqa: E402
from autotp.operators import rule  # noqa: E402
from autotp.outputs import gather  # noqa: E402
from autotp.report import Plan  # noqa: E402
from autotp.run import ParallelModule  # noqa: E402
from autotp.state import clip_grad_norm_, full_state_dict, load_full_state_dict  # noqa: E402
from autotp.verify import Report, verify  # noqa: E402

__all__ = [
    "Error",
    "ParallelModule",
    "Plan",
    "Report",
    "clip_grad_norm_",
    "explain",
    "from_pretrained",
    "full_state_dict",
    "gather",
    "load_full_state_dict",
    "parallelize",
    "rule",
    "save_pretrained",
    "verify",
]
