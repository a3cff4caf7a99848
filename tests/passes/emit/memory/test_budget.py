"""budget: a graph under a budget keeps what it predicts, computes the same numbers, and says what does not fit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import Checks
from small_models import Mixture, gpt
from torch import Tensor, nn

import autotp
from autotp.costs.hardware import CPU_GLOO, hardware_of
from autotp.diagnostics.report import plan_of_choice
from autotp.options import memory_limit
from autotp.passes.emit.memory import budget
from autotp.passes.emit.memory.budget import Allowance, Budget, budget_of, budget_on, budget_within, choice_under
from autotp.runtime.module import executable_of

checks = Checks()
BUDGETS = ("90%", "70%", "50%", "30%")


def budget_in(model: nn.Module) -> Budget:
    operator = budget_of(executable_of(model).graphs.latest.ready.module)
    assert operator is not None
    return operator


def kept_bytes(model: nn.Module, run: Any) -> int:
    """Bytes that backward needs of a forward, each memory once, without the model's own."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    tensors: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(size for place, size in sizes.items() if place not in own)


@checks.on(2)
def a_budget_changes_no_number(rank: int, n: int) -> None:
    """Bitwise, with dropout, in calls larger than at capture; a percentage is of what a call of its size keeps."""
    expect_same_numbers(n, sequence_parallel=False)


@checks.on(2)
def sizes_of_values_cannot_be_counted(rank: int, n: int) -> None:
    """A rank's rows of whole experts are known in the call only."""
    options: dict[str, Any] = {"experts": "expert", "memory": "50%", "example_inputs": (torch.randn(12, 8),)}
    text = message(lambda: autotp.parallelize(Mixture(), n, **options))
    assert "memory= counts bytes before a call, and `aten._local_scalar_dense.default` makes sizes of values" in text
    assert 'try      recompute="full"' in text


@checks.on(2)
def a_budget_with_sequence_parallel_changes_no_number(rank: int, n: int) -> None:
    expect_same_numbers(n, sequence_parallel=True)


@checks.on(2)
def ranks_with_parts_of_other_sizes_run_no_collective_again(rank: int, n: int) -> None:
    """Three heads on two ranks, which choose each for itself."""
    expect_same_numbers(n, sequence_parallel=False, n_head=3, n_embd=48, budgets=("90%", "60%"))


def expect_same_numbers(
    n: int, sequence_parallel: bool, n_head: int = 4, n_embd: int = 32, budgets: tuple[str, ...] = BUDGETS
) -> None:
    torch.manual_seed(0)
    whole = gpt(dropout=0.1, n_head=n_head, n_embd=n_embd, vocab_size=96).double()
    tokens, labels = torch.randint(0, 64, (4, 16)), torch.randint(0, 64, (4, 16))
    calls = [(tokens, labels), (tokens[:2, :8], labels[:2, :8]), (tokens, labels)]
    expected: list[Tensor] = []
    for memory in (None, *budgets):
        model = autotp.parallelize(
            copy.deepcopy(whole), n, example_inputs=calls[1], memory=memory, sequence_parallel=sequence_parallel
        )
        torch.manual_seed(1)
        values: list[Tensor] = []
        for call in calls:
            loss = model(*call)
            loss.backward()
            values += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        expected = expected or values
        for value, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=0, atol=0)
        if memory is not None:
            choice = budget_in(model).choose(calls[0])
            measured = kept_bytes(model, lambda model=model: model(*calls[0]))
            assert measured == pytest.approx(choice.kept, rel=0.02)
            assert choice.kept <= float(memory[:-1]) / 100 * choice.kept_without
            again = sum(made.after.collectives for made in choice.chosen.choices)
            assert again == 0 or memory in ("50%", "30%")
            plan = model.plan.memory
            assert sum(plan.collectives.values()) == again and all(at.startswith("gpt.py") for at in plan.collectives)


@checks.on(2)
def stages_of_a_pipeline_choose_each_for_itself(rank: int, n: int) -> None:
    """The same gradients in steps of two sizes; the first stage keeps two microbatches."""
    torch.manual_seed(0)
    whole, x = gpt(n_head=4, n_embd=32).double(), torch.randint(0, 97, (4, 16))
    expected: list[Tensor] = []
    for memory in (None, "50%", "2GB"):
        trainer = autotp.distribute(
            copy.deepcopy(whole), pp=n, microbatches=2, example_inputs=(x[:2], x[:2]), memory=memory
        )
        values: list[Tensor] = []
        for batch in (x, x[:, :8], x):
            trainer.step(batch, batch)
            values += [p.grad.clone() for p in trainer.parameters() if p.grad is not None]
        expected = expected or values
        for value, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=0, atol=0)
        if memory is not None:
            (stage,) = trainer._pipelines[0].stages.values()
            own = budget_of(stage.module)
            assert own is not None and own.latest is not None and own.allowance.calls == n - rank
            assert (own.latest.kept < own.latest.kept_without) == (memory == "50%")


