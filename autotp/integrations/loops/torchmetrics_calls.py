"""Has torchmetrics count the rows of a parallel model once.

A metric adds up what all processes counted. The ranks of one parallel model count the same rows: they are one replica.
So a metric adds up over replicas; of one replica it is what each rank counted. A metric with a process group of its own
adds up over that.

This module does not import torchmetrics before the user's program does.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from autotp.attached import first_time
from autotp.distributed.mesh import group_of
from autotp.integrations.loops.replicas import replicas

WATCHED = "torchmetrics.metric"


def watch_torchmetrics() -> None:
    """Changes `Metric.sync`, once it is imported."""
    metric = getattr(sys.modules.get(WATCHED), "Metric", None)
    if metric is None or not first_time(metric, "changed"):
        return
    original = metric.sync

    @wraps(original)
    def sync(
        it: Any,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        axis = replicas()
        # A group that the user gave is meant as it is.
        over_replicas = axis is not None and (process_group or it.process_group) is None
        if over_replicas and axis is not None and axis.size > 1:
            process_group = group_of(axis)
        alone = over_replicas and axis is not None and axis.size == 1
        original(it, dist_sync_fn, process_group, should_sync and not alone, distributed_available)

    metric.sync = sync
