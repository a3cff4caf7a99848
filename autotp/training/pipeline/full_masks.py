"""full_masks: whether a graph without masks is right for a whole batch.

NOTE [Looks at masks] in `passes/capture/guards/looks.py` says why there are two graphs.

A batch is divided into parts, and only some of them may have padding. A graph that leaves masks out is right for all of
them where every mask that a library looks at has ones only. This is known of the whole batch at once: without a look at
each part, and without a wait for the device if the batch is on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autotp.compiler import analyse
from autotp.passes.capture.captured import Captured
from autotp.passes.capture.pytree import flatten
from autotp.passes.program.program import CallState, Program
from autotp.runtime.calls.graph_entry import input_values_on


def analyse_for_masks(
    padded: bool, skeleton: Any, args: Any, kwargs: Any, tp: int, training: Any, call: CallState, **options: Any
) -> Program:
    """Returns the program without masks, if the batch has no padding and it is right for each such batch.

    Otherwise the program keeps the masks, and is right for all batches. Arguments as for `analyse`.

    Args:
        padded: whether some part of the batch has padding.
    """
    analysis = analyse(skeleton, args, kwargs, tp, training, replace(call, looks=not padded), **options)
    tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    if padded or _is_right_for_ones(analysis.captured, tensors):
        return analysis
    with_masks = analyse(skeleton, args, kwargs, tp, training, replace(call, looks=False), **options)
    return replace(with_masks, call=replace(with_masks.call, looks=True))  # Nothing is left to try.


def masks_left_out(captured: Captured) -> list[int]:
    """Returns the places, among a call's tensors, of the masks that must be full for this graph."""
    if captured.input_values is None or not captured.asked:
        return []
    read = {node.name for node in captured.input_values.find_nodes(op="placeholder")}
    return [i for i, name in enumerate(captured.inputs) if name in read]


def are_full(tensors: Sequence[Tensor], places: Collection[int]) -> bool:
    """Returns whether the masks at these places have ones only; those on `meta` are taken for full."""
    masks = [tensors[i] for i in places if not tensors[i].is_meta]
    return not masks or bool(torch.stack([(mask == 1).all() for mask in masks]).all())


def _is_right_for_ones(captured: Captured, tensors: Sequence[Tensor]) -> bool:
    """Whether the reads of a program have the same outcomes for each batch whose masks are full, as those here."""
    places = masks_left_out(captured)
    if not are_full(tensors, places) or any(not (read.look and read.of_inputs) for read in captured.asked):
        return False
    ones = [torch.ones(x.shape, dtype=x.dtype) if i in places else x for i, x in enumerate(tensors)]
    values = input_values_on(captured, torch.device("cpu"))
    if values is None:
        return True
    tensor_at = values(ones)
    return all(read.made(tensor_at).is_same(read.outcome) for read in captured.asked)
