"""The graphs that a rank has of the microbatches of one kind, and which of them fit a batch."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from autotp.distributed.agreement import line_sums
from autotp.distributed.device_arguments import inputs_on_host
from autotp.passes.capture.python_state.guard import Guard
from autotp.passes.emit.count_load import experts_of_all
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.plan.experts.expert_parallel import exchanges
from autotp.passes.program.program import Program
from autotp.runtime.calls.graph_digest import digest, order_of
from autotp.source_location import block_of
from autotp.training.microbatches import Batch
from autotp.training.pipeline.documents import Documents
from autotp.training.pipeline.full_masks import are_full, masks_left_out


def checksums_of(analysis: Program, lowered: fx.Graph) -> tuple[int, int]:
    """Returns checksums of a graph before sequences are cut, and of a rank's collectives in order."""
    return zlib.crc32(repr(line_sums(digest(analysis))).encode()), order_of(lowered)


@dataclass(frozen=True)
class Pipeline:
    """The graphs of one mode, for microbatches of one kind.

    Attributes:
        key: the mode, the places of the tensors with rows, and the arguments' structure.
        shapes: the shapes of a microbatch's tensors; an engine can run these only.
        analysis: the program of a microbatch.
        stages: number of a stage of this rank -> its graph.
        engine: torch's schedule that runs the stages; None if this rank has the whole pipeline.
        first: the same for forward alone, before a step whose loss needs sums over the batch; None if there is none.
        guard: sees whether the original model is as it was captured.
        learning: the names of the parameters that have a gradient; None means all that the graphs read.
        checksums: those of the graph before sequences are cut, and of this rank's collectives in order.
    """

    key: Any
    shapes: Sequence[Any]
    analysis: Program
    stages: Mapping[int, RankProgram]
    engine: Any
    first: Any
    guard: Guard
    learning: frozenset[str] | None
    checksums: tuple[int, int]

    @property
    def training(self) -> bool:
        """Whether the graphs are for training."""
        return bool(self.key[0])

    @property
    def functions(self) -> fx.Graph | None:
        """The part of the loss that is computed from sums over the batch."""
        assert self.analysis.totals is not None
        return self.analysis.totals.functions

    @cached_property
    def read(self) -> tuple[list[str], list[str]]:
        """The names of the parameters that the graph reads, and the blocks in order."""
        graph, names = self.analysis.graph, self.analysis.captured.parameters
        read = [names[node.name] for node in graph.find_nodes(op="placeholder") if node.users and node.name in names]
        blocks = dict.fromkeys(block_of(node) for node in graph.nodes if node.op != "placeholder")
        return sorted(read), [block for block in blocks if block]

    @cached_property
    def exchanges(self) -> tuple[tuple[str, ...], ...]:
        """The parameters of experts, for each exchange of rows between replicas in order."""
        return exchanges(self.analysis.graph, self.analysis.captured.parameters)

    @cached_property
    def experts_of_all(self) -> frozenset[str]:
        """The modules of experts whose rows all ranks along `cp` have whole."""
        return experts_of_all(self.analysis.graph, self.analysis.captured.parameters, "cp")

    @cached_property
    def documents(self) -> Documents:
        """What is known of packed documents in a batch."""
        return Documents(self.analysis)

    def runs(self, shapes: Sequence[Any]) -> bool:
        """True if stages send tensors of the same shapes for these. The number of documents does not matter."""
        places = [i for i, name in enumerate(self.analysis.captured.inputs) if name not in self.documents.beside]
        return self.engine is None or all(self.shapes[i] == shapes[i] for i in places)

    @cached_property
    def masks_left_out(self) -> list[int]:
        """The places, among a batch's tensors, of the masks that must have ones only for these graphs."""
        return masks_left_out(self.analysis.captured)

    @cached_property
    def on_host(self) -> frozenset[str]:
        """The names of the inputs that an operator wants on the CPU."""
        return inputs_on_host(self.analysis.graph, self.analysis.captured.inputs)


def fitting_graphs(pipelines: Iterable[Pipeline], batch: Batch, of_size: bool = True) -> Pipeline | None:
    """Returns the graphs for a batch, or None; with `of_size`, only graphs whose engine fits the batch's size."""
    fitting = []
    for pipeline in pipelines:
        if pipeline.key != batch.key or (of_size and not pipeline.runs(batch.shapes)):
            continue
        if pipeline.analysis.captured.fits(batch.shapes):
            fitting.append(pipeline)
    # Graphs without masks come first where they are right: they can run kernels that take no mask.
    without_masks = [pipeline for pipeline in fitting if pipeline.masks_left_out]
    full = [pipeline for pipeline in without_masks if are_full(batch.tensors, pipeline.masks_left_out)]
    with_masks = (pipeline for pipeline in fitting if not pipeline.masks_left_out)
    rest = (pipeline for pipeline in with_masks if without_masks or pipeline.analysis.call.looks or batch.padded)
    return next(itertools.chain(full, rest), None)
