"""Lets TRL's trainers compute the reference once, before a training, also where each process has files of its own.

`precompute_ref_log_probs` writes a file beside the rows, on the first process, and all processes read it. Rows that are
in no file are in a temporary folder of each process: there each rank writes what all ranks have computed.

This module does not import TRL before the user's program does.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from autotp.distributed.mesh import gather_ints
from autotp.hf.loops.accelerate_state import each_is_first
from autotp.hf.loops.replicas import own_ranks, replicas

TRAINERS = {"trl.trainer.dpo_trainer": "DPOTrainer", "trl.trainer.kto_trainer": "KTOTrainer"}
WATCHED = tuple(TRAINERS)
"""The modules of the trainers that write such a file."""
Method = Callable[..., Any]
_changed: set[type] = set()


def watch_trl_trainers() -> None:
    """Changes methods of TRL's trainers, once they are imported."""
    for module, name in TRAINERS.items():
        trainer = getattr(sys.modules.get(module), name, None)
        if trainer is not None and trainer not in _changed:
            _changed.add(trainer)
            original = trainer._precompute_ref_logps
            trainer._precompute_ref_logps = wraps(original)(_written_where_read(original))


def _written_where_read(method: Method) -> Method:
    def _precompute_ref_logps(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(dataset, "_get_cache_file_path", str)
        differs = False
        if replicas() is not None:
            rows = gather_ints([zlib.crc32(str(path("")).encode())], own_ranks())
            differs = any(row != rows[0] for row in rows)
        with each_is_first() if differs else nullcontext():
            return method(self, dataset, *args, **kwargs)

    return _precompute_ref_logps
