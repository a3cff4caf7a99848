"""megatron_names: Megatron-LM's names of GPT and BERT, beside those of transformers and of autotp's own models.

    language_model.encoder.layers.0.self_attention.query_key_value.weight    [(heads 3 d)/tp, hidden]
    transformer.h.0.attn.c_attn.weight                                       [hidden, (3 heads d)]

The names are those of Megatron-LM's `language_model.py`, `bert_model.py` and `transformer.py` ("mcore" has others).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Cut = Literal["whole", "rows", "columns", "vocabulary", "heads"]
"""How the tensor-parallel ranks hold a tensor: each the whole; a part of the first dimension; a part of the second; a
part of the padded vocabulary; queries, keys and values of some heads."""


@dataclass(frozen=True)
class Row:
    """A tensor. theirs: its name in Megatron-LM; ours: its names elsewhere (queries, keys and values may be three)"""

    theirs: str
    ours: tuple[str, ...]
    cut: Cut = "whole"
    turned: bool = False  # transformers' Conv1D has the transposed weight.


@dataclass(frozen=True)
class Names:
    """The names of a library for one kind of model.

    Attributes:
        kind: "GPT" or "BERT".
        outside: (Megatron's name, own name, cut), outside of layers.
        inside: the same for layers, without `weight` and `bias`; queries, keys and values have three names or one.
        layer: the own prefix of a layer.
        turned: whether weights of layers are transposed.
        tied: own names of tensors that are the word embedding or another tensor once more -> that name.
    """

    kind: str
    outside: tuple[tuple[str, str, Cut], ...]
    inside: tuple[tuple[str, tuple[str, ...], Cut], ...]
    layer: str
    tied: tuple[tuple[str, str], ...] = ()
    turned: bool = False

    def rows(self, layers: int) -> Iterator[Row]:
        """Yields the tensors of a model of so many layers."""
        for theirs, ours, cut in self.outside:
            yield Row(theirs, (ours,), cut)
        for i in range(layers):
            for theirs, ours_of, cut in self.inside:
                for kind in ("weight", "bias"):
                    own = tuple(f"{self.layer}.{i}.{name}.{kind}" for name in ours_of)
                    # The bias behind a product that is summed over ranks is whole on each.
                    how: Cut = "whole" if kind == "bias" and cut == "columns" else cut
                    turned = self.turned and kind == "weight" and cut != "whole"
                    yield Row(f"language_model.encoder.layers.{i}.{theirs}.{kind}", own, how, turned)


def _both(theirs: str, ours: str) -> tuple[tuple[str, str, Cut], ...]:
    return tuple((f"{theirs}.{kind}", f"{ours}.{kind}", "whole") for kind in ("weight", "bias"))


EMBEDDING, ENCODER = "language_model.embedding", "language_model.encoder"
WORDS, POSITIONS, SEGMENTS = (
    f"{EMBEDDING}.{name}_embeddings.weight" for name in ("word", "position", "tokentype")
)  # fmt: skip
HEAD = "language_model.output_layer.weight"
"""A GPT's head of its own."""


def _inside(
    norm: str, fused: tuple[str, ...], out: str, second: str, up: str, down: str
) -> tuple[tuple[str, tuple[str, ...], Cut], ...]:
    return (
        ("input_layernorm", (norm,), "whole"),
        ("self_attention.query_key_value", fused, "heads"),
        ("self_attention.dense", (out,), "columns"),
        ("post_attention_layernorm", (second,), "whole"),
        ("mlp.dense_h_to_4h", (up,), "rows"),
        ("mlp.dense_4h_to_h", (down,), "columns"),
    )


GPT_LAYER = _inside("ln_1", ("attn.c_attn",), "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
LIBRARIES: dict[str, Names] = {
    "gpt2": Names(
        "GPT",
        (
            (WORDS, "transformer.wte.weight", "vocabulary"),
            (POSITIONS, "transformer.wpe.weight", "whole"),
            *_both(f"{ENCODER}.final_layernorm", "transformer.ln_f"),
        ),
        GPT_LAYER,
        "transformer.h",
        (("lm_head.weight", "transformer.wte.weight"),),
        turned=True,
    ),
    "megatron-bert": Names(
        "BERT",
        (
            (WORDS, "bert.embeddings.word_embeddings.weight", "vocabulary"),
            (POSITIONS, "bert.embeddings.position_embeddings.weight", "whole"),
            (SEGMENTS, "bert.embeddings.token_type_embeddings.weight", "whole"),
            *_both(f"{ENCODER}.final_layernorm", "bert.encoder.ln"),
            *_both("language_model.pooler.dense", "bert.pooler.dense"),
            *_both("lm_head.dense", "cls.predictions.transform.dense"),
            *_both("lm_head.layernorm", "cls.predictions.transform.LayerNorm"),
            ("lm_head.bias", "cls.predictions.bias", "vocabulary"),
            *_both("binary_head", "cls.seq_relationship"),
        ),
        _inside(
            "attention.ln", tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
            "attention.output.dense", "ln", "intermediate.dense", "output.dense",
        ),
        "bert.encoder.layer",
        (
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ),
    ),
    "autotp.models.gpt": Names(
        "GPT",
        (
            (WORDS, "wte.weight", "vocabulary"),
            (POSITIONS, "wpe.weight", "whole"),
            *_both(f"{ENCODER}.final_layernorm", "ln_f"),
        ),
        GPT_LAYER,
        "h",
    ),
    "autotp.models.bert": Names(
        "BERT",
        (
            (WORDS, "embeddings.word.weight", "vocabulary"),
            (POSITIONS, "embeddings.position.weight", "whole"),
            (SEGMENTS, "embeddings.segment.weight", "whole"),
            *_both(f"{ENCODER}.final_layernorm", "norm"),
            *_both("language_model.pooler.dense", "pooler"),
            *_both("lm_head.dense", "mlm.transform"),
            *_both("lm_head.layernorm", "mlm.norm"),
            ("lm_head.bias", "mlm.bias", "vocabulary"),
            *_both("binary_head", "nsp"),
        ),
        _inside(
            "attention_norm", tuple(f"attention.{name}" for name in ("query", "key", "value")),
            "attention.output", "mlp_norm", "mlp.intermediate", "mlp.output",
        ),
        "layer",
    ),
}  # fmt: skip
"""Library and kind -> its names. The first of each kind is that of transformers."""
