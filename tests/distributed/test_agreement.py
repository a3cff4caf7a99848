"""agreement: ranks that differ, in other calls, without a peer: one clear error, its message compared whole."""

import copy
import itertools
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import BRANCHES, DATA_BRANCH, TRY_WHERE, Branching, Odd, line_of, message, refusal, with_sizes_by_order
from ranks import Checks, Collectives, run_ranks
from small_models import gpt, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import started, trained

import autotp
from autotp.distributed.agreement import (
    Among,
    Fact,
    agree,
    compare,
    gather_texts,
    problem_as_text,
    raise_problem,
    told,
)
from autotp.distributed.fingerprint import FACTOR, bits_of, bits_of_all
from autotp.distributed.mesh import Mesh, make_mesh
from autotp.models.gpt import __file__ as gpt_file

checks = Checks()


# ---- ranks that differ

SAME_MODEL = "\n  try      build the same model and call it alike on all ranks"
SAME_BATCH = "\n  try      the same batch for all ranks of one model: no DistributedSampler, one seed for shuffling"
SAME_SEED = "\n  try      torch.manual_seed(seed) with one seed on all ranks"


@checks.on(3)
@checks.on(2, rare=True)
def different_models(rank: int, n: int) -> None:
    """Of another depth, with other heads, in another mode, frozen elsewhere, or asked for otherwise."""
    last = rank == n - 1
    heads, dropped = line_of(gpt_file, "q = q.view(B"), line_of(gpt_file, "x = self.drop(")
    rows = [
        ({}, gpt(n_layer=1 + last), "%14 = parameter `ln_f.weight`  float32[48]",
         "%14 = parameter `h.1.ln_1.weight`  float32[48]"),
        ({}, gpt(n_layer=1, n_head=3 + 3 * last),
         f"%30 = aten.reshape.default(%29, [%23, %19, 3, 16])  float32[s95, s85, 3, 16]  at {heads}",
         f"%30 = aten.reshape.default(%29, [%23, %19, 6, 8])  float32[s95, s85, 6, 8]  at {heads}"),
        ({}, gpt(n_layer=1, dropout=0.1).train(not last),
         f"%23 = aten.dropout.default(%22, 0.1, True)  float32[s95, s85, 48]  at {dropped}",
         "%23 = aten.sym_size.int(%16, 0)"),
        ({}, gpt(n_layer=1).requires_grad_(not last),
         "... balance='batch') [True, True, True, True, True, True, True,  ...",
         "... balance='batch') [False, False, False, False, False, False,  ..."),
        ({"outputs": "full" if last else "local"}, gpt(n_layer=1),
         "... [48] Options(outputs='local', experts='width', sequence_para ...",
         "... [48] Options(outputs='full', experts='width', sequence_paral ..."),
        ({"randomness": "exact" if last else "fast"}, gpt(n_layer=1),
         "... without=(), randomness='fast', check_inputs='first', recompu ...",
         "... without=(), randomness='exact', check_inputs='first', recomp ..."),
    ]  # fmt: skip
    for given, model, one, other in rows:
        assert with_sizes_by_order(refusal(model, n, **given)) == with_sizes_by_order(
            f"parallelize(GPT, tp={n}): tp rank {n - 1} would run another graph than rank 0\n"
            f"  rank 0   {one}\n  rank {n - 1}   {other}{SAME_MODEL}"
        )


@checks.on(3)
def one_rank_fails(rank: int, n: int) -> None:
    """Its own error there, and one that says where on the others; a further graph too."""
    model = Branching() if rank == 1 else Odd()
    found = refusal(model, n, example_inputs=torch.randn(4, 16))
    if rank == 1:
        assert found == f"parallelize(Branching, tp=3): {BRANCHES}\n  at       {DATA_BRANCH}{TRY_WHERE}"
    else:
        assert found == f"parallelize(Odd, tp=3): {BRANCHES}\n  at       {DATA_BRANCH}{TRY_WHERE}\n  on       tp rank 1"
    parallel, x = autotp.parallelize(gpt(n_layer=1), n), torch.zeros(2, 20 if rank == 1 else 6, dtype=torch.int64)
    assert message(lambda: parallel(x)) == (f"GPT.forward: tp rank 1 got other inputs than rank 0{SAME_BATCH}")


