"""outputs: caches in registered buffers, of a model of one's own, are cut by heads."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded

checks = Checks()
WIDTH, HEAD, GROUPS, BATCH, PLACES = 32, 8, 2, 2, 12
PROMPT = torch.arange(BATCH * 4).view(BATCH, 4) % 11
Write = Callable[[Tensor, Tensor, Tensor], Any]
"""Writes [batch groups new head] into a cache [batch groups places head] at these positions."""


def by_index(cache: Tensor, new: Tensor, positions: Tensor) -> None:
    cache[:, :, positions] = new


def by_copy(cache: Tensor, new: Tensor, positions: Tensor) -> None:
    cache.index_copy_(2, positions, new)


def by_scatter(cache: Tensor, new: Tensor, positions: Tensor) -> None:
    cache.scatter_(2, positions[:, None].expand_as(new), new)


WRITES: dict[str, Write] = {"index": by_index, "copy": by_copy, "scatter": by_scatter}


class Attention(nn.Module):
    """Attention with four heads of queries and two of keys, and a cache in two buffers.

    Args:
        write: writes new keys and values.
        flat: whether a cache is [batch places groups*head], and not [batch groups places head].
        spread: whether it also returns how much the keys of the cache differ, before it writes.
    """

    def __init__(self, write: Write, flat: bool = False, spread: bool = False) -> None:
        super().__init__()
        self.write, self.flat, self.spread = write, flat, spread
        self.q, self.o = nn.Linear(WIDTH, 4 * HEAD, bias=False), nn.Linear(4 * HEAD, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * HEAD, bias=False) for _ in range(2))
        shape = (BATCH, PLACES, GROUPS * HEAD) if flat else (BATCH, GROUPS, PLACES, HEAD)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        caches, spread = (self.k_cache, self.v_cache), self.k_cache.std() if self.spread else 0
        if self.flat:
            caches = tuple(cache.unflatten(-1, (GROUPS, HEAD)).transpose(1, 2) for cache in caches)
        for cache, new in zip(caches, (k, v), strict=True):
            self.write(cache, new, positions)
        self.calls += 1
        mask = positions[:, None] >= torch.arange(PLACES)
        attended = F.scaled_dot_product_attention(q, *caches, attn_mask=mask, enable_gqa=True)
        return self.o(attended.transpose(1, 2).flatten(2)) + spread


class Decoder(nn.Module):
    """A language model that decodes with caches of its own: tokens [batch new] and their positions -> logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(Attention(*args, **kwargs) for _ in range(2))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, positions)
        logits: Tensor = self.head(x)
        return logits

    def reset(self) -> None:
        for layer in self.layers:
            layer.k_cache.zero_()
            layer.v_cache.zero_()

    def generate(self, prompt: Tensor, count: int) -> Tensor:
        tokens, positions = prompt, torch.arange(prompt.shape[1])
        for _ in range(count):
            logits = self(tokens[:, -len(positions) :], positions)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
            positions = positions[-1:] + 1
        return tokens


