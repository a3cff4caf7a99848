"""The parallel model as a user calls it: signatures, dtypes, modes, outputs, structures."""

import copy
import dataclasses
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from ranks import Checks
from small_models import VOCAB, Plain, both, expect_gradients, gpt, read_values, signatures_met, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.groups.one_thread import one_thread

checks = Checks()


# ---- signatures


class Window(nn.Module):
    """Slices that end at a number: the example is as long as that, later arguments are longer and shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())[:3, :5]
        return out


@checks.on(2)
def slices_of_longer_arguments_end_where_the_model_says(rank: int, n: int) -> None:
    """Also in a call with longer arguments they end where the model says."""
    whole, parallel = both(n, Window().double(), example_inputs=torch.ones(3, 5, 8).double())
    for rows, length in ((3, 5), (4, 7), (2, 4), (3, 9), (3, 5)):
        x = torch.linspace(-1, 1, rows * length * 8).view(rows, length, 8).double()
        torch.testing.assert_close(parallel(x), whole(x))
    assert signatures_met(parallel) <= 3


@checks.on(2)
def checkpoint_around_a_call_equals_one_device(rank: int, n: int) -> None:
    """torch's checkpointing around a call counts what is saved: a capture saves nothing that it sees."""
    whole, parallel = both(n, gpt().double().train())
    for x, y in (tokens(), tokens(2, 5)):
        for model in (whole, parallel):
            model.zero_grad()
            checkpoint(model, x, y, use_reentrant=False).backward()
        expect_gradients(whole, parallel)
    with torch.autograd.graph.save_on_cpu():
        loss = parallel.eval()(*tokens())
    torch.testing.assert_close(loss, whole.eval()(*tokens()))


@checks.on(2)
def calls_after_a_change_of_dtype_equal_one_device(rank: int, n: int) -> None:
    """`.to(dtype)` moves shards and buffers, and the next call has a graph of its own."""
    whole, parallel = both(n, gpt().double().train())
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
def autocast_has_one_device_s_dtypes_and_its_own_graph(rank: int, n: int) -> None:
    """bfloat16 wherever one device has it, float32 elsewhere, and a graph for each state of autocast."""
    torch.manual_seed(0)
    whole, parallel = both(n, Dtypes(), example_inputs=torch.randn(4, 5, 16), outputs="full")
    x = torch.randn(4, 5, 16)
    torch.testing.assert_close(parallel(x), whole(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = parallel(x), whole(x)
        assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in expected.items()}
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert signatures_met(parallel) == 2
    torch.testing.assert_close(parallel(x), whole(x))
    language, split = both(n, gpt().train())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(*tokens()) for model in (language, split)]
        torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    for loss in losses:
        loss.backward()
    assert {p.grad.dtype for p in split.parameters()} == {torch.float32}
    expect_gradients(language, split, 5e-2)


@checks.on(2)
def a_graph_first_met_without_gradients_trains_later(rank: int, n: int) -> None:
    """A signature first met under no_grad or inference mode is as good for training afterwards."""
    whole, parallel = both(n, gpt().double().train())
    x, y = tokens(2, 1)
    with torch.inference_mode():
        torch.testing.assert_close(parallel(x, y), whole(x, y))
    with torch.no_grad():
        assert not parallel(x).requires_grad
    for model in (whole, parallel):
        model(x, y).backward()
    expect_gradients(whole, parallel)


