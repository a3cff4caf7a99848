"""Models and arguments that cannot be: one clear error on every rank, its message compared whole."""

from functools import partial
from typing import Any

import pytest
import torch
from errors import BRANCHES, DATA_BRANCH, LOOPS, NO_RULE, ROUNDS, TRY_WHERE, Branching, Odd, line_of, message, refusal
from ranks import Checks
from small_models import gpt, tokens
from torch import Tensor, nn

import autotp
from autotp.passes.capture.unsupported.lost_gradients import BACKWARD_HOOK

checks = Checks()
line = partial(line_of, __file__)

# ---- models that cannot be captured


class Looping(Branching):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.mlp(x).argmax())):  # a loop on data
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


class Writing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-1, 1)
        return self.up(x)


class Choosing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.up(x),))


@torch.library.custom_op("autotp_tests::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x.clone()


class Shapeless(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(shapeless(self.up(x)))


UNFIT = "the model does not run on these inputs"
TRY_INPUTS = "\n  try      arguments that the original model accepts; example_inputs={...}, if you gave none"


@checks.on(2)
def parallelize_refuses_models_it_cannot_follow(rank: int, n: int) -> None:
    expected = {
        Branching: f"{BRANCHES}\n  at       {DATA_BRANCH}{TRY_WHERE}",
        Looping: f"{LOOPS}\n  at       {line('for _ in range(int(')}\n  try      {ROUNDS}",
        Misfit: f"{UNFIT}: RuntimeError: a and b must have same reduction dim, but got [4, 64] X [16, 64]."
        f"\n  at       {line('return self.up(self.up(x))')}{TRY_INPUTS}",
        Opaque: "a Handle holds tensors, and torch does not know how to take one apart"
        "\n  try      torch.utils._pytree.register_pytree_node(Handle, ...), or a tuple or dict",
        Writing: "the model changes a tensor in place where autotp cannot follow: writes into an input or a parameter"
        f" of the model\n  at       {line('self.up.weight.clamp_')}\n  try      write the new value to a new tensor",
        Choosing: "the model calls an operator that takes functions (cond, while_loop, scan)"
        f"\n  at       {line('return torch.cond(')}\n  try      compute both branches and choose with torch.where;"
        " loop in Python, as often as shapes say",
        Shapeless: "the model calls an operator that does not say what shape it returns"
        f"\n  at       {line('return self.down(shapeless')}\n  try      torch.library.register_fake, on the operator",
    }
    for kind, text in expected.items():
        found = refusal(kind(), n, example_inputs=torch.randn(4, 16))
        assert found == f"parallelize({kind.__name__}, tp=2): {text}", found


@checks.on(2)
def parallelize_refuses_example_inputs_that_do_not_fit(rank: int, n: int) -> None:
    expected = {
        "GPT.forward() got an unexpected keyword argument 'toks'": {"toks": tokens(seq=4)[0]},
        "GPT: a sequence of 20 tokens is longer than block_size=16": torch.zeros(2, 20, dtype=torch.int64),
    }
    for text, given in expected.items():
        found = refusal(gpt(n_layer=1), n, example_inputs=given).split("\n")
        assert found[0] in (f"parallelize(GPT, tp=2): {UNFIT}: {kind}: {text}" for kind in ("TypeError", "ValueError"))
        assert f"\n{found[-1]}" == TRY_INPUTS
        assert len(found) == 2 or found[1].startswith("  at       gpt.py:")


@checks.on(2)
def parallelize_refuses_unknown_choices(rank: int, n: int) -> None:
    allowed = {
        "outputs": "'auto', 'full', 'local', 'loss'",
        "randomness": "'fast', 'exact'",
        "check_inputs": "'always', 'first', 'never'",
    }
    for name, values in allowed.items():
        found = refusal(gpt(n_layer=1), n, **{name: "all"})
        assert found == f"parallelize(GPT, tp=2): {name}='all' is not one of its values\n  expected {values}"


@checks.on(2)
def strict_refuses_weights_that_stay_whole(rank: int, n: int) -> None:
    x = torch.randn(4, 16)
    assert refusal(Odd(), n, example_inputs=x, strict=True) == (
        "parallelize(Odd, tp=2): strict=True, and weights in a block would stay whole: "
        f"h.0.weight (aten.linalg_matrix_exp.default has no rule, {NO_RULE})\n"
        "  try      strict=False, or autotp.rule(...)"
    )
    autotp.parallelize(Odd(), n, example_inputs=x)
    autotp.parallelize(gpt(n_layer=1), n, strict=True)


REMEDIES = {
    "verify": "verify the original model, before autotp.parallelize",
    "explain": "explain the original model, before autotp.parallelize",
    "distribute": "distribute the original model once",
}


@checks.on(2)
def parallelize_refuses_a_parallel_model(rank: int, n: int) -> None:
    model = gpt(n_layer=1)
    parallel = autotp.parallelize(model, n)
    assert parallel is model
    for again in (model, model.h):
        assert message(lambda again=again: autotp.parallelize(again, n)) == (
            f"parallelize({type(again).__name__}, tp=2): the model is parallel already\n"
            "  try      parallelize the original model once"
        )
    known, computed = vars(type(model)).copy(), model(*tokens(seq=4)).detach()
    for again in (model, model.h, nn.Sequential(model), autotp.distribute(gpt(n_layer=1), tp=n)):
        for name, remedy in REMEDIES.items():
            call, sizes = getattr(autotp, name), "tp=2, pp=1, dp=1" if name == "distribute" else "tp=2"
            assert message(partial(call, again, tp=n)) == (
                f"{name}({type(again).__name__}, {sizes}): the model is parallel already\n  try      {remedy}"
            )
    assert vars(type(model)) == known and torch.equal(model(*tokens(seq=4)), computed)
    assert autotp.verify(gpt(n_layer=1), n).ok and autotp.parallelize(gpt(n_layer=1), n)(*tokens(seq=4)).requires_grad
    assert message(lambda: autotp.parallelize(gpt(n_layer=1).forward, n)) == (  # type: ignore[arg-type]
        "parallelize(method, tp=2): a method is not a torch.nn.Module\n  try      pass the model itself"
    )


@checks.on(2)
def parallelize_refuses_parts_of_another_parallel_model(rank: int, n: int) -> None:
    """A module or a parameter that is cut as the first model's is no whole of the second."""
    first = autotp.parallelize(gpt(n_layer=1), n)
    for share, name in (
        (lambda other: setattr(other, "h", first.h), "h"),
        (lambda other: setattr(other.wte, "weight", first.wte.weight), "wte.weight"),
    ):
        second = gpt(n_layer=1)
        share(second)
        assert message(lambda second=second: autotp.parallelize(second, n)) == (
            f"parallelize(GPT, tp=2): `{name}` is part of another parallel model\n"
            "  try      one module that holds both models and calls the one that is asked for, parallelized once\n"
            "  or       models that share nothing: copy.deepcopy"
        )
    second = gpt(n_layer=1)
    second.ln_f = first.ln_f.__class__(48)
    second.ln_f.weight = first.ln_f.weight
    autotp.parallelize(second, n)(*tokens(seq=4))


@checks.on(2)
def hooks_on_a_part_of_a_parallel_model_are_refused(rank: int, n: int) -> None:
    """What a part of a parallel model cannot do."""
    block = autotp.parallelize(gpt(n_layer=1), n).h[0]
    before = "register it on the original model before autotp.parallelize, or on the whole parallel model"
    hooks = {
        block.register_forward_hook: before, block.attn.register_forward_pre_hook: before,
        block.register_full_backward_hook: BACKWARD_HOOK,
    }  # fmt: skip
    for register, instead in hooks.items():
        assert message(lambda register=register: register(print)) == (
            "a hook on a submodule of a parallel model would never run: its work is part of the model's graph\n"
            f"  try      {instead}"
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
