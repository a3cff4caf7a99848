"""Connects parallel models with transformers' `generate`: caches, decoding loops, logits processors.

Nothing here imports transformers before the user has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.distributed.consistency import agree
from autotp.distributed.gather import gather_all, marked
from autotp.distributed.mesh import Mesh, broadcast_from_first, expect_alike, follow_first_random_state, waiting
from autotp.distributed.sharded_tensor import Sharded
from autotp.errors import Error, within
from autotp.hf.sampling import NOTHING, CutScores, Few

# ---- caches

COUNTS = ("cumulative_length", "cumulative_length_int")
"""Attributes of a cache's layer that grow with each token."""


def is_state(x: Any) -> bool:
    """True for a key-value cache, or one layer of it: an object that holds tensors, and that a call changes."""
    found = sys.modules.get("transformers.cache_utils")
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    return any(isinstance(x, getattr(found, name)) for name in names if hasattr(found, name))


def shown_attribute(name: str, value: Any) -> Any:
    """An attribute of a cache as the leaves of a structure. A count is a tensor's size: no constant.

    Raises:
        Error: a cache that moves its tensors to other devices, or quantizes them.
    """
    if (name == "offloading" and value) or name == "q_group_size":
        how = "offloaded" if name == "offloading" else "quantized"
        raise Error(f"a cache that is {how} cannot be cut", fix='cache_implementation="dynamic" or "static"')
    if name in COUNTS and isinstance(value, int | torch.SymInt):
        return torch.zeros((), dtype=torch.bool).expand(value)
    return None if isinstance(value, torch.device) else value


def read_attribute(name: str, value: Any, among: Sequence[Any]) -> Any:
    """The attribute that such leaves stand for; `among`: all of its object. A device is that of the tensors there."""
    if name in COUNTS and isinstance(value, Tensor) and value.dim() == 1:
        return value.shape[0]
    if name.endswith("device"):
        return next((x.device for x in pytree.tree_leaves(list(among)) if isinstance(x, Tensor) and x.dim() > 2), None)
    return value


# ---- generate


