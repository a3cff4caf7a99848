"""Checkpoints of Megatron-LM: files are written here as Megatron-LM lays them out, rank by rank and head by head."""

from __future__ import annotations

import enum
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import autotp
from autotp.checkpoint.conversion.content import Content, Held
from autotp.checkpoint.conversion.megatron_files import Target, is_megatron, read_megatron, write_megatron
from autotp.checkpoint.files.tensor_sources import read_whole

LAYERS, HEADS, SIZE, WORDS, PADDED, LENGTH = 4, 4, 3, 37, 48, 10
HIDDEN, WIDE = HEADS * SIZE, 20
ARGS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": WIDE,
    "max_position_embeddings": LENGTH, "padded_vocab_size": PADDED, "layernorm_epsilon": 1e-5, "openai_gelu": False,
    "bias_gelu_fusion": False, "hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02,
    "params_dtype": torch.float32, "swiglu": False, "num_experts": None,
}  # fmt: skip


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape) * 1000 + drawn.count()))


drawn.count = iter(range(10**6)).__next__  # type: ignore[attr-defined]


def weights(bert: bool) -> dict[str, Tensor]:
    """A model's whole tensors, under short names of this test. Padded words are in the embedding's last rows."""
    found = {"words": drawn(PADDED, HIDDEN), "positions": drawn(LENGTH, HIDDEN)}
    found |= {f"last.{kind}": drawn(HIDDEN) for kind in ("w", "b")}
    for i in range(LAYERS):
        for name in "qkvo":
            found |= {f"{i}.{name}.w": drawn(HIDDEN, HIDDEN), f"{i}.{name}.b": drawn(HIDDEN)}
        found |= {f"{i}.{norm}.{kind}": drawn(HIDDEN) for norm in ("n1", "n2") for kind in ("w", "b")}
        found |= {f"{i}.up.w": drawn(WIDE, HIDDEN), f"{i}.up.b": drawn(WIDE)}
        found |= {f"{i}.down.w": drawn(HIDDEN, WIDE), f"{i}.down.b": drawn(HIDDEN)}
    if bert:
        found |= {"segments": drawn(2, HIDDEN), "said": drawn(PADDED), "next.w": drawn(2, HIDDEN), "next.b": drawn(2)}
        found |= {f"{name}.w": drawn(HIDDEN, HIDDEN) for name in ("pool", "turn")}
        found |= {
            f"{name}.{kind}": drawn(HIDDEN) for name, kind in (("pool", "b"), ("turn", "b"), ("tn", "w"), ("tn", "b"))
        }
    return found


def qkv(w: dict[str, Tensor], layer: int, kind: str, heads: range, version: float) -> Tensor:
    """Queries, keys and values of a rank's heads, in the order of a version, row by row."""
    rows = []
    if version >= 2:
        order = [(head, part, d) for head in heads for part in "qkv" for d in range(SIZE)]
    elif version == 1:
        order = [(head, part, d) for head in heads for d in range(SIZE) for part in "qkv"]
    else:
        order = [(head, part, d) for part in "qkv" for head in heads for d in range(SIZE)]
    for head, part, d in order:
        rows.append(w[f"{layer}.{part}.{kind}"][head * SIZE + d])
    return torch.stack(rows)


def part(x: Tensor, rank: int, tp: int, dim: int = 0) -> Tensor:
    return x.chunk(tp, dim)[rank].clone()


