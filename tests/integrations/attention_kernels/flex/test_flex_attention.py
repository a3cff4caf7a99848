"""flex_attention: torch's flex_attention on ranks, by heads and queries, with what score and mask functions read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

import autotp
from autotp.integrations.attention_kernels.flex.recorded import flex_without_kernels


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Attention(nn.Module):
    """Attention of [batch seq 24] with the functions of a subclass, which may read documents [batch seq]."""

    def __init__(self, heads: int = 4, groups: int = 4, width: int = 4) -> None:
        super().__init__()
        self.sizes, self.gqa = (heads * width, groups * width, groups * width), heads != groups
        self.width, self.heads = width, heads
        self.qkv, self.o = nn.Linear(24, sum(self.sizes)), nn.Linear(heads * width, 24)
        self.prepare(heads)

    def prepare(self, heads: int) -> None: ...

    def score_mod(self, x: Tensor) -> Callable[..., Any] | None:
        return None

    def mask_mod(self, documents: Tensor) -> Callable[..., Any] | None:
        return causal

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        mask_mod = self.mask_mod(documents)
        mask = create_block_mask(mask_mod, b, None, t, t, device=x.device) if mask_mod is not None else None
        return self.o(self.attend(q, k, v, self.score_mod(x), mask).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod, mask, enable_gqa=self.gqa)


class Window(Attention):
    def mask_mod(self, documents: Tensor) -> Callable[..., Any]:
        return lambda b, h, q, k: (q >= k) & (q - k < 3)


class Documents(Attention):
    def mask_mod(self, documents: Tensor) -> Callable[..., Any]:
        return and_masks(causal, lambda b, h, q, k: documents[b, q] == documents[b, k])


class Prefix(Attention):
    """Each row reads its first tokens from both sides: as many as it has in document 0."""

    def mask_mod(self, documents: Tensor) -> Callable[..., Any]:
        lengths = (documents == 0).sum(1)
        return lambda b, h, q, k: (q >= k) | (k < lengths[b])


class Alibi(Attention):
    """Slopes that are learned, one for each head."""

    def prepare(self, heads: int) -> None:
        self.slopes = nn.Parameter(torch.rand(heads))

    def score_mod(self, x: Tensor) -> Callable[..., Any]:
        return lambda score, b, h, q, k: score + self.slopes[h] * (k - q)


class AlibiByNumber(Attention):
    """Slopes that follow from the number of the head."""

    def score_mod(self, x: Tensor) -> Callable[..., Any]:
        return lambda score, b, h, q, k: score + torch.exp2(-8.0 * (h + 1) / self.heads) * (k - q)


class SoftCap(Attention):
    def score_mod(self, x: Tensor) -> Callable[..., Any]:
        return lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0)


class LearnedBias(Attention):
    """A table for each head and distance, and a number for each query of each row."""

    def prepare(self, heads: int) -> None:
        self.table = nn.Parameter(torch.randn(heads, 64))
        self.of_rows = nn.Linear(24, 1)

    def score_mod(self, x: Tensor) -> Callable[..., Any]:
        rows = self.of_rows(x).squeeze(-1)
        return lambda score, b, h, q, k: score * rows[b, q].sigmoid() + self.table[h, (q - k).abs()]


class HeadsDiffer(Attention):
    """Even heads read before, odd heads behind a query; the scores depend on the length, too."""

    def mask_mod(self, documents: Tensor) -> Callable[..., Any]:
        return lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, q <= k)

    def score_mod(self, x: Tensor) -> Callable[..., Any]:
        length = x.shape[1]
        return lambda score, b, h, q, k: score * (length - q) / (1 + k)


class Vectors(Attention):
    """Reads whole rows of tensors: each query has a vector, and each key."""

    def prepare(self, heads: int) -> None:
        self.of_queries, self.of_keys = nn.Linear(24, 5), nn.Parameter(torch.randn(64, 5))

    def score_mod(self, x: Tensor) -> Callable[..., Any]:
        vectors = self.of_queries(x)
        return lambda score, b, h, q, k: score + (vectors[b, q] * self.of_keys[k]).sum()

    def mask_mod(self, documents: Tensor) -> None:
        return None


class WithTotals(Alibi):
    """Returns the log-sum-exp, whose gradient flows, in the place of a sink."""

    def prepare(self, heads: int) -> None:
        super().prepare(heads)
        self.sinks = nn.Parameter(torch.randn(heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Any) -> Tensor:
        wanted = torch.nn.attention.flex_attention.AuxRequest(lse=True, max_scores=True)
        out, aux = flex_attention(q, k, v, score_mod, mask, scale=0.3, enable_gqa=self.gqa, return_aux=wanted)
        kept = torch.sigmoid(aux.lse - self.sinks[:, None])
        return out * kept.unsqueeze(-1) + aux.max_scores.unsqueeze(-1).tanh()


MODELS = (
    Attention, Window, Documents, Prefix, Alibi, AlibiByNumber, SoftCap, LearnedBias, HeadsDiffer, Vectors, WithTotals,
)  # fmt: skip


def batch(rows: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    documents = torch.randint(3, (rows, length), generator=generator).sort(1).values
    return torch.randn(rows, length, 24, generator=generator), documents


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2}, "tp3": {"tp": 3}, "cp2": {"tp": 1, "cp": 2}, "tp2-cp2": {"tp": 2, "cp": 2},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "grouped"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_flex_attention_on_ranks_equals_one_device(model: Any, groups: int, layout: dict[str, Any]) -> None:
    report = autotp.verify(model(groups=groups), example_inputs=batch(), **layout)
    assert report.ok, report
    plan = str(report.plan)
    assert "no rule" not in plan and "it needs whole sequences" not in plan
    assert layout["tp"] == 1 or "QKV -> attention" in plan


class ByTable(Attention):
    """A mask that a table of queries and keys says. x: [batch seq 24], documents: [batch seq]"""

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:  # type: ignore[override]
        table = documents.unsqueeze(2) == documents.unsqueeze(1)
        mask = create_block_mask(lambda b, h, q, k: table[b, q, k], len(x), None, x.shape[1], x.shape[1], device="cpu")
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.o(flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("model", "told"), [(ByTable, True), (Documents, False), (Alibi, False)], ids=["table", "documents", "slopes"]
)
def test_the_plan_says_of_which_masks_it_does_not_know_what_is_seen(model: Any, told: bool) -> None:
    plan = str(autotp.explain(model(), 1, cp=2, cp_attention="gather", example_inputs=batch()))
    assert ("of 1 the mask is a tensor, so which keys are seen is not known" in plan) == told, plan


@pytest.mark.parametrize(
    "layout", [{"sequence_parallel": True}, {"recompute": "full"}, {"sequence_parallel": True, "cp": 2}], ids=str
)
@pytest.mark.parametrize("model", [Documents, LearnedBias, HeadsDiffer], ids=lambda model: model.__name__)
def test_other_layouts_equal_one_device(model: Any, layout: dict[str, Any]) -> None:
    report = autotp.verify(model(heads=6, groups=3), 2, example_inputs=batch(3, 10), **layout)
    assert report.ok, report


@pytest.mark.parametrize("heads", [(5, 5), (6, 3), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("model", [LearnedBias, HeadsDiffer], ids=lambda model: model.__name__)
def test_heads_that_do_not_divide_equal_one_device(model: Any, heads: tuple[int, int]) -> None:
    """Also ranks without heads."""
    for tp in (3, 7):
        report = autotp.verify(model(*heads), tp, example_inputs=batch())
        assert report.ok, report


def test_ranks_without_queries_equal_one_device() -> None:
    report = autotp.verify(LearnedBias(), 1, cp=4, example_inputs=batch(2, 5))
    assert report.ok, report


def test_torch_compile_takes_a_parallel_model() -> None:
    inputs = batch()
    model = autotp.parallelize(LearnedBias(), 1, example_inputs=inputs)
    expected = model(*inputs)
    expected.sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(*inputs)
    got.sum().backward()
    torch.testing.assert_close(got, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, before[name])


# ---- on real ranks

checks = Checks()


class Compiled(Documents):
    """As pages of torch advise: the function is compiled, before forward or in it."""

    def prepare(self, heads: int) -> None:
        self.compiled = torch.compile(flex_attention)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Any) -> Tensor:
        first = self.compiled(q, k, v, score_mod, mask)
        return first + torch.compile(flex_attention)(q, k, v, score_mod, mask)


class FromLoop(Attention):
    """A mask that the training loop makes."""

    def forward(self, x: Tensor, mask: Any) -> Tensor:  # type: ignore[override]
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.o(flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))


def mask_of(documents: Tensor, window: int) -> Any:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[b, q] == documents[b, k]) & (q - k < window)

    return create_block_mask(mask_mod, len(documents), None, documents.shape[1], documents.shape[1], device="cpu")


def equal_training(n: int, model: type[Attention], make: Callable[[int], tuple[Any, ...]], **layout: Any) -> None:
    """Steps of a model on ranks, and on one device by products; each of another batch."""
    torch.manual_seed(0)
    plain, parallel = model().double(), model().double()
    parallel.load_state_dict(plain.state_dict())
    parallel = autotp.parallelize(parallel, n // layout.get("cp", 1), example_inputs=make(0), **layout)
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (plain, parallel)]
    for step in range(3):  # From the second on, outputs depend on gradients.
        inputs = make(step)
        with flex_without_kernels():
            expected = plain(*inputs)
            expected.square().mean().backward()
        got = parallel(*inputs)
        torch.testing.assert_close(got.cpu(), expected)
        got.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def of_step(step: int) -> tuple[Tensor, Tensor]:
    x, documents = batch((2, 3, 2, 3)[step], (7, 12, 5, 7)[step])
    return x.double(), documents


def from_loop(step: int) -> tuple[Tensor, Any]:
    x, documents = of_step(step)
    return x, mask_of(documents, (20, 3, 2, 1)[step])


@checks.on(2, 3)
def steps_equal_one_device(rank: int, n: int) -> None:
    for model in (LearnedBias, HeadsDiffer):
        equal_training(n, model, of_step)


@checks.on(2)
def bfloat16_equals_one_device(rank: int, n: int) -> None:
    """By products, whose scores are float32: a GPU calls its kernel, which was not run."""
    torch.manual_seed(0)
    plain, (x, documents) = Documents().bfloat16(), batch()
    inputs = x.bfloat16(), documents
    parallel = autotp.parallelize(copy.deepcopy(plain), n, example_inputs=inputs)
    outputs = list[Tensor]()
    for model in (plain, parallel):
        with flex_without_kernels():
            outputs.append(model(*inputs))
        outputs[-1].float().square().mean().backward()
    assert outputs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.05, atol=0.01)
    grads = [autotp.gather(p.grad) if p.grad is not None else None for p in parallel.parameters()]
    for got, p in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, rtol=0.1, atol=0.01)


@checks.on(2)
def steps_over_cp_equal_one_device(rank: int, n: int) -> None:
    equal_training(n, LearnedBias, of_step, cp=2)


class WithoutMask(Attention):
    """The loss of attention where each query reads all keys."""

    def mask_mod(self, documents: Tensor) -> None:
        return None

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return super().forward(super().forward(x, documents), documents).square().mean()


@checks.on(2)
def rows_without_a_mask_are_computed_in_parts(rank: int, n: int) -> None:
    torch.manual_seed(0)
    model, inputs = WithoutMask().double(), dict(zip(("x", "documents"), of_step(0), strict=True))
    with flex_without_kernels():
        expected = model(**inputs).detach()
    own = {name: x[rank : rank + 1] for name, x in inputs.items()}
    trainer = autotp.distribute(model, tp=1, dp=n, example_inputs=own)
    torch.testing.assert_close(trainer.step(**own).cpu(), expected)


@checks.on(2)
def each_call_uses_the_mask_of_its_loop(rank: int, n: int) -> None:
    equal_training(n, FromLoop, from_loop)


@checks.on(2)
def each_call_uses_the_mask_of_its_loop_over_cp(rank: int, n: int) -> None:
    equal_training(n, FromLoop, from_loop, cp=2)


DOCUMENTS, WINDOW = torch.zeros(0), 0
"""Globals as those of a script, whose loop stands at the top level."""


def reads_globals(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return in_one_document(b, q, k) & (q - k < WINDOW)


def in_one_document(b: Tensor, q: Tensor, k: Tensor, depth: int = 1) -> Tensor:
    """A function that calls itself, as it may."""
    return in_one_document(b, q, k, 0) if depth else DOCUMENTS[b, q] == DOCUMENTS[b, k]


def test_each_call_uses_the_globals_that_its_mask_reads() -> None:
    def make(step: int) -> tuple[Tensor, Any]:
        global DOCUMENTS, WINDOW
        x, DOCUMENTS = of_step(step)
        WINDOW = (20, 20, 2)[step]
        return x, create_block_mask(reads_globals, len(x), None, x.shape[1], x.shape[1], device="cpu")

    equal_training(1, FromLoop, make)


@checks.on(2)
def compiled_functions_are_the_same_operator(rank: int, n: int) -> None:
    equal_training(n, Compiled, of_step)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