LOGITS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Models that generate -> whether a token is chosen from "whole" logits, or from those that are "cut"."""


@contextmanager
def _decoding(model: Any, logits: str) -> Iterator[None]:
    """A region in which a model generates."""
    before = LOGITS.get(model)
    LOGITS[model] = logits
    try:
        yield
    finally:
        LOGITS.pop(model)
        if before is not None:
            LOGITS[model] = before


class Generates:
    """Decoding with a parallel model: transformers' own loops, on scores that stay cut by vocabulary.

    Before: outputs.logits f32[B, 1, V@tp], gathered; argmax(logits)
    After:  argmax of Scores, which exchanges a pair for each row
    """

    mesh: Mesh
    outputs_stay_cut: Callable[[], AbstractContextManager[None]]

    def generate(self, *args: Any, timeout: timedelta | None = None, **kwargs: Any) -> Any:
        """What `generate` of the original model returns: the same tokens on every rank.

        Args:
            timeout: how long a collective waits for other ranks meanwhile; None is what the model was made with.

        Raises:
            Error: an option that a parallel model does not have; a rank is lost.
        """
        inherited = super().generate  # type: ignore[misc]

        def run() -> Any:
            with _decoding(self, "whole"), waiting(self.mesh, timeout):
                return inherited(*args, **kwargs)

        return within(f"{type(self).__name__}.generate", run)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raises Error."""
        raise Error("continuous batching of a parallel model is not supported yet", fix="model.generate(**inputs)")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        logits = LOGITS.get(self)
        if logits is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with self.outputs_stay_cut():
            found = super().__call__(*args, **kwargs)  # type: ignore[misc]
        for name, value in list(found.items()):
            if not is_state(value):
                found[name] = marked(value) if name == "logits" and logits == "cut" else gather_all(value)
        return found

    def _sample(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        whole = generation_config.output_scores or generation_config.output_logits
        if not whole and not any(hasattr(one, "model") for one in logits_processor):
            LOGITS[self] = "cut"
        return self._decoded("_sample", input_ids, logits_processor, stopping_criteria, generation_config, kwargs)

    def _beam_search(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        return self._decoded(
            "_beam_search", input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        )  # fmt: skip

    def _assisted_decoding(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        return self._decoded(
            "_assisted_decoding", input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        )

    def _decoded(
        self, name: str, ids: Tensor, processors: Any, criteria: Any, config: Any, rest: dict[str, Any]
    ) -> Any:
        """What transformers' loop of this name returns, where the first rank's chance and clock decide for all."""
        from autotp.hf.generation_settings import (  # Later: it compares as inputs are, whose structure is read here.
            generation_settings,
            holds_function,
            is_of_transformers,
        )

        mesh, said = self.mesh, (name, *generation_settings(config, (*processors, *criteria)))
        expect_alike(said, mesh, "generates with other settings", "the same arguments of generate")
        if config.do_sample:
            follow_first_random_state(mesh)
        criteria[:] = [one if type(one).__name__ in ALIKE else _FirstRanks(one, mesh) for one in criteria]
        loop = getattr(super(), name)
        all_alike = type(processors)(
            one if is_of_transformers(one) and not holds_function(one) else _FirstRanksScores(one, mesh)
            for one in processors
        )
        chosen = partial(processed, all_alike) if name == "_sample" else all_alike
        return loop(ids, logits_processor=chosen, stopping_criteria=criteria, generation_config=config, **rest)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """False: a graph is captured already."""
        return False


ALIKE = ("MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria")
"""Criteria that come out alike on all ranks, since they see the tokens and nothing else."""


class _FirstRanks:
    """A stopping criterion of which the first rank decides: that of a clock would stop ranks at different tokens."""

    def __init__(self, criterion: Any, mesh: Mesh) -> None:
        self.criterion, self.mesh = criterion, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = agree(self.mesh, lambda: self.criterion(*args, **kwargs))
        return broadcast_from_first(torch.as_tensor(done, device=args[0].device).to(torch.uint8), self.mesh).bool()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.criterion, name)


class _FirstRanksScores:
    """A processor that is the user's or asks a function of theirs, which may draw numbers or read a file.

    The first rank's scores count.
    """

    def __init__(self, processor: Any, mesh: Mesh) -> None:
        self.processor, self.mesh = processor, mesh

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        found = agree(self.mesh, lambda: self.processor(input_ids, scores))
        return broadcast_from_first(found.contiguous(), self.mesh)


# ---- logits processors

EACH = ("TemperatureLogitsWarper", "InfNanRemoveLogitsProcessor")
"""Every score for itself."""

ADDED = (
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "SuppressTokensLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor", "PrefixConstrainedLogitsProcessor",
)  # fmt: skip
"""What is added, often -inf, follows from the tokens so far; each rank finds it by itself, from scores of zero."""

SCALED = ("RepetitionPenaltyLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor")
"""A penalty on some columns; which, each rank finds from scores of one."""

AMONG = (
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
)  # fmt: skip
"""The scores of a row by their sizes, wherever they stand; one of -inf does not count."""


def processed(processors: Any, tokens: Tensor, logits: Any) -> Any:
    """The scores that a list of logits processors makes of the last position's logits.

    What a processor not known here reads is whole: the row is gathered for it, unless top-k has left only a few.

    Args:
        tokens: [batch seq], those so far.
        logits: [batch vocab], cut or whole.
    """
    if not isinstance(logits, Sharded):
        return processors(tokens, logits)
    scores: CutScores | Few | Tensor = CutScores.of(logits)
    for processor in processors:
        scores = _after(processor, tokens, scores, logits)
    return scores


def _after(processor: Any, tokens: Tensor, scores: Any, logits: Sharded) -> Any:
    kind = type(processor.processor if isinstance(processor, _FirstRanksScores) else processor)
    name = kind.__name__ if kind.__module__ == "transformers.generation.logits_process" else ""
    if isinstance(scores, CutScores | Few) and name in ADDED:
        return scores.added(processor(tokens, torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)))
    if isinstance(scores, Few):
        every = name in AMONG
        return scores.each(lambda row: processor(tokens, row)) if every else processor(tokens, scores.whole())
    if isinstance(scores, CutScores):
        found = _of_columns(processor, name, tokens, scores)
        return processor(tokens, scores.whole(logits)) if found is None else found
    return processor(tokens, scores)


def _of_columns(processor: Any, name: str, tokens: Tensor, scores: CutScores) -> CutScores | Few | None:
    """What a processor makes of scores that are cut; None where it needs them whole."""
    if name in EACH:
        return replace(scores, values=processor(tokens, scores.values))
    if name == "TopKLogitsWarper" and processor.filter_value == NOTHING:
        return scores.top(processor.top_k)
    if name in SCALED:
        tried = processor(tokens, scores.values.new_ones(len(tokens), scores.width))
        return scores.scaled(tried != 1, processor.penalty)
    return None