class Biased(nn.Module):
    """Attention with a bias for each head, one for all heads, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv, self.out, self.unread = nn.Linear(8, 24), nn.Linear(8, 8), nn.Parameter(torch.ones(3))
        self.own, self.all = nn.Parameter(torch.randn(2, 6, 6)), nn.Parameter(torch.randn(6, 6))
        self.tied = self.own
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, self.own + self.all + 0.5 * self.tied)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


@checks.on(3)
def a_rank_without_heads_has_every_gradient(rank: int, n: int) -> None:
    """Two heads on three ranks: the third has the gradients that the others have, some without elements."""
    x = torch.linspace(-2, 3, 96, dtype=torch.float64).view(2, 6, 8).sin()
    for frozen in ((), ("own",), ("all",), ("qkv.weight", "qkv.bias")):
        whole = Biased()
        for name in frozen:
            whole.get_parameter(name).requires_grad_(False)
        whole, parallel = both(n, whole, example_inputs=x)
        for _ in range(2):  # The second time in a graph that is kept.
            for model in (whole, parallel):
                model(x).backward(retain_graph=True)
        for name, p in parallel.named_parameters():
            expected = whole.get_parameter(name).grad
            assert (p.grad is None) == (expected is None) == (name in (*frozen, "unread")), name
            if p.grad is not None:
                torch.testing.assert_close(autotp.gather(p.grad), expected)
        read = [name for name, p in whole.named_parameters() if name not in (*frozen, "unread")]
        found = [torch.autograd.grad(m(x), [m.get_parameter(name) for name in read]) for m in (whole, parallel)]
        for want, part in zip(*found, strict=True):
            torch.testing.assert_close(part, want)


# ---- gradients


@checks.on(2)
def gradients_accumulate_through_freezing_and_unfreezing(rank: int, n: int) -> None:
    """Several backwards, frozen parameters, and the same ones unfrozen later, with the graph there was."""
    whole = gpt().double().train()
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
    assert signatures_met(parallel) == 1


class Embedded(nn.Module):
    """Takes embeddings, as Hugging Face's `inputs_embeds`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, embeds: Tensor, scale: float = 1.0) -> Tensor:
        return (embeds + self.down(nn.functional.gelu(self.up(embeds)))) * scale


@checks.on(2)
def inputs_get_one_device_s_gradient(rank: int, n: int) -> None:
    whole, parallel = both(n, Embedded().double(), example_inputs=torch.randn(3, 16, dtype=torch.float64))
    x = torch.randn(3, 16, dtype=torch.float64)
    given = [x.clone().requires_grad_() for _ in range(2)]
    for model, leaf in zip((whole, parallel), given, strict=True):
        model(leaf, scale=2.0).square().sum().backward()
    torch.testing.assert_close(given[1].grad, given[0].grad)
    expect_gradients(whole, parallel)
    torch.testing.assert_close(parallel(x, 3.0), whole(x, 3.0))  # another plain value: another graph


# ---- outputs


@checks.on(2)
@checks.on(4, rare=True)
def outputs_are_cut_or_whole_as_set(rank: int, n: int) -> None:
    """Logits: whole in eval mode; with a loss in training this rank's part, and `gather` has the right backward."""
    x, y = tokens()
    for whole in (WithLoss(), WithLoss().eval()):
        for setting in ("auto", "full", "local"):
            parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs={"x": x, "y": y}, outputs=setting)
            cut = setting == "local" or (setting == "auto" and whole.training)
            logits = parallel(x, y)["logits"]
            assert logits.shape == (*x.shape, VOCAB) and isinstance(logits, Sharded) == cut
            everything = autotp.gather(parallel(x, y))
            expected = whole(x, y)
            torch.testing.assert_close(everything, expected)
            weights = torch.linspace(0, 1, VOCAB, dtype=torch.float64)
            for model, found in ((whole, expected), (parallel, everything)):
                model.zero_grad()
                (found["loss"] + (found["logits"] * weights).square().sum()).backward()
            expect_gradients(whole, parallel)
    torch.testing.assert_close(autotp.gather(parallel(x, y)["logits"] * 2), expected["logits"] * 2)