@checks.on(2)
def a_later_call_that_fits_on_one_rank_only_is_one_error(rank: int, n: int) -> None:
    """The first rank has two of three heads: it alone has too little memory, and the other does not go on."""
    torch.manual_seed(0)
    whole, few, more = gpt(n_head=3, n_embd=48), torch.ones(2, 8).long(), torch.ones(8, 16).long()
    model = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(few, few), memory=900_000)
    least = gathered(message(model, more, more))
    assert least[0] == least[1]
    needed = least[0].partition('try      memory="')[2].partition('"')[0]
    less = int(memory_limit(needed) - 2**20 / 100)  # The number is rounded up to a hundredth of a MiB.
    model = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(few, few), memory=less)
    texts = gathered(message(model, more, more))
    assert texts[0] == texts[1] and f'try      memory="{needed}"' in texts[0]
    model(few, few).backward()


def gathered(text: str) -> list[str]:
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_a_budget_of_everything_keeps_everything() -> None:
    tokens = torch.randint(0, 64, (4, 16))
    model = autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="2GB")
    choice = budget_in(model).latest
    assert choice is not None and choice.chosen.seconds == 0 and choice.kept == choice.kept_without
    # Parameters, gradients, and two states of AdamW.
    assert choice.allowance.fixed == pytest.approx(4 * sum(p.nbytes for p in model.parameters()), rel=0.01)


@pytest.mark.parametrize("state_bytes", [0, 2.03, 12.0])
def test_states_of_another_optimizer_are_subtracted_as_they_are(state_bytes: float) -> None:
    """Of the parameters that learn, which have a gradient, too."""
    tokens = torch.randint(0, 64, (4, 16))
    model = gpt().requires_grad_(False)
    model.wte.requires_grad_(True)
    options: dict[str, Any] = {"example_inputs": (tokens, tokens), "memory": "2GB", "state_bytes": state_bytes}
    model = autotp.parallelize(model, 1, **options)
    choice, learning = budget_in(model).latest, model.wte.weight.numel()
    assert choice is not None
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert choice.allowance.fixed == held + int((4 + state_bytes) * learning)


def test_the_plan_lists_collectives_that_run_again() -> None:
    """By line of the model, of all blocks."""
    tokens = torch.randint(0, 64, (4, 16))
    table = budget_in(autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="2GB")).latest.table  # type: ignore[union-attr]
    values = {name: replace(x, collectives=2 * ("gelu" in name)) for name, x in table.tables[0].values.items()}
    table = replace(table, tables=[replace(table.tables[0], values=values)])
    assert not plan_of_choice(choice_under(Allowance(memory="100%"), table, CPU_GLOO)).collectives
    plan = plan_of_choice(choice_under(Allowance(memory="1%"), table, CPU_GLOO))  # All that can run again does.
    ((line, count),) = plan.collectives.items()
    assert "gelu" in line and count == 2 * len(table.calls)
    assert f"with {count} collectives (predicted)" in plan.lines()[1]
    assert plan.lines()[2] == f"budget      {count} collectives run again: {line}"


def test_the_next_gigabyte_is_the_difference_to_a_budget_with_one_more() -> None:
    tokens = torch.randint(0, 64, (4, 16))
    table = budget_in(autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="2GB")).latest.table  # type: ignore[union-attr]
    values = {name: replace(x, made=10**5 * x.made, kept=10**5 * x.kept) for name, x in table.tables[0].values.items()}
    table = replace(table, tables=[replace(table.tables[0], values=values)])
    whole = choice_under(Allowance(memory="100%"), table, CPU_GLOO).kept
    assert whole > 4e9
    less, more = (choice_under(Allowance(memory=n), table, CPU_GLOO) for n in (whole // 2, whole // 2 + 10**9))
    assert less.gigabyte == less.chosen.seconds - more.chosen.seconds > 0
    assert choice_under(Allowance(memory=2 * whole), table, CPU_GLOO).gigabyte == 0


def test_a_budget_that_nothing_fits_says_the_smallest() -> None:
    tokens = torch.randint(0, 64, (4, 16))
    text = message(lambda: autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="1%"))
    least = text.partition('memory="')[2].partition('"')[0]
    assert "a microbatch keeps at least" in text
    assert 'or autotp.search(model, gpus=1, gpu="cpu-gloo", batch=4), which lists layouts that fit' in text
    model = autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory=least)
    assert budget_in(model).latest is not None
    text = message(lambda: autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory=1000))
    assert "are parameters (with copies in the dtype of computation), gradients, optimizer states and buffers" in text
    needed = text.partition('try      memory="')[2].partition('"')[0]
    autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory=needed)
    less = int(0.97 * memory_limit(needed))  # The number is rounded up to a hundredth.
    text = message(lambda: autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory=less))
    assert f'try      memory="{needed}"' in text


def test_auto_is_for_devices_with_memory_of_their_own() -> None:
    assert budget_on("50%", torch.device("cpu"), (2,)) == "50%"
    assert message(budget_on, "auto", torch.device("cpu"), (2,)) == (
        'memory="auto" on a CPU, which shares its memory with other programs\n'
        '  try      memory="24GiB", what this rank may use'
    )
    small = hardware_of("312TF 2TB/s 1GiB node=4x300GB/s net=25GB/s")
    assert "libraries and NCCL take all of the 1.00 GiB of" in message(budget_within, "auto", small, (2,))