@checks.on(3)
def different_batches(rank: int, n: int) -> None:
    """Values, shapes, dtypes, plain arguments; the ranks that differ from the first are named."""
    parallel = autotp.parallelize(gpt(n_layer=1).train(), n)
    x, y = tokens(seq=4)
    other = tokens(seq=4, seed=2)[0]
    two = f"GPT.forward: tp ranks 1, 2 got other inputs than rank 0{SAME_BATCH}"
    assert message(lambda: parallel(x if rank == 0 else other, y)) == two
    assert message(lambda: parallel(x[: 3 - (rank > 0)], y[: 3 - (rank > 0)])) == two
    assert message(lambda: parallel(x, y if rank == 0 else None)) == two
    assert message(lambda: parallel(x, y if rank == 0 else y.int())) == two
    assert message(lambda: parallel(x if rank == 2 else other, y)) == (
        f"GPT.forward: tp rank 2 got other inputs than rank 0{SAME_BATCH}"
    )
    assert torch.isfinite(parallel(x, y))  # and it is as good as before


@checks.on(2)
def different_modes(rank: int, n: int) -> None:
    """One rank in eval mode, at the first call: the others know that graph already."""
    parallel = autotp.parallelize(gpt(n_layer=1).train(), n, example_inputs=tokens(seq=4))
    parallel.train(rank == 0)
    assert message(lambda: parallel(*tokens(seq=4))) == (
        "GPT.forward: tp rank 1 was called in another mode than rank 0\n"
        "  try      model.train(), model.eval(), .to(dtype) and autocast on all ranks alike"
    )
    assert torch.isfinite(parallel.train()(*tokens(seq=4)))


@checks.on(2)
def when_inputs_are_compared(rank: int, n: int) -> None:
    """At first: the first two calls of each graph; always; never."""
    x, y = tokens(seq=4)
    wrong = tokens(seq=4, seed=1 + rank)[0]
    compared = {}
    for setting in ("first", "always", "never"):
        parallel = autotp.parallelize(gpt(n_layer=1).train(), n, check_inputs=setting)
        compared[setting] = []
        for right in (False, True, True, False):
            try:
                parallel(x if right else wrong, y)
                compared[setting].append(False)
            except autotp.Error as error:
                assert str(error) == f"GPT.forward: tp rank 1 got other inputs than rank 0{SAME_BATCH}"
                compared[setting].append(True)
    assert compared == {
        "first": [True, False, False, False], "always": [True, False, False, True], "never": [False] * 4,
    }  # fmt: skip


@checks.on(2)
def different_seeds(rank: int, n: int) -> None:
    """Only where random numbers are drawn."""
    parallel = autotp.parallelize(gpt(n_layer=1, dropout=0.1).train(), n)
    torch.manual_seed(rank)
    text = f"GPT.forward: tp rank 1 would draw other random numbers than rank 0{SAME_SEED}"
    assert message(lambda: parallel(*tokens(seq=4))) == text
    parallel.eval()(*tokens(seq=4))
    torch.manual_seed(0)
    parallel.train()(*tokens(seq=4))


# ---- what is exchanged


@checks.on(3)
def ranks_that_agree_make_one_collective(rank: int, n: int) -> None:
    """However many facts there are, also within parts of the ranks, where another part has other values."""
    mesh = make_mesh()
    pair = Among.of(rank, [[0, 1], [2]])
    facts = [Fact("all", "x" * 1000, "has other text"), Fact("some", [rank == 2], "has another number", among=pair)]
    with Collectives() as seen:
        assert compare(mesh, facts, counts=[rank, 2**62]) == ([3, 3 * 2**62 - 2**64], ())
        assert agree(mesh, lambda: rank, lambda made: facts) == rank
    assert seen.counts == {"all-reduce": 2}
    swapped = [Fact(key, (rank == 1) == (key == "x"), f"has another {key}") for key in ("x", "y")]
    with pytest.raises(autotp.Error, match=r"^tp rank 1 has another x than rank 0"):
        compare(mesh, swapped)
    told_by_all = told(mesh, lambda: {"rank": rank, "text": "y" * rank})
    assert told_by_all == [{"rank": i, "text": "y" * i} for i in range(n)]


