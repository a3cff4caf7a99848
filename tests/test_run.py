"""The parallel model as a user handles it: signatures, dtypes, modes, names, outputs, buffers, structures."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from helpers import Checks
from torch import Tensor, nn

import autotp
from autotp.models.gpt import GPT, GPTConfig

checks = Checks()
VOCAB = 97


def gpt(dropout: float = 0.0) -> GPT:
    """Its vocabulary and its three heads divide by no number of ranks."""
    return GPT(GPTConfig(block_size=16, vocab_size=VOCAB, n_layer=2, n_head=3, n_embd=48, dropout=dropout)).double()


def tokens(batch: int = 3, seq: int = 7) -> tuple[Tensor, Tensor]:
    count = torch.arange(batch * seq).view(batch, seq)
    return count * 31 % VOCAB, count * 17 % VOCAB


def both(n: int, whole: nn.Module, **settings: Any) -> tuple[nn.Module, autotp.ParallelModule]:
    return whole, autotp.parallelize(copy.deepcopy(whole), n, **settings)


def graphs(parallel: autotp.ParallelModule) -> int:
    """How many signatures it has met."""
    return len(parallel._entries)


def expect_gradients(whole: nn.Module, parallel: autotp.ParallelModule, tolerance: float = 1e-12) -> None:
    scale = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    for (name, a), b in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            mine = parallel.layouts[name].take(a.grad, parallel.mesh.rank)
            torch.testing.assert_close(b.grad, mine, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")


# ---- signatures


@checks.on(2)
def further_signatures(rank: int, n: int) -> None:
    """Without labels, in eval mode, of length 1 and batch 1: another graph each time one is needed, and only then."""
    whole, parallel = both(n, gpt().train())
    x, y = tokens()
    for a, b in ((x, y), (x[:2, :5], y[:2, :5])):
        torch.testing.assert_close(parallel(a, b), whole(a, b))
        torch.testing.assert_close(parallel(labels=b, tokens=a), whole(a, b))
    assert graphs(parallel) == 1
    for a in (x, x[:2], x[:1], x[:, :1], x[:1, :1], x[1:3, :4]):
        torch.testing.assert_close(parallel(a), whole(a))
        torch.testing.assert_close(parallel(a, labels=None), whole(a))
    assert graphs(parallel) <= 5
    before = graphs(parallel)
    for mode in (False, True, False):
        torch.testing.assert_close(parallel.train(mode)(x), whole.train(mode)(x))
    assert graphs(parallel) == before + 1


@checks.on(2)
def dtypes(rank: int, n: int) -> None:
    """`.to(dtype)` moves shards and buffers, and the next call has a graph of its own."""
    whole, parallel = both(n, gpt().train())
    x, y = tokens()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        loss, expected = parallel.to(dtype)(x, y), whole.to(dtype)(x, y)
        assert loss.dtype == expected.dtype == dtype
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
        loss.backward()
        expected.backward()
        expect_gradients(whole, parallel, tolerance)
        whole.zero_grad()
        parallel.zero_grad()


class Dtypes(nn.Module):
    """An MLP that shows the dtypes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.inside: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        up = self.up(self.norm(x))
        down = self.down(nn.functional.gelu(up))
        with torch.autocast("cpu", enabled=False):
            own = self.down.weight.sum() * 1.0
        kept = down.to(up.dtype) + own  # a cast to what the value has
        return {"up": up, "down": down, "sum": x + down, "kept": kept, "prob": (x @ down.mT).softmax(-1)}


@checks.on(2)
def autocast(rank: int, n: int) -> None:
    """bfloat16 wherever one device has it, float32 elsewhere, and a graph for each state of autocast."""
    torch.manual_seed(0)
    whole, parallel = both(n, Dtypes(), example_inputs=torch.randn(4, 5, 16), outputs="full")
    x = torch.randn(4, 5, 16)
    torch.testing.assert_close(parallel(x), whole(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = parallel(x), whole(x)
        assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in expected.items()}
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert graphs(parallel) == 2
    torch.testing.assert_close(parallel(x), whole(x))
    language, split = both(n, gpt().float().train())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(*tokens()) for model in (language, split)]
        torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    for loss in losses:
        loss.backward()
    assert {p.grad.dtype for p in split.parameters()} == {torch.float32}
    expect_gradients(language, split, 5e-2)


