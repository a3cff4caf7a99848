"""`model.generate` through a parallel model: the tokens of one device, and what decoding costs."""

import copy
import subprocess
import sys
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
from errors import message
from hugging_face import NEW, both, built, prompt, transformers
from ranks import Checks, Collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.mesh import group_of, timeout_of
from autotp.runtime.module import executable_of

checks = Checks(timeout=900)
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}


def expect_same(whole: Any, parallel: Any, given: dict[str, Any], **how: Any) -> Tensor:
    """Both generate the same tokens from one random state."""
    found = []
    for model in (whole, parallel):
        torch.manual_seed(7)
        found.append(model.generate(**given, **how))
    assert torch.equal(*found), (how, found)
    return found[0]


# ---- the families


def greedy(n: int, name: str) -> Any:
    """25 tokens, and how many graphs that takes: one for the prompt and one for a token, beside that of parallelize."""
    whole, parallel = both(n, name, check_inputs="never")
    tokens = expect_same(whole, parallel, prompt(), **GREEDY)
    assert tokens.shape[1] == NEW + (1 if name == "t5" else 7)
    assert len(tokens[0].unique()) > 5, "a model that repeats one token shows little"
    assert len(executable_of(parallel).graphs.entries) <= 1 + {"t5": 3, "mistral": 4}.get(name, 2)
    every = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    logits = [torch.stack(model.generate(**prompt(), **every).logits) for model in (whole, parallel)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3 if name == "bloom" else 1e-5)  # float32
    return whole, parallel


def expect_cost(parallel: Any, all_reduces: int) -> None:
    """What a token costs, two all-reduces a layer and one for the embedding: the difference of three tokens more."""
    counts = []
    for count in (10, 13):
        with Collectives() as sent:
            parallel.generate(**prompt(), **{**GREEDY, "max_new_tokens": count, "min_new_tokens": count})
        counts.append(sent.counts)
    more = {name: counts[1][name] - counts[0].get(name, 0) for name in counts[1]}
    assert more == {"all-reduce": 3 * all_reduces, "all-gather-into-tensor": 3}


@checks.on(2, rare=True)
def gpt2(rank: int, n: int) -> None:
    expect_cost(greedy(n, "gpt2")[1], 5)


@checks.on(2, rare=True)
def llama(rank: int, n: int) -> None:
    expect_cost(greedy(n, "llama")[1], 5)


@checks.on(2, rare=True)
def qwen3(rank: int, n: int) -> None:
    expect_cost(greedy(n, "qwen3")[1], 3)


@checks.on(2, rare=True)
def opt(rank: int, n: int) -> None:
    expect_cost(greedy(n, "opt")[1], 3)


@checks.on(2, rare=True)
def bloom(rank: int, n: int) -> None:
    expect_cost(greedy(n, "bloom")[1], 3)


@checks.on(2, rare=True)
def mistral(rank: int, n: int) -> None:
    """The window is passed on the way."""
    expect_cost(greedy(n, "mistral")[1], 3)


@checks.on(2, rare=True)
def t5(rank: int, n: int) -> None:
    """Three parts in a layer of the decoder; the encoder runs once, by itself."""
    _, parallel = greedy(n, "t5")
    expect_cost(parallel, 4)
    assert len(executable_of(parallel.get_encoder()).graphs.entries) == 1


@checks.on(4, rare=True)
def few_heads(rank: int, n: int) -> None:
    """Two of four ranks share each key."""
    expect_cost(greedy(n, "llama")[1], 5)


@checks.on(4, rare=True)
def heads_that_do_not_divide(rank: int, n: int) -> None:
    """One rank has nothing of gpt2's six."""
    _, parallel = greedy(n, "gpt2")
    with torch.no_grad():
        keys = parallel(**prompt()).past_key_values.layers[0].keys
    assert keys.shape == (2, 6, 7, 8) and keys.part.shape == (2, [2, 2, 2, 0][rank], 7, 8)


@cache
def gpt2_and_twin(n: int) -> tuple[Any, Any]:
    """One model for all that changes nothing of it."""
    return both(n, "gpt2")