@checks.on(3)
def ranks_that_differ_find_the_same_fact(rank: int, n: int) -> None:
    """The first in order; rows come to all if somebody wants them."""
    mesh, last = make_mesh(), rank == 2
    facts = [
        Fact("own", rank),
        Fact("kind", "b" if last else "a", "kinds differ", "one kind", wording="values"),
        Fact("near", 5 + rank, "is far", digested=0),
    ]
    assert (
        message(lambda: compare(mesh, facts))
        == "kinds differ\n  expected a, as on tp rank 0\n  got      b on tp rank 2\n  try      one kind"
    )
    sums, rows = compare(mesh, [facts[2]], counts=[int(last)])
    assert (list(sums), rows) == ([1], ()), "what is in no sum is not looked at"
    with pytest.raises(autotp.Error, match=r"^tp ranks 1, 2 is far than rank 0"):
        compare(mesh, [facts[2]], counts=[int(last)], differ=any)
    _, rows = compare(mesh, facts[:1])
    assert rows == [{"own": i} for i in range(n)]


@checks.on(2)
def a_problem_goes_before_a_difference(rank: int, n: int) -> None:
    """By a collective, and by any other exchange of texts, which is used twice only if ranks differ."""
    mesh, counts = make_mesh(), []

    def exchange(text: str) -> list[str]:
        counts.append(1)
        return gather_texts(text, mesh)

    for way in (None, exchange):
        problem = ValueError("7") if rank else None
        with pytest.raises(ValueError if rank else autotp.Error, match="7"):
            compare(mesh, [Fact("x", rank, "has another x")], problem, exchange=way)
        with pytest.raises(autotp.Error, match=r"^tp rank 1 has another x than rank 0"):
            compare(mesh, [Fact("x", rank, "has another x")], exchange=way)
        compare(mesh, [Fact("x", 1, "has another x")], exchange=way)
        assert agree(mesh, lambda: 5, exchange=way) == 5
    assert len(counts) == 2 + 2 + 1 + 1


def test_each_group_is_compared_with_its_first_rank() -> None:
    """Ranks that have nothing to compare are left out; another wording may leave out the ranks."""
    place = Mesh("tp", 4, 0)
    fact = Fact("x", None, "has another x", "the same x", Among([[0, 1], [2, 3]]), suffix=", today")
    fact.expect({0: 1, 1: 1, 2: 5, 3: 5}, place)
    fact.expect({0: 1, 1: None, 2: None, 3: 5}, place)
    with pytest.raises(autotp.Error) as raised:
        fact.expect({0: 1, 1: 1, 2: 5, 3: 6}, place)
    assert str(raised.value) == "tp rank 3 has another x than tp rank 2, today\n  try      the same x"
    with pytest.raises(autotp.Error) as raised:
        Fact("x", None, "there are several x", wording="alone", details=lambda *ranks: {"ranks": str(ranks)}).expect(
            {0: 1, 1: 2}, Mesh("tp", 2, 0)
        )
    assert str(raised.value) == "there are several x\n  ranks    (1, 2, 1)"
    Fact("x", None).expect({0: 1, 1: 2}, Mesh("tp", 2, 0))


# ---- meshes


