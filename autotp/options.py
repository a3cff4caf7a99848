"""The options that a user may choose, and the check that each has an allowed value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from autotp.errors import Error

Outputs = Literal["auto", "full", "local"]
Experts = Literal["width", "expert"]
Randomness = Literal["fast", "exact"]
CheckInputs = Literal["always", "first", "never"]
Recompute = Literal["none", "selective", "full"]
OPTIONAL = (
    "repeats", "cse", "defer_reductions", "hoist", "fuse_bias", "bucket", "overlap", "in_place", "outline",
)  # fmt: skip
"""Passes that change what a model costs to capture, run or compile, and nothing that it computes."""


@dataclass(frozen=True)
class Options:
    """What a user may choose; see `autotp.parallelize`.

    Attributes:
        outputs: whether cut outputs are gathered.
        experts: along what experts are cut: each through its width, or "expert", each rank having some whole.
        sequence_parallel: whether what lies between a block's products is cut along the sequence.
        without: those of OPTIONAL that are left out.
        randomness: whether dropout draws the numbers of one device.
        check_inputs: when ranks compare what they are called with.
        recompute: what backward computes again.
        summed: the graph returns the loss alone, as a sum over the batch (`passes/pipeline/loss_totals.py`).
    """

    outputs: Outputs = "auto"
    experts: Experts = "width"
    sequence_parallel: bool = False
    without: Collection[str] = ()
    randomness: Randomness = "fast"
    check_inputs: CheckInputs = "first"
    recompute: Recompute = "none"
    summed: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        one = isinstance(self.without, str) or not isinstance(self.without, Collection)
        names = [self.without] if one else self.without
        object.__setattr__(self, "without", tuple(sorted(set(names), key=str)))  # The same on all ranks.

    def optional(self, name: str) -> bool:
        """True if a pass that may be left out is not."""
        return name not in self.without


DEFAULTS = Options()


def expect_choices(options: Options, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> None:
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
    for name, value in vars(options).items():
        if name in allowed and value not in allowed[name]:
            raise Error(f"{name}={value!r}", expected=", ".join(map(repr, allowed[name])))
    if unknown := [name for name in options.without if name not in OPTIONAL]:
        raise Error(f"without={unknown}: there is no such pass", expected=", ".join(map(repr, OPTIONAL)))
    if "outline" in options.without and options.recompute != "none":
        raise Error("without=('outline',): what is computed again is a block", fix='recompute="none"')