@checks.on(2)
def without_gradients(rank: int, n: int) -> None:
    """A signature first met under no_grad or inference mode is as good for training afterwards."""
    whole, parallel = both(n, gpt().train())
    x, y = tokens(2, 1)
    with torch.inference_mode():
        torch.testing.assert_close(parallel(x, y), whole(x, y))
    with torch.no_grad():
        assert not parallel(x).requires_grad
    for model in (whole, parallel):
        model(x, y).backward()
    expect_gradients(whole, parallel)


# ---- gradients


@checks.on(2)
def accumulation_and_freezing(rank: int, n: int) -> None:
    """Several backwards, frozen parameters, and the same ones unfrozen later, with the graph there was."""
    whole = gpt().train()
    whole.h[0].requires_grad_(False)
    whole.wte.requires_grad_(False)
    parallel = autotp.parallelize(copy.deepcopy(whole), n)
    for frozen in (True, False):
        for model in (whole, parallel):
            model.h[0].requires_grad_(not frozen)
            model.wte.weight.requires_grad_(not frozen)
            for rows in (2, 3):
                model(*tokens(rows)).backward()
        expect_gradients(whole, parallel)
        torch.testing.assert_close(
            autotp.clip_grad_norm_(parallel, 0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        )
        expect_gradients(whole, parallel)
    assert graphs(parallel) == 1


class Embedded(nn.Module):
    """Takes embeddings, as Hugging Face's `inputs_embeds`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, embeds: Tensor, scale: float = 1.0) -> Tensor:
        return (embeds + self.down(nn.functional.gelu(self.up(embeds)))) * scale


@checks.on(2)
def gradient_of_inputs(rank: int, n: int) -> None:
    whole, parallel = both(n, Embedded().double(), example_inputs=torch.randn(3, 16, dtype=torch.float64))
    x = torch.randn(3, 16, dtype=torch.float64)
    given = [x.clone().requires_grad_() for _ in range(2)]
    for model, leaf in zip((whole, parallel), given, strict=True):
        model(leaf, scale=2.0).square().sum().backward()
    torch.testing.assert_close(given[1].grad, given[0].grad)
    expect_gradients(whole, parallel)
    torch.testing.assert_close(parallel(x, 3.0), whole(x, 3.0))  # another plain value: another graph


# ---- outputs


@checks.on(2, 4)
def outputs(rank: int, n: int) -> None:
    """Logits: whole in eval mode; with a loss in training this rank's part, and `gather` has the right backward."""
    x, y = tokens()
    for whole in (WithLoss(), WithLoss().eval()):
        for setting in ("auto", "full", "local"):
            parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs={"x": x, "y": y}, outputs=setting)
            cut = setting == "local" or (setting == "auto" and whole.training)
            logits = parallel(x, y)["logits"]
            assert (logits.shape[-1] < VOCAB) == cut
            everything = autotp.gather(parallel(x, y))
            expected = whole(x, y)
            torch.testing.assert_close(everything, expected)
            weights = torch.linspace(0, 1, VOCAB, dtype=torch.float64)
            for model, found in ((whole, expected), (parallel, everything)):
                model.zero_grad()
                (found["loss"] + (found["logits"] * weights).square().sum()).backward()
            expect_gradients(whole, parallel)
    with pytest.raises(autotp.Error) as raised:
        autotp.gather(logits * 2)
    assert str(raised.value) == (
        f"gather: a tensor {list(logits.shape)} that is no output of a parallel model\n"
        "  try      autotp.gather(output) on what the model returned, before anything is computed from it"
    )


