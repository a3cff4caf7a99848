"""The options that a user may choose: which calls take which, their defaults, and the check of their values.

NOTE [An option is one row]
An option has a row in the TypedDict of the calls that take it, and a field of `Options` with its default. Its text is
in the docstring of `parallelize`, where editors show it. The calls take `**options: Unpack[...]`: mypy and pyright read
the row, jedi the field (it follows `**options` into `Options`), and `lists_options` shows both to `inspect.signature`
and `help`. The command line makes its flags of the same.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from typing_extensions import TypedDict

from autotp.errors import Error
from autotp.extensions import chosen_extensions, optional_passes, values_of
from autotp.model_library import library

Outputs = Literal["auto", "full", "local", "loss"]
Experts = Literal["width", "expert"]
Randomness = Literal["fast", "exact"]
CheckInputs = Literal["always", "first", "never"]
Recompute = Literal["none", "selective", "full"]
Memory = int | str | None
Balance = Literal["batch", "microbatch"]
CpAttention = Literal["auto", "gather", "heads"]
Overlap = Literal["none", "batch"]  # "batch" is an extension's.
OPTIONAL = (
    "repeats", "cse", "balance", "linear_cross_entropy", "defer_reductions", "hoist", "fuse_bias", "bucket", "overlap",
    "in_place", "outline", "late_sums", *optional_passes(),
)  # fmt: skip
"""Passes that can be left out: they change the cost to capture, run or compile a model, but no result."""


WHOLE, COLUMNS, ROWS = "whole", "colwise", "rowwise"
HEADS = ("heads", "kv_heads", "group")
"""The names of axes that count attentions: a user's "heads" means each of them."""
CUT_ALONG = (*HEADS, "experts", "width", "vocab", COLUMNS, ROWS, WHOLE)
Cut = Mapping[str, str | int]


class StepOptions(TypedDict, total=False):
    """The options of every call."""

    sequence_parallel: bool
    overlap: Overlap
    cp_attention: CpAttention


class CutOptions(StepOptions, total=False):
    """Those of every call but `estimate`."""

    cut: Cut | None


class BackwardOptions(TypedDict, total=False):
    """Those of every call but `explain`."""

    recompute: Recompute


class MemoryOptions(TypedDict, total=False):
    """Those of calls that count the bytes of a rank."""

    memory: Memory
    state_bytes: float | None


class ExpertOptions(TypedDict, total=False):
    """Those of calls that train mixtures of experts, or say what that takes."""

    capacity: float | None


class RankOptions(ExpertOptions, total=False):
    """Those of calls that run on several processes."""

    randomness: Randomness


class EstimateOptions(StepOptions, BackwardOptions, MemoryOptions, ExpertOptions, total=False):
    """The options of `estimate`."""


class TrainingOptions(CutOptions, BackwardOptions, MemoryOptions, RankOptions, total=False):
    """The options of `distribute` that are not about pipelines and replicas."""


class PlanOptions(CutOptions, total=False):
    """The options of `explain`."""

    outputs: Outputs
    experts: Experts
    without: Collection[str]


class TrialOptions(PlanOptions, BackwardOptions, total=False):
    """The options of `stages`."""


class VerifyOptions(TrialOptions, MemoryOptions, total=False):
    """The options of `verify`."""


class ParallelOptions(VerifyOptions, RankOptions, total=False):
    """The options of `parallelize` and `from_pretrained`."""

    check_inputs: CheckInputs


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


def _expect_state_bytes(state_bytes: Any) -> None:
    """Raises Error unless `state_bytes` is None or a number of bytes."""
    is_number = isinstance(state_bytes, int | float) and not isinstance(state_bytes, bool)
    if state_bytes is not None and not (is_number and 0 <= state_bytes < math.inf):
        raise Error(
            f"state_bytes={state_bytes!r} is no number of bytes of a parameter's states",
            expected='8 (AdamW in float32), 2.03 (autotp.low_memory(..., "8bit")), 0 (SGD, offload=True), or None',
        )


def _expect_capacity(capacity: Any) -> None:
    """Raises Error unless `capacity` is None or a factor."""
    is_number = isinstance(capacity, int | float) and not isinstance(capacity, bool)
    if capacity is not None and not (is_number and 0 < capacity < math.inf):
        raise Error(f"capacity={capacity!r} is no positive factor", expected="1.25, or None to drop no row")


@dataclass(frozen=True)
class Options:
    """The options of a user; `autotp.parallelize` explains them.

    Attributes:
        outputs: whether cut outputs are gathered; "loss": a training call returns its loss only.
        experts: "width" cuts every expert; with "expert" each rank has some whole experts.
        sequence_parallel: whether values between a block's products are cut along the sequence.
        without: the passes in OPTIONAL that are left out.
        randomness: whether dropout draws the numbers of one device.
        check_inputs: when ranks compare their inputs.
        recompute: the values that backward computes again.
        memory: the bytes that a rank may use: a number, "24GB", "auto", or "50%" of what a microbatch keeps.
        state_bytes: what the optimizer's states take for each element of a parameter; None: two numbers of its dtype.
        overlap: "batch": the halves of a batch (or of one row) take turns: one computes while the other communicates.
        cp: the number of context-parallel ranks, over which sequences are cut.
        ep: the number of ranks with different rows that experts are cut over.
        capacity: how many rows an expert computes at most, as a multiple of its mean; None for all.
        cp_attention: whether attention over cp gathers keys and values, or exchanges heads for the sequence.
        cut: the user's choice of what is cut, and along what: a `Cut`, or None; it becomes a tuple of UserCut.
        summed: whether the graph returns only the loss, as a sum over the batch (`passes/pipeline/loss_totals.py`).
        balance: then, whether what a loss computes from means over the batch reads those of the whole batch.
    """

    outputs: Outputs = "auto"
    experts: Experts = "width"
    sequence_parallel: bool = False
    without: Collection[str] = ()
    randomness: Randomness = "fast"
    check_inputs: CheckInputs = "first"
    recompute: Recompute = "none"
    memory: Memory = None
    overlap: Overlap = "none"
    cp_attention: CpAttention = "auto"
    cp: int = field(default=1, kw_only=True)
    ep: int = field(default=1, kw_only=True)
    cut: Any = field(default=None, kw_only=True)
    capacity: float | None = field(default=None, kw_only=True)
    state_bytes: float | None = field(default=None, kw_only=True)
    summed: bool = field(default=False, kw_only=True)
    balance: Balance = field(default="batch", kw_only=True)

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
F = TypeVar("F", bound=Callable[..., Any])


