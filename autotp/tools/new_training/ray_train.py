"""Runs train.py on Ray Train, on the cluster or on this machine alone: `python ray_train.py`.

`autotp init` wrote this file: change it as you like. All machines need the folder of train.py.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

WORKERS = 2


def work(folder: str) -> None:
    """Trains in one worker. Ray Train has set the variables that torchrun sets, and made the process group."""
    sys.path.insert(0, folder)
    importlib.import_module("train").main()


def main() -> None:
    """Starts the workers, and starts them again, three times at most, if one fails."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init()
    on_gpus = ray.cluster_resources().get("GPU", 0) >= WORKERS
    TorchTrainer(
        lambda settings: work(settings["folder"]),
        train_loop_config={"folder": str(Path(__file__).resolve().parent)},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=on_gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
