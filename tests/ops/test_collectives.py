"""The conjugates on real ranks against what they mean, written out in one process over all the ranks' values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cards.pretend import REAL
from cards.spies import collective_order
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.ops import collectives
from autotp.ops.collectives import all_gather, all_to_all, copy, gather, reduce, reduce_scatter, scatter, start_all

PAIRS = (copy, reduce), (scatter, gather), (all_gather, reduce_scatter)
ALL = {fn.__name__: fn for pair in PAIRS for fn in pair}
BACKWARD = {f.__name__: g.__name__ for pair in PAIRS for f, g in (pair, pair[::-1])}


@dataclass(frozen=True)
class Case:
    """A whole value and the dimension of it that is cut. shape: [... size ...]"""

    shape: tuple[int, ...]
    dim: int
    block: int = 1
    dtype: torch.dtype = torch.float64

    @property
    def size(self) -> int:
        return self.shape[self.dim]

    def parts(self, whole: Tensor, n: int) -> list[Tensor]:
        """The n ranks' parts of `whole`, empty ones included."""
        blocks = torch.arange(self.size).view(-1, self.block)
        chunks = [chunk.flatten() for chunk in blocks.chunk(n)]
        chunks += [torch.arange(0)] * (n - len(chunks))
        return [whole.index_select(self.dim, chunk) for chunk in chunks]


CASES = {
    "even": Case((12, 5), 0),
    "even-last": Case((3, 12), -1),
    "even-middle": Case((2, 12, 3), 1),
    "uneven-first": Case((7, 2), 0),
    "uneven-last": Case((2, 3, 7), 2),
    "empty": Case((2, 5), 1),
    "emptier": Case((1, 3), 0),
    "blocks": Case((3, 20), 1, 4),
    "blocks-first": Case((6, 2), 0, 2),
    "vector": Case((9,), 0),
    "nothing": Case((0, 6), 1),
    "bfloat16": Case((2, 7), 1, 1, torch.bfloat16),
    "float16": Case((7, 2), 0, 1, torch.float16),
    "float32": Case((2, 7), 1, 1, torch.float32),
    "int64": Case((2, 7), 1, 1, torch.int64),
    "int16": Case((2, 7), 1, 1, torch.int16),
    "bool": Case((2, 7), 1, 1, torch.bool),
}
SUMS = {"reduce", "reduce_scatter"}
RAN = [(name, label) for name in ALL for label in CASES if not (name in SUMS and label in ("int16", "bool"))]


def meaning(name: str, values: list[Tensor], case: Case) -> list[Tensor]:
    """What each rank gets from `name` where the ranks hold `values`."""
    n = len(values)
    match name:
        case "copy":
            return values
        case "reduce":
            return [sum(values[1:], values[0])] * n
        case "scatter":
            return [case.parts(value, n)[rank] for rank, value in enumerate(values)]
        case "gather" | "all_gather":
            return [torch.cat(values, case.dim)] * n
        case _:
            return case.parts(sum(values[1:], values[0]), n)


def backward_meaning(name: str, grads: list[Tensor], case: Case) -> list[Tensor]:
    return meaning(BACKWARD[name], grads, case)


def wholes(case: Case, n: int, seed: int) -> list[Tensor]:
    """For each rank a different whole value of small whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 5, case.shape, generator=generator).to(case.dtype) for _ in range(n)]


def inputs(name: str, case: Case, n: int) -> list[Tensor]:
    """What the ranks hold before `name`: the same where it takes a Replicate, parts where it takes a Shard."""
    values = wholes(case, n, 0)
    if name in ("copy", "scatter"):
        return [values[0]] * n
    return case.parts(values[0], n) if name in ("gather", "all_gather") else values


def grads(name: str, case: Case, n: int) -> list[Tensor]:
    """The gradients of the outputs: the same where the output is Replicate, parts where it is Shard."""
    values = wholes(case, n, 1)
    if name in ("reduce", "gather"):
        return [values[0]] * n
    return case.parts(values[0], n) if name in ("scatter", "reduce_scatter") else values


def convert(name: str, x: Tensor, group: str | None, case: Case) -> Tensor:
    where = () if name in ("copy", "reduce") else (case.dim, case.size, case.block)
    return ALL[name](x, group, *where)


def strided(x: Tensor) -> Tensor:
    """An equal tensor with every second element of its memory unused."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def world() -> str:
    group = dist.group.WORLD
    assert group is not None
    return group.group_name


