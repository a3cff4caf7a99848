"""autotp: one line turns an ordinary torch model into one rank of a tensor-parallel model."""

from pathlib import Path

from autotp.errors import Error
from autotp.operators import rule

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "setup.cfg").is_file():  # A checkout that is not installed: autotp.passes and autotp.models lie beside.
    __path__ = [*__path__, str(_checkout)]

__all__ = ["Error", "rule"]