def test_evaluation_chooses_nothing() -> None:
    tokens = torch.randint(0, 64, (4, 16))
    with torch.no_grad():
        model = autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="1%")
        model(tokens, tokens)
    assert budget_in(model).latest is None


def test_a_stage_of_a_pipeline_keeps_several_microbatches() -> None:
    """In bytes: the limit is for all of them."""
    tokens = torch.randint(0, 64, (4, 16))
    model = autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="2GB")
    whole = budget_in(model).choose((tokens, tokens))
    one, three = Allowance(memory="2GB"), Allowance(memory="2GB", calls=3)
    assert three.measure(whole.table, whole.whole) - one.measure(whole.table, whole.whole) == 2 * whole.kept_without
    assert Allowance(memory=1000, fixed=400, share=0.5).limit(whole.table, whole.whole) == 100


def test_choices_of_many_kinds_of_calls_do_not_pile_up() -> None:
    tokens = torch.randint(0, 64, (4, 16))
    model = autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="50%")
    with patch.object(budget, "MOST", 2):
        kept = []
        for length in (16, 12, 8, 16):
            model(tokens[:, :length], tokens[:, :length]).backward()
            kept.append(budget_in(model).latest.kept)  # type: ignore[union-attr]
    assert len(budget_in(model)._choices) == 2 and kept[0] == kept[3] > kept[1] > kept[2]


def test_frozen_parameters_and_autocast_are_other_kinds_of_calls() -> None:
    """What is kept changes with both, and so does what a budget lets stay."""
    tokens = torch.randint(0, 64, (4, 16))
    model = autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="50%")
    operator = budget_in(model)

    def kept() -> int:
        expected = kept_bytes(model, lambda: model(tokens, tokens))
        now = budget_in(model).latest
        assert now is not None and now.kept == pytest.approx(expected, rel=0.02)
        return now.kept

    whole = kept()
    fixed = operator.latest.allowance.fixed  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("c_proj" in name)
    assert kept() < whole and budget_in(model) is operator and operator.latest.allowance.fixed < fixed  # type: ignore[union-attr]
    model.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        assert kept() < whole  # A graph of its own, counted without autocast: its casts are operators.
    model(tokens, tokens)
    assert operator.latest is not None and operator.latest.kept == whole


def test_a_trainer_under_autocast_chooses_anew() -> None:
    """It runs one graph with and without autocast."""
    tokens = torch.randint(0, 64, (4, 16))
    trainer = autotp.distribute(gpt(), example_inputs=(tokens, tokens), memory="50%")
    trainer.step(tokens, tokens)
    operator = budget_of(next(iter(trainer._pipelines[0].stages.values())).module)
    assert operator is not None and operator.latest is not None
    kept = operator.latest.kept
    with torch.autocast("cpu", torch.bfloat16):
        trainer.step(tokens, tokens)
    assert operator.latest.kept < kept


def test_the_plan_shows_what_a_budget_did() -> None:
    tokens = torch.randint(0, 64, (4, 16))
    plan = autotp.parallelize(gpt(), 1, example_inputs=(tokens, tokens), memory="50%").plan
    assert plan.memory is not None and plan.memory.kept <= 0.5 * plan.memory.kept_without
    text = f"{plan}"
    assert "memory      50%: a call keeps" in text and "the next gigabyte would save" in text
    rows = {row.at.split("  ")[0]: row for row in plan.memory.largest}
    assert any("recompute" in row.done and row.staying < row.bytes for row in rows.values())
    assert all(at.startswith("gpt.py:") for at in rows)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it.
def test_a_budget_has_a_second_backward_transforms_and_compiled_blocks() -> None:
    """Twice by one graph the same bits; torch.func keeps all; compiled blocks have the fates of the last call."""
    torch.manual_seed(0)
    whole, tokens = gpt(n_head=4, n_embd=32).double(), torch.randint(0, 64, (4, 16))
    whole(tokens, tokens).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    model = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=(tokens, tokens), memory="50%")
    loss = model(tokens, tokens)
    parameters = dict(model.named_parameters())
    first = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(parameters.values()))
    assert all(map(torch.equal, first, second))

    def loss_of(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, values, (tokens, tokens))
        return result

    of_transform = torch.func.grad(loss_of)({name: p.detach() for name, p in parameters.items()})
    model.compile_blocks(backend="aot_eager")
    of_compiled = torch.autograd.grad(model(tokens, tokens), list(parameters.values()))
    for name, *values in zip(parameters, first, of_transform.values(), of_compiled, strict=True):
        for value in values:
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


def test_the_plan_of_a_trainer_shows_what_a_budget_did_in_its_last_step() -> None:
    tokens = torch.randint(0, 64, (4, 16))
    trainer = autotp.distribute(gpt(), example_inputs=(tokens, tokens), memory="50%")
    trainer.step(tokens, tokens)
    text = f"{trainer.plan}"
    assert "kept for backward" in text and "memory      50%: a call keeps" in text