# --- the six, forward and backward


def run_case(rank: int, n: int, name: str, case: Case) -> tuple[Tensor, Tensor | None]:
    x = strided(inputs(name, case, n)[rank])
    before = x.clone()
    x.requires_grad_(case.dtype.is_floating_point)
    out = convert(name, x, world(), case)
    assert torch.equal(x, before), "the input was written to"
    assert name == "copy" or out.is_contiguous()
    if not x.requires_grad:
        return out, None
    out.backward(strided(grads(name, case, n)[rank]))
    return out.detach(), x.grad


def run_cases(rank: int, n: int) -> dict[tuple[str, str], tuple[Tensor, Tensor | None]]:
    return {(name, label): run_case(rank, n, name, CASES[label]) for name, label in RAN}


@cache
def results(n: int) -> list[Any]:
    return run_ranks(run_cases, n)


@pytest.mark.parametrize("n", [2, 3, 4], ids="tp{}".format)
@pytest.mark.parametrize(("name", "label"), RAN, ids=[f"{name}-{label}" for name, label in RAN])
def test_conjugates_on_ranks_do_what_they_mean(name: str, label: str, n: int) -> None:
    case = CASES[label]
    expected = meaning(name, inputs(name, case, n), case)
    expected_grads = backward_meaning(name, grads(name, case, n), case)
    for rank in range(n):
        out, grad = results(n)[rank][name, label]
        torch.testing.assert_close(out, expected[rank], rtol=0, atol=0)
        if grad is not None:
            torch.testing.assert_close(grad, expected_grads[rank], rtol=0, atol=0)


# --- the exchange of one cut dimension for another

EXCHANGES = {
    "even": (Case((12, 5, 4), 0), Case((12, 5, 4), 2)),
    "back": (Case((12, 5, 4), 2), Case((12, 5, 4), 0)),
    "uneven": (Case((2, 7, 3), 1), Case((2, 7, 3), -1)),
    "fewer-than-ranks": (Case((1, 5), 0), Case((1, 5), 1)),
    "blocks": (Case((20, 6), 0, 4), Case((20, 6), 1, 2)),
    "nothing": (Case((0, 6, 4), 1), Case((0, 6, 4), 2)),
    "int16": (Case((4, 7), 0, 1, torch.int16), Case((4, 7), 1, 1, torch.int16)),
    "bfloat16": (Case((4, 7), 0, 1, torch.bfloat16), Case((4, 7), 1, 1, torch.bfloat16)),
    "float8": (Case((4, 7), 0, 1, torch.float8_e4m3fn), Case((4, 7), 1, 1, torch.float8_e4m3fn)),
    "complex": (Case((4, 7), 0, 1, torch.complex64), Case((4, 7), 1, 1, torch.complex64)),
}
"""The dimension that is cut before, and the one that is cut then."""


