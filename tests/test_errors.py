"""Bad input: one clear error on every rank, its message compared whole, and nothing of the user's changed."""

import copy
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Checks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.models.gpt import GPT, GPTConfig

checks = Checks()
VOCAB = 97
HERE = os.path.basename(__file__)


def gpt(n_layer: int = 1, dropout: float = 0.0, n_head: int = 3) -> GPT:
    config = GPTConfig(block_size=16, vocab_size=VOCAB, n_layer=n_layer, n_head=n_head, n_embd=48, dropout=dropout)
    return GPT(config)


def tokens(seed: int = 1) -> tuple[Tensor, Tensor]:
    count = torch.arange(12).view(3, 4)
    return count * 31 * seed % VOCAB, count * 17 % VOCAB


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(autotp.Error) as raised:
        call()
    return str(raised.value)


def line(text: str) -> str:
    """Where in this file `text` stands, as an error names it."""
    with open(__file__) as file:
        at, code = next((i, row.strip()) for i, row in enumerate(file, 1) if text in row)
    return f"{HERE}:{at}  {code}"


def refusal(model: nn.Module, n: int, **given: Any) -> str:
    """The message of a failed `parallelize`, which has left the parameters and buffers the very objects they were."""
    before = dict(model.state_dict(keep_vars=True))
    values = {name: tensor.clone() for name, tensor in before.items()}
    text = message(lambda: autotp.parallelize(model, n, **given))
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(before)
    assert all(now[name] is before[name] and torch.equal(now[name], values[name]) for name in now)
    return text


# ---- models that cannot be captured


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # a branch on data
            x = x + 1
        return self.down(nn.functional.gelu(self.up(x)))


class Looping(Branching):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.argmax())):  # a loop on data
            x = self.down(self.up(x))
        return x


class Misfit(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.up(x))  # 64 numbers for 16


class Handle:
    """An object with a tensor in it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Opaque(Branching):
    def forward(self, x: Tensor) -> Any:
        return Handle(self.up(x))


class Growing(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat((self.seen, self.seen))
        return self.up(x) + self.seen.sum()


class Writing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x += 1  # into the caller's tensor
        return self.up(x)


@torch.library.custom_op("autotp_tests::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x.clone()


class Shapeless(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(shapeless(self.up(x)))


class Copyless(Branching):
    """Holds a computed tensor, which deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = self.up.weight * 2


