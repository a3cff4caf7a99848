"""What a rank holds of a tensor, as torch.distributed.checkpoint writes and reads it: by boxes of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autotp.boxes import Box, local_of
from autotp.errors import Error
from autotp.parts import Parts


class Boxed(Tensor):
    """A tensor that looks as large as the whole and has what this rank holds of it.

    Attributes:
        tensor: what it stands for.
        parts: the boxes: where each begins in the whole -> what this rank has there.
    """

    tensor: Tensor
    parts: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, tensor: Tensor, shape: tuple[int, ...], parts: dict[tuple[int, ...], Tensor]) -> Boxed:
        new: Boxed = Tensor._make_wrapper_subclass(cls, shape, dtype=tensor.dtype, device=torch.device("cpu"))
        new.tensor, new.parts = tensor, parts
        return new

    @classmethod
    def of(cls, parts: Parts, name: str, tensor: Tensor, copied: bool = False) -> Boxed:
        """What this rank holds of a parameter, or of what lies as it does.

        Args:
            copied: for writing: a copy on the CPU, of what no rank before this one has. Otherwise for reading into it.
        """
        found: list[Box] = parts.boxes(name, tensor, first=copied)
        local = local_of(tensor.detach())
        there = {box.whole: box.of(local) for box in found}
        there = {at: part.to("cpu", copy=True) for at, part in there.items()} if copied else there
        return cls(tensor, parts.shapes[name], there)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """The protocol of torch.distributed.checkpoint: what is written."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                None,
                TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The protocol of torch.distributed.checkpoint: what is here."""
        return [ChunkStorageMetadata(torch.Size(at), part.size()) for at, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The protocol of torch.distributed.checkpoint: one box."""
        assert index.offset is not None
        return self.parts[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise Error(f"{func} on a tensor of which this is only some boxes, for files")
