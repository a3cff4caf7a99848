"""Exchanges plain data between ranks while another thread trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from autotp.distributed.consistency import settled, spelled, tried
from autotp.distributed.heartbeat import reason
from autotp.distributed.mesh import Mesh
from autotp.errors import Error

T = TypeVar("T")


@dataclass(frozen=True)
class BackgroundExchange:
    """All ranks of a mesh, over a group of their own.

    Its own methods are called, not those of torch.distributed: these no longer know it after `destroy_process_group()`,
    which may be called while a checkpoint is being written.

    Attributes:
        group: torch's object of a gloo group.
    """

    mesh: Mesh
    group: Any

    def tell(self, mine: Any) -> list[Any]:
        """Every rank's `mine`, by rank. It is what JSON has.

        Raises:
            Error: a rank was lost.
        """
        text = json.dumps(mine).encode()
        try:
            lengths = [int(n) for n in self._gather(torch.tensor([len(text)]))]
            padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
            rows = self._gather(padded)
        except RuntimeError as error:
            why = reason(lambda rank: self.mesh.named([rank])) or str(error).splitlines()[0]
            problem = f"{self.mesh.axis} rank {self.mesh.rank} of {self.mesh.size} cannot save: {why}"
            raise Error(problem, fix="read the other ranks' logs") from error
        return [json.loads(row.numpy().tobytes()) for row in rows]

    def agree(self, make: Callable[[], T]) -> T:
        """What `make()` returns, once it has returned on every rank.

        Raises:
            Error: on every rank, as `agree` of `consistency.py`.
        """
        made, problem = tried(make)
        return settled(self.mesh, made, problem, self.tell(spelled(problem)))

    def _gather(self, mine: Tensor) -> list[Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.mesh.size)]
        self.group.allgather([found], [mine]).wait()
        return found