@checks.on(2)
def timeouts(rank: int, n: int) -> None:
    """A mesh that is given waits as long as it is told, and while it generates as long as that is told."""
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    model, seen = autotp.parallelize(built("gpt2"), mesh=mesh, timeout=timedelta(seconds=77)), set()
    groups = [mesh.get_group(), group_of(model.mesh)]
    before = list(map(timeout_of, groups))
    assert before[1] == timedelta(seconds=77) != before[0]
    stop = lambda ids, scores: seen.add(timeout_of(groups[1])) or torch.zeros(len(ids), dtype=torch.bool)  # noqa: E731
    model.generate(**prompt(), max_new_tokens=2, timeout=timedelta(seconds=55), stopping_criteria=[stop])
    assert seen == {timedelta(seconds=55)} and list(map(timeout_of, groups)) == before
    for wrong in (5, timedelta(0)):
        with pytest.raises(autotp.Error, match="timeout="):
            model.generate(**prompt(), max_new_tokens=2, timeout=wrong)


# ---- the cache


@checks.on(2)
def static_cache(rank: int, n: int) -> None:
    """Its tensors stay where they are."""
    whole, parallel = both(n, "qwen3")
    expect_same(whole, parallel, prompt(), cache_implementation="static", **GREEDY)


@checks.on(2, rare=True)
def compiled_blocks(rank: int, n: int) -> None:
    """Blocks that torch.compile made, with both caches; greedy and drawn tokens."""
    whole, parallel = both(n, "llama")
    parallel.compile_blocks(backend="aot_eager")
    for kind in ("dynamic", "static"):
        expect_same(whole, parallel, prompt(), cache_implementation=kind, **GREEDY)
        expect_same(whole, parallel, prompt(9), cache_implementation=kind, do_sample=True, max_new_tokens=5)


@checks.on(2, rare=True)
def caches(rank: int, n: int) -> None:
    """One that is the user's, and a static one: over two turns."""
    whole, parallel = both(n, "llama")
    static = transformers.StaticCache(config=whole.config, max_cache_len=40)
    turns = [two_turns(model, transformers.DynamicCache(config=model.config)) for model in (whole, parallel)]
    turns.append(two_turns(parallel, static))
    for found in turns[1:]:
        assert all(torch.equal(a, b) for a, b in zip(turns[0], found, strict=True))
    first, expected = parallel(**prompt()).past_key_values, whole(**prompt()).past_key_values
    torch.testing.assert_close(autotp.gather(first.layers[1].values), expected.layers[1].values)
    full = autotp.parallelize(built("llama"), n, outputs="full")(**prompt()).past_key_values
    torch.testing.assert_close(full.layers[1].values, expected.layers[1].values)


def two_turns(model: Any, cache: Any) -> list[Tensor]:
    """The tokens after each."""
    first = model.generate(**prompt(), past_key_values=cache, do_sample=False, max_new_tokens=5)
    before = cache.layers[0].keys
    given = {"input_ids": first, "attention_mask": torch.cat([prompt()["attention_mask"], torch.ones(2, 5).long()], 1)}
    second = model.generate(**given, past_key_values=cache, do_sample=False, max_new_tokens=4)
    after = cache.layers[0].keys
    assert cache.get_seq_length() == 15
    if isinstance(model, autotp.ParallelModule):
        assert isinstance(after, Sharded) and after.part.shape[:2] == (2, 1)
        same = before.part.data_ptr() == after.part.data_ptr()
        assert same == isinstance(cache, transformers.StaticCache)
    return [first, second]


