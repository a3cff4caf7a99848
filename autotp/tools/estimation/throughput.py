"""throughput: tokens a second, and the share of the devices' peak (MFU), of the steps that a loop trains."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from autotp.arguments import expect_arguments
from autotp.errors import Error, within
from autotp.tools.estimation.result import Estimate, mfu, tokens_per_second


class Throughput:
    """Measures tokens a second, and the part of the devices' peak that the model's own operations take (MFU).

    Both are of the whole job, in wall time. The tokens of all replicas are counted, and those of a row once, however
    many ranks share it. Operations computed again do not count for the MFU (Chowdhery et al. 2022, appendix B).

    Args:
        estimate: of the same model, made before it was parallelized: it has the operations of a step, and the number
            and the peak of the devices. Without it, and for a CPU, there is no `mfu`: no peak is known.

    Raises:
        Error: `estimate` is no `Estimate`.

    Example:
        >>> from autotp.models.gpt import GPT, GPTConfig
        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig(vocab_size=512, block_size=64, n_layer=2, n_head=4, n_embd=64))
        >>> estimate = autotp.estimate(model, gpu="h100-80gb", batch=4)
        >>> throughput = autotp.Throughput(estimate)  # the time begins
        >>> sorted(throughput.measure(steps=10))  # after ten steps of such a batch
        ['mfu', 'tokens_per_second']
    """

    def __init__(self, estimate: Estimate | None = None) -> None:
        within("Throughput", lambda: expect_arguments(Throughput.__init__, estimate=estimate))
        if estimate is not None and not estimate.device.is_gpu:
            warnings.warn(f"no MFU is measured: the peak of {estimate.device.name}, a CPU, is not known", stacklevel=2)
        self.estimate = estimate
        self.restart()

    def restart(self) -> None:
        """Begins the time again: after the first step, which captures the model, or after an evaluation."""
        _wait_for_device()
        self._start = time.perf_counter()

    def measure(self, tokens: int | None = None, steps: int = 1) -> dict[str, float]:
        """Returns the numbers since the time began, and begins it again.

        They are "tokens_per_second", unless the model's rows have no tokens, and "mfu", a part of 1, where it is known.
        The call waits for the device. Every rank may make it, or the first alone: it sends nothing.

        Args:
            tokens: the tokens since then, of all replicas; by default those of `steps` steps of the estimate.
            steps: the optimizer's steps since then; they count where no tokens are given.

        Raises:
            Error: no tokens are known, or the estimate is of another number of devices.
        """
        return within("Throughput.measure", lambda: self._measured(tokens, steps))

    def _measured(self, tokens: int | None, steps: int) -> dict[str, float]:
        expect_arguments(Throughput.measure, tokens=tokens, steps=steps)
        estimate = self.estimate
        if estimate is None and tokens is None:
            raise Error("no tokens are known", fix="measure(tokens=...), or Throughput(estimate)")
        started = self._start
        self.restart()
        seconds = self._start - started
        if estimate is None:
            return {"tokens_per_second": tokens_per_second(tokens or 0, seconds) or 0.0}
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != estimate.layout.devices:
            problem = f"the estimate is of {estimate.layout.devices} devices, and {ranks} train"
            raise Error(problem, fix=f"an estimate whose tp, cp, pp and dp have the product {ranks}")
        measured = {}
        if estimate.tokens:
            tokens = estimate.tokens * steps if tokens is None else tokens
            measured["tokens_per_second"] = tokens_per_second(tokens, seconds) or 0.0
            steps_of_estimate = tokens / estimate.tokens
        else:
            steps_of_estimate = float(steps)
        if estimate.device.is_gpu:
            measured["mfu"] = mfu(estimate.flops * steps_of_estimate, seconds, ranks, estimate.peak)
        return measured

    def log_to(self, trainer: Any) -> None:
        """Adds both numbers to each training log of a Trainer of transformers, from the second step on.

        So its progress bar, TensorBoard, W&B and `state.log_history` have them. Call it before `trainer.train()`, on
        every rank. Trainer counts the tokens, of all replicas: `include_num_input_tokens_seen="all"` of
        `TrainingArguments`, or "non_padding". An evaluation or a checkpoint between two logs counts as time.

        Args:
            trainer: a `transformers.Trainer`, or one of a class that derives from it, such as those of TRL.

        Raises:
            Error: it is no Trainer of transformers; it counts no tokens; or, where the model's
                rows have no tokens, its steps have other rows than the estimate's.

        Example:
            throughput.log_to(trainer)
            trainer.train()
        """
        within("Throughput.log_to", lambda: self._log_to(trainer))

    def _log_to(self, trainer: Any) -> None:
        trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
        if trainer_class is None or not isinstance(trainer, trainer_class):
            raise Error(
                f"trainer is a {type(trainer).__name__}",
                expected="a Trainer of transformers; a loop of your own calls measure(tokens=...)",
            )
        arguments, estimate = trainer.args, self.estimate
        # `world_size` is the number of replicas, not of ranks.
        rows = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        if estimate is not None and not estimate.tokens:
            if estimate.layout.batch != rows:
                problem = f"the estimate's step has {estimate.layout.batch} rows, and that of this Trainer {rows}"
                raise Error(problem, fix=f"estimate(..., batch={rows})")
        elif arguments.include_num_input_tokens_seen == "no":
            fix = 'TrainingArguments(..., include_num_input_tokens_seen="all")'
            raise Error("this Trainer counts no tokens", fix=fix)
        from autotp.integrations.loops.log_callback import add_to_logs

        add_to_logs(trainer, self)


def _wait_for_device() -> None:
    """Waits for the work of the GPU: its kernels run later than the calls."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
