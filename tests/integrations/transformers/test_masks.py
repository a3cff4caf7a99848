"""masks: attention leaves out the masks that it leaves out on one device: a look at the padding decides it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from cards.spies import Traffic, host_waits
from ranks import Checks
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    DogeConfig,
    DogeModel,
    GemmaConfig,
    GemmaModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5Model,
)
from transformers.masking_utils import create_bidirectional_mask

import autotp
from autotp.compiler import analyse
from autotp.integrations.transformers.masks import as_on_one_device
from autotp.passes.capture import capture as capturing
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.program.program import CallState, Program
from autotp.rules.call import arguments_of
from autotp.runtime.module import executable_of

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 60}
IDS = torch.arange(2, 16).view(2, 7)
FULL, PADDED = torch.ones_like(IDS), (torch.arange(7) < torch.tensor([[7], [5]])).long()


TRIED: Any = capturing._tried
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
checks = Checks(cards=True)


def llama() -> nn.Module:
    return LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2))


def bert() -> nn.Module:
    return BertModel(BertConfig(**SIZES))


def t5() -> nn.Module:
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0, pad_token_id=0))


def umt5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = UMT5Config(vocab_size=60, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0, **sizes)
    return UMT5Model(config)


def bart() -> nn.Module:
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    sizes = {**dict.fromkeys(names, 2), "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 40}
    return BartModel(BartConfig(vocab_size=60, d_model=32, dropout=0.0, **sizes))


def doge() -> nn.Module:
    """Adds a mask of its own to the causal one; without a causal one its attention is not causal."""
    return DogeModel(DogeConfig(**SIZES, num_key_value_heads=2, keep_window_size=64))


class Mixed(GemmaModel):  # type: ignore[misc]
    """Gives causal masks to attention whose modules say that they are not causal, as PaliGemma."""

    def __init__(self) -> None:
        super().__init__(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8))
        for layer in self.layers:
            layer.self_attn.is_causal = False


def call(model: nn.Module, mask: Tensor | None) -> dict[str, Any]:
    given = {"input_ids": IDS, **({} if mask is None else {"attention_mask": mask})}
    decodes = isinstance(model, UMT5Model | BartModel | T5ForConditionalGeneration)
    return {**given, "decoder_input_ids": IDS} if decodes else given


@pytest.mark.system
@pytest.mark.parametrize("mask", [FULL, PADDED, None], ids=["full", "padded", "none"])
@pytest.mark.parametrize("make", [umt5, bart, Mixed, doge], ids=["umt5", "bart", "mixed", "doge"])
def test_masks_equal_one_device(make: Any, mask: Tensor | None) -> None:
    torch.manual_seed(0)
    model = make().eval()
    report = autotp.verify(model, 2, example_inputs=call(model, mask))
    assert report.ok, report


def program(model: nn.Module, mask: Tensor | None, looks: bool = True) -> Program:
    return analyse(skeleton_of(model.eval()), (), call(model, mask), 2, call=CallState(looks=looks))


def reads(model: nn.Module, mask: Tensor | None, looks: bool = True) -> list[Any]:
    return [read.outcome.value for read in program(model, mask, looks).captured.asked]


@pytest.mark.parametrize("mask", [FULL, PADDED, None], ids=["full", "padded", "none"])
def test_masks_of_plain_kinds_need_no_look_at_the_padding(mask: Tensor | None) -> None:
    """Causal masks for causal modules, bidirectional ones for the others: such a graph is right for all padding."""
    assert reads(llama(), mask, looks=False) == []
    assert reads(bert(), mask, looks=False) == []


def attentions(model: nn.Module, mask: Tensor | None, looks: bool = True) -> set[tuple[bool, bool, int]]:
    """Whether attention gets a mask, whether it is causal, and the heads of its keys."""
    calls = [node for node in program(model, mask, looks).graph.nodes if node.target is ATTENTION]
    assert len(calls) == 3
    given = map(arguments_of, calls)
    return {(x["attn_mask"] is not None, x["is_causal"], x["key"].meta["val"].shape[1]) for x in given}


def test_attention_is_called_as_on_one_device() -> None:
    """Two key heads stay two where there is no mask: torch's kernels take them as they are."""
    for mask in (FULL, None):
        assert attentions(llama(), mask) == {(False, True, 2)}
        assert attentions(bert(), mask) == {(False, False, 4)}
    for looks in (True, False):
        assert attentions(llama(), PADDED, looks) == {(True, False, 4)}
        assert attentions(bert(), PADDED, looks) == {(True, False, 4)}


def test_a_batch_with_padding_is_captured_once() -> None:
    """The masks among the arguments tell what the look gives before it is made."""
    runs = list[int]()
    with patch.object(capturing, "_tried", lambda *a: runs.append(1) or TRIED(*a)):  # type: ignore[func-returns-value]
        for mask in (FULL, PADDED):
            program(llama(), mask)
    assert len(runs) == 2


class OtherName(nn.Module):
    """Calls its mask by a name that tells nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: Tensor, seen: Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=seen)[0]


def test_a_mask_of_another_name_is_read() -> None:
    """Without padding is assumed, and is found wrong."""
    found = analyse(skeleton_of(OtherName().eval()), (IDS, PADDED), {}, 2)
    assert [read.outcome.value for read in found.captured.asked] == [False, False]
    assert autotp.verify(OtherName().eval(), 2, example_inputs=(IDS, PADDED)).ok


class LearnedPadding(nn.Module):
    """Leaves out tokens that a layer chooses: no look at the arguments says whether it leaves out any."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.choose = llama(), nn.Embedding(60, 1)

    def forward(self, input_ids: Tensor) -> Any:
        seen = self.choose(input_ids)[..., 0] > -1
        return self.inner(input_ids=input_ids, attention_mask=seen)[0]