class WithLoss(nn.Module):
    """Returns a dict, a dataclass or a tuple around both."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt().double()

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
def outputs_of_any_structure_come_back(rank: int, n: int) -> None:
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


# ---- what Python reads of values


class Predicates(nn.Module):
    """Branches on parts, activations, a buffer and an input; draws; sets a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.head, self.norm = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Plain() for _ in range(1)])
        self.calls, self.last = nn.Buffer(torch.zeros(())), None

    def forward(self, ids: Tensor, boost: Tensor | None = None) -> Tensor:
        self.calls += 1
        x = self.e(ids[:, : int(ids.max()) % 3 + 2])
        x = self.norm((x if boost is None else x * boost).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            h = block.up(x)
            h = h.clamp(max=1.0) if (h > 1.0).any() else h
            x = x + nn.functional.dropout(block.down(h.relu()), 0.3, self.training)
        self.last = x.detach().mean()
        if not torch.isfinite(x).all():
            x = torch.zeros_like(x)
        x = x * 1.5 if self.calls > 4 else x
        logits = self.head(x)
        return logits.tanh() if logits.max() > 2 else logits


def values_in_steps(n: int, steps: int) -> None:
    """Calls in which predicates come out otherwise: results, gradients, buffers and random state."""
    torch.manual_seed(0)
    whole, parallel = both(n, Predicates().double())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (whole, parallel)]
    for step in range(steps):
        for model in (whole, parallel):
            model.train(step % 4 != 3)
        torch.manual_seed(100 + step)
        ids = torch.randint(0, 11, (2 + step % 3, 5))
        boost = None if step < 2 else torch.tensor([1.0, 40.0, float("inf") if step == 5 else 0.1][step % 3]).double()
        found = []
        for model in (whole, parallel):
            torch.manual_seed(step)
            found.append((model(ids, boost), torch.get_rng_state()))
        (expected, state), (mine, its) = found
        assert torch.equal(state, its), step
        torch.testing.assert_close(mine, expected, msg=lambda m, s=step: f"step {s}: {m}")
        torch.testing.assert_close([parallel.calls, parallel.last], [whole.calls, whole.last], equal_nan=True)
        torch.testing.assert_close(parallel.norm.running_mean, whole.norm.running_mean, equal_nan=True)
        if whole.training and step != 5:
            expected.square().mean().backward()
            mine.square().mean().backward()
            expect_gradients(whole, parallel, 1e-10)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if step == 5:
            whole.norm.reset_running_stats()
            parallel.norm.reset_running_stats()


@checks.on(2)
def branches_on_tensor_values_equal_one_device(rank: int, n: int) -> None:
    values_in_steps(n, 7)


@checks.on(2, 3, rare=True)
def branches_on_tensor_values_equal_one_device_over_14_steps(rank: int, n: int) -> None:
    values_in_steps(n, 14)


