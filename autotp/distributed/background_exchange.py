"""Exchanges plain data between ranks from a background thread, while another thread trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from autotp.distributed.consistency import problem_as_text, result_of_all, tried
from autotp.distributed.mesh import Mesh
from autotp.distributed.peers.heartbeat import reason
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

    def tell(self, make: Callable[[], Any]) -> list[Any]:
        """Returns what `make()` returned on every rank, by rank: JSON data.

        What a rank computes between two exchanges belongs into `make`: an exception there reaches the other ranks,
        which would wait for this rank otherwise.

        Raises:
            Error: on every rank. `make` failed on some rank, as for `agree` in `consistency.py`; or a rank was lost.
        """
        made, problem = tried(lambda: json.dumps(make()))
        try:
            texts = self._exchanged(json.dumps([problem_as_text(problem), *made]))
        except (RuntimeError, MemoryError) as error:
            why = reason(lambda rank: self.mesh.named([rank])) or str(error).partition("\n")[0]
            text = f"{self.mesh.axis} rank {self.mesh.rank} of {self.mesh.size} cannot save: {why}"
            raise Error(text, fix="read the other ranks' logs") from error
        answers = [json.loads(text) for text in texts]
        result_of_all(self.mesh, [None], problem, [failed for failed, *_ in answers])
        return [json.loads(text) for _, text in answers]

    def agree(self, make: Callable[[], T]) -> T:
        """Returns the result of `make()`, once it has returned on every rank.

        Raises:
            Error: as `tell`.
        """
        made = list[T]()
        self.tell(lambda: made.append(make()))
        return made[0]

    def _exchanged(self, text: str) -> list[str]:
        """Returns every rank's text, by rank."""
        encoded = text.encode()
        lengths = [int(n) for n in self._gather(torch.tensor([len(encoded)]))]
        padded = torch.frombuffer(bytearray(encoded.ljust(max(lengths))), dtype=torch.uint8)
        return [row.numpy().tobytes().decode() for row in self._gather(padded)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.mesh.size)]
        self.group.allgather([gathered], [tensor]).wait()
        return gathered