def lists_options(function: F) -> F:
    """Gives a function with `**options: Unpack[...]` a signature that has each option, with its default.

    In its docstring, a line `options: ...` begins with their names then.
    """
    *parameters, variadic = inspect.signature(function).parameters.values()
    (row_type,) = get_args(get_type_hints(function)[variadic.name])
    types, keyword = get_type_hints(row_type), inspect.Parameter.KEYWORD_ONLY
    rows = [row for row in fields(Options) if row.name in types]
    more = [inspect.Parameter(row.name, keyword, default=row.default, annotation=types[row.name]) for row in rows]
    function.__signature__ = inspect.signature(function).replace(parameters=[*parameters, *more])  # type: ignore[attr-defined]
    function.__doc__ = (function.__doc__ or "").replace(" options: ", f" {', '.join(row.name for row in rows)}: ")
    return function


OF_STEPS = ("pp", "dp", "ep", "zero", "schedule", "interleave")
"""Arguments of `distribute` for ranks with other rows of a batch, or with other layers."""


def expect_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises Error for a keyword that is none of the function's; names the nearest one."""
    names = [*inspect.signature(function).parameters]
    if unknown := [name for name in options if name not in names]:
        fix = " or ".join(get_close_matches(unknown[0], names, 2)) or f"one of {', '.join(names)}"
        if unknown[0] in OF_STEPS:
            fix = "autotp.distribute: its ranks may have other rows, or other layers; here all compute one batch"
        raise Error(f"there is no argument `{unknown[0]}`", fix=fix)


def expect_choices(options: Options, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> None:
    """Raises Error for an option with a value that is not allowed.

    Args:
        more: allowed values of further options.
    """
    allowed: Mapping[str, tuple[Any, ...]] = {
        **more,
        "outputs": ("auto", "full", "local", "loss"),
        "randomness": ("fast", "exact"),
        "check_inputs": ("always", "first", "never"),
        "experts": ("width", "expert"),
        "sequence_parallel": (True, False),
        "cp_attention": ("auto", "gather", "heads"),
        "recompute": ("none", "selective", "full"),
        "balance": ("batch", "microbatch"),
        "overlap": ("none",),
    }  # fmt: skip
    _expect_cut(options.cut)
    _expect_capacity(options.capacity)
    _expect_state_bytes(options.state_bytes)
    for name, value in vars(options).items():
        if name in allowed and value not in (values := (*allowed[name], *values_of(name))):
            raise Error(f"{name}={value!r} is not one of its values", expected=", ".join(map(repr, values)))
    if unknown := [name for name in options.without if name not in OPTIONAL]:
        raise Error(f"without={unknown}: there is no such pass", expected=", ".join(map(repr, OPTIONAL)))
    for extension in chosen_extensions(options):
        extension.expect(options)
    if "outline" in options.without and options.recompute != "none":
        raise Error("without=('outline',): recompute needs blocks, which outline makes", fix='recompute="none"')
    if options.memory is not None:
        _expect_memory(options)


_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B|B)")
_UNITS = {"%": 0.01, "B": 1, **{f"{c}B": 1000 ** (i + 1) for i, c in enumerate("KMGT")},
          **{f"{c}iB": 1024 ** (i + 1) for i, c in enumerate("KMGT")}}  # fmt: skip


def memory_limit(memory: int | str) -> float:
    """Returns the bytes of a budget; for a percentage the part, at most 1.

    Raises:
        Error: it is neither.
    """
    match = _MEMORY.fullmatch(memory.strip()) if isinstance(memory, str) else None
    limit = float(match[1]) * _UNITS[match[2]] if match else float(memory) if type(memory) is int else 0.0
    percent = match is not None and match[2] == "%"
    if not (0 < limit <= 1 if percent else limit > 1):
        raise Error(f"memory={memory!r} is no number of bytes", expected='"20GiB", "24GB", "50%", "auto", or an int')
    return limit


def _expect_memory(options: Options) -> None:
    """Raises Error for a budget that cannot be read, or beside an option that says the same."""
    if options.memory != "auto" and options.memory is not None:
        memory_limit(options.memory)
    if options.recompute != "none":
        raise Error(
            f'memory={options.memory!r} beside recompute="{options.recompute}": both say what is computed again',
            fix='recompute="none"',
        )
    if "outline" in options.without:
        raise Error("without=('outline',): memory needs blocks, which outline makes", fix="memory=None")
    if options.overlap != "none":
        raise Error(
            f'memory={options.memory!r} beside overlap="{options.overlap}": no block has values of a whole batch then',
            fix='overlap="none"',
        )