def run_exchanges(rank: int, n: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    got = {}
    for label, (cut, to) in EXCHANGES.items():
        x = turned(cut.parts(wholes(cut, n, 0)[0], n)[rank], rank).requires_grad_(
            cut.dtype.is_floating_point or cut.dtype.is_complex
        )
        out = all_to_all(x, world(), cut.dim, cut.size, to.dim, to.size, cut.block, to.block)
        if x.requires_grad:
            out.backward(strided(to.parts(wholes(cut, n, 1)[0], n)[rank]))
        got[label] = in_bytes(out.detach()), None if x.grad is None else in_bytes(x.grad)
    return got


def in_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor: torch sends no float8 between processes."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("n", [2, 3, 4], ids="tp{}".format)
def test_all_to_all_exchanges_the_cut_dimension_and_is_its_own_conjugate(n: int) -> None:
    """Also of ranks whose strides differ, and of a rank that has nothing to send."""
    for rank, got in enumerate(run_ranks(run_exchanges, n)):
        for label, (cut, to) in EXCHANGES.items():
            out, grad = got[label]
            assert torch.equal(out, in_bytes(to.parts(wholes(cut, n, 0)[0], n)[rank])), label
            assert grad is None or torch.equal(grad, in_bytes(cut.parts(wholes(cut, n, 1)[0], n)[rank])), label


def run_of_one_column(rank: int, n: int) -> list[Tensor]:
    row = torch.arange(3 * rank, 3 * rank + 3, dtype=torch.int16)[None]
    column = row.t()  # Contiguous, with a stride of 3 in its last dimension, which has one position.
    single = torch.full((1, 2), rank, dtype=torch.int16).t()[:1] if rank else torch.full((1, 1), 0, dtype=torch.int16)
    return [all_gather(column, world(), 0, 3 * n), all_to_all(single, world(), 0, n, 1, 1)]


def test_bytes_of_a_last_dimension_of_one_position_are_sent() -> None:
    """torch takes such a tensor for contiguous whatever its stride is, and gives its bytes only if that is 1."""
    for rank, (column, single) in enumerate(run_ranks(run_of_one_column, 2)):
        assert column.flatten().tolist() == list(range(6))
        assert single.tolist() == ([[0], [1]] if rank == 0 else [[], []])


# --- who runs a collective


class Observed(TorchDispatchMode):
    """A mode that notes the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(f"{op.namespace}.{op._opname}")
        return op(*args, **(kwargs or {}))


def run_observed(rank: int, n: int) -> list[str]:
    """The process group's own methods run; functional collectives where others see operators, and for complex sums."""
    group = dist.group.WORLD.group_name

    def uses_process_group(x: Tensor) -> bool:
        found, work = collectives._launch("all_reduce", (x, "sum", group))
        assert torch.equal(collectives._wait(found, work), n * x)
        return work is not None

    x = torch.arange(3.0)
    assert uses_process_group(x) and uses_process_group(x.view(3, 1).expand(3, 2))
    assert not uses_process_group(x.to(torch.complex64))
    with Observed() as mode:
        assert not uses_process_group(x)
    return mode.names


def test_observers_of_operators_see_functional_collectives() -> None:
    for names in run_ranks(run_observed, 2):
        assert "_c10d_functional.all_reduce" in names and "_c10d_functional.wait_tensor" in names


def batched_gradients(x: Tensor, group: str | None) -> Tensor:
    """The Jacobian of a reduced product, by torch's older batching of backward passes. x: [n] -> [n n]"""
    x = x.clone().requires_grad_()
    y = reduce(copy(x, group) ** 2, group)
    return torch.autograd.grad(y, x, torch.eye(len(x)), is_grads_batched=True)[0]


def run_batched(rank: int, n: int) -> Tensor:
    return batched_gradients(torch.arange(1.0, 4.0), dist.group.WORLD.group_name)


def test_collectives_have_batched_gradients() -> None:
    for found in run_ranks(run_batched, 2):
        assert torch.equal(found, 2 * batched_gradients(torch.arange(1.0, 4.0), None))


def lazy() -> dict[str, Tensor]:
    """Tensors whose memory has other values than they: torch keeps a bit beside it."""
    z = torch.complex(torch.arange(1.0, 4.0), torch.arange(4.0, 7.0))
    return {"conjugate": z.conj(), "negative": torch._neg_view(torch.arange(1.0, 4.0)), "both": z.conj().imag}


def run_lazy(rank: int, n: int) -> dict[str, list[Tensor]]:
    group = dist.group.WORLD.group_name
    return {
        name: [
            *(reduce(lazy()[name], group, fresh=fresh) for fresh in (False, True)),
            gather(lazy()[name], group, 0, n * 3),
            collectives.start_sum(lazy()[name], group, None)(),
            collectives.communicate_all([lazy()[name]], group)[0],
        ]
        for name in lazy()
    }


def test_collectives_resolve_lazy_conjugation_and_negation() -> None:
    for of_rank in run_ranks(run_lazy, 2):
        for name, found in of_rank.items():
            value = lazy()[name].resolve_conj().resolve_neg()
            wanted = [2 * value, 2 * value, torch.cat([value, value]), 2 * value, 2 * value]
            assert [x.tolist() for x in found] == [x.tolist() for x in wanted], name


# --- operands whose dimensions lie in memory in another order on each rank


def turned(x: Tensor, rank: int) -> Tensor:
    """An equal tensor, on ranks with odd numbers with its dimensions in memory in reverse."""
    dims = list(range(x.dim()))[::-1]
    return x.permute(dims).contiguous().permute(dims) if rank % 2 else x.contiguous()


def run_turned(rank: int, n: int, native: bool) -> dict[tuple[str, str], tuple[Tensor, Tensor | None]]:
    if native:
        collectives._is_gloo = lambda *_: False
    found = {}
    for name, label in RAN:
        case = CASES[label]
        x = turned(inputs(name, case, n)[rank], rank).requires_grad_(case.dtype.is_floating_point)
        out = convert(name, x, world(), case)
        if min(*x.shape, *out.shape, 2) > 1:
            assert out.stride() == turned(out, rank).stride(), "a result has its operand's order"
        if x.requires_grad:
            out.backward(turned(grads(name, case, n)[rank], rank + 1))
        found[name, label] = out.detach(), x.grad
    return found


@pytest.mark.parametrize("native", [False, True], ids=["gloo", "native"])
def test_collectives_of_ranks_with_different_strides(native: bool) -> None:
    """With one position, strides do not say the order: of 3 on 2 ranks, one rank has [2 1 5] and the other [1 1 5]."""
    ranks = run_ranks(run_turned, 3, native)
    for name, label in RAN:
        case = CASES[label]
        expected = meaning(name, inputs(name, case, 3), case)
        expected_grads = backward_meaning(name, grads(name, case, 3), case)
        for rank in range(3):
            out, grad = ranks[rank][name, label]
            where = f"{name} {label}"
            torch.testing.assert_close(out, expected[rank], rtol=0, atol=0, msg=lambda m, where=where: f"{where} {m}")
            if grad is not None:
                torch.testing.assert_close(grad, expected_grads[rank], rtol=0, atol=0)


# --- the backend's own reduce-scatter, which NCCL takes


def run_native(rank: int, n: int) -> list[Tensor]:
    collectives._is_gloo = lambda *_: False
    cases = [CASES[label] for name, label in RAN if name == "reduce_scatter"]
    return [convert("reduce_scatter", inputs("reduce_scatter", case, n)[rank], world(), case) for case in cases]


def test_native_reduce_scatter_equals_its_meaning() -> None:
    ranks = run_ranks(run_native, 3)
    labels = [label for name, label in RAN if name == "reduce_scatter"]
    for index, label in enumerate(labels):
        case = CASES[label]
        expected = meaning("reduce_scatter", inputs("reduce_scatter", case, 3), case)
        for rank in range(3):
            torch.testing.assert_close(ranks[rank][index], expected[rank], rtol=0, atol=0)


# --- scalars, maxima, groups of one


def run_small(rank: int, n: int) -> dict[str, Any]:
    x = torch.tensor(float(rank + 1), requires_grad=True)
    reduce(copy(x, world()) ** 2, world()).backward()
    y = torch.tensor([1.0, -rank], requires_grad=True)
    top = reduce(y, world(), "max")
    (y * top).sum().backward()
    per_row = torch.func.vmap(lambda row: reduce(row, world(), op="max"))(torch.tensor([[rank], [-rank]]))
    shifted = torch.func.grad(lambda y: (y - reduce(y, world(), "max")).sum())(y.detach())
    alone: str = [dist.new_group([each]) for each in range(n)][rank].group_name
    same = [convert(name, y, group, Case((2,), 0)) is y for name in ALL for group in (None, alone)]
    same += [torch.equal(top := reduce(y, group, "max"), y) and not top.requires_grad for group in (None, alone)]
    return {
        "scalar": x.grad,
        "top": reduce(y, world(), "max"),
        "kept": y.grad,
        "rows": per_row,
        "shifted": shifted,
        "same": same,
        "empty": all_gather(torch.empty(2, 0, 3), world(), 1, 0).shape,
    }


def test_collectives_of_scalars_maxima_and_groups_of_one() -> None:
    for rank, got in enumerate(run_ranks(run_small, 3)):
        assert got["scalar"].item() == sum(2 * (r + 1) for r in range(3)), "copy's gradient is summed"
        assert got["top"].tolist() == [1, 0] and not got["top"].requires_grad
        assert got["kept"].tolist() == [1, 0], "no gradient through the maximum"
        assert got["rows"].tolist() == [[2], [0]]
        assert got["shifted"].tolist() == [1, 1]
        assert got["same"] == [True] * 14, rank
        assert got["empty"] == (2, 0, 3)


# --- transforms: a function through all six, cut on every rank, and the same uncut

HIDDEN, ROWS, COLUMNS = 5, 6, 3


def waves(*shape: int, pace: float) -> Tensor:
    """Values of both signs below one, in float64, that every process has alike; no draw, which vmap would refuse."""
    return torch.sin(pace * torch.arange(math.prod(shape), dtype=torch.float64)).view(shape)


def weights() -> tuple[Tensor, Tensor, Tensor]:
    return waves(COLUMNS, HIDDEN, pace=1.1), waves(HIDDEN, COLUMNS, pace=2.3), waves(COLUMNS, HIDDEN, pace=0.7)


def samples() -> Tensor:
    return waves(4, ROWS, COLUMNS, pace=1.9)


def whole_loss(x: Tensor) -> Tensor:
    """x: [rows columns] -> []"""
    w1, w2, w3 = weights()
    y = (torch.tanh(x @ w1) @ w2) ** 3
    z = torch.tanh(torch.sin(y) ** 2)
    h = torch.tanh(torch.tanh(z @ w1) @ w2 + z)
    return (torch.cos(h @ w3) ** 3).sum()


def cut_loss(rank: int, n: int, group: str) -> Callable[[Tensor], Tensor]:
    w1, w2, w3 = weights()
    w1, w2, w3 = (Case(tuple(w.shape), dim).parts(w, n)[rank].contiguous() for w, dim in ((w1, 1), (w2, 0), (w3, 1)))

    def loss(x: Tensor) -> Tensor:
        y = reduce(torch.tanh(copy(x, group) @ w1) @ w2, group) ** 3  # tensor parallel
        z = torch.sin(scatter(y, group, 0, ROWS)) ** 2  # sequence parallel from here on
        z = torch.tanh(all_to_all(z, group, 0, ROWS, -1, COLUMNS))
        z = all_to_all(z, group, -1, COLUMNS, 0, ROWS)
        h = torch.tanh(all_gather(z, group, 0, ROWS) @ w1) @ w2
        h = torch.tanh(reduce_scatter(h, group, 0, ROWS) + z)
        out = gather(torch.cos(all_gather(h, group, -2, ROWS) @ w3), group, -1, HIDDEN)
        return (out**3).sum()

    return loss


def transforms(loss: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The gradient, per-sample gradients, and Hessian-vector products both ways that compose here."""
    xs = samples()
    x = xs[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (product,) = torch.autograd.grad(grad, x, xs[1])
    slope = torch.func.grad(loss)
    return {
        "value": loss(xs[0]),
        "grad": slope(xs[0]),
        "autograd": grad.detach(),
        "hessian-vector": product,
        "func-hessian-vector": torch.func.grad(lambda x: (slope(x) * xs[1]).sum())(xs[0]),
        "per-sample": torch.func.vmap(slope)(xs),
        "per-sample-inner": torch.func.vmap(slope, in_dims=2, out_dims=1)(xs.movedim(0, 2)),
        "per-sample-hessian-vector": torch.func.vmap(lambda x: torch.func.vjp(slope, x)[1](xs[1])[0])(xs),
    }


def run_transforms(rank: int, n: int) -> dict[str, Tensor]:
    return transforms(cut_loss(rank, n, world()))


@pytest.mark.parametrize("n", [2, 3, 4], ids="tp{}".format)
def test_collectives_under_transforms_equal_one_device(n: int) -> None:
    expected = transforms(whole_loss)
    for got in run_ranks(run_transforms, n):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


# --- torch.compile


def run_compiled(rank: int, n: int, backend: str, dynamic: bool) -> list[Tensor]:
    loss = cut_loss(rank, n, world())

    def step(x: Tensor) -> Tensor:
        return loss(x) + reduce(x, world(), "max").sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, dynamic=dynamic, fullgraph=True)
    x = samples()[0].requires_grad_()
    value = compiled(x)
    value.backward()
    assert x.grad is not None
    return [value.detach(), x.grad]


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [("aot_eager", True), pytest.param("inductor", False, marks=pytest.mark.system)],  # which asks a C++ compiler
)
def test_compiled_collectives_equal_one_device(backend: str, dynamic: bool) -> None:
    x = samples()[0].requires_grad_()
    value = whole_loss(x)
    value.backward()
    assert x.grad is not None
    expected = [value.detach() + x.detach().sum(), x.grad]
    for got in run_ranks(run_compiled, 2, backend, dynamic, timeout=120):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def run_symbolic(rank: int, n: int) -> list[Tensor]:
    group = world()

    def there_and_back(x: Tensor) -> Tensor:
        part = scatter(x, group, 1, x.shape[1]) * 2
        return reduce_scatter(all_gather(part, group, 1, x.shape[1]), group, 1, x.shape[1])

    compiled = torch.compile(there_and_back, backend="aot_eager", dynamic=True, fullgraph=True)
    return [compiled(torch.arange(3.0 * size).view(3, size)) for size in (8, 5, 9, 4)]


def test_compiled_collectives_take_symbolic_sizes() -> None:
    for rank, got in enumerate(run_ranks(run_symbolic, 2)):
        for size, part in zip((8, 5, 9, 4), got, strict=True):
            assert torch.equal(part, 4 * torch.arange(3.0 * size).view(3, size).chunk(2, 1)[rank])


def launch_where_dynamo_gave_up(rank: int, n: int) -> Tensor:
    """Dynamo tries each function that one calls which it does not compile, as behind its limit of recompilations."""
    from torch._dynamo.eval_frame import skip_code

    group = world()

    def step(x: Tensor) -> Tensor:
        return collectives._wait(*collectives._launch("all_reduce", (x, "sum", group)))

    skip_code(step.__code__)
    found: Tensor = torch.compile(step, backend="eager")(torch.ones(3))
    return found


def test_process_groups_work_where_dynamo_gave_up() -> None:
    for got in run_ranks(launch_where_dynamo_gave_up, 2):
        assert got.tolist() == [2, 2, 2]


# --- what goes wrong


def run_misfit(rank: int, n: int) -> list[str]:
    messages = []
    for call in (lambda x: gather(x, world(), 1, 4), lambda x: scatter(x, world(), -1, 4)):
        with pytest.raises(autotp.Error) as raised:
            call(torch.ones(2, 3))
        messages.append(str(raised.value))
    with pytest.raises(RuntimeError, match="memory format"):  # somebody else's error stays what it is
        collectives.communicate("all_reduce", torch.eye(2).to_sparse(), "product", world())
    return messages


def test_a_part_of_the_wrong_length_is_refused() -> None:
    message = (
        "dimension 1 of [2, 3] should have length {} on rank 0 of 2\n"
        "  try      pass the value as the parallel model returned it, with the global size of the cut dimension"
    )
    assert run_ranks(run_misfit, 2)[0] == [message.format(2), message.format(4)]


def one_by_one(rank: int, n: int) -> list[str]:
    """As over gloo, which has no coalesced sum of tensors of a GPU. (The wheel for CPUs has none of them at all.)"""
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    xs = [torch.full((k + 1,), float(rank + k), device="cuda") for k in range(3)]
    with pytest.MonkeyPatch.context() as patch, collective_order() as order:
        patch.setattr(collectives, "_is_gloo", lambda group, device_type: True)
        found = start_all(xs, group)()
    assert [x.tolist() for x in found] == [[n * (n - 1) / 2 + n * k] * (k + 1) for k in range(3)]
    return [line.partition(": ")[2] for line in order]


def test_gloo_sums_tensors_of_a_gpu_one_by_one() -> None:
    if REAL:
        pytest.skip("real cards log no collectives")
    assert run_ranks(one_by_one, 2, cards=True) == [[f"allreduce Float[{k + 1}]" for k in range(3)]] * 2


def test_all_reduce_is_started_with_options_not_an_op() -> None:
    """With an operation in place of options, torch's binding takes several times as long as the start of a sum."""
    started: list[Any] = []
    group: Any = SimpleNamespace(allreduce=lambda xs, options: started.append(options))
    for op, meant in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        collectives._all_reduced_(group, torch.ones(2), op)
        assert type(started[-1]) is dist.AllreduceOptions and started[-1].reduceOp == meant
