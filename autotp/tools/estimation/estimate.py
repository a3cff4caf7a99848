"""`estimate`: predicts the time and the memory of a training step, on any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import Unpack

from autotp.arguments import expect_arguments
from autotp.costs.hardware import Hardware, estimated_on, hardware_of
from autotp.distributed.mesh import tell_errors
from autotp.errors import Error, within
from autotp.options import EstimateOptions, Overlap, expect_choices, expect_options, lists_options
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.runtime.build import expect_ordinary
from autotp.tools.estimation.counts.pieces import CAPTURED_ROWS, Capturing, Lowered, lowered
from autotp.tools.estimation.layout import AUTOTP, COMPILED, StepLayout
from autotp.tools.estimation.price import Prices, price, savings
from autotp.tools.estimation.result import Estimate
from autotp.training.pipeline.schedules import Schedule, engine_of

LENGTHS = ("block_size", "n_positions", "max_position_embeddings", "seq_length", "n_ctx", "max_seq_len")
"""The names under which configurations have the longest sequence."""


@lists_options
def estimate(
    model: nn.Module,
    *,
    gpu: str | Hardware,
    batch: int,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    micro_batch: int = 1,
    schedule: Schedule = "1F1B",
    interleave: int | None = None,
    zero: int = 0,
    dtype: torch.dtype | None = None,
    compiled: bool = False,
    sequence: int | None = None,
    example_inputs: Any = None,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """Returns the predicted seconds, TFLOP/s and memory of a step that `distribute` would train with.

    It needs no GPU, no process groups and no memory for the model, which may be on `meta`. Products, bytes, collectives
    and what backward keeps are counted on the graph that the first tensor-parallel rank would run (it holds the largest
    shards): blocks that are alike are counted once. Each operator is priced by a roofline of the device, and the
    schedule is played action by action.

    A model that `distribute` refuses is estimated, without a pipeline, as under `parallelize` in each of dp replicas.

    Args:
        model: an ordinary model that returns its loss.
        gpu: the name of a kind of device ("a100-80gb"; a wrong name lists them), or a line that describes one:
            "989TF 3.35TB/s 80GB node=8x450GB/s net=50GB/s".
        batch: the rows of a step, over all replicas.
        tp, pp, dp, cp, ep, zero: as for `distribute`.
        options: as for `distribute`.
        micro_batch: the rows of a microbatch; a replica has batch / dp / micro_batch microbatches.
        schedule: as for `distribute`.
        interleave: the number of stages of a rank under "interleaved"; 2 by default, as in `distribute`.
        dtype: the dtype of computation, `compute_dtype` of `distribute`; None: the model's own.
        compiled: whether blocks are compiled, so that pointwise operators that follow one another are one kernel.
        sequence: the length of a sequence; by default the longest that the model's configuration names. With `cp` it
            counts as the next multiple of `cp`.
        example_inputs: as for `parallelize`. With them, `sequence` is theirs unless it is given.

    Raises:
        Error: as `distribute`, or without a pipeline as `parallelize`; the kind of device is not known; the batch is
            not divided evenly; or the length of a sequence is not known.

    Example:
        >>> from autotp.models.gpt import GPT, GPTConfig
        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig(vocab_size=51200, n_layer=4, n_head=8, n_embd=1024))
        >>> est = autotp.estimate(model, gpu="h100-80gb", tp=2, batch=8, micro_batch=4, dtype=torch.bfloat16)
        >>> 0 < est.seconds < 1 and est.fits
        True
    """

    def run() -> Estimate:
        tell_errors()
        expect_options(estimate, options)
        expect_arguments(estimate, gpu=gpu, interleave=interleave, dtype=dtype, compiled=compiled, sequence=sequence)
        device = hardware_of(gpu)
        layout = StepLayout(
            batch=batch, tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, micro_batch=micro_batch, schedule=schedule,
            interleave=interleave, zero=zero, dtype=dtype, **options,
        )  # fmt: skip
        # Raises for a schedule that there is not, before the model is captured.
        engine_of(schedule, interleave)
        with estimated_on(device):
            model_for_layout = captured(model, layout, sequence, example_inputs)
        prices = Prices(model_for_layout, device, COMPILED if compiled else AUTOTP)
        priced = price(prices, layout)
        return replace(priced, savings=savings(prices, priced))

    context = f", cp={cp}" * (cp != 1) + f", ep={ep}" * (ep != 1)
    return within(f"estimate({type(model).__name__}, tp={tp}, pp={pp}, dp={dp}{context})", run)


def captured(
    model: nn.Module,
    layout: StepLayout,
    sequence: int | None,
    example_inputs: Any = None,
    without: tuple[str, ...] = (),
) -> Lowered:
    """Returns the model, captured for a layout's tensor-parallel ranks.

    Args:
        sequence, example_inputs: as for `estimate`.
        without: passes to leave out, as for `parallelize`.

    Raises:
        Error: as `estimate`.
    """
    return lowered_for(estimated_call(model, sequence, example_inputs, layout.cp), layout, without)


def estimated_call(model: nn.Module, sequence: int | None, example_inputs: Any = None, cp: int = 1) -> Capturing:
    """Returns the call of a model that is estimated. Arguments and errors as of `captured`.

    Args:
        cp: the ranks that sequences are cut over. All parts are as long as the longest: so are the next multiple's.
    """
    expect_ordinary(model, "estimate the original model")
    arguments = find_inputs(model, example_inputs)
    if example_inputs is None or sequence is not None:
        arguments = of_length(arguments, _length(model, arguments, sequence))
    first = next((x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)), None)
    if first is not None and _is_ids(first) and first.shape[1] % cp:
        arguments = of_length(arguments, -(-first.shape[1] // cp) * cp)
    return Capturing(model, of_rows(arguments, CAPTURED_ROWS))


def lowered_for(call: Capturing, layout: StepLayout, without: tuple[str, ...] = (), checked: bool = True) -> Lowered:
    """Returns the model of a call, for a layout's tensor-parallel ranks. Arguments and errors as of `captured`.

    Args:
        checked: whether the types of the graph are checked.
    """
    # What was asked for is checked as `distribute` checks it, also where a microbatch has one row.
    expect_choices(layout.training)
    layout.expect_experts()
    overlap: Overlap = layout.overlap if layout.micro_batch > 1 else "none"  # A divided row is not counted.
    training = replace(layout.training, without=without, overlap=overlap, memory=None, zero=0)
    try:
        return lowered(call, layout.tp, training, checked)
    except Error:
        if layout.pp > 1 or layout.ep > 1:
            raise
    return lowered(call, layout.tp, replace(training, summed=False), checked)  # As under `parallelize`.


def _length(model: nn.Module, arguments: Any, sequence: int | None) -> int | None:
    """Returns the length of a sequence; None for a model whose inputs have none."""
    if sequence is not None:
        if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 2:
            raise Error(f"sequence={sequence!r} is not a whole number of 2 or more", fix="sequence=2048")
        return sequence
    if not _is_ids(next(x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor))):
        return None
    config = getattr(model, "config", None)
    length = next((n for name in LENGTHS if isinstance(n := getattr(config, name, None), int)), None)
    if length is None:
        raise Error("the length of a sequence is not known", fix="sequence=2048")
    return length


def _is_ids(x: Tensor) -> bool:
    return x.dim() == 2 and not x.is_floating_point()


def of_length(arguments: Any, length: int | None) -> Any:
    """Returns the arguments with sequences of this length: all dimensions as long as the first tensor's second one."""
    first = next((x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)), None)
    if length is None or first is None or first.dim() < 2:
        return arguments
    old = first.shape[1]

    def longer(x: Any) -> Any:
        for dim in range(1, x.dim() if isinstance(x, Tensor) else 0):
            # Values are repeated and not made up: ids stay within the vocabulary, and masks stay masks.
            x = x.index_select(dim, torch.arange(length) % old) if x.shape[dim] == old else x
        return x

    return pytree.tree_map(longer, arguments)


def of_rows(arguments: Any, rows: int) -> Any:
    """Returns the arguments with this number of rows: of all tensors with as many rows as the first."""
    first = next((x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)), None)
    if first is None or not first.dim() or first.shape[0] >= rows:
        return arguments
    old = first.shape[0]

    def more(x: Any) -> Any:
        has_rows = isinstance(x, Tensor) and x.dim() and x.shape[0] == old
        return x.index_select(0, torch.arange(rows) % old) if has_rows else x

    return pytree.tree_map(more, arguments)