def made(*args: Any, **kwargs: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(*args, **kwargs).double().eval()


EXAMPLE = PROMPT, torch.arange(4)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
def test_caches_are_cut_by_heads_and_nothing_is_gathered(write: str, flat: bool) -> None:
    with torch.no_grad():
        plan = autotp.explain(made(WRITES[write], flat), tp=2, example_inputs=EXAMPLE)
    assert plan.notes["caches"] == "4 buffers are cut: the first rank holds 50.0% of them"
    assert plan.traffic.forward == {"all-gather": 1, "all-reduce": 3}  # Logits; embeddings and projections.
    assert plan.outputs == ()


def test_what_cannot_be_cut_is_gathered_and_listed() -> None:
    """A reader of the whole cache keeps it whole; so does training, whose loop may read it on one rank."""
    with torch.no_grad():
        plan = autotp.explain(made(by_index, spread=True), tp=2, example_inputs=EXAMPLE)
        training = autotp.explain(made(by_index).train(), tp=2, example_inputs=EXAMPLE)
    names = [f"layers.{i}.{name}" for i in range(2) for name in ("k_cache", "v_cache")]
    assert plan.notes["caches"] == (
        f"2 buffers are cut: the first rank holds 50.0% of them; gathered whole in each call: {names[0]}, {names[2]}"
    )
    assert training.notes["caches"] == f"gathered whole in each call: {', '.join(names)}"


def test_ranks_with_cut_caches_equal_one_device() -> None:
    for write in WRITES.values():
        with torch.no_grad():
            report = autotp.verify(made(write), tp=2, example_inputs=EXAMPLE)
        assert report.ok, report


@checks.on(2, 3)
def decoding_equals_one_device(rank: int, n: int) -> None:
    """With three ranks and two groups a rank has no heads."""
    for flat in (False, True):
        plain = made(by_index, flat)
        parallel = autotp.parallelize(copy.deepcopy(plain), tp=n, example_inputs=EXAMPLE)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(parallel.generate(PROMPT, 5), plain.generate(PROMPT, 5))
                for x, y in zip(parallel.buffers(), plain.buffers(), strict=True):
                    assert isinstance(x, Sharded) == (y.dim() > 0)
                    torch.testing.assert_close(autotp.gather(x), y, rtol=1e-10, atol=1e-10)
                parallel.reset()
                plain.reset()
        cache = parallel.layers[0].k_cache
        assert cache.shape == plain.layers[0].k_cache.shape
        assert cache.part.numel() == cache.numel() * (rank < 2) // 2


@checks.on(2)
def a_state_dict_has_the_whole_cache(rank: int, n: int) -> None:
    plain = made(by_index)
    parallel = autotp.parallelize(copy.deepcopy(plain), tp=n, example_inputs=EXAMPLE)
    with torch.no_grad():
        plain.generate(PROMPT, 3)
        parallel.generate(PROMPT, 3)
        state = autotp.full_state_dict(parallel)
        if not rank:
            assert list(state) == list(plain.state_dict())
            for name, whole in plain.state_dict().items():
                torch.testing.assert_close(state[name], whole, rtol=1e-10, atol=1e-10)
        later = autotp.parallelize(made(by_index), tp=n, example_inputs=EXAMPLE)
        autotp.load_full_state_dict(later, state)
        torch.testing.assert_close(autotp.gather(later.layers[1].k_cache), plain.layers[1].k_cache)
        later.load_state_dict({name: x + 1 for name, x in plain.state_dict().items()})
        torch.testing.assert_close(autotp.gather(later.layers[1].k_cache), plain.layers[1].k_cache + 1)
        own = io.BytesIO()
        torch.save(parallel.state_dict(), own)
        own.seek(0)
        later.load_state_dict(torch.load(own))
        torch.testing.assert_close(autotp.gather(later.layers[1].k_cache), plain.layers[1].k_cache)
        assert torch.equal(copy.deepcopy(later).float().generate(PROMPT, 3), plain.float().generate(PROMPT, 3))


@checks.on(2)
def a_cache_that_a_later_call_writes_is_cut_then(rank: int, n: int) -> None:
    """The first graph is of training; a whole tensor in the place of a cut cache is cut again."""
    plain = made(by_index)
    parallel = autotp.parallelize(copy.deepcopy(plain).train(), tp=n, example_inputs=EXAMPLE)
    parallel(*EXAMPLE)
    plain(*EXAMPLE)
    assert not any(isinstance(x, Sharded) for x in parallel.buffers())
    parallel.layers[0].aliases = [parallel.layers[0].k_cache]
    parallel.eval()
    with torch.no_grad():
        assert torch.equal(parallel.generate(PROMPT, 3), plain.generate(PROMPT, 3))
        assert isinstance(parallel.layers[0].k_cache, Sharded)
        assert parallel.layers[0].aliases[0] is parallel.layers[0].k_cache
        parallel.layers[0].k_cache = torch.zeros(BATCH, GROUPS, PLACES, HEAD, dtype=torch.float64)
        assert torch.equal(parallel.generate(PROMPT, 3), plain.generate(PROMPT, 3))
        assert isinstance(parallel.layers[0].k_cache, Sharded)
        parallel.train()
        torch.testing.assert_close(parallel(*EXAMPLE), plain(*EXAMPLE), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_cut_caches_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
