"""Hugging Face families as tiny random models, built from configurations: nothing is downloaded.

`FAMILIES[name]()` returns a model and the keyword arguments of a training call. The sizes are difficult on purpose: six
heads, a vocabulary of 99, a width that three does not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Model = tuple[nn.Module, dict[str, Any]]
Sizes = dict[str, Any]
VOCAB, BATCH, SEQ = 99, 2, 7

SIZES: Sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
}
ROPE: Sizes = {**SIZES, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT: Sizes = {
    "vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 6,
    "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT: Sizes = {**SIZES, "max_position_embeddings": 32, "type_vocab_size": 2, "pad_token_id": 0}
SEQ2SEQ: Sizes = {
    "vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def tokens(low: int = 5) -> Tensor:
    """Returns token ids, [batch seq], none of which is special."""
    return torch.arange(BATCH * SEQ).view(BATCH, SEQ) * 17 % (VOCAB - low) + low


def language(config: str, head: str = "AutoModelForCausalLM", experts: str = "", **given: Any) -> Callable[[], Model]:
    """Returns a function that builds a model of tokens; `experts`: the implementation of experts, if it has any."""

    def build() -> Model:
        how = {"experts_implementation": experts} if experts else {}
        model = getattr(transformers, head).from_config(getattr(transformers, config)(**given), **how)
        x = tokens()
        inputs = {"input_ids": x, "attention_mask": torch.ones_like(x)}
        return model, inputs | HEADS.get(head, {"labels": x.masked_fill(x % 3 == 0, -100)})

    return build


def _choices() -> dict[str, Tensor]:
    x = tokens().unsqueeze(1).expand(-1, 2, -1).contiguous()
    return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": torch.tensor([0, 1])}


HEADS = {
    "AutoModelForSequenceClassification": {"labels": torch.tensor([0, 1])},
    "AutoModelForTokenClassification": {"labels": tokens() % 2},
    "AutoModelForQuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    "AutoModelForMultipleChoice": _choices(),
}
"""Name of the head -> the labels of its loss."""


def whisper() -> Model:
    """Returns a model from speech to text: an encoder of sound, a decoder of tokens."""
    config = transformers.WhisperConfig(
        **{
            **SEQ2SEQ,
            "max_source_positions": 10,
            "max_target_positions": 32,
            "num_mel_bins": 8,
            "begin_suppress_tokens": None,
        }
    )
    model = transformers.WhisperForConditionalGeneration(config)
    sound = torch.linspace(-1, 1, BATCH * 8 * 20).view(BATCH, 8, 20)
    return model, {"input_features": sound, "labels": tokens()}


def vit() -> Model:
    """Returns a model from images to classes."""
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=80, image_size=8, patch_size=4,
    )  # fmt: skip
    image = torch.linspace(-1, 1, BATCH * 3 * 64).view(BATCH, 3, 8, 8)
    return transformers.ViTForImageClassification(config), {"pixel_values": image, "labels": torch.tensor([0, 1])}


def clip() -> Model:
    """Returns a model of images and texts, with the loss that pairs them."""
    text = {**SIZES, "max_position_embeddings": 16, "eos_token_id": 98, "bos_token_id": 1, "pad_token_id": 0}
    vision = {**SIZES, "image_size": 8, "patch_size": 4}
    del vision["vocab_size"]
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=20)
    image = torch.linspace(-1, 1, BATCH * 3 * 64).view(BATCH, 3, 8, 8)
    x = tokens()
    inputs = {"input_ids": x, "attention_mask": torch.ones_like(x), "pixel_values": image, "return_loss": True}
    return transformers.CLIPModel(config), inputs


MASKED = "AutoModelForMaskedLM"
BATCHED, GROUPED = "batched_mm", "grouped_mm"
SEQ2SEQ_LM = "AutoModelForSeq2SeqLM"
FALCON: Sizes = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
MOE: Sizes = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "output_router_logits": True}
DEEPSEEK: Sizes = {
    "num_key_value_heads": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], Model]] = {
    "gpt2": language("GPT2Config", **GPT),
    "gpt_neo": language(
        "GPTNeoConfig", vocab_size=VOCAB, hidden_size=48, num_layers=2, num_heads=6, max_position_embeddings=32,
        attention_types=[[["global", "local"], 1]], window_size=4, bos_token_id=1, eos_token_id=2,
    ),
    "gptj": language("GPTJConfig", **GPT, rotary_dim=4),
    "gpt_neox": language("GPTNeoXConfig", **ROPE),
    "gpt_bigcode": language("GPTBigCodeConfig", **GPT),
    "gpt_bigcode-mha": language("GPTBigCodeConfig", **GPT, multi_query=False),
    "codegen": language("CodeGenConfig", **{**GPT, "n_head": 4}, rotary_dim=4),
    "opt": language("OPTConfig", **{**SIZES, "ffn_dim": 80, "word_embed_proj_dim": 48, "max_position_embeddings": 32}),
    "bloom": language("BloomConfig", vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=6),
    "falcon-mqa": language("FalconConfig", **FALCON, new_decoder_architecture=False, multi_query=True, alibi=False),
    "falcon-new": language("FalconConfig", **FALCON, new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "falcon-alibi": language("FalconConfig", **FALCON, new_decoder_architecture=False, multi_query=False, alibi=True),
    "mpt": language("MptConfig", vocab_size=VOCAB, d_model=48, n_heads=6, n_layers=2, max_seq_len=32),
    "llama": language("LlamaConfig", **ROPE, num_key_value_heads=2),
    "mistral": language("MistralConfig", **ROPE, num_key_value_heads=2, sliding_window=4),
    "qwen2": language("Qwen2Config", **ROPE, num_key_value_heads=2),
    "qwen3": language("Qwen3Config", **ROPE, num_key_value_heads=2, head_dim=8),
    "gemma": language("GemmaConfig", **ROPE, num_key_value_heads=1, head_dim=8),
    "gemma2": language("Gemma2Config", **ROPE, num_key_value_heads=2, head_dim=8, sliding_window=4),
    "gemma3": language("Gemma3TextConfig", **ROPE, num_key_value_heads=2, head_dim=8, sliding_window=4),
    "phi": language("PhiConfig", **ROPE),
    "phi3": language("Phi3Config", **ROPE, num_key_value_heads=2),
    "olmo": language("OlmoConfig", **ROPE),
    "olmo2": language("Olmo2Config", **ROPE),
    "stablelm": language("StableLmConfig", **ROPE, num_key_value_heads=2),
    "starcoder2": language("Starcoder2Config", **ROPE, num_key_value_heads=2),
    "cohere": language("CohereConfig", **ROPE, num_key_value_heads=2),
    "cohere2": language("Cohere2Config", **ROPE, num_key_value_heads=2, sliding_window=4),
    "granite": language("GraniteConfig", **ROPE, num_key_value_heads=2),
    "persimmon": language("PersimmonConfig", **ROPE),
    "deepseek_v3": language("DeepseekV3Config", experts=GROUPED, **ROPE, **DEEPSEEK),
    "gpt_oss": language(
        "GptOssConfig", experts=GROUPED, **ROPE, num_key_value_heads=2, head_dim=8,
        num_local_experts=4, num_experts_per_tok=2,
    ),
    "mixtral": language("MixtralConfig", experts=GROUPED, **ROPE, **MOE, num_local_experts=4),
    "mixtral-batched": language("MixtralConfig", experts=BATCHED, **ROPE, **MOE, num_local_experts=4),
    "qwen3_moe": language(
        "Qwen3MoeConfig", experts=BATCHED, **ROPE, **MOE, num_experts=4, moe_intermediate_size=20, head_dim=8,
    ),
    "bert": language("BertConfig", MASKED, **BERT),
    "roberta": language("RobertaConfig", MASKED, **BERT),
    "distilbert": language(
        "DistilBertConfig", MASKED, vocab_size=VOCAB, dim=48, n_layers=2,
        n_heads=6, hidden_dim=80, max_position_embeddings=32
    ),
    "deberta_v2": language(
        "DebertaV2Config", MASKED, **BERT, relative_attention=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False
    ),
    "electra": language("ElectraConfig", MASKED, **BERT, embedding_size=24),
    "albert": language("AlbertConfig", MASKED, **BERT, embedding_size=24),
    "mpnet": language("MPNetConfig", MASKED, **{**BERT, "type_vocab_size": 1}),
    "modernbert": language("ModernBertConfig", MASKED, **ROPE, cls_token_id=1, sep_token_id=2),
    "t5": language(
        "T5Config", SEQ2SEQ_LM, vocab_size=VOCAB, d_model=48, d_kv=8, d_ff=80, num_layers=2, num_heads=6,
        decoder_start_token_id=0,
    ),
    "bart": language("BartConfig", SEQ2SEQ_LM, **SEQ2SEQ),
    "marian": language("MarianConfig", SEQ2SEQ_LM, **SEQ2SEQ),
    "pegasus": language("PegasusConfig", SEQ2SEQ_LM, **SEQ2SEQ),
    "whisper": whisper,
    "vit": vit,
    "clip": clip,
    "bert-sequence": language("BertConfig", "AutoModelForSequenceClassification", **BERT),
    "bert-token": language("BertConfig", "AutoModelForTokenClassification", **BERT),
    "bert-answer": language("BertConfig", "AutoModelForQuestionAnswering", **BERT),
    "bert-choice": language("BertConfig", "AutoModelForMultipleChoice", **BERT),
    "llama-sequence": language("LlamaConfig", "AutoModelForSequenceClassification", **ROPE, num_key_value_heads=2),
}  # fmt: skip
