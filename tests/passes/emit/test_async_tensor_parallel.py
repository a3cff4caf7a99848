"""async_tensor_parallel: torch fuses the collectives of a block with its products; all are counted; numbers stay.

Here torch's fused operators are its own fallbacks, which gather and then multiply, and Inductor's passes run without
its code generation, but in the rare test.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import astuple
from typing import Any

import pytest
import torch
from graphs import as_on_gpus
from ranks import run_ranks
from small_models import gpt
from torch import Tensor, fx, nn

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.passes.emit.async_tensor_parallel import BlockFusion, FusedPairs

SIZES: dict[str, Any] = {"block_size": 16, "vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 16}


def model_of(name: str) -> nn.Module:
    """A model in float64."""
    torch.manual_seed(0)
    if name == "gpt":
        return gpt(**SIZES).double()
    if name == "bert":
        return BERT(BERTConfig(**SIZES, dropout=0.0)).double()
    transformers: Any = pytest.importorskip("transformers")
    if name == "gpt2":
        sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        return transformers.GPT2LMHeadModel(config).double()
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config).double()


def batch_of(name: str, rows: int, length: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(length)
    tokens, labels = torch.randint(61, (2, rows, length), generator=draw)
    if name == "bert":
        more = {"mask": tokens.sign(), "next_sentence": torch.randint(2, (rows,), generator=draw)}
        return {"tokens": tokens, "types": tokens % 2, "labels": labels, **more}
    return {"tokens" if name == "gpt" else "input_ids": tokens, "labels": labels}


def loss_of(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0] if isinstance(found, tuple) else found.loss


def fused_step(
    rank: int, n: int, name: str, shapes: list[tuple[int, int]], how: dict[str, Any], code: bool
) -> list[tuple[int, ...]]:
    """Compares steps on batches of these shapes with one device; returns what was fused, graph by graph."""
    whole = model_of(name)
    cut = autotp.parallelize(
        copy.deepcopy(whole), n, example_inputs=batch_of(name, *shapes[0]), **{"sequence_parallel": True} | how
    )
    with as_on_gpus(code):
        fused = cut.compile_blocks(async_tp=True)
        for rows, length in shapes:
            batch = batch_of(name, rows, length)
            found, expected = (loss_of(model(**batch)) for model in (cut, whole))
            for model, loss in ((cut, found), (whole, expected)):
                model.zero_grad()
                loss.backward()
            near = {"rtol": 0, "atol": 1e-12 if name in ("gpt", "bert") else 1e-6}  # transformers' norms are float32.
            torch.testing.assert_close(found, expected, **near)
            for (path, p), one in zip(cut.named_parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.grad, one.grad, **near, msg=lambda m, at=path: f"{at}: {m}")
    assert isinstance(fused, FusedPairs)
    return [(*astuple(some), *astuple(every)) for some, every in fused.graphs]


ALL = (2, 2, 2, 2)
BLOCKS = {
    "gpt": [ALL, ALL],
    "gpt2": [ALL, ALL],  # Its products are of flattened rows, and add their bias.
    "bert": [ALL, (2, 1, 2, 2)],  # In backward, the gradients of queries, keys and values are added up.
    "llama": [(2, 2, 2, 3), ALL, (2, 0, 2, 2), (2, 0, 3, 2)],  # The first block has the sum of the embedding.
}
"""Of each graph, in the order of compiling: fused all-gathers and reduce-scatters, and all of them."""
RARE = pytest.mark.rare


STEPS = {
    **{name: (name, (2, 8), {}) for name in BLOCKS},
    "gpt-one-row": ("gpt", (1, 8), {}),
    "gpt-without-overlap": ("gpt", (2, 8), {"without": ("overlap",)}),
    "gpt-recomputed": ("gpt", (2, 8), {"recompute": "full"}),
}
OFTEN = ("gpt", "bert", "llama", "gpt-one-row")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", [pytest.param(one, marks=[RARE] * (one not in OFTEN)) for one in STEPS])
def test_async_tp_fuses_all_collectives_of_a_step(step: str) -> None:
    name, shape, how = STEPS[step]
    found = run_ranks(fused_step, 2, name, [shape], how, False, timeout=250)
    assert found == [BLOCKS[name], BLOCKS[name]]


@pytest.mark.rare
@pytest.mark.timeout(300)
def test_async_tp_generated_code_takes_any_length() -> None:
    """Also of any length. The ranks do not divide the second: its collectives are not fused, without an error."""
    found = run_ranks(fused_step, 2, "gpt", [(2, 8), (2, 7), (2, 12), (3, 16)], {}, True, timeout=280)
    assert found == [[ALL, ALL, (0, 0, 2, 2), (0, 0, 2, 2), ALL, ALL, ALL, ALL]] * 2


def first_odd(rank: int, n: int) -> tuple[str, str]:
    """What is said of a first length that the ranks do not divide, and then of what is fused."""
    batch = batch_of("gpt", 2, 7)
    cut = autotp.parallelize(model_of("gpt"), n, sequence_parallel=True, example_inputs=batch)
    with as_on_gpus():
        fused = cut.compile_blocks(async_tp=True)
        before = str(fused)
        with pytest.raises(autotp.Error) as error:
            cut(**batch)
    return before, str(error.value)


def test_async_tp_without_fusion_is_an_error() -> None:
    message = (
        "compile_blocks(async_tp=True): torch fused 0 of the collectives of a block with products\n"
        "  got      1 graph: 0 of 2 all-gathers and 0 of 2 reduce-scatters are fused with products\n"
        "  try      sequences whose length tp divides\n"
        "  or       compile_blocks()"
    )
    none = "no graph was compiled yet: torch compiles in the first forward, and in the first backward"
    assert run_ranks(first_odd, 2) == [(none, message)] * 2


def refused(rank: int, n: int, sequence_parallel: bool, attends: bool, options: dict[str, Any]) -> str:
    if attends:
        model, batch = model_of("gpt"), batch_of("gpt", 2, 8)
    else:
        model, batch = Stack(), {"x": torch.ones(2, 8, 16)}
    cut = autotp.parallelize(model, n, sequence_parallel=sequence_parallel, example_inputs=batch)
    with ExitStack() as stack:
        if not attends:
            stack.enter_context(as_on_gpus())
        with pytest.raises(autotp.Error) as error:
            cut.compile_blocks(async_tp=True, **options)
    loss = cut(**batch)
    (loss if attends else loss.sum()).backward()  # As before.
    return str(error.value)


class Stack(nn.Module):
    """Blocks without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x