class Attends(nn.Module):
    """A layer with a cache of its own: a pair of tensors, taken and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (y.unflatten(-1, (6, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2)), (k, v)


@checks.on(2)
@checks.on(4, rare=True)
def local_outputs_come_back(rank: int, n: int) -> None:
    """Outputs that stayed cut are inputs that are cut: nothing is gathered, and gradients go through both calls."""
    torch.manual_seed(0)
    whole = Attends().double()
    given = torch.randn(2, 3, 48, dtype=torch.float64)
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=given, outputs="local", check_inputs="never")
    for _ in range(2):
        for model in (whole, parallel):
            x, past = given, None
            with Collectives() as sent:
                for i in range(4):
                    x, past = model(x[:, -(3 - i) or -1 :], past)
            x.sum().backward()
    assert sent.counts == {"all-reduce": 4}
    assert past[0].to_local().shape == (2, [2, 2, 2, 0][rank] if n == 4 else 3, 3 + 2 + 1 + 1, 8)
    for name, parameter in parallel.named_parameters():
        expected = whole.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, msg=lambda m, name=name: f"{name}: {m}")


# ---- choosing

SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "warped": {"temperature": 0.7, "top_k": 7, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [8, 9]], "top_k": 20},
    "whole-rows": {"top_k": 0, "top_p": 0.8, "typical_p": 0.9},
    "several": {"num_return_sequences": 3, "top_k": 5, "renormalize_logits": True},
    "unknown": {"top_k": 9, "top_h": 0.4},
    "forced": {"forced_eos_token_id": [98, 7], "eos_token_id": 98, "top_k": 0},  # `min_new_tokens` excludes 98 before.
}


@checks.on(2)
def sampling(rank: int, n: int) -> None:
    """The tokens of one device from the same random state; from different ones, those of the first rank."""
    whole, parallel = gpt2_and_twin(n)
    how = {"do_sample": True, "max_new_tokens": 12, "min_new_tokens": 12}
    for given in SAMPLED.values():
        expected = expect_same(whole, parallel, prompt(), **how, **given)
        torch.manual_seed(7 + rank)
        assert torch.equal(parallel.generate(**prompt(), **how, **given), expected), given


@checks.on(2)
def what_is_sent(rank: int, n: int) -> None:
    """A row of scores is sent only to what needs it whole."""
    _, parallel = both(n, "gpt2", check_inputs="never")
    sizes = []
    for given in ({"top_k": 0}, {"top_k": 7, "top_p": 0.9}, {"top_k": 0, "top_p": 0.9}):
        for count in (5, 6):
            with Received() as received:
                parallel.generate(**prompt(), do_sample=True, max_new_tokens=count, min_new_tokens=count, **given)
            sizes.append(received.bytes)
    more = [b - a for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
    assert more == [n * 2 * 16, n * 2 * 16 * 8, n * 2 * 4 * 50]  # pairs in float64; 50 columns of 99 in float32


class Received(Collectives):
    """Counts the bytes that all-gathers give."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if "all_gather" in func._schema.name:
            self.bytes += found.numel() * found.element_size()
        return found


class Odd(transformers.LogitsProcessor):
    """A processor nobody knows: of even columns nothing is left."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 0, -torch.inf)


class Until(transformers.StoppingCriteria):
    """Stops on the last rank only, where nobody asks it; on the first after nine tokens."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.rank == 1 or self.calls == 9)


