"""Connects parallel models with transformers' `generate`: decoding loops, logits processors.

Nothing here imports transformers before the user has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autotp.attached import attach, attached_if_any, detach
from autotp.distributed.agreement import Fact, agree, compare
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.gather import gather_all
from autotp.distributed.mesh import Mesh, broadcast_from_first, follow_first_random_state, group_of, waiting
from autotp.errors import Error, within
from autotp.integrations.transformers.caches import is_state
from autotp.integrations.transformers.pages.attention_to_pages import KEYS, divided, is_pages, pages_of
from autotp.integrations.transformers.sampling import EXCLUDED, CutScores, FewScores

# ---- generate


@dataclass
class Decoding:
    """Belongs to a model that generates now.

    Attributes:
        logits: "whole" or "cut", the form of the logits from which it chooses a token.
    """

    logits: str


@contextmanager
def _decoding(model: Any, logits: str) -> Iterator[None]:
    """Marks a model as generating, in a `with` block."""
    # A model may generate while it generates, as its own assistant does.
    before = attached_if_any(model, Decoding)
    attach(model, Decoding(logits))
    try:
        yield
    finally:
        detach(model, Decoding)
        if before is not None:
            attach(model, before)


class Generates:
    """Decoding with a parallel model: transformers' loops, on scores that stay cut along the vocabulary.

    Before: outputs.logits f32[B, 1, V@tp], gathered; argmax(logits)
    After:  argmax of Scores, which exchanges a pair for each row
    """

    mesh: Mesh
    outputs_stay_cut: Callable[[], AbstractContextManager[None]]

    def generate(self, *args: Any, timeout: timedelta | None = None, **kwargs: Any) -> Any:
        """Returns the same as `generate` of the original model: the same tokens on every rank.

        Args:
            timeout: the longest time that a collective waits for other ranks; None means the model's timeout.

        Raises:
            Error: a parallel model does not have an option, or a rank is lost.
        """
        inherited = super().generate  # type: ignore[misc]

        def run() -> Any:
            with _decoding(self, "whole"), waiting(self.mesh, timeout):
                return inherited(*args, **kwargs)

        return within(f"{type(self).__name__}.generate", run)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Returns transformers' manager of continuous batching: all ranks call this; the first one's requests count.

        Raises:
            Error: pages are kept on the CPU, too, and would be made for other heads than this rank computes.
        """
        inherited, mesh = super().init_continuous_batching, self.mesh.everyone  # type: ignore[misc]
        if mesh.size == 1:
            return inherited(*args, **kwargs)
        # By this mesh transformers divides the heads of its pages, and sends what the first rank schedules.
        ranks = DeviceMesh.from_group(group_of(mesh), mesh.device.type, mesh_dim_names=("tp",))
        with patch.object(self, "_device_mesh", ranks, create=True):
            manager = inherited(*args, **kwargs)
        if manager.continuous_batching_config.cpu_offload_space and KEYS[0] not in self.tp_plan:
            raise Error(
                "continuous batching keeps pages on the CPU, too, for heads of keys that tp divides, and no cp",
                fix="ContinuousBatchingConfig(cpu_offload_space=0)",
            )
        return manager

    @property
    def tp_plan(self) -> dict[str, Any]:
        """The plan of the original model; which heads are in a rank's pages is as autotp cuts them."""
        plan: dict[str, Any] = super().tp_plan  # type: ignore[misc]
        return divided(plan, self.config.get_text_config(), self.mesh.size, self.mesh.cp)  # type: ignore[attr-defined]

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the same as `generate_batch` of the original model, on every rank: continuous batching.

        Raises:
            Error: as `init_continuous_batching`, or a request has failed.
        """
        inherited = super().generate_batch  # type: ignore[misc]

        def run() -> Any:
            results = [inherited(*args, **kwargs)]
            if (mesh := self.mesh.everyone).size > 1:  # transformers has them where the requests are.
                torch.distributed.broadcast_object_list(results, group=group_of(mesh), group_src=0)
            if errors := [result.error for result in results[0].values() if result.error is not None]:
                raise Error(f"{len(errors)} requests failed: {errors[0]}", fix="what transformers has logged")
            return results[0]

        return within(f"{type(self).__name__}.generate_batch", run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_pages(kwargs.get("cache")):
            with pages_of(kwargs.pop("cache")):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        decoding = attached_if_any(self, Decoding)
        if decoding is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with self.outputs_stay_cut():
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        for name, value in list(outputs.items()):
            if not is_state(value) and not (name == "logits" and decoding.logits == "cut"):
                outputs[name] = gather_all(value)
        return outputs

    def _sample(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        whole = generation_config.output_scores or generation_config.output_logits
        # A processor with a model calls it, and combines both logits: these must be whole.
        if not whole and not any(hasattr(processor, "model") for processor in logits_processor):
            attach(self, Decoding("cut"))
        return self._decode("_sample", input_ids, logits_processor, stopping_criteria, generation_config, kwargs)

    def _beam_search(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        return self._decode(
            "_beam_search", input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        )  # fmt: skip

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: Tensor | None = None,  # transformers passes it only where the signature names it.
        **kwargs: Any,
    ) -> Any:
        rest = {"inputs_tensor": inputs_tensor, **kwargs}
        return self._decode(
            "_assisted_decoding", input_ids, logits_processor, stopping_criteria, generation_config, rest
        )

    def _decode(self, name: str, ids: Tensor, processors: Any, criteria: Any, config: Any, rest: dict[str, Any]) -> Any:
        """Runs transformers' loop of this name; all ranks use the first rank's random numbers and clock."""
        # Imported here, because it imports modules that import this one.
        from autotp.integrations.transformers.generation_settings import (
            generation_settings,
            holds_function,
            inputs_as_text,
            is_of_transformers,
        )

        mesh, settings = self.mesh, (name, *generation_settings(config, (*processors, *criteria)))
        inputs = inputs_as_text({"input_ids": ids, **rest})
        same_settings = "generates with other settings", "the same arguments of generate on all ranks"
        same_inputs = "generates from other inputs", "the same inputs on all ranks"
        compare(mesh, [Fact("settings", repr(settings), *same_settings), Fact("inputs", inputs, *same_inputs)])
        if config.do_sample:
            # Each rank draws the noise of the whole row itself (`sampling.py`).
            follow_first_random_state(mesh)
        criteria[:] = [
            part if type(part).__name__ in SAME_ON_ALL_RANKS else _FirstRankCriterion(part, mesh) for part in criteria
        ]
        loop = getattr(super(), name)
        all_alike = type(processors)(
            part if is_of_transformers(part) and not holds_function(part) else _FirstRankProcessor(part, mesh)
            for part in processors
        )
        chosen = partial(process_logits, all_alike) if name == "_sample" else all_alike
        return loop(ids, logits_processor=chosen, stopping_criteria=criteria, generation_config=config, **rest)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Returns False, so that transformers does not compile: a graph is captured already."""
        return False