def layer(w: dict[str, Tensor], i: int, here: int, rank: int, tp: int, version: float, old: bool) -> dict[str, Tensor]:
    """A layer's tensors on a rank, as Megatron-LM names them; old: before `self_attention`"""
    heads = range(rank * HEADS // tp, (rank + 1) * HEADS // tp)
    at, attention = f"layers.{here}", "attention" if old else "self_attention"
    return {
        f"{at}.input_layernorm.weight": w[f"{i}.n1.w"], f"{at}.input_layernorm.bias": w[f"{i}.n1.b"],
        f"{at}.{attention}.query_key_value.weight": qkv(w, i, "w", heads, version),
        f"{at}.{attention}.query_key_value.bias": qkv(w, i, "b", heads, version),
        f"{at}.{attention}.dense.weight": part(w[f"{i}.o.w"], rank, tp, 1),
        f"{at}.{attention}.dense.bias": w[f"{i}.o.b"],
        f"{at}.post_attention_layernorm.weight": w[f"{i}.n2.w"], f"{at}.post_attention_layernorm.bias": w[f"{i}.n2.b"],
        f"{at}.mlp.dense_h_to_4h.weight": part(w[f"{i}.up.w"], rank, tp),
        f"{at}.mlp.dense_h_to_4h.bias": part(w[f"{i}.up.b"], rank, tp),
        f"{at}.mlp.dense_4h_to_h.weight": part(w[f"{i}.down.w"], rank, tp, 1),
        f"{at}.mlp.dense_4h_to_h.bias": w[f"{i}.down.b"],
    }  # fmt: skip


def stage(
    w: dict[str, Tensor], mine: list[int], ends: tuple[bool, bool], rank: int, tp: int, version: float, old: bool
) -> dict[str, Any]:
    """What `model` has on a rank: some layers, and what is before the first and behind the last."""
    first, last = ends
    encoder: dict[str, Tensor] = {}
    for here, i in enumerate(mine):
        encoder |= layer(w, i, here, rank, tp, version, old)
    language: dict[str, Any] = {"transformer" if old else "encoder": encoder}
    model: dict[str, Any] = {"language_model": language}
    words = {"weight": part(w["words"], rank, tp)}
    if first:
        language["embedding"] = {"word_embeddings": words, "position_embeddings": {"weight": w["positions"]}}
        if "segments" in w:
            language["embedding"]["tokentype_embeddings"] = {"weight": w["segments"]}
    if last:
        encoder |= {"final_layernorm.weight": w["last.w"], "final_layernorm.bias": w["last.b"]}
        if not first:
            model["word_embeddings_for_head"] = words
        if "said" in w:
            language["pooler"] = {"dense.weight": w["pool.w"], "dense.bias": w["pool.b"]}
            model["lm_head"] = {
                "bias": part(w["said"], rank, tp), "dense.weight": w["turn.w"], "dense.bias": w["turn.b"],
                "layernorm.weight": w["tn.w"], "layernorm.bias": w["tn.b"],
            }  # fmt: skip
            model["binary_head"] = {"weight": w["next.w"], "bias": w["next.b"]}
    return model


def save(
    folder: Path, w: dict[str, Tensor], tp: int = 1, pp: int = 1, version: float = 3.0, *, chunks: int = 1,
    old: bool = False, args: dict[str, Any] | None = None, **more: Any,
) -> Path:  # fmt: skip
    """Writes the checkpoint of iteration 7."""
    own = Namespace(**{**ARGS, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **(args or {})})
    each = LAYERS // pp // chunks
    for rank in range(tp):
        for p in range(pp):
            models = {}
            for c in range(chunks):
                start = (c * pp + p) * each
                ends = c == p == 0, (c, p) == (chunks - 1, pp - 1)
                key = "model" if chunks == 1 else f"model{c}"
                models[key] = stage(w, list(range(start, start + each)), ends, rank, tp, version, old)
            at = folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{p:03d}" if pp > 1 else ""))
            at.mkdir(parents=True)
            content = {"args": own, "checkpoint_version": version, "iteration": 7, **models, **more}
            torch.save(content, at / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def gpt2_of(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as transformers' GPT-2 has it: transposed weights, queries, keys and values one behind the other."""
    found = {"transformer.wte.weight": w["words"][:WORDS], "transformer.wpe.weight": w["positions"]}
    found |= {"transformer.ln_f.weight": w["last.w"], "transformer.ln_f.bias": w["last.b"]}
    for i in range(LAYERS):
        at = f"transformer.h.{i}"
        for ours, theirs in (("ln_1", "n1"), ("ln_2", "n2")):
            found |= {f"{at}.{ours}.weight": w[f"{i}.{theirs}.w"], f"{at}.{ours}.bias": w[f"{i}.{theirs}.b"]}
        found[f"{at}.attn.c_attn.weight"] = torch.cat([w[f"{i}.{x}.w"] for x in "qkv"]).t()
        found[f"{at}.attn.c_attn.bias"] = torch.cat([w[f"{i}.{x}.b"] for x in "qkv"])
        for ours, theirs in (("attn.c_proj", "o"), ("mlp.c_fc", "up"), ("mlp.c_proj", "down")):
            found |= {f"{at}.{ours}.weight": w[f"{i}.{theirs}.w"].t(), f"{at}.{ours}.bias": w[f"{i}.{theirs}.b"]}
    return found


def expect_equal(content: Content, expected: dict[str, Tensor]) -> None:
    assert content.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        found = read_whole(content.tensors[name])
        assert found.shape == content.tensors[name].shape and torch.equal(found, tensor), name


LAYOUTS = pytest.mark.parametrize(
    ("tp", "pp", "chunks", "version", "old"),
    [(1, 1, 1, 3.0, False), (2, 1, 1, 3.0, False), (4, 2, 1, 3.0, False), (2, 2, 2, 3.0, False), (2, 1, 1, 2.0, True),
     (2, 1, 1, 1.0, True), (2, 1, 1, 0, True), (1, 4, 1, 0, False)],
    ids=["one", "tp2", "tp4-pp2", "interleaved", "version2", "version1", "version0", "pp4"],
)  # fmt: skip


@LAYOUTS
def test_a_gpt(tmp_path: Path, tp: int, pp: int, chunks: int, version: float, old: bool) -> None:
    w = weights(bert=False)
    content = read_megatron(save(tmp_path, w, tp, pp, version, chunks=chunks, old=old), WORDS)
    expect_equal(content, gpt2_of(w))
    assert content.step == 7 and content.notes == () and content.config is not None
    assert (content.config["vocab_size"], content.config["n_inner"], content.config["activation_function"]) == (
        WORDS, WIDE, "gelu",
    )  # fmt: skip


def test_transformers_opens_a_gpt(tmp_path: Path) -> None:
    """Its logits are those of the blocks as Megatron-LM computes them, from one rank's files."""
    transformers = pytest.importorskip("transformers")
    w = weights(bert=False)
    content = read_megatron(save(tmp_path, w, 2), WORDS)
    config = transformers.GPT2Config(**content.config, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config).eval().double()
    missing, unexpected = model.load_state_dict({n: read_whole(s) for n, s in content.tensors.items()}, strict=False)
    assert unexpected == [] and missing == ["lm_head.weight"]
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    with torch.no_grad():
        logits = model(tokens).logits[0]
    torch.testing.assert_close(logits, forward({n: x.double() for n, x in w.items()}, tokens[0]), rtol=1e-6, atol=1e-6)


def forward(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """A GPT as Megatron-LM's `transformer.py` computes it: heads are views of [heads, 3 d], split by three."""
    norm = torch.nn.functional.layer_norm
    x = w["words"][tokens] + w["positions"][: len(tokens)]
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for i in range(LAYERS):
        y = norm(x, (HIDDEN,), w[f"{i}.n1.w"], w[f"{i}.n1.b"], 1e-5)
        mixed = y @ qkv(w, i, "w", range(HEADS), 3.0).t() + qkv(w, i, "b", range(HEADS), 3.0)
        q, k, v = mixed.view(-1, HEADS, 3 * SIZE).chunk(3, -1)  # [seq heads d] each
        scores = torch.einsum("shd,thd->hst", q, k) / SIZE**0.5
        probabilities = scores.masked_fill(mask, -torch.inf).softmax(-1)
        y = torch.einsum("hst,thd->shd", probabilities, v).reshape(-1, HIDDEN)
        x = x + y @ w[f"{i}.o.w"].t() + w[f"{i}.o.b"]
        y = norm(x, (HIDDEN,), w[f"{i}.n2.w"], w[f"{i}.n2.b"], 1e-5)
        y = torch.nn.functional.gelu(y @ w[f"{i}.up.w"].t() + w[f"{i}.up.b"])
        x = x + y @ w[f"{i}.down.w"].t() + w[f"{i}.down.b"]
    return norm(x, (HIDDEN,), w["last.w"], w["last.b"], 1e-5) @ w["words"][:WORDS].t()


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_a_bert(tmp_path: Path, tp: int, pp: int) -> None:
    transformers = pytest.importorskip("transformers")
    w = weights(bert=True)
    content = read_megatron(save(tmp_path, w, tp, pp), WORDS)
    layer_0 = {name: read_whole(content.tensors[f"bert.encoder.layer.0.attention.self.{name}.weight"])
               for name in ("query", "key", "value")}  # fmt: skip
    assert all(torch.equal(layer_0[name], w[f"0.{name[0]}.w"]) for name in layer_0)
    assert torch.equal(read_whole(content.tensors["cls.predictions.bias"]), w["said"][:WORDS])
    assert torch.equal(read_whole(content.tensors["cls.seq_relationship.weight"]), w["next.w"])
    model = transformers.MegatronBertForPreTraining(transformers.MegatronBertConfig(**content.config))
    tensors = {n: read_whole(s) for n, s in content.tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert unexpected == [] and set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}


def test_words_that_pad_are_told(tmp_path: Path) -> None:
    save(tmp_path, weights(bert=False))
    content = read_megatron(tmp_path)
    assert content.tensors["transformer.wte.weight"].shape == (PADDED, HIDDEN)
    assert content.notes == (
        f"the vocabulary has {PADDED} words, with those that pad it: cut them with --vocab-size",
    )  # fmt: skip
    with pytest.raises(autotp.Error, match=f"has {PADDED} words, and not 99"):
        read_megatron(tmp_path, 99)


# ---- what is refused


class Positions(enum.Enum):
    """One of Megatron-LM's enumerations, which is not there when its file is read."""

    absolute = 1


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of this name, as long as files are written."""
    for name in ("megatron", "megatron.model", "megatron.model.enums"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(Positions, "__module__", "megatron.model.enums")
    sys.modules["megatron.model.enums"].Positions = Positions  # type: ignore[attr-defined]
    yield


def test_what_else_a_file_has_is_not_read(tmp_path: Path, megatron: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumerations, random states of numpy, and an optimizer."""
    w = weights(bert=False)
    state = {"np_rng_state": numpy.random.get_state(), "random_rng_state": random.getstate()}
    args = {"position_embedding_type": Positions.absolute}
    save(tmp_path, w, args=args, rng_state=[state], optimizer={"state": [numpy.float64(3)]})
    monkeypatch.delitem(sys.modules, "megatron.model.enums")
    expect_equal(read_megatron(tmp_path, WORDS), gpt2_of(w))


def touch(file: str) -> None:
    """What a file would call, if unpickling called functions."""
    Path(file).touch()


class Evil:
    """Touches a file if it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return touch, (str(self.file),)


@pytest.mark.parametrize("where", ["args", "model", "beside"])
def test_no_code_of_a_file_is_run(tmp_path: Path, where: str) -> None:
    evil, w = Evil(tmp_path / "touched"), weights(bert=False)
    args = {"num_layers": evil} if where == "args" else {}
    save(tmp_path / "m", w, args=args, **({"optimizer": evil} if where == "beside" else {}))
    file = tmp_path / "m" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    if where == "model":
        content = torch.load(file, weights_only=False)
        content["model"] = evil
        torch.save(content, file)
    if where == "beside":
        expect_equal(read_megatron(tmp_path / "m", WORDS), gpt2_of(w))
    else:
        with pytest.raises(autotp.Error):
            read_megatron(tmp_path / "m")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"swiglu": True}, "swiglu=True"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"normalization": "RMSNorm"}, "normalization='RMSNorm'"),
        ({"use_rotary_position_embeddings": True}, "use_rotary_position_embeddings=True"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True"),
        ({"tensor_model_parallel_size": 8}, "tensor_model_parallel_size is 8, and there are files of 2"),
        ({"num_layers": 3}, "not a GPT or BERT of Megatron-LM as autotp knows them"),
        ({"hidden_size": None}, "arguments have no hidden_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_models(tmp_path: Path, args: dict[str, Any], told: str) -> None:
    with pytest.raises(autotp.Error, match=told):
        read_megatron(save(tmp_path, weights(bert=False), 2, args=args))


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    w = weights(bert=False)
    save(tmp_path, w, 2, 2)
    at = tmp_path / "iter_0000007"
    content = torch.load(at / "mp_rank_01_001" / "model_optim_rng.pt", weights_only=False)
    content["model"]["word_embeddings_for_head"]["weight"] += 1
    torch.save(content, at / "mp_rank_01_001" / "model_optim_rng.pt")
    with pytest.raises(autotp.Error, match="of the last stage is not the word embedding of the first"):
        read_megatron(tmp_path)
    (at / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    (at / "mp_rank_01_001").rmdir()
    with pytest.raises(autotp.Error, match="tensor-parallel rank 1 of stage 1 is missing"):
        read_megatron(tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["mp_rank_99999999999", "mp_rank_00_99999999999"])
def test_numbers_of_ranks_that_are_not_there(tmp_path: Path, name: str) -> None:
    at = save(tmp_path, weights(bert=False), 2) / "iter_0000007"
    (at / name).mkdir()
    with pytest.raises(autotp.Error, match=r"tensor-parallel rank \d of stage \d is missing"):
        read_megatron(tmp_path)


@pytest.mark.timeout(30)
def test_layers_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(autotp.Error, match="num_layers is 1000000000000, and there are 52 tensors"):
        read_megatron(save(tmp_path, weights(bert=False), args={"num_layers": 10**12}))


@pytest.mark.parametrize("text", [b"../../x", b"9" * 5000, b"\xff\xfe", "\u0667".encode(), b"", b"8"])
def test_an_iteration_that_is_not_there(tmp_path: Path, text: bytes) -> None:
    (save(tmp_path, weights(bert=False)) / "latest_checkpointed_iteration.txt").write_bytes(text)
    with pytest.raises(autotp.Error, match=r"latest_checkpointed_iteration.txt says '.*', and there is no such"):
        read_megatron(tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("depth", [1, 60])
def test_dicts_that_are_there_twice(tmp_path: Path, depth: int) -> None:
    """Sixty levels with two names for each have more names than anybody can count."""
    file = save(tmp_path, weights(bert=False)) / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    inner: dict[str, Any] = {"x": torch.zeros(1)}
    for _ in range(depth):
        inner = {"a": inner, "b": inner}
    torch.save(content | {"model": {**content["model"], "more": inner}}, file)
    with pytest.raises(autotp.Error, match="of a rank's file is there twice"):
        read_megatron(tmp_path)


def test_ranks_that_hold_different_norms(tmp_path: Path) -> None:
    save(tmp_path, weights(bert=False), 2)
    file = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["language_model"]["encoder"]["layers.2.input_layernorm.bias"] += 1
    torch.save(content, file)
    with pytest.raises(autotp.Error, match="the tensor-parallel ranks hold different values of "):
        read_megatron(tmp_path)


# ---- writing


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("bert", [False, True], ids=["gpt", "bert"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_what_is_written_is_what_megatron_writes(tmp_path: Path, bert: bool, tp: int, pp: int) -> None:
    """The same names on the same ranks, nested alike, and the same values, but for the words that pad."""
    w = weights(bert)
    save(tmp_path / "theirs", w, tp, pp)
    content = read_megatron(tmp_path / "theirs", WORDS)
    write_megatron(tmp_path / "ours", content, Target(tp, pp, divisible=PADDED // tp))
    assert (
        is_megatron(tmp_path / "ours")
        and (tmp_path / "ours" / "latest_checkpointed_iteration.txt").read_text() == "release"
    )
    files = sorted(path.relative_to(tmp_path / "theirs" / "iter_0000007") for path in tmp_path.rglob("iter*/*/*.pt"))
    assert len(files) == tp * pp
    kept = {True: 0, False: 0}
    for file in files:
        theirs = torch.load(tmp_path / "theirs" / "iter_0000007" / file, weights_only=False)
        ours = torch.load(tmp_path / "ours" / "release" / file, weights_only=False)
        assert ours["checkpoint_version"] == 3.0 and vars(ours["args"]).items() >= {
            "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": WIDE, "padded_vocab_size": PADDED,
            "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "orig_vocab_size": WORDS,
        }.items()  # fmt: skip
        mine, its = flat(ours["model"]), flat(theirs["model"])
        assert mine.keys() == its.keys()
        for name in mine:
            words = "word_embeddings" in name or name == "lm_head/bias"
            rank = int(file.parent.name.split("_")[2])
            rows = max(0, min(PADDED // tp, WORDS - rank * PADDED // tp)) if words else len(its[name])
            assert mine[name].shape == its[name].shape and torch.equal(mine[name][:rows], its[name][:rows]), name
            kept[words] += 1
    assert kept[True] and kept[False]
    expect_equal(read_megatron(tmp_path / "ours"), {n: read_whole(s) for n, s in content.tensors.items()})


def test_padding_says_no_word(tmp_path: Path) -> None:
    content = read_megatron(save(tmp_path / "theirs", weights(bert=True)), WORDS)
    write_megatron(tmp_path / "ours", content, Target(divisible=16))
    model = torch.load(tmp_path / "ours/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    assert set(model["lm_head"]["bias"][WORDS:].tolist()) == {-10_000.0}
    assert not model["language_model"]["embedding"]["word_embeddings"]["weight"][WORDS:].any()


def test_a_head_of_its_own(tmp_path: Path) -> None:
    content = read_megatron(save(tmp_path / "theirs", weights(bert=False)), WORDS)
    tensors = {**content.tensors, "lm_head.weight": Held(drawn(WORDS, HIDDEN))}
    write_megatron(tmp_path / "ours", Content("torch", tensors, content.config), Target(2, 2, 8))
    again = read_megatron(tmp_path / "ours")
    expect_equal(again, {n: read_whole(s) for n, s in tensors.items()})
    assert again.config is not None and not again.config["tie_word_embeddings"]
    tied = {**content.tensors, "lm_head.weight": content.tensors["transformer.wte.weight"]}
    write_megatron(tmp_path / "tied", Content("torch", tied, content.config), Target())
    assert "lm_head.weight" not in read_megatron(tmp_path / "tied").tensors


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_models_of_autotp(tmp_path: Path, kind: str) -> None:
    """All tensors of the model, and no others."""
    from autotp.models.bert import BERT, BERTConfig
    from autotp.models.gpt import GPT, GPTConfig

    sizes: Any = {"block_size": LENGTH, "vocab_size": WORDS, "n_layer": LAYERS, "n_head": HEADS, "n_embd": HIDDEN}
    model = GPT(GPTConfig(**sizes)) if kind == "gpt" else BERT(BERTConfig(**sizes, norm="pre"))
    save(tmp_path, weights(kind == "bert"))
    content = read_megatron(tmp_path, WORDS, f"autotp.models.{kind}")
    assert content.tensors.keys() == model.state_dict().keys()
    write_megatron(tmp_path / "again", content, Target(2))
    expect_equal(read_megatron(tmp_path / "again", None, f"autotp.models.{kind}"),
                 {n: read_whole(s) for n, s in content.tensors.items()})  # fmt: skip
    with pytest.raises(autotp.Error, match=f"has no names for a {kind.upper()}"):
        read_megatron(tmp_path, WORDS, "gpt2" if kind == "bert" else "megatron-bert")


@pytest.mark.parametrize(
    ("config", "to", "told"),
    [
        ({}, Target(3), "num_attention_heads=4 does not divide by 3"),
        ({}, Target(1, 3), "num_layers=4 does not divide by 3"),
        ({"activation_function": "relu"}, Target(), "has no activation 'relu'"),
        ({"n_layer": 3}, Target(), "not those of a GPT of 3 layers"),
        ({"n_layer": None}, Target(), "the configuration has no n_layer"),
    ],
    ids=["heads", "stages", "activation", "layers", "none"],
)
def test_what_cannot_be_written(tmp_path: Path, config: dict[str, Any], to: Target, told: str) -> None:
    content = read_megatron(save(tmp_path / "theirs", weights(bert=False)), WORDS)
    with pytest.raises(autotp.Error, match=told):
        write_megatron(tmp_path / "ours", Content("torch", content.tensors, {**(content.config or {}), **config}), to)
    assert not (tmp_path / "ours").exists()
    with pytest.raises(autotp.Error, match="the model's configuration is not known"):
        write_megatron(tmp_path / "ours", Content("torch", content.tensors), to)
