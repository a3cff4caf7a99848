"""xformers' biases that are no matrices: their classes, and the matrix that each stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class AttentionBias:
    def materialize(self, shape: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
        raise NotImplementedError


def _hidden(hidden: Tensor, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden.to(device), float("-inf"))


class LowerTriangularMask(torch.Tensor, AttentionBias):
    """As there, a tensor without values: its class says it all."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, *, device: Any = "cpu", **_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, [], device=device, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented

    def materialize(self, shape: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
        return _hidden(torch.ones(shape[-2:], dtype=torch.bool).triu(1), dtype, device)


class LowerTriangularFromBottomRightMask(AttentionBias):
    def materialize(self, shape: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
        return _hidden(torch.ones(shape[-2:], dtype=torch.bool).triu(1 + shape[-1] - shape[-2]), dtype, device)


class LocalAttentionFromBottomRightMask(AttentionBias):
    def __init__(self, window_left: int, window_right: int) -> None:
        self.window_left, self.window_right = window_left, window_right


@dataclass
class _SeqLenInfo:
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Any) -> _SeqLenInfo:
        starts = [sum(seqlens[:n]) for n in range(len(seqlens) + 1)]
        return cls(torch.tensor(starts, dtype=torch.int32), max(seqlens), min(seqlens), starts)


@dataclass
class BlockDiagonalMask(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Any = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Any, kv_seqlen: Any = None) -> Any:
        info = _SeqLenInfo.from_seqlens(q_seqlen)
        return cls(info, info if kv_seqlen in (None, q_seqlen) else _SeqLenInfo.from_seqlens(kv_seqlen))

    def materialize(self, shape: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
        hidden = torch.ones(shape[-2:], dtype=torch.bool)
        queries, keys = self.q_seqinfo.seqstart_py, self.k_seqinfo.seqstart_py
        for first, end, first_key, end_key in zip(queries, queries[1:], keys, keys[1:], strict=False):
            hidden[first:end, first_key:end_key] = self._hidden(end - first, end_key - first_key)
        return _hidden(hidden, dtype, device)

    def _hidden(self, queries: int, keys: int) -> Tensor:
        return torch.zeros(queries, keys, dtype=torch.bool)

    def split(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.split([*self.q_seqinfo.seqstart.diff()], 1))


class BlockDiagonalCausalMask(BlockDiagonalMask):
    def _hidden(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).triu(1)


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    def _hidden(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