@checks.on(2)
def meshes(rank: int, n: int) -> None:
    sys.argv = ["train.py"]
    assert refusal(gpt(n_layer=1), 3) == (
        "parallelize(GPT, tp=3): tp=3 needs 3 processes, and the world has 2\n"
        "  try      torchrun --nproc-per-node 3 train.py"
    )
    assert refusal(gpt(n_layer=1), 1) == (
        "parallelize(GPT, tp=1): 2 processes are more than tp=1: "
        "without a mesh the replicas would silently drift apart\n"
        '  try      mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))\n'
        "  then     parallelize(model, mesh=mesh), and DDP over mesh['dp']"
    )
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    assert refusal(gpt(n_layer=1), 2, mesh=mesh) == (
        "parallelize(GPT, tp=2): no dimension of the mesh is named tp: ('data', 'model')\n"
        '  try      init_device_mesh("cpu", (1, 2), mesh_dim_names=(..., "tp"))'
    )


@checks.on(3)
def no_multiple(rank: int, n: int) -> None:
    sys.argv = ["train.py"]
    assert refusal(gpt(n_layer=1), 2) == (
        "parallelize(GPT, tp=2): 3 processes are not a multiple of tp=2\n"
        "  try      torchrun --nproc-per-node 2 train.py"
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- a peer that dies


# ---- ranks in different public calls


def in_other_calls(rank: int, n: int, folder: str) -> dict[str, str]:
    """Each rank makes a call of its own, for all pairs; and then all go on."""
    trainer, optimizer = started((2, 1, 1))
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    state, x = autotp.full_state_dict(trainer), torch.arange(12).view(2, 6)
    calls = {
        "Trainer.step": lambda: trainer.step(x, labels=x),
        "Trainer.evaluate": lambda: trainer.evaluate(x, labels=x),
        "save_checkpoint": lambda: autotp.save_checkpoint(folder, trainer, optimizer, 2),
        "load_checkpoint": lambda: autotp.load_checkpoint(folder, trainer, optimizer),
        "full_state_dict": lambda: autotp.full_state_dict(trainer),
        "load_full_state_dict": lambda: autotp.load_full_state_dict(trainer, state),
    }
    found = {}
    for pair in itertools.permutations(calls, 2):
        found[" ".join(pair)] = message(calls[pair[rank]]).splitlines()[0]
    trained(trainer, optimizer, range(1))
    return found


AXES = ("global", "tp")  # These ranks are all there are.


def test_ranks_in_other_calls_get_one_error_that_names_both(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(in_other_calls, 2, str(tmp_path), timeout=100)):
        for pair, said in found.items():
            one, other = pair.split()
            ways = [f"{pair.split()[rank]}: {axis} rank 0 is in {one}, and {axis} rank 1 in {other}" for axis in AXES]
            assert said in ways, pair


def lose_a_peer(rank: int, n: int, when: str) -> str:
    """Rank 1 dies between forward and backward, or before forward."""
    group = dist.new_group(timeout=timedelta(seconds=20), group_desc="tp")
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    assert group is not None
    parallel = autotp.parallelize(gpt(n_layer=1).train(), mesh=mesh)
    parallel(*tokens(seq=4)).backward()
    parallel(*tokens(seq=4)).backward()
    if rank == 1 and when == "before":
        os._exit(3)
    loss = parallel(*tokens(seq=4)) if when == "backward" or rank == 0 else None
    if rank == 1:
        os._exit(3)
    assert loss is not None
    loss.backward()
    return "no error"


@pytest.mark.system
@pytest.mark.parametrize("when", ["backward", pytest.param("before", marks=pytest.mark.rare)])
def test_a_peer_that_dies_in_a_step_is_named(when: str) -> None:
    assert message(lambda: run_ranks(lose_a_peer, 2, when, timeout=60, may_die=[1])) == (
        "all_reduce_ over axis `tp` failed on rank 0 of 2 (global rank 0): "
        "tp rank 1 (global rank 1) is lost, ended or stopped\n"
        "  try      every call is made by all ranks (none under `if rank == 0`); read the logs of the others\n"
        "  or       if it was only slow: timeout= of autotp.parallelize, or of init_process_group"
    )


# ---- one process


def test_parallelize_without_torchrun_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    model = gpt(n_layer=1)
    assert refusal(model, 8) == (
        "parallelize(GPT, tp=8): tp=8 needs 8 processes, and this is one\n"
        "  try      torchrun --nproc-per-node 8 train.py"
    )
    assert autotp.parallelize(copy.deepcopy(model), 1)(*tokens(seq=4)).isfinite()


def test_rule_refuses_what_does_not_parse() -> None:
    assert message(lambda: autotp.rule(torch.ops.aten.add.Tensor, "b h")) == (
        'rule(aten.add.Tensor): the rule "b h" does not parse\n'
        "  expected one `->` between operands and outputs\n"
        '  try      for example "* i, o i -> * o"'
    )


def test_error_keeps_call_and_facts_between_processes() -> None:
    """Pickled, as between processes, an Error keeps its call and its facts."""
    import pickle

    error = autotp.Error("a problem", at="here", fix="this").within("parallelize(GPT, tp=2)")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "parallelize(GPT, tp=2): a problem\n  at       here\n  try      this"


# ---- numbers of a tensor's bits

TENSORS = [
    torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    torch.arange(7, dtype=torch.bfloat16),
    torch.tensor(2.5, dtype=torch.float64),
    torch.empty(0, 4),
    torch.tensor([[True, False], [True, True]]),
    torch.arange(24).view(2, 3, 4).transpose(0, 2),
    torch.arange(6, dtype=torch.float32).to(torch.complex64).view(2, 3) * 1j,
]


def test_bits_of_many_tensors_are_those_of_each() -> None:
    """The sums along rows and columns, weighted by place, modulo 2**64."""
    found = bits_of_all(TENSORS)
    for tensor, pair in zip(TENSORS, found, strict=True):
        assert torch.equal(bits_of(tensor), pair)
        rows = tensor.contiguous().view(tensor.shape[0] if tensor.dim() else 1, -1) if tensor.numel() else None
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        sums = [[0], [0]] if rows is None else [rows.view(kind).long().sum(dim).tolist() for dim in (0, 1)]
        expected = [sum(x * ((i * FACTOR) | 1) for i, x in enumerate(each, start=1)) for each in sums]
        assert [int(x) % 2**64 for x in pair] == [x % 2**64 for x in expected]


@pytest.mark.parametrize("i", [i for i, x in enumerate(TENSORS) if x.numel()])
def test_bits_change_with_an_element(i: int) -> None:
    other = TENSORS[i].clone()
    other[(0,) * other.dim()] = other[(-1,) * other.dim()] + 3 if other.dtype != torch.bool else False
    assert not torch.equal(bits_of(other), bits_of(TENSORS[i]))


def test_a_tensors_bits_take_two_operators() -> None:
    """Beside those that all tensors share: a card gets them one by one from the host."""
    tensors = [torch.ones(4, i) for i in range(1, 21)]
    counts = []
    for some in (tensors, tensors * 2):
        with Calls() as calls:
            bits_of_all(some)
        counts.append(len([func for func in calls.functions if not func.is_view]))
    assert counts[1] - counts[0] == 2 * len(tensors)


class Calls(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


# ---- the problem of one rank, told to the others


def test_an_agreement_within_an_agreement_names_the_first_ranks() -> None:
    """What failed on rank 2 of another group is told as of that rank, not as of the ranks that were told of it."""
    inner = problem_as_text(autotp.Error("no space", on="dp rank 2", fix="another disk"))
    with pytest.raises(autotp.Error) as raised:
        raise_problem(Mesh("tp", 3, 0), None, ["", inner, ""])
    assert str(raised.value) == "no space\n  on       dp rank 2\n  try      another disk"
    outer = problem_as_text(ValueError("7"))
    with pytest.raises(autotp.Error) as raised:
        raise_problem(Mesh("tp", 3, 0), None, ["", outer, outer])
    assert str(raised.value) == "ValueError: 7\n  on       tp ranks 1, 2"


def test_a_ranks_own_problem_is_raised_as_it_is() -> None:
    mine = KeyError("x")
    with pytest.raises(KeyError) as raised:
        raise_problem(Mesh("tp", 2, 1), mine, ["", problem_as_text(mine)])
    assert raised.value is mine
    raise_problem(Mesh("tp", 2, 1), None, ["", ""])