class Shown(transformers.generation.BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.tokens.append(value)

    def end(self) -> None:
        self.tokens.append(torch.tensor([-1]))


@checks.on(2, rare=True)
def options(rank: int, n: int) -> None:
    """Beams, guesses, processors and criteria of the user's, streamers, what `return_dict_in_generate` returns."""
    whole, parallel = both(n, "gpt2")
    one = {name: rows[1:] for name, rows in prompt().items()}
    expect_same(whole, parallel, prompt(), num_beams=3, **GREEDY)
    expect_same(whole, parallel, prompt(), num_beams=3, num_return_sequences=2, max_new_tokens=9, do_sample=True)
    expect_same(whole, parallel, one, prompt_lookup_num_tokens=3, **GREEDY)
    expect_same(whole, parallel, prompt(), use_cache=False, max_new_tokens=4, do_sample=False)
    processors = transformers.LogitsProcessorList([Odd()])
    assert expect_same(whole, parallel, prompt(), logits_processor=processors, **GREEDY)[:, 7:].remainder(2).all()
    stopped = parallel.generate(**prompt(), stopping_criteria=[Until(rank)], **GREEDY)
    assert stopped.shape[1] == 7 + 9
    shown = [Shown(), Shown()]
    for model, streamer in zip((whole, parallel), shown, strict=True):
        model.generate(**one, streamer=streamer, **GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(*[s.tokens for s in shown], strict=True))


@checks.on(2, rare=True)
def an_assistant_with_an_encoder(rank: int, n: int) -> None:
    """It encodes the prompt itself."""
    whole, parallel = both(n, "t5")
    one = {name: rows[1:] for name, rows in prompt().items()}
    torch.manual_seed(1)
    expect_same(whole, parallel, one, assistant_model=type(whole)(whole.config).eval(), **GREEDY)


@checks.on(2, rare=True)
def everything_returned(rank: int, n: int) -> None:
    """With `return_dict_in_generate`, whole: scores, hidden states, attentions by head."""
    whole = built("gpt2")
    whole.set_attn_implementation("eager")
    parallel = autotp.parallelize(copy.deepcopy(whole), n)
    wanted = ("return_dict_in_generate", "output_scores", "output_hidden_states", "output_attentions")
    a, b = (
        model.generate(**prompt(), **dict.fromkeys(wanted, True), do_sample=False, max_new_tokens=3)
        for model in (whole, parallel)
    )
    assert a.keys() == b.keys()
    for name in ("sequences", "scores", "hidden_states", "attentions"):
        torch.testing.assert_close(a[name], b[name])


@checks.on(2)
def refusals(rank: int, n: int) -> None:
    """What a parallel model does not have is said in one error; a length of the cache is not guessed."""
    _, parallel = gpt2_and_twin(n)
    if torch.version.cuda is None or torch.cuda.is_available():  # Else transformers asks for a stream of a GPU before.
        assert message(lambda: parallel.generate(**prompt(), cache_implementation="offloaded", **GREEDY)) == (
            "GPT2LMHeadModel.generate: a cache that is offloaded cannot be cut\n"
            '  try      cache_implementation="dynamic" or "static"'
        )
    for name in ("sdpa", "eager", "flash_attention_2"):
        parallel.config._attn_implementation = f"paged|{name}"
        text = message(lambda: parallel(**prompt()))
        assert f'attn_implementation="paged|{name}" reads pages of continuous batching' in text, text
        assert f'try      attn_implementation="{name}", and model.generate(**inputs)' in text, text


# ---- parts and methods


@checks.on(2)
def a_part_by_itself(rank: int, n: int) -> None:
    """An encoder called alone, with the parameters as they are held: values and gradients."""
    whole, parallel = both(n, "t5")
    for model in (whole, parallel):
        model.get_encoder()(**prompt()).last_hidden_state.square().sum().backward()
    for name, parameter in parallel.encoder.named_parameters():
        expected = whole.encoder.get_parameter(name).grad
        mine = expected
        torch.testing.assert_close(parameter.grad, mine, msg=lambda m, name=name: f"{name}: {m}")
    twin = copy.deepcopy(parallel)
    torch.testing.assert_close(twin.encoder(**prompt()).last_hidden_state, whole.encoder(**prompt()).last_hidden_state)


@checks.on(2)
def methods_see_their_class(rank: int, n: int) -> None:
    """What a method of the model asks of itself: its class, its instance's attributes before its class's, its call."""
    model = Asks()
    parallel = autotp.parallelize(copy.deepcopy(model), n, example_inputs=torch.ones(2, 48))
    assert parallel.asked() == (True, "own", "inherited", True)
    x = torch.randn(2, 48)
    torch.testing.assert_close(parallel.twice(x), model.twice(x))
    parallel.remember(3)
    assert parallel.remembered == 3 and not hasattr(model, "remembered")


class Base(nn.Module):
    kind = "class"

    def name(self) -> str:
        return "inherited"


class Asks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(48, 96), nn.Linear(96, 48), "own"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def name(self) -> str:
        return super().name()

    def asked(self) -> tuple[Any, ...]:
        return isinstance(self, Asks), self.kind, self.name(), getattr(type(self), "twice", None) is Asks.twice

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x)) + self.up(x).sum()

    def remember(self, value: int) -> None:
        self.remembered = value


# ---- what is imported


def test_transformers_is_not_imported() -> None:
    code = "import sys, autotp; assert not any(name.split('.')[0] == 'transformers' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
