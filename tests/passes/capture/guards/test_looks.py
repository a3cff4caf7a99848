"""looks: a graph for batches without padding, and one for batches with padding; what cannot look keeps its masks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import autotp
from autotp.passes.capture.guards.looks import has_values, is_looking, looking, without_padding
from autotp.runtime.module import executable_of

IDS = torch.arange(2, 16).view(2, 7)
FULL, PADDED = torch.ones_like(IDS), (torch.arange(7) < torch.tensor([[7], [5]])).long()


def test_looking_ends_with_an_exception() -> None:
    with pytest.raises(ValueError, match="inside"), looking():
        assert is_looking()
        raise ValueError("inside")
    assert not is_looking()


def test_what_masks_tell_before_a_run() -> None:
    assert without_padding({"attention_mask": FULL, "input_ids": IDS * 0, "head_mask": None})
    assert not without_padding({"attention_mask": FULL, "decoder_attention_mask": PADDED})
    assert without_padding({"attention_mask": PADDED.to("meta")})
    assert has_values(IDS) and not has_values(IDS.to("meta")) and not has_values(3)


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaModel(LlamaConfig(vocab_size=60, num_key_value_heads=2, **sizes)).double().eval()


def outcomes(model: nn.Module) -> list[list[bool]]:
    """What Python read for each graph of a model."""
    entries = [entry for _, entry in executable_of(model).graphs.entries]
    return [[read.outcome.value for read in entry.analysis.captured.asked] for entry in entries]


def same(one: nn.Module, model: nn.Module, called: Any, mask: Tensor) -> None:
    given = {"input_ids": IDS, "attention_mask": mask, "use_cache": False}
    torch.testing.assert_close(called(**given)[0], one(**given)[0], rtol=1e-6, atol=1e-6)


def each_first(rank: int, n: int, masks: list[Tensor]) -> list[list[bool]]:
    one, cut = llama(), autotp.parallelize(llama(), n)
    for _ in range(3):
        for mask in masks:
            same(one, cut, cut, mask)
    return outcomes(cut)[1:]  # The first is that of `parallelize`.


def test_two_graphs_whichever_batch_comes_first() -> None:
    assert run_ranks(each_first, 2, [FULL, PADDED]) == [[[True], [False, False]]] * 2
    assert run_ranks(each_first, 2, [PADDED, FULL]) == [[[False, False], [True]]] * 2


def collectives_of_calls(rank: int, n: int) -> list[int]:
    from ranks import Collectives

    cut, counts = autotp.parallelize(llama(), n), []
    for mask in (FULL, PADDED) * 4:
        with Collectives() as seen, torch.no_grad():
            cut(input_ids=IDS, attention_mask=mask, use_cache=False)
        counts.append(sum(seen.counts.values()))
    return counts[-4:]


def test_ranks_do_not_ask_each_other() -> None:
    """Each looks for itself: no call sends more than one without a mask, once the first calls are compared."""
    (counts, *_) = run_ranks(collectives_of_calls, 2)
    assert len(set(counts)) == 1


def compiled(rank: int, n: int) -> None:
    one, cut = llama(), autotp.parallelize(llama(), n)
    torch._dynamo.reset()
    whole = torch.compile(cut, backend="eager")
    for mask in (FULL, PADDED, FULL):
        same(one, cut, whole, mask)
    assert outcomes(cut)[1:] == [[True], [False, False]]  # A call without its graph is not compiled as a whole.
    strict = torch.compile(cut, backend="eager", fullgraph=True)
    for mask in (PADDED, FULL):
        same(one, cut, strict, mask)


def test_code_that_is_compiled_as_a_whole_keeps_masks() -> None:
    run_ranks(compiled, 2, alone=True)


def strict_after_padding(rank: int, n: int) -> None:
    one, cut = llama(), autotp.parallelize(llama(), n)
    same(one, cut, cut, PADDED)
    strict = torch.compile(cut, backend="eager", fullgraph=True)
    for mask in (PADDED, FULL):
        same(one, cut, strict, mask)
    assert outcomes(cut)[1:] == [[False, False]]


def test_a_graph_with_masks_is_right_without_padding() -> None:
    run_ranks(strict_after_padding, 2, alone=True)


def recorded(rank: int, n: int) -> None:
    cut = autotp.parallelize(llama(), n, device="cuda")
    given = {"input_ids": IDS.cuda(), "use_cache": False}
    expected = cut(**given, attention_mask=FULL.cuda())[0]
    recording = patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
    with recording, pytest.raises(autotp.Error, match="a CUDA graph is recorded of a call of a kind that was not made"):
        cut(**given, attention_mask=FULL.cuda())
    for _ in range(2):  # The ranks compare the first two calls of each graph.
        cut(**given, attention_mask=PADDED.cuda())
    with recording:
        found = cut(**given, attention_mask=FULL.cuda())[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_recorded_cuda_graph_keeps_masks() -> None:
    run_ranks(recorded, 2, cards=True)