SAME_ON_ALL_RANKS = ("MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria")
"""Criteria with the same result on all ranks, because they depend only on the tokens."""


class _FirstRankCriterion:
    """A stopping criterion that the first rank decides: with a clock, ranks would stop at different tokens."""

    def __init__(self, criterion: Any, mesh: Mesh) -> None:
        self.criterion, self.mesh = criterion, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = agree(self.mesh, lambda: self.criterion(*args, **kwargs))
        return broadcast_from_first(torch.as_tensor(done, device=args[0].device).to(torch.uint8), self.mesh).bool()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.criterion, name)


class _FirstRankProcessor:
    """A logits processor that is the user's, or calls a function of the user's, such as `prefix_allowed_tokens_fn`.

    All ranks use the first rank's scores, because it may be random or read a file.
    """

    def __init__(self, processor: Any, mesh: Mesh) -> None:
        self.processor, self.mesh = processor, mesh

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores_of_first = agree(self.mesh, lambda: self.processor(input_ids, scores))
        return broadcast_from_first(scores_of_first.contiguous(), self.mesh)


# ---- logits processors

EACH = ("TemperatureLogitsWarper", "InfNanRemoveLogitsProcessor")
"""Processors that compute each score from itself alone."""

FORCED = ("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor")
"""Processors that leave all scores, or set all: 0 for the forced tokens, which other processors may have excluded."""

ADDED = (
    "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "NoRepeatNGramLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor", "PrefixConstrainedLogitsProcessor",
)  # fmt: skip
"""Processors that add values, often -inf, that depend only on the tokens. Each rank computes them, from zeros."""

SCALED = ("RepetitionPenaltyLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor")
"""Processors with a penalty on some columns. Each rank finds these columns, from scores of one."""

AMONG = (
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
)  # fmt: skip
"""Processors that do not depend on the order of a row's scores, and ignore scores of -inf."""


def process_logits(processors: Any, tokens: Tensor, logits: Any) -> Any:
    """Applies a list of logits processors to the last position's logits, and returns the scores.

    For a processor that is not listed here, the whole row is gathered, unless top-k has left only some columns.

    Args:
        tokens: [batch seq], the tokens so far.
        logits: [batch vocab], cut or whole.
    """
    if not isinstance(logits, Sharded):
        return processors(tokens, logits)
    scores: CutScores | FewScores | Tensor = CutScores.of(logits)
    for processor in processors:
        scores = _apply_processor(processor, tokens, scores, logits)
    return scores


def _apply_processor(processor: Any, tokens: Tensor, scores: Any, logits: Sharded) -> Any:
    processor_class = type(processor.processor if isinstance(processor, _FirstRankProcessor) else processor)
    name = processor_class.__name__ if processor_class.__module__ == "transformers.generation.logits_process" else ""
    if isinstance(scores, CutScores | FewScores) and name in ADDED + FORCED:
        row = processor(tokens, torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device))
        return scores.added(row) if name in ADDED else scores.forced(row) if row.any() else scores
    if isinstance(scores, FewScores):
        every = name in AMONG
        return scores.each(lambda row: processor(tokens, row)) if every else processor(tokens, scores.whole())
    if isinstance(scores, CutScores):
        processed = _on_cut_scores(processor, name, tokens, scores)
        return processor(tokens, scores.whole(logits)) if processed is None else processed
    return processor(tokens, scores)


def _on_cut_scores(processor: Any, name: str, tokens: Tensor, scores: CutScores) -> CutScores | FewScores | None:
    """Applies a processor to cut scores; returns None if it needs the whole row."""
    if name in EACH:
        return replace(scores, values=processor(tokens, scores.values))
    if name == "TopKLogitsWarper" and processor.filter_value == EXCLUDED:
        return scores.top(processor.top_k)
    if name in SCALED:
        # Where a penalty applies is seen on scores of one: these change there alone.
        tried = processor(tokens, scores.values.new_ones(len(tokens), scores.width))
        return scores.scaled(tried != 1, processor.penalty)
    return None
