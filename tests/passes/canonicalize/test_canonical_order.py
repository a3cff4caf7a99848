"""canonical_order: what is computed counts, not in which order it was recorded: sets of strings may have any."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse, flat_graph
from autotp.options import DEFAULTS
from autotp.passes.capture.skeleton import skeleton_of
from autotp.runtime.calls.graph_digest import digest

X = torch.linspace(-1, 1, 24).view(3, 8)
TYPES = ("full_attention", "sliding_attention")


class Tables(nn.Module):
    """Computes a table for each of its kinds, in the order in which it is given them, and reads them in another."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        self.order = order
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = {kind: (x * len(kind)).cos() + torch.tensor([float(len(kind))]) for kind in self.order}
        hidden = torch.relu(self.up(x + made["long one"]))
        return self.down(hidden) + made["short"]


class Draws(nn.Module):
    """Draws for one of two independent values before it does for the other."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.up = first, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        order = (0, 1) if self.first == 0 else (1, 0)
        found = {i: torch.rand_like(y) * (y.sin() if i else y.cos()) for i in order}
        return found[0] - found[1]


def _text(model: nn.Module) -> str:
    return digest(analyse(skeleton_of(model), (X,), {}, 2))


def test_canonical_order_ignores_the_order_of_recording() -> None:
    assert _text(Tables(("short", "long one"))) == _text(Tables(("long one", "short")))


def test_canonical_order_keeps_the_order_of_draws() -> None:
    """The stream is one: what draws first has other numbers."""
    assert _text(Draws(0)) != _text(Draws(1))


class Unread(Tables):
    """Computes what nobody reads, too."""

    def forward(self, x: Tensor) -> Tensor:
        for kind in self.order:
            self.up(x * len(kind)).exp()
        return super().forward(x)


def test_canonical_order_sorts_unread_operators() -> None:
    assert _text(Unread(("short", "long one"))) == _text(Unread(("long one", "short")))
    assert _text(Unread(("short", "long one"))) != _text(Tables(("short", "long one")))  # It tells axes: it stays.


def test_canonical_text_changes_with_an_operator() -> None:
    other = Tables(("short", "long one"))
    other.down = nn.Linear(32, 8, bias=False)
    assert _text(other) != _text(Tables(("short", "long one")))


@pytest.mark.parametrize("model", [Tables(("short", "long one")), Draws(0)], ids=["tables", "draws"])
def test_canonical_order_computes_the_same(model: nn.Module) -> None:
    assert autotp.verify(model, 2, example_inputs=X).ok


def _family(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of transformers, and its arguments."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}
    some = {**sizes, "num_hidden_layers": 4, "num_key_value_heads": 2}
    tokens = torch.arange(24).view(2, 12)
    specials = dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 0)
    models: dict[str, Any] = {
        "modernbert": lambda: hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(
                **sizes, num_hidden_layers=4, global_attn_every_n_layers=2, local_attention=4, **specials
            )
        ),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**some)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**some, head_dim=12, sliding_window=4, layer_types=[*TYPES, *TYPES])
        ),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**some, num_local_experts=4)),
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(**sizes, num_hidden_layers=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ),
    }
    return models[name](), {"input_ids": tokens, "labels": tokens}


def _printed(name: str) -> str:
    """The digest of a model, and what a rank of it runs, as numbers."""
    model, given = _family(name)
    analysis = analyse(skeleton_of(model), (), given, 2, DEFAULTS)
    number = {node: i for i, node in enumerate(flat_graph(analysis, 0, "fast").nodes)}
    lowered = [(str(n.target), torch.fx.map_arg((n.args, n.kwargs), number.__getitem__)) for n in number]
    calls = [f"{target.partition(' at 0x')[0]} {given}" for target, given in lowered]
    return f"{zlib.crc32(digest(analysis).encode())} {zlib.crc32('|'.join(calls).encode())}"


@pytest.mark.rare
@pytest.mark.parametrize("name", ["modernbert", "llama", "gemma3", "mixtral", "bert"])
def test_every_hash_seed_gives_the_same_graph(name: str) -> None:
    """Sets have another order in each, by hash seed or by address; so must nothing that passes decide."""
    found = set()
    for seed in ("1", "2", "3"):
        code = f"import sys; sys.path[:0] = {sys.path!r}; import {__name__} as here; print(here._printed({name!r}))"
        there = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=there, cwd=Path(__file__).parent, capture_output=True, timeout=240
        )
        assert done.returncode == 0, done.stderr.decode()
        found.add(done.stdout.split(b"\n")[-2])
    assert len(found) == 1


# ---- on real ranks, each with a hash seed of its own

checks = Checks(fresh=True)


@checks.on(2)
def sets_differ_in_order_between_these_ranks(rank: int, n: int) -> None:
    """Or the others here could not fail."""
    orders: list[Any] = [None] * n
    dist.all_gather_object(orders, list(set(TYPES)))
    assert orders[0] != orders[1]


@checks.on(2)
def modernbert_trains_with_sets_in_any_order(rank: int, n: int) -> None:
    _expect_trained("modernbert", n)


@checks.on(2, rare=True)
def other_families_train_with_sets_in_any_order(rank: int, n: int) -> None:
    for name in ("gemma3", "mixtral", "bert"):
        _expect_trained(name, n)


def _expect_trained(name: str, n: int) -> None:
    one, given = _family(name)
    mine = autotp.parallelize(_family(name)[0], n)
    losses = []
    for model in (one, mine):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


@pytest.mark.system
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