def test_a_mask_that_is_computed_is_kept() -> None:
    found = analyse(skeleton_of(LearnedPadding().eval()), (IDS,), {}, 2)
    assert found.captured.asked == ()
    assert autotp.verify(LearnedPadding().eval(), 2, example_inputs=IDS).ok


def test_no_look_where_blocks_are_captured_one_by_one() -> None:
    """Blocks that are alike, and cannot be captured once, are no reason to look: such a model may be distributed."""
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    given = {"input_ids": IDS, "labels": IDS, "decoder_input_ids": IDS, "attention_mask": PADDED}
    assert autotp.verify(model, 2, pp=2, microbatches=2, example_inputs={**given, "decoder_attention_mask": PADDED}).ok


def test_a_look_where_it_makes_a_difference() -> None:
    assert set(reads(Mixed(), FULL)) == {True}
    assert set(reads(Mixed(), PADDED)) == {False}
    assert set(reads(doge(), FULL)) == {True}
    assert set(reads(doge(), PADDED)) == {False}


class Expecting(nn.Module):
    """Takes no mask: on one device, without padding, transformers makes none. x: [rows, seq, 32]"""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.up = BertConfig(**SIZES, attn_implementation="eager"), nn.Linear(32, 32)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=padding)
        if mask is not None:
            raise ValueError(f"a mask of {mask.shape}")
        return self.up(x).square().mean()


def test_a_model_that_fails_with_a_mask() -> None:
    """It runs as on one device; with padding it fails there, too."""
    inputs = torch.randn(2, 7, 32), FULL
    assert autotp.verify(Expecting(), 2, example_inputs=inputs).ok
    with pytest.raises(autotp.Error, match="does not run on these inputs: ValueError: a mask of"):
        autotp.verify(Expecting(), 2, example_inputs=(inputs[0], PADDED))


def test_as_on_one_device_puts_the_functions_back() -> None:
    from transformers import masking_utils, modeling_utils

    before = masking_utils._ignore_causal_mask_sdpa, modeling_utils.AttentionInterface._global_mapping["sdpa"]
    with as_on_one_device(False, looks=True):
        assert masking_utils._ignore_causal_mask_sdpa is not before[0]
    assert (masking_utils._ignore_causal_mask_sdpa, modeling_utils.AttentionInterface._global_mapping["sdpa"]) == before


FLASH, MASKED = "attention that a flash kernel computes", "attention with a mask"


def stepped(model: nn.Module, given: dict[str, Any]) -> tuple[Tensor, Traffic]:
    """The first output of a call on a card, after backward, and what happened in the call."""
    on_card = {name: x.cuda() for name, x in given.items()}
    with host_waits() as traffic:
        found = model(**on_card)[0]
    found.sum().backward()
    return found.detach().cpu(), traffic


def pair(make: Any, n: int) -> tuple[nn.Module, nn.Module]:
    """A model on a card, and the same as `n` ranks."""
    torch.manual_seed(0)
    one = make().double().eval().cuda()
    torch.manual_seed(0)
    return one, autotp.parallelize(make().double().eval(), n, device="cuda")


@checks.on(2)
def batches_with_and_without_padding_by_turns(rank: int, n: int) -> None:
    """Attention gets what it gets on one card, after as many looks; ten steps capture two graphs more at most."""
    for make in (llama, bert, t5):
        one, cut = pair(make, n)
        stepped(cut, call(cut, PADDED if make is bert else FULL))
        first = len(executable_of(cut).graphs.entries)
        for step in range(10):
            given = call(one, PADDED if step % 2 else FULL)
            expected, theirs = stepped(one, given)
            found, ours = stepped(cut, given)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # Their norms are in float32.
            assert (ours.count(FLASH), ours.count(MASKED)) == (theirs.count(FLASH), theirs.count(MASKED)), make
            if step > 3:  # The ranks compare the first two calls of each graph.
                assert sum(ours.waits.values()) <= sum(theirs.waits.values()), f"{make}\n{ours}\n{theirs}"
        assert len(executable_of(cut).graphs.entries) <= first + 1
        for part in (one, cut):
            part.zero_grad()


@checks.on(2)
def tokens_are_decoded_as_on_one_card(rank: int, n: int) -> None:
    def make() -> nn.Module:
        return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, eos_token_id=None))

    one, cut = pair(make, n)
    left = (torch.arange(7) >= torch.tensor([[0], [2]])).long()
    for mask in (FULL, left, FULL):
        given = {"input_ids": IDS.cuda(), "attention_mask": mask.cuda(), "max_new_tokens": 5, "do_sample": False}
        with host_waits() as theirs:
            expected = one.generate(**given)
        with host_waits() as ours:
            found = cut.generate(**given)
        assert torch.equal(found, expected)
        assert (ours.count(FLASH), ours.count(MASKED)) == (theirs.count(FLASH), theirs.count(MASKED)), mask


@pytest.mark.system
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_cards(n: int, name: str) -> None:
    checks.expect(n, name)