class Odd(Branching):
    """A block's weight that an operator needs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.h = nn.ModuleList([nn.Linear(16, 16, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.down(nn.functional.gelu(self.up(x))))
        return x @ torch.linalg.matrix_exp(self.h[0].weight)


BRANCHES = "the model branches on the values of a tensor, which one graph cannot do"
UNFIT = "the model does not run on these inputs"
TRY_INPUTS = "\n  try      arguments that the original model accepts: where they were made up, example_inputs={...}"
TRY_WHERE = "\n  try      choose with torch.where, or branch on shapes and configuration only"


@checks.on(2)
def models(rank: int, n: int) -> None:
    expected = {
        Branching: f"{BRANCHES}\n  at       {line('if x.sum() > 0:')}{TRY_WHERE}",
        Looping: f"{BRANCHES}\n  at       {line('for _ in range(int(')}{TRY_WHERE}",
        Misfit: f"{UNFIT}: RuntimeError: a and b must have same reduction dim, but got [4, 64] X [16, 64]."
        f"\n  at       {line('return self.up(self.up(x))')}{TRY_INPUTS}",
        Opaque: "a Handle holds tensors, and torch does not know how to take one apart"
        "\n  try      torch.utils._pytree.register_pytree_node(Handle, ...), or a tuple or dict",
        Growing: "the model gives its buffer `seen` another shape, [6, 16]"
        "\n  try      a buffer as long as it may become, of which forward takes a slice",
        Writing: "the model changes a tensor in place where autotp cannot follow: writes into an input or a parameter"
        f" of the model\n  at       {line('x += 1')}\n  try      write the new value to a new tensor",
        Shapeless: "the model calls an operator that does not say what shape it returns"
        f"\n  at       {line('return self.down(shapeless')}\n  try      torch.library.register_fake, on the operator",
        Copyless: "copy.deepcopy fails on the model: Only Tensors created explicitly by the user (graph leaves) support"
        " the deepcopy protocol at the moment.  If you were attempting to deepcopy a module, this may be because of a"
        " torch.nn.utils.weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001"
        "\n  try      delete computed tensors and open handles from its attributes before the call",
    }
    for kind, text in expected.items():
        assert refusal(kind(), n, example_inputs=torch.randn(4, 16)) == f"parallelize({kind.__name__}, tp=2): {text}"


@checks.on(2)
def example_inputs(rank: int, n: int) -> None:
    expected = {
        "GPT.forward() got an unexpected keyword argument 'toks'": {"toks": tokens()[0]},
        "GPT: a sequence of 20 tokens is longer than block_size=16": torch.zeros(2, 20, dtype=torch.int64),
    }
    for text, given in expected.items():
        found = refusal(gpt(), n, example_inputs=given).split("\n")
        assert found[0] in (f"parallelize(GPT, tp=2): {UNFIT}: {kind}: {text}" for kind in ("TypeError", "ValueError"))
        assert f"\n{found[-1]}" == TRY_INPUTS
        assert len(found) == 2 or found[1].startswith("  at       gpt.py:")


@checks.on(2)
def choices(rank: int, n: int) -> None:
    allowed = {
        "outputs": "'auto', 'full', 'local'",
        "randomness": "'fast', 'exact'",
        "check_inputs": "'always', 'first', 'never'",
    }
    for name, values in allowed.items():
        assert refusal(gpt(), n, **{name: "all"}) == f"parallelize(GPT, tp=2): {name}='all'\n  expected {values}"


@checks.on(2)
def strictness(rank: int, n: int) -> None:
    x = torch.randn(4, 16)
    assert refusal(Odd(), n, example_inputs=x, strict=True) == (
        "parallelize(Odd, tp=2): strict=True, and weights in a block would stay whole: "
        f"h.0.weight (aten.linalg_matrix_exp.default has no rule, {line('return x @ torch')})\n"
        "  try      strict=False, or autotp.rule(...)"
    )
    autotp.parallelize(Odd(), n, example_inputs=x)
    autotp.parallelize(gpt(), n, strict=True)


@checks.on(2)
def parallel_already(rank: int, n: int) -> None:
    model = gpt()
    parallel = autotp.parallelize(model, n)
    assert message(lambda: autotp.parallelize(parallel, n)) == (
        "parallelize(ParallelModule, tp=2): the model is parallel already\n"
        "  try      parallelize the original model once"
    )
    assert message(lambda: autotp.parallelize(model, n)) == (
        "parallelize(GPT, tp=2): the model was parallelized before, which took its parameters over\n"
        "  try      use what parallelize returned then"
    )
    assert message(lambda: autotp.parallelize(model.forward, n)) == (  # type: ignore[arg-type]
        "parallelize(method, tp=2): a method is no torch.nn.Module\n  try      pass the model itself"
    )


@checks.on(2)
def parts(rank: int, n: int) -> None:
    """What a part of a parallel model cannot do."""
    block = autotp.parallelize(gpt(), n).h[0]
    hooks = block.register_forward_hook, block.attn.register_forward_pre_hook, block.register_full_backward_hook
    for register in hooks:
        assert message(lambda register=register: register(print)) == (
            "a hook on a submodule of a parallel model would never run: its work is part of the model's graph\n"
            "  try      register it on the original model before autotp.parallelize, or on the whole parallel model"
        )


# ---- ranks that differ

SAME_MODEL = "\n  try      build the same model and call it alike on all ranks"
SAME_BATCH = "\n  try      give every rank of the axis the same batch"
SAME_SEED = "\n  try      torch.manual_seed(seed) with one seed on all ranks"


@checks.on(2, 3)
def different_models(rank: int, n: int) -> None:
    """Of another depth, with other heads, in another mode, frozen elsewhere, or asked for otherwise."""
    last = rank == n - 1
    other = f"parallelize(GPT, tp={n}): tp rank {n - 1} would run another graph than rank 0{SAME_MODEL}"
    models = gpt(n_layer=1 + last), gpt(n_head=3 + 3 * last), gpt(dropout=0.1).train(not last)
    for model in models:
        assert refusal(model, n) == other
    frozen = gpt().requires_grad_(not last)
    settings = (
        ({}, frozen),
        ({"outputs": "full" if last else "local"}, gpt()),
        ({"randomness": "exact" if last else "fast"}, gpt()),
    )
    for given, model in settings:
        assert refusal(model, n, **given) == other


@checks.on(3)
def one_rank_fails(rank: int, n: int) -> None:
    """Its own error there, and one that says where on the others; a further graph too."""
    model = Branching() if rank == 1 else Odd()
    found = refusal(model, n, example_inputs=torch.randn(4, 16))
    if rank == 1:
        assert found == f"parallelize(Branching, tp=3): {BRANCHES}\n  at       {line('if x.sum() > 0:')}{TRY_WHERE}"
    else:
        assert found == (
            "parallelize(Odd, tp=3): tp rank 1 could not build a graph\n  try      read the error there: here is none"
        )
    assert message(lambda: autotp.parallelize(gpt(), n)(torch.zeros(2, 20 if rank == 1 else 6, dtype=torch.int64))) == (
        f"GPT.forward: tp rank 1 got other inputs than rank 0{SAME_BATCH}"
    )


@checks.on(3)
def different_batches(rank: int, n: int) -> None:
    """Values, shapes, dtypes, plain arguments; the ranks that differ from the first are named."""
    parallel = autotp.parallelize(gpt().train(), n)
    x, y = tokens()
    other = tokens(seed=2)[0]
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
def when_inputs_are_compared(rank: int, n: int) -> None:
    """At first: the first two calls of each graph; always; never."""
    x, y = tokens()
    wrong = tokens(seed=1 + rank)[0]
    compared = {}
    for setting in ("first", "always", "never"):
        parallel = autotp.parallelize(gpt().train(), n, check_inputs=setting)
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
    parallel = autotp.parallelize(gpt(dropout=0.1).train(), n)
    torch.manual_seed(rank)
    text = f"GPT.forward: tp rank 1 would draw other random numbers than rank 0{SAME_SEED}"
    assert message(lambda: parallel(*tokens())) == text
    parallel.eval()(*tokens())
    torch.manual_seed(0)
    parallel.train()(*tokens())


# ---- meshes


@checks.on(2)
def meshes(rank: int, n: int) -> None:
    sys.argv = ["train.py"]
    assert refusal(gpt(), 3) == (
        "parallelize(GPT, tp=3): tp=3 needs 3 processes, and the world has 2\n"
        "  try      torchrun --nproc-per-node 3 train.py"
    )
    assert refusal(gpt(), 1) == (
        "parallelize(GPT, tp=1): 2 processes are more than tp=1: "
        "without a mesh the replicas would silently drift apart\n"
        '  try      mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))\n'
        "  then     parallelize(model, mesh=mesh), and DDP over mesh['dp']"
    )
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    assert refusal(gpt(), 2, mesh=mesh) == (
        "parallelize(GPT, tp=2): no dimension of the mesh is named tp: ('data', 'model')\n"
        '  try      init_device_mesh("cpu", (1, 2), mesh_dim_names=(..., "tp"))'
    )


@checks.on(3)
def no_multiple(rank: int, n: int) -> None:
    sys.argv = ["train.py"]
    assert refusal(gpt(), 2) == (
        "parallelize(GPT, tp=2): 3 processes are not a multiple of tp=2\n"
        "  try      torchrun --nproc-per-node 2 train.py"
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- a peer that dies


def lose_a_peer(rank: int, n: int, when: str) -> str:
    """Rank 1 dies between forward and backward, or before forward."""
    group = dist.new_group(timeout=timedelta(seconds=20), group_desc="tp")
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    assert group is not None
    parallel = autotp.parallelize(gpt().train(), mesh=mesh)
    parallel(*tokens()).backward()
    parallel(*tokens()).backward()
    if rank == 1 and when == "before":
        os._exit(3)
    loss = parallel(*tokens()) if when == "backward" or rank == 0 else None
    if rank == 1:
        os._exit(3)
    assert loss is not None
    loss.backward()
    return "no error"


@pytest.mark.parametrize("when", ["before", "backward"])
def test_a_peer_dies_in_a_step(when: str) -> None:
    with pytest.raises(autotp.Error) as raised:
        run_ranks(lose_a_peer, 2, when, timeout=60, may_die=[1])
    assert str(raised.value) == (
        "all_reduce_ over axis `tp` failed on rank 0 of 2 (global rank 0): a peer closed its connection\n"
        "  try      read the other ranks' logs: one stopped with an error of its own, or was given another batch\n"
        "  or       if it was only slow: call init_process_group(timeout=...) first and pass mesh=init_device_mesh(...)"
    )


# ---- one process


def test_not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    model = gpt()
    assert refusal(model, 8) == (
        "parallelize(GPT, tp=8): tp=8 needs 8 processes, and this is one\n"
        "  try      torchrun --nproc-per-node 8 train.py"
    )
    assert autotp.parallelize(copy.deepcopy(model), 1)(*tokens()).isfinite()


def test_rules_that_do_not_parse() -> None:
    assert message(lambda: autotp.rule(torch.ops.aten.add.Tensor, "b h")) == (
        'rule(aten.add.Tensor): the rule "b h" does not parse\n'
        "  expected one `->` between operands and outputs\n"
        '  try      for example "* i, o i -> * o"'
    )


def test_an_error_travels() -> None:
    """Pickled, as between processes, an Error keeps its call and its facts."""
    import pickle

    error = autotp.Error("a problem", at="here", **{"try": "this"}).within("parallelize(GPT, tp=2)")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "parallelize(GPT, tp=2): a problem\n  at       here\n  try      this"
