"""What a user chose, of what is cut and of how it runs; and that there is such a choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from autotp.compiler import OPTIONAL, Choices
from autotp.distributed.consistency import CheckInputs
from autotp.errors import Error
from autotp.passes.emit.recompute import Recompute


@dataclass(frozen=True)
class Settings(Choices):
    """What `parallelize` was asked for beyond the size."""

    randomness: Literal["fast", "exact"] = "fast"
    check_inputs: CheckInputs = "first"
    recompute: Recompute = "none"


def expect_choices(choices: Choices, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> None:
    """Raises Error for a choice that there is not.

    Args:
        more: what there is of further ones.
    """
    allowed: Mapping[str, tuple[Any, ...]] = {
        **more,
        "outputs": ("auto", "full", "local"),
        "randomness": ("fast", "exact"),
        "check_inputs": ("always", "first", "never"),
        "experts": ("width", "expert"),
        "sequence_parallel": (True, False),
        "recompute": ("none", "selective", "full"),
    }  # fmt: skip
    for name, value in vars(choices).items():
        if name in allowed and value not in allowed[name]:
            raise Error(f"{name}={value!r}", expected=", ".join(map(repr, allowed[name])))
    if unknown := [name for name in choices.without if name not in OPTIONAL]:
        raise Error(f"without={unknown}: there is no such pass", expected=", ".join(map(repr, OPTIONAL)))
    if "outline" in choices.without and getattr(choices, "recompute", "none") != "none":
        raise Error("without=('outline',): what is computed again is a block", **{"try": 'recompute="none"'})
