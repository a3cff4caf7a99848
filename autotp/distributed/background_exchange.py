"""Exchanges texts between ranks from a background thread, while another thread trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotp.distributed.mesh import Mesh
from autotp.distributed.peers.heartbeat import reason
from autotp.errors import Error


@dataclass(frozen=True)
class BackgroundExchange:
    """All ranks of a mesh, with a separate process group: an `Exchange` for `agree` and `told`.

    It calls methods of the group, not functions of torch.distributed: those fail after `destroy_process_group()`, which
    may be called while a checkpoint is being written.

    Attributes:
        group: torch's object of a gloo group.
    """

    mesh: Mesh
    group: Any

    def __call__(self, text: str) -> list[str]:
        """Returns every rank's text, by rank; raises Error on every rank if one was lost."""
        try:
            encoded = text.encode()
            # An allgather takes tensors of one size.
            lengths = [int(n) for n in self._gather(torch.tensor([len(encoded)]))]
            padded = torch.frombuffer(bytearray(encoded.ljust(max(lengths))), dtype=torch.uint8)
            return [row.numpy().tobytes().decode() for row in self._gather(padded)]
        except (RuntimeError, MemoryError) as error:
            why = reason(lambda rank: self.mesh.named([rank])) or str(error).partition("\n")[0]
            problem = f"{self.mesh.axis} rank {self.mesh.rank} of {self.mesh.size} cannot save: {why}"
            raise Error(problem, fix="read the other ranks' logs") from error

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.mesh.size)]
        self.group.allgather([gathered], [tensor]).wait()
        return gathered