WITHOUT = "compile_blocks(async_tp=True) would fuse nothing: "
REFUSED = {
    "alone": (1, True, True, {}, "with tp=1 nothing is sent\n  try      compile_blocks()"),
    "sums": (
        2, False, True, {},
        "products are followed by all-reduces, and torch fuses all-gathers and reduce-scatters\n"
        "  try      sequence_parallel=True of autotp.parallelize\n  or       compile_blocks()",
    ),
    "backend": (
        2, True, True, {"backend": "aot_eager"},
        "the fusing is a pass of Inductor, and the backend is 'aot_eager'\n"
        "  try      compile_blocks(async_tp=True), without backend=\n"
        "  or       compile_blocks(backend='aot_eager')",
    ),
    "cpu": (
        2, True, True, {},
        "torch needs the symmetric memory of NVIDIA GPUs under NCCL, and the ranks are on cpu under gloo\n"
        "  try      compile_blocks()",
    ),
    "no-attention": (
        2, True, False, {},
        "no block of a graph has an all-gather or a reduce-scatter\n"
        "  try      a model whose plan has a line `sequence` with cut operators: print(model.plan)\n"
        "  or       compile_blocks()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_async_tp_refuses_settings_it_cannot_fuse(name: str) -> None:
    n, *how, message = REFUSED[name]
    assert run_ranks(refused, n, *how) == [WITHOUT + message] * n


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # in Inductor
def test_async_tp_keeps_the_user_s_options() -> None:
    def mine(graph: fx.Graph) -> None: ...

    how = BlockFusion(FusedPairs()).options(
        {"mode": "max-autotune", "dynamic": False, "options": {"post_grad_custom_post_pass": mine}}
    )
    assert set(how) == {"dynamic", "options"}, "torch takes a mode or options"
    assert how["options"]["max_autotune"] and how["options"]["_micro_pipeline_tp"]
    assert how["options"]["post_grad_custom_post_pass"][0] is mine and len(how["options"]) >= 4
    torch.compile(lambda x: x, **how)
