"""What a rank holds after `parallelize`: its part of what is cut, what is replicated, and nothing of the full model."""

from __future__ import annotations

from dataclasses import dataclass

import memory
import pytest
import torch
from ranks import run_ranks
from torch import nn

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig

EVEN = {"block_size": 8, "vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 16}
UNEVEN = EVEN | {"vocab_size": 67, "n_head": 3, "n_embd": 12}
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Held:
    """What one rank found, in bytes; `left` and `late` count full tensors."""

    sizes: memory.Sizes
    left: int
    late: int
    cut: dict[str, int]


def taken(rank: int, tp: int, build: type[nn.Module], config: GPTConfig | BERTConfig) -> Held:
    model = build(config)
    fullness = memory.Fullness(model)
    with fullness.watch():
        parallel = autotp.parallelize(model)
    parts = {name: p.to_local() for name, p in parallel.named_parameters() if parallel.layouts[name].dim is not None}
    cut = {name: p.numel() * FLOAT for name, p in parts.items()}
    return Held(memory.sizes(parallel), fullness.alive(), fullness.late(parallel.layouts), cut)


@pytest.mark.parametrize(
    ("config", "tp"),
    [
        pytest.param(GPTConfig(**EVEN), 2, id="gpt-2"),
        pytest.param(BERTConfig(**EVEN), 4, id="bert-4", marks=pytest.mark.rare),
        pytest.param(GPTConfig(**EVEN), 4, id="gpt-4", marks=pytest.mark.rare),
        pytest.param(BERTConfig(**EVEN), 2, id="bert-2", marks=pytest.mark.rare),
    ],
)
def test_rank_holds_its_part_and_what_is_replicated(config, tp):
    build = GPT if isinstance(config, GPTConfig) else BERT
    whole = memory.stored(build(config))
    for found in run_ranks(taken, tp, build, config):
        assert found.sizes.cut + found.sizes.replicated == whole
        assert found.sizes.held == found.sizes.cut // tp + found.sizes.replicated
        assert found.sizes.held < 1.5 * whole / tp  # it is the weights that are cut
        assert (found.late, found.left) == (0, 0)  # full parameters are freed one by one


def test_a_rank_holds_uneven_parts_as_chunk_cuts_them():
    tp, config = 4, GPTConfig(**UNEVEN)
    heads, width, vocab = (_chunk(n, tp) for n in (config.n_head, 4 * config.n_embd, config.vocab_size))
    hidden, head_dim = config.n_embd, config.n_embd // config.n_head
    for rank, found in enumerate(run_ranks(taken, tp, GPT, config)):
        attention = 4 * heads[rank] * head_dim * hidden + 3 * heads[rank] * head_dim
        mlp = 2 * width[rank] * hidden + width[rank]
        assert sum(found.cut.values()) == FLOAT * (vocab[rank] * hidden + config.n_layer * (attention + mlp))
        assert found.sizes.held == sum(found.cut.values()) + found.sizes.replicated
        assert found.sizes.held <= found.sizes.allowed


def _chunk(n: int, tp: int) -> list[int]:
    lengths = [len(part) for part in torch.arange(n).chunk(tp)]
    return lengths + [0] * (tp - len(lengths))


def test_parallelize_frees_every_full_tensor():
    model = GPT(GPTConfig(**EVEN))
    fullness, parameters, kept = memory.Fullness(model), list(model.parameters()), model.wte.weight.detach()
    autotp.parallelize(model)
    assert fullness.alive() == 1  # An optimizer's list of parameters is no list of full tensors.
    del kept
    assert fullness.alive() == 0
    assert len(parameters) == 28


def grown(rank: int, tp: int) -> memory.Row:
    config = GPTConfig(block_size=16, vocab_size=8192, n_layer=8, n_head=8, n_embd=512)
    return memory.measure("gpt", config, on_meta=True)


@pytest.mark.skipif(memory.resident() == 0, reason="this system does not tell how large a process is")
def test_model_on_meta_never_is_whole_in_memory():
    """Shards, the largest parameter, and 24 MB for what torch allocates besides; the whole model has 118 MB."""
    for row in run_ranks(grown, 2):
        whole, largest = row.sizes.cut + row.sizes.replicated, 8192 * 512 * FLOAT
        assert row.sizes.held + largest + 24e6 < whole
        assert row.grown < row.sizes.held + largest + 24e6
