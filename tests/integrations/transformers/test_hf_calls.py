"""Hugging Face models as they are called: eager and sdpa attention, masks, packed rows, embeddings, hidden states."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hugging_face import checkpoint_blocks, tiny
from torch import Tensor, nn

import autotp

transformers = pytest.importorskip("transformers")
Inputs = dict[str, Any]
Call = Callable[[nn.Module, Inputs], Inputs]
CAUSAL = ("gpt2", "llama", "qwen3", "bloom", "falcon-new")
FAMILIES = (*CAUSAL, "bert", "t5")
PACKING = ("gpt2", "llama", "qwen3")
"""Those that keep packed texts apart."""


OTHERS: dict[str, tuple[str, str, Inputs]] = {
    # Slices between bounds that the values of a tensor give.
    "deberta": ("DebertaConfig", "AutoModelForMaskedLM", {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 80,
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": 32}),
    "xlm": ("XLMConfig", "XLMWithLMHeadModel", {
        "emb_dim": 48, "n_layers": 2, "n_heads": 6, "max_position_embeddings": 32}),
    # A torch.autograd.Function of transformers with a backward of its own.
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 40, "num_local_experts": 4, "pad_token_id": 0}),
    "xlnet": ("XLNetConfig", "XLNetLMHeadModel", {"d_model": 48, "n_layer": 2, "n_head": 6, "d_inner": 80}),
}  # fmt: skip
"""Families that are not in the table, for what is odd in them."""


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.rare)])
def test_hidden_states_are_returned_in_each_kind_of_call(name: str) -> None:
    """The hooks that collect them are registered in the first such call, and are there in a call of another kind."""
    torch.manual_seed(0)
    model, given = tiny(name)
    parallel = autotp.parallelize(copy.deepcopy(model.eval()), 1, example_inputs=given)
    for wanted in (False, True, False, True):
        for rows in (2, 1):
            inputs = {key: x[:rows] for key, x in given.items()} | {"output_hidden_states": wanted}
            found, expected = parallel(**inputs).hidden_states, model(**inputs).hidden_states
            assert (found is None) == (expected is None)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "mixtral", "gpt_oss"])
def test_tp_plan_of_transformers_is_a_choice_of_cuts(name: str) -> None:
    """Their styles name the cuts that autotp finds without them."""
    model, example = tiny(name)
    found = autotp.explain(model, 2, example_inputs=example)
    assert autotp.explain(model, 2, example_inputs=example, cut=model._tp_plan).cuts == found.cuts
    with pytest.warns(UserWarning, match="no parameter has this name"):  # a plan for all sizes of a class
        autotp.explain(model, 2, example_inputs=example, cut={"no.such.experts": "grouped_gemm"})
    by_hand = autotp.explain(model, 2, example_inputs=example, cut={**model._tp_plan, "o_proj": "whole"})
    assert {row.name for row in by_hand.whole} - {row.name for row in found.whole} == {
        row.name for row in found.cuts if ".o_proj.weight" in row.name
    }


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # in transformers
@pytest.mark.parametrize(
    "name", ["deberta", "phimoe", *(pytest.param(n, marks=pytest.mark.rare) for n in ("xlm", "xlnet"))]
)
def test_odd_families_equal_one_device(name: str) -> None:
    config, kind, sizes = OTHERS[name]
    torch.manual_seed(0)
    built = getattr(transformers, config)(vocab_size=99, **sizes)
    own = getattr(transformers, kind)
    model = own.from_config(built) if kind.startswith("Auto") else own(built)
    x = torch.arange(14).view(2, 7) * 17 % 94 + 5
    report = autotp.verify(model, 2, example_inputs={"input_ids": x, "labels": x})
    assert report.ok, report


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.rare)])
def test_checkpointed_blocks_equal_one_device(name: str) -> None:
    """What is computed twice is erased from the graph, and in verify the model keeps what it computes once."""
    model, given = tiny(name)
    checkpoint_blocks(model)
    report = autotp.verify(model.train(), 2, example_inputs=given)
    assert report.ok, report
    assert all(module.gradient_checkpointing for module in model.modules() if hasattr(module, "gradient_checkpointing"))


def no_mask(model: nn.Module, given: Inputs) -> Inputs:
    return {name: value for name, value in given.items() if name != "attention_mask"}


def padding(model: nn.Module, given: Inputs) -> Inputs:
    """The second row is shorter by two: at its end, and for causal models at its start, as for generation."""
    mask = torch.ones_like(given["input_ids"])
    mask[-1, -2:] = 0
    mask = mask.flip(1) if model.config.model_type in ("gpt2", "llama") else mask
    return given | {"attention_mask": mask, "labels": given["labels"].masked_fill(mask == 0, -100)}


def packed(model: nn.Module, given: Inputs) -> Inputs:
    """Two texts in each row, told by positions that start again, and no mask. (With a cache they would be one.)"""
    length = given["input_ids"].shape[1]
    positions = torch.tensor([*range(length - 3), *range(3)]).expand_as(given["input_ids"]).contiguous()
    return no_mask(model, given) | {"position_ids": positions, "use_cache": False}


def no_labels(model: nn.Module, given: Inputs) -> Inputs:
    """A forward alone; an encoder and decoder is told what it decodes."""
    rest = {name: value for name, value in given.items() if name != "labels"}
    seq2seq = model.config.is_encoder_decoder
    return rest | ({"decoder_input_ids": given["input_ids"][:, :5]} if seq2seq else {})


def embeddings(model: nn.Module, given: Inputs) -> Inputs:
    """Embeddings in place of tokens, of which a gradient is wanted."""
    rest = {name: value for name, value in given.items() if name != "input_ids"}
    size = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator, union-attr]
    count = given["input_ids"].numel() * size
    return rest | {"inputs_embeds": torch.linspace(-1, 1, count).view(*given["input_ids"].shape, size)}


def hidden_states(model: nn.Module, given: Inputs) -> Inputs:
    return given | {"output_hidden_states": True}


def attentions(model: nn.Module, given: Inputs) -> Inputs:
    """The weights of every head, which only eager attention has."""
    return given | {"output_attentions": True}


CALLS: tuple[Call, ...] = (no_mask, padding, packed, no_labels, embeddings, hidden_states, attentions)


USUAL = {
    "falcon-new-no_mask-eager", "bloom-padding-eager", "qwen3-packed-eager", "llama-no_labels-sdpa",
    "gpt2-embeddings-eager", "gpt2-hidden_states-sdpa", "bert-attentions-eager",
}  # fmt: skip
"""Each call once."""


def cases() -> list[Any]:
    """Every family in every call and both attentions."""
    found = []
    for family, call in itertools.product(FAMILIES, CALLS):
        for how in attentions_of(family, call):
            name = f"{family}-{call.__name__}-{how}"
            marks = () if name in USUAL else pytest.mark.rare
            found.append(pytest.param(family, call, how, marks=marks, id=name))
    assert {case.id for case in found} >= USUAL
    return found


def attentions_of(family: str, call: Call) -> tuple[str, ...]:
    """How the family can compute attention in this call."""
    if call is packed and family not in PACKING:
        return ()
    return ("eager",) if call is attentions or family == "bloom" else ("eager", "sdpa")


@pytest.mark.parametrize(("family", "call", "attention"), cases())
def test_calls_of_families_equal_one_device(family: str, call: Call, attention: str) -> None:
    model, given = tiny(family, attention)
    inputs: dict[str, Tensor] = call(model, given)
    report = autotp.verify(model, 2, example_inputs=inputs)
    assert report.ok, report


def test_packed_rows_stay_apart() -> None:
    """The graph of a call with one text in each row is right for two: the second does not see the first."""
    model, given = tiny("llama")
    two = no_labels(model, packed(model, given))
    one = two | {"position_ids": torch.arange(7).expand(2, 7).contiguous()}
    other = two | {"input_ids": two["input_ids"].index_fill(1, torch.arange(4), 50)}
    expected = [model(**inputs).logits for inputs in (one, two, other)]
    parallel = autotp.parallelize(model, 1, example_inputs=one)
    found = [parallel(**inputs).logits for inputs in (one, two, other)]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[1][:, 4:], found[2][:, 4:])
    assert not torch.allclose(found[0][:, 4:], found[1][:, 4:])


@pytest.mark.parametrize("name", ["Wav2Vec2", "Data2VecAudio"])
def test_steps_that_are_masked_at_random(name: str) -> None:
    """SpecAugment draws its masks from numpy; it can be switched off, also where a configuration does not say so."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    config = getattr(transformers, f"{name}Config")(
        **sizes, **layers, num_conv_pos_embeddings=2, conv_pos_kernel_size=3, num_conv_pos_embedding_groups=2
    )
    model = getattr(transformers, f"{name}Model")(config).train()
    given = {"input_values": torch.randn(2, 4000)}
    assert autotp.verify(model, 2, example_inputs=given).ok
    model.config.apply_spec_augment = False
    assert autotp.verify(model, 2, example_inputs=given).ok