class WithLoss(nn.Module):
    """Returns a dict, a dataclass or a tuple around both."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, x: Tensor, y: Tensor, form: str = "dict") -> Any:
        logits = self.gpt(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        if form == "none":
            return None
        if form == "tuple":
            return loss, [logits, x.shape[1], None], "text"
        return {"loss": loss, "logits": logits} if form == "dict" else Result(loss, logits, x.shape[0])


@dataclasses.dataclass
class Result:
    loss: Tensor
    logits: Tensor
    rows: int
    note: str | None = None


@checks.on(2)
def structures(rank: int, n: int) -> None:
    """Whatever the model returns, sizes in it included, at sizes other than those of the capture."""
    whole = WithLoss().eval()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=tokens())
    for rows, seq in ((3, 7), (2, 5)):
        x, y = tokens(rows, seq)
        for form in ("dict", "tuple", "none", "dataclass"):
            found, expected = parallel(x, y, form), whole(x, y, form)
            assert type(found) is type(expected)
            if form == "dataclass":
                assert (found.rows, found.note) == (rows, None)
                found, expected = vars(found), vars(expected)
            if form == "tuple":
                assert found[1][1:] == [seq, None] and found[2] == "text"
                found, expected = (found[0], found[1][0]), (expected[0], expected[1][0])
            torch.testing.assert_close(found, expected)


# ---- state that a forward changes


class Counting(nn.Module):
    """A counter, a running mean of what is cut, a buffer set anew, and one that nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("share", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("last", torch.zeros(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = nn.functional.gelu(self.up(x))
        self.calls += 1
        self.share = self.share * 0.5 + 0.5
        if self.training:
            self.mean.mul_(0.9).add_(inside.detach().mean(0), alpha=0.1)
        self.last = x.detach().sum(0)
        return self.down(inside * (self.share + self.mean)) * self.calls


@checks.on(2)
def buffers(rank: int, n: int) -> None:
    torch.manual_seed(0)
    example = torch.randn(4, 16, dtype=torch.float64)
    whole, parallel = both(n, Counting().double(), example_inputs=example, outputs="local")
    for step in range(3):
        x = torch.randn(4, 16, dtype=torch.float64)
        whole.train(step < 2)
        parallel.train(step < 2)
        torch.testing.assert_close(parallel(x), whole(x))
        for (name, a), (other, b) in zip(whole.named_buffers(), parallel.named_buffers(), strict=True):
            assert name == other
            torch.testing.assert_close(b, a, msg=lambda m, name=name: f"{name}: {m}")
    assert parallel.calls == 3
    assert "last" not in parallel.state_dict()


# ---- as an nn.Module


@checks.on(2)
def names_and_attributes(rank: int, n: int) -> None:
    whole, other = gpt(), gpt()
    other.ln_f.weight.mark = "no decay"
    parallel = autotp.parallelize(other, n)
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert [name for name, _ in parallel.named_modules()] == [name for name, _ in whole.named_modules()]
    assert list(parallel.state_dict()) == list(whole.state_dict())
    assert parallel.config is not None and parallel.config == whole.config
    assert (parallel.h[0].attn.n_head, len(parallel.h)) == (3, 2)
    assert parallel.ln_f.weight.mark == "no decay"
    assert parallel.dummy_inputs.keys() == whole.dummy_inputs.keys()
    assert not hasattr(parallel, "no_such_thing") and not hasattr(parallel.h[0], "no_such_thing")
    seen: list[Any] = []
    parallel.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    parallel.ln_f.weight.register_hook(lambda grad: seen.append(grad.shape))
    parallel(*tokens()).backward()
    assert seen == [(), (48,)]


@checks.on(2)
def local_state(rank: int, n: int) -> None:
    """The state dict of one rank's shards into another parallel model, and back."""
    _, first = both(n, gpt())
    torch.manual_seed(5)
    _, second = both(n, gpt())
    saved = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    assert saved["wte.weight"].shape == (49 - rank, 48)
    assert not torch.equal(second.wte.weight, saved["wte.weight"])
    second.load_state_dict(saved)
    torch.testing.assert_close(second(*tokens()), first(*tokens()), rtol=0, atol=0)


@checks.on(2)
def copies(rank: int, n: int) -> None:
    """A deep copy is a model of its own, whose further captures are its own; pickling says what to do instead."""
    whole, parallel = both(n, gpt().train())
    other = copy.deepcopy(parallel)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    torch.testing.assert_close(parallel(*tokens()), whole(*tokens()))
    with torch.no_grad():
        for p in whole.parameters():
            p.add_(0.01)
    other(*tokens()).backward()
    whole(*tokens()).backward()
    expect_gradients(whole, other)
    assert parallel.wte.weight.grad is None
    torch.testing.assert_close(other.eval()(tokens()[0]), whole.eval()(tokens()[0]))
    assert (graphs(parallel), graphs(other), parallel.training) == (1, 2, True)
    with pytest.raises(autotp.Error) as raised:
        pickle.dumps(parallel)
    assert str(raised.value) == (
        "a parallel model cannot be pickled: it is tied to its process group\n"
        "  try      save model.state_dict() on each rank, or autotp.full_state_dict(model)"
    )


@checks.on(2)
def generation(rank: int, n: int) -> None:
    """The model's own `generate` draws the tokens that one device draws, past the block size."""
    torch.manual_seed(0)
    whole = gpt().eval()
    for p in whole.parameters():
        nn.init.normal_(p, std=0.3)
    parallel = autotp.parallelize(copy.deepcopy(whole), n)
    drawn = []
    for model in (whole, parallel):
        torch.manual_seed(3)
        drawn.append(model.generate(tokens(2, 1)[0], 20, temperature=0.8, top_k=20))
    assert torch.equal(*drawn)


@checks.on(2)
def what_was_made_before(rank: int, n: int) -> None:
    """An optimizer and hooks on parameters that were there first go on working: parameters stay the same objects."""
    whole, model = gpt().double().train(), gpt().double().train()
    model.load_state_dict(whole.state_dict())
    before = list(model.parameters())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (whole, model)]
    for one in (whole, model):
        one.ln_f.weight.register_hook(lambda grad: 2 * grad)
        one.wte.weight.grad = torch.ones_like(one.wte.weight)  # stale
    whole.zero_grad()
    parallel = autotp.parallelize(model, n)
    assert all(now is then for now, then in zip(parallel.parameters(), before, strict=True))
    assert parallel.wte.weight.grad is None
    for _ in range(3):
        for one, optimizer in zip((whole, parallel), optimizers, strict=True):
            one(*tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(parallel(*tokens()), whole(*tokens()), rtol=1e-12, atol=0)


@checks.on(2)
def attributes_that_are_in_the_graph(rank: int, n: int) -> None:
    parallel = autotp.parallelize(gpt(dropout=0.1).train(), n)
    with pytest.raises(autotp.Error) as raised:
        parallel.h[0].attn.n_head = 4
    assert str(raised.value) == (
        "`n_head` is 3 in the graphs of the parallel model, and setting it would change nothing\n"
        "  try      set it on the original model before autotp.parallelize"
    )
    with pytest.raises(autotp.Error, match="`n_head` is 3 in the graphs"):
        parallel.h[0].attn.n_head = torch.ones(3)
    parallel.h[0].attn.n_head = 3
    parallel.note = "my own"
    parallel.training = False
    assert parallel.note == "my own"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- one process


class Shared(nn.Module):
    """One module under two names, a tied weight, a parameter that is None, and a submodule called as ours are."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Linear(8, 8, bias=False)
        self.again = self.plan
        self.head = nn.Linear(8, 8)
        self.head.weight = self.plan.weight
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.plan(x)))

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


def test_tree() -> None:
    whole, parallel = both(1, Shared(), example_inputs=torch.randn(2, 8))
    assert parallel.again is parallel._modules["plan"]
    assert parallel.head.weight is parallel.again.weight
    assert parallel.nothing is None
    assert (parallel.made(), parallel.twice(4)) == ("Shared", 8)
    for duplicates in (True, False):
        theirs = [n for n, _ in whole.named_parameters(remove_duplicate=duplicates)]
        assert [n for n, _ in parallel.named_parameters(remove_duplicate=duplicates)] == theirs
    x = torch.randn(3, 8)
    torch.testing.assert_close(parallel(x), whole(x))


def test_plan_of_a_parallel_model() -> None:
    parallel = autotp.parallelize(gpt(), 1)
    assert str(parallel.plan).startswith("GPT on tp=1\n")
    assert parallel.layout_of("wte.weight").shape == (VOCAB, 48)
