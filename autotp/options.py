"""The options that a user may choose, and the check that each has an allowed value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from autotp.errors import Error
from autotp.extensions import chosen_extensions, optional_passes, values_of
from autotp.model_library import library

Outputs = Literal["auto", "full", "local"]
Experts = Literal["width", "expert"]
Randomness = Literal["fast", "exact"]
CheckInputs = Literal["always", "first", "never"]
Recompute = Literal["none", "selective", "full"]
Overlap = Literal["none", "batch"]  # "batch" is an extension's.
OPTIONAL = (
    "repeats", "cse", "balance", "defer_reductions", "hoist", "fuse_bias", "bucket", "overlap", "in_place", "outline",
    "late_sums", *optional_passes(),
)  # fmt: skip
"""Passes that can be left out: they change the cost to capture, run or compile a model, but no result."""


WHOLE, COLUMNS, ROWS = "whole", "colwise", "rowwise"
HEADS = ("heads", "kv_heads", "group")
"""The names of axes that count attentions: a user's "heads" means each of them."""
CUT_ALONG = (*HEADS, "experts", "width", "vocab", COLUMNS, ROWS, WHOLE)
Cut = Mapping[str, str | int]


@dataclass(frozen=True)
class UserCut:
    """The user's choice for some parameters.

    Attributes:
        pattern: segments of a name between dots, each perhaps with `*`; they stand anywhere in a parameter's name.
        along: the name of an axis; a dimension; "colwise" or "rowwise", which is the axis of a weight that its product
            makes, or sums over; or "whole".
        parameters: the names of the parameters that the choice is for (`passes/plan/user_cuts.py` finds them).
    """

    pattern: str
    along: str | int
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"cut={{{self.pattern!r}: {self.along!r}}}"


def named_axis(along: Any) -> str | int | None:
    """Returns the axis that a user's word names; "" if it is about communication alone, and None if it is no such word.

    A style in a plan of a library, such as "colwise_gather_output", is a word, too.
    """
    if along in CUT_ALONG or type(along) is int:
        return along
    return library().cut_along(along) if isinstance(along, str) else None


def _expect_cut(cut: Any) -> None:
    """Raises Error unless `cut` names axes by patterns."""
    if not isinstance(cut, tuple) or not all(
        isinstance(choice, UserCut) and isinstance(choice.pattern, str) for choice in cut
    ):
        raise Error(f"cut is {str(cut)[:80]!r}", expected='a dict such as {"lm_head": "whole", "*.mlp": "width"}')
    for choice in cut:
        if named_axis(choice.along) is None:
            raise Error(str(choice), expected=f"{', '.join(map(repr, CUT_ALONG))}, or a dimension")


@dataclass(frozen=True)
class Options:
    """The options of a user; `autotp.parallelize` explains them.

    Attributes:
        outputs: whether cut outputs are gathered.
        experts: "width" cuts every expert; with "expert" each rank has some whole experts.
        sequence_parallel: whether values between a block's products are cut along the sequence.
        without: the passes in OPTIONAL that are left out.
        randomness: whether dropout draws the numbers of one device.
        check_inputs: when ranks compare their inputs.
        recompute: the values that backward computes again.
        overlap: "batch": the halves of a batch (or of one row) take turns: one computes while the other communicates.
        cp: the number of context-parallel ranks, over which sequences are cut.
        cut: the user's choice of what is cut, and along what: a `Cut`, or None; it becomes a tuple of UserCut.
        summed: whether the graph returns only the loss, as a sum over the batch (`passes/pipeline/loss_totals.py`).
    """

    outputs: Outputs = "auto"
    experts: Experts = "width"
    sequence_parallel: bool = False
    without: Collection[str] = ()
    randomness: Randomness = "fast"
    check_inputs: CheckInputs = "first"
    recompute: Recompute = "none"
    overlap: Overlap = "none"
    cp: int = field(default=1, kw_only=True)
    cut: Any = field(default=(), kw_only=True)
    summed: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        is_single = isinstance(self.without, str) or not isinstance(self.without, Collection)
        names = [self.without] if is_single else self.without
        object.__setattr__(self, "without", tuple(sorted(set(names), key=str)))  # The same on all ranks.
        if isinstance(self.cut, Mapping | None):
            cuts = tuple(UserCut(pattern, along) for pattern, along in (self.cut or {}).items())
            object.__setattr__(self, "cut", cuts)

    def optional(self, name: str) -> bool:
        """True unless an optional pass is left out."""
        return name not in self.without


DEFAULTS = Options()


def expect_choices(options: Options, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> None:
    """Raises Error for an option with a value that is not allowed.

    Args:
        more: allowed values of further options.
    """
    allowed: Mapping[str, tuple[Any, ...]] = {
        **more,
        "outputs": ("auto", "full", "local"),
        "randomness": ("fast", "exact"),
        "check_inputs": ("always", "first", "never"),
        "experts": ("width", "expert"),
        "sequence_parallel": (True, False),
        "recompute": ("none", "selective", "full"),
        "overlap": ("none",),
    }  # fmt: skip
    _expect_cut(options.cut)
    for name, value in vars(options).items():
        if name in allowed and value not in (values := (*allowed[name], *values_of(name))):
            raise Error(f"{name}={value!r} is not one of its values", expected=", ".join(map(repr, values)))
    if unknown := [name for name in options.without if name not in OPTIONAL]:
        raise Error(f"without={unknown}: there is no such pass", expected=", ".join(map(repr, OPTIONAL)))
    for extension in chosen_extensions(options):
        extension.expect(options)
    if "outline" in options.without and options.recompute != "none":
        raise Error("without=('outline',): recompute needs blocks, which outline makes", fix='recompute="none"')
