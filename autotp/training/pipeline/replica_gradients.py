"""The sums of gradients over the ranks that hold the same parameter: other replicas, and other stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotp.passes.emit.attach_parameters import place_in, value_at
from autotp.runtime.torch_hooks.gradient_hooks import HooksOfStep
from autotp.sharding.boxes import is_sharded, local_of
from autotp.training.pipeline.gradient_buckets import GradientSums, sum_in_buckets


@dataclass(frozen=True)
class ReplicaGradients:
    """The sums of the gradients of one rank's parameters.

    Attributes:
        module: has the parameters.
        shared: name of a parameter that other pipeline ranks hold, too -> the numbers of its ranks, and their group.
        read_by_several: names of parameters that several stages of one rank read.
        replicas: the group of the ranks that have the same stage.
        alone: whether this rank has the whole pipeline: then a gradient is complete once replicas have summed it.
        under_backward: whether sums over the replicas can run under backward.
        experts: the parameters of which a rank has the rows of its own experts.
        copies: the group of the ranks with the same experts; None if no other rank has them.
        learning: which parameters are trained -> those of them that had gradients in the last such step.
    """

    module: nn.Module
    shared: Mapping[str, tuple[list[int], Any]]
    read_by_several: Collection[str]
    replicas: Any
    alone: bool
    under_backward: bool
    experts: Collection[nn.Parameter]
    copies: Any
    learning: dict[tuple[bool, ...], list[nn.Parameter]] = field(default_factory=dict)

    def begin(self, hooks: HooksOfStep) -> GradientSums:
        """Returns the sums over the replicas that run under backward; each stage's module starts its own.

        These are sums of the parameters that had gradients in the last step that trained the same ones, but for those
        that several stages read, or that ZeRO or `ep` divides.
        """
        learning = self.learning.get(self._trained(), []) if self.under_backward else []
        excluded = {*self.shared, *self.read_by_several}
        names = {parameter: name for name, parameter in self.module.named_parameters()} if learning else {}
        complete = hooks.complete if self.alone and hooks.steps else None
        summed = [p for p in learning if names[p] not in excluded and p not in self.experts]
        return GradientSums(summed, self.replicas, complete=complete)

    def finish(self, sums: GradientSums, stepped: Collection[nn.Parameter]) -> None:
        """Sums gradients: of shared parameters over their stages, and of unsharded parameters over the replicas.

        It notes which parameters have a gradient: the same ones do in the next step that trains as many.

        Args:
            stepped: parameters that were stepped under backward: their gradients are gone.
        """
        for name, (_, group) in self.shared.items():
            parameter = value_at(place_in(self.module, name))
            if parameter.requires_grad:
                # All holders take part in the sum, also one whose stage has no gradient for it.
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(local_of(parameter.grad), group=group)
        if self.replicas.size() > 1:
            sums.finish()
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None and p not in sums]
            sum_in_buckets([local_of(grad) for grad in gradients if not is_sharded(grad)], self.replicas)
            # All rows of the replicas along `ep` have come to a rank's experts: the rest of the sum is over copies.
            if self.copies is not None:
                sum_in_buckets([local_of(p.grad) for p in self.experts if p.grad is not None], self.copies)
        if self.under_backward:
            self.learning[self._trained()] = [p for p in self.module.parameters() if p.grad is not None or p in stepped]

    def _trained(self) -> tuple[bool, ...]:
        """Returns which parameters are trained: it is the same on all replicas, whatever graphs their batches have."""
        return tuple(parameter.requires_grad for parameter in self.module.parameters())
