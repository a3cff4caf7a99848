"""Exchanges plain data between ranks from a background thread, while another thread trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from autotp.distributed.consistency import problem_as_text, result_of_all, tried
from autotp.distributed.heartbeat import reason
from autotp.distributed.mesh import Mesh
from autotp.errors import Error

T = TypeVar("T")


@dataclass(frozen=True)
class BackgroundExchange:
    """All ranks of a mesh, with a separate process group.

    It calls methods of the group, not functions of torch.distributed: those fail after `destroy_process_group()`, which
    may be called while a checkpoint is being written.

    Attributes:
        group: torch's object of a gloo group.
    """

    mesh: Mesh
    group: Any

    def tell(self, mine: Any) -> list[Any]:
        """Returns every rank's `mine`, by rank. `mine` must be JSON data.

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
        """Returns the result of `make()`, once it has returned on every rank.

        Raises:
            Error: on every rank, as `agree` in `consistency.py` does.
        """
        made, problem = tried(make)
        return result_of_all(self.mesh, made, problem, self.tell(problem_as_text(problem)))

    def _gather(self, mine: Tensor) -> list[Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.mesh.size)]
        self.group.allgather([found], [mine]).wait()
        return found
