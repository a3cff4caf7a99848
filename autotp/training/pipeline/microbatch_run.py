"""One run of a batch: forward of each microbatch in this rank's stages, and in training backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from autotp.runtime.torch_hooks.gradient_hooks import HooksOfStep
from autotp.training.pipeline.microbatch_graphs import Pipeline
from autotp.training.pipeline.rest_of_loss import first_pass
from autotp.training.pipeline.schedules import StageModule, Training


@dataclass(frozen=True)
class MicrobatchRun:
    """One run of a batch through this rank's stages.

    Attributes:
        pipeline: the graphs of the stages.
        works: number of a stage of this rank -> its module.
        inputs: the batch's tensors by name.
        training: the options of the trainer.
        has_last: whether the last stage, which has the loss, is on this rank.
        adds_rest: whether this replica adds the part of the loss that is computed from sums over the batch.
        scale: a loss -> the loss times the factor of a scaler.
        device: the device of the stages.
        hooks: the hooks of parameters, which run once a gradient is complete.
        completes: whether graphs complete gradients.
        replicas: the number of replicas.
    """

    pipeline: Pipeline
    works: Mapping[int, StageModule]
    inputs: Mapping[str, Tensor]
    training: Training
    has_last: bool
    adds_rest: bool
    scale: Callable[[Tensor], Tensor]
    device: torch.device
    hooks: HooksOfStep
    completes: bool
    replicas: int

    def losses(self) -> list[Tensor]:
        """Runs forward, and in training backward; returns the microbatches' losses on ranks with the last stage."""
        for graph in self.pipeline.stages.values():
            graph.begin_step()
        rest = next((work.rest for work in self.works.values() if work.rest is not None), None)
        at_once = all(work.at_once for work in self.works.values())
        if self.pipeline.functions is not None and self.pipeline.training and not at_once:  # NOTE [A pass for the sums]
            with first_pass(self.device):
                self._run_forward()
            if rest is not None:
                rest.sum_up()
        losses = self._run_stages() if self.pipeline.engine is not None else self._run_alone()
        for graph in self.pipeline.stages.values():
            graph.sum_the_rest()
        if rest is not None:
            value = rest.sum_up() if rest.value is None else rest.value
            losses += [self.scale(value)] * self.adds_rest
        return losses

    def _run_forward(self) -> None:
        """Runs forward of all microbatches."""
        if self.pipeline.first is not None:
            self.pipeline.first.eval(**self.inputs, target=self._target(), losses=[])
            return
        (work,) = self.works.values()
        for part in self._parts():
            work(**part)

    def _target(self) -> Tensor | None:
        """Returns what torch's schedule divides among the microbatches as a target. Our loss does not read it."""
        return torch.zeros(self.training.microbatches) if self.has_last else None

    def _parts(self) -> Sequence[Mapping[str, Tensor]]:
        """Returns the inputs of each microbatch."""
        rows, count = {*self.pipeline.analysis.rows, *self.pipeline.documents.tokens}, self.training.microbatches
        divided = {name: x.chunk(count) if name in rows else [x] * count for name, x in self.inputs.items()}
        return [{name: values[i] for name, values in divided.items()} for i in range(count)]

    def _run_stages(self) -> list[Tensor]:
        """Runs all microbatches by torch's schedule."""
        losses: list[Tensor] = []
        run = self.pipeline.engine.step if self.pipeline.training else self.pipeline.engine.eval
        run(**self.inputs, target=self._target(), losses=losses)
        return losses

    def _run_alone(self) -> list[Tensor]:
        """Runs one microbatch after the other on a rank that has the whole pipeline."""
        losses: list[Tensor] = []
        (work,), parts = self.works.values(), self._parts()
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            # ZeRO 1 keeps whole gradients until the last microbatch; 2 and 3 keep rows, so each microbatch is summed.
            complete = self.hooks.complete if last and self.pipeline.training and self.completes else None
            work.graph.sum_now(self.training.zero > 1 or last, complete)
            loss = self.scale(work(**part).sum())
            if self.pipeline.training:
                with self._last_backward(work) if last else nullcontext():
                    loss.backward()
            losses.append(loss.detach())
        return losses

    def _last_backward(self, work: StageModule) -> AbstractContextManager[None]:
        """Returns a region for the last backward of a step; on one replica it completes gradients."""
        return self.hooks.as_gradients_arrive(work.parameters()) if self.replicas == 1 else work.last_backward()