class Branching(nn.Module):
    """Has other weights for large activations than for small ones, in one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.large, self.small = Plain(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x).relu()
        return (self.large(h) if h.mean() > 0.3 else self.small(h)).tanh()


@checks.on(2)
def branches_under_checkpointing_equal_one_device(rank: int, n: int) -> None:
    """Checkpointing must not record the run of a graph that assumed another outcome, nor what the ranks compare."""
    whole, parallel = both(n, Branching().double(), example_inputs=torch.zeros(3, 8).double())
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    for given in ({}, {"context_fn": contexts}):
        for scale in (1, 9, 1, 1, 9, 9):
            x = (torch.linspace(-1, 2, 24).double() * scale).view(3, 8).requires_grad_()
            whole(x).square().sum().backward()
            checkpoint(parallel, x, use_reentrant=False, **given).square().sum().backward()
            expect_gradients(whole, parallel)
    assert set(read_values(parallel)) == {True, False}


class Clamping(nn.Module):
    """A graph that assumes that no index is too large fails where one is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift, self.table = Plain(), nn.Buffer(torch.tensor(0)), nn.Embedding(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        drawn = torch.rand((), dtype=torch.float64)
        ids = ids + self.shift
        ids = ids.clamp(max=3) if (ids > 3).any() else ids
        x = self.table(ids) * drawn
        y: Tensor = self.body(x)
        return y * torch.rand((), dtype=torch.float64) if y.sum() > 0 else y


@checks.on(2, 3)
def a_graph_that_fails_leaves_random_numbers_as_one_device(rank: int, n: int) -> None:
    whole, parallel = both(n, Clamping().double(), example_inputs=torch.arange(4).view(2, 2))
    for step in range(8):
        found = []
        for model in (whole, parallel):
            torch.manual_seed(step)
            model.shift.fill_(step % 3)
            found.append((model(torch.arange(4).view(2, 2)), torch.get_rng_state()))
        torch.testing.assert_close(found[1][0], found[0][0], msg=f"step {step}")
        assert torch.equal(found[0][1], found[1][1]), step


class ClampingByLogits(nn.Module):
    """As `Clamping`, by what it computes of logits, which may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = nn.Linear(VOCAB, 8), nn.Embedding(4, 8)

    def forward(self, ids: Tensor, logits: Tensor) -> Tensor:
        ids = ids + (self.head(logits).sum() > 0)
        ids = ids.clamp(max=3) if (ids > 3).any() else ids
        rows: Tensor = self.table(ids)
        return rows


@checks.on(2)
def a_graph_that_fails_reads_parts_of_cut_arguments(rank: int, n: int) -> None:
    ids, x = torch.arange(4), tokens()[0]
    language, cut_language = both(n, gpt().double(), outputs="local")
    whole, parallel = both(n, ClampingByLogits().double(), example_inputs=(ids, language(x)))
    logits = cut_language(x)
    assert isinstance(logits, Sharded)
    for sign in (1, -1, 1, -1):
        torch.testing.assert_close(parallel(ids, logits * sign), whole(ids, language(x) * sign))


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Plain()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y[ids] * 2 if y.sum() > 0 else y[ids]


@checks.on(2)
def calls_in_two_threads_are_an_error_in_both(rank: int, n: int) -> None:
    """A call in another thread during a call is an error in both, and later; a new model has a group of its own."""
    whole, parallel = both(n, gpt().double())
    x, found = tokens()[0], list[str]()

    def call() -> None:
        with pytest.raises(autotp.Error, match="two threads use the process group of axis `tp` at once") as raised:
            parallel(x)
        found.append(raised.value.call)

    parallel(x)
    with pytest.raises(autotp.Error, match="two threads"), one_thread("first", str(parallel.mesh.group)):
        other = Thread(target=call)
        other.start()
        other.join()
    call()
    assert found == ["GPT.forward", "GPT.forward"]
    torch.testing.assert_close(autotp.parallelize(copy.deepcopy(whole), tp=n)(x), whole(x))


@checks.on(2)
def a_call_with_the_model_s_own_error_can_be_repeated(rank: int, n: int) -> None:
    given = {"x": torch.ones(3, 8).double(), "ids": torch.tensor([0, 2])}
    _, parallel = both(n, Wrong().double(), example_inputs=given)
    for sign in (1.0, -1.0):
        with pytest.raises(IndexError):
            parallel(given["x"] * sign, torch.tensor([0, 5]))
    parallel(**given)


class Guarded(nn.Module):
    """int() of infinity raises an exception where the call does not make it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.on = Plain(), nn.Buffer(torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x.nan_to_num(1, 1, 1))
        return y * len(range(int(x.max()))) if self.on else y


@checks.on(2)
def a_tensor_read_behind_a_branch_may_be_left_out(rank: int, n: int) -> None:
    x = torch.full((3, 8), 2.0).double()
    whole, parallel = both(n, Guarded().double(), example_inputs=x)
    for step in range(6):
        for model in (whole, parallel):
            model.on.fill_(step % 3 != 2)
        given = x * float("inf") if step % 3 == 2 else x
        torch.testing.assert_close(parallel(given), whole(given))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
