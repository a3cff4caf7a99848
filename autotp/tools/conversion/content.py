"""content: what a checkpoint of any format has: sources of its tensors, and the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from autotp.checkpoint.manifest import Manifest
from autotp.integrations.transformers.files.tensor_sources import Box, Shape, Source

Format = Literal["safetensors", "torch", "training"]
FORMATS: tuple[Format, ...] = ("safetensors", "torch", "training")


@dataclass(frozen=True)
class Content:
    """A checkpoint.

    Attributes:
        format: its format.
        tensors: name -> source, of the model.
        config: the configuration of transformers, as config.json has it; None if the checkpoint has none.
        state: name -> source, of an optimizer and others.
        step: the step of a training.
    """

    format: Format
    tensors: Mapping[str, Source]
    config: Mapping[str, Any] | None = None
    state: Mapping[str, Source] = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True)
class Saved:
    """A tensor of a training checkpoint."""

    manifest: Manifest
    key: str

    @property
    def shape(self) -> Shape:
        return self.manifest.pieces(self.key).shape

    @property
    def dtype(self) -> torch.dtype:
        return self.manifest.pieces(self.key).dtype

    def read(self, box: Box) -> Tensor:
        part = torch.empty([b - a for a, b in box], dtype=self.dtype)
        self.manifest.pieces(self.key).read(self.manifest.folder, self.key, tuple(a for a, _ in box), part)
        return part
