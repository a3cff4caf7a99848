"""The benchmarks' own parts: the floor computes what the model does, clocks and comparisons tell what they should."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import activations
import capture
import checkpoint
import growth
import pytest
import share
import step
import torch
import torch.distributed as dist
import zero
from calls import muon
from peers import megatron
from predicted import bubble
from ranks import run_ranks

import passes
from autotp.models.bert import BERTConfig
from autotp.models.configs import GPT_SIZES
from autotp.models.gpt import GPTConfig

SIZES = {"block_size": 8, "vocab_size": 32, "n_layer": 2, "n_head": 4, "n_embd": 16, "dropout": 0.0}
TP = 2
ROTARY = 2 * 2 * 4  # bytes: two buffers of half a head's four elements

# --- step.py and peers/megatron.py


def test_a_gradient_that_is_nan_is_not_equal() -> None:
    ones, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    expected = {"first": ones, "second": 2 * ones}
    assert step.apart(expected, {"first": 2 * ones, "second": 2 * ones}) == (0.5, "first")
    assert step.apart(expected, {"first": ones, "second": nan}) == (float("inf"), "second")


def compared(rank: int, tp: int, config: step.Shape) -> dict[str, step.Row]:
    rows = step.measure("tiny", config, batch=2, rounds=2, device="cpu")  # compares losses and gradients first
    return {row.way: row for row in rows}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GPTConfig(**SIZES), id="gpt"),
        pytest.param(BERTConfig(**SIZES), id="bert-post", marks=pytest.mark.rare),
        pytest.param(BERTConfig(**SIZES, norm="pre"), id="bert-pre", marks=pytest.mark.rare),
        pytest.param(step.LlamaShape(8, 32, 2, 4, 16, 32), id="llama"),
    ],
)
def test_floor_is_the_model_and_sends_no_more_than_it_must(config):
    for rows in run_ranks(compared, TP, config):
        hidden = 2 * config.block_size * config.n_embd * 4  # bytes of [batch seq hidden]
        per_token = 2 * config.block_size * 4
        floor = rows[step.HAND].sent
        assert floor.number == 4 * config.n_layer + 5  # the embedding, the head's input, three for the loss
        assert floor.bytes == (4 * config.n_layer + 2) * hidden + 3 * per_token
        assert rows[step.OURS].sent.bytes <= floor.bytes + 2 * 2 * config.n_embd * 4  # BERT's pooler is cut as well
        least = (step.HAND, step.KEPT, step.OURS)
        assert all(row.sent.bytes > floor.bytes for way, row in rows.items() if way not in least)
        assert len(rows) == (6 if isinstance(config, step.LlamaShape) else 3)


def broken(rank: int, tp: int) -> str:
    config = GPTConfig(**SIZES)
    plain, inputs = step.build(config, 2, "cpu")
    by_hand = megatron.MegatronGPT(plain, rank, tp)
    by_hand.takes["h.1.mlp.c_fc.bias"] = lambda full, rank, tp: megatron.rows(full, 1 - rank, tp)
    with pytest.raises(RuntimeError) as raised:
        step.compare(plain, {step.HAND: by_hand}, inputs)
    return str(raised.value)


def test_different_gradient_is_named():
    for message in run_ranks(broken, TP):
        assert message.startswith("the gradient of by hand differs from one device's by ")
        assert message.endswith(" h.1.mlp.c_fc.bias")


def test_who_goes_first_changes_from_round_to_round(monkeypatch):
    order = []
    monkeypatch.setattr(step, "seconds", lambda run, device: order.append(run()) or step.Seconds(1, 1))
    times = step.in_turn({name: lambda name=name: name for name in "abc"}, 2, "cpu")
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert [len(found) for found in times.values()] == [2, 2, 2]


# --- capture.py


def test_a_stage_is_charged_with_what_has_passed(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(capture, "time", SimpleNamespace(process_time=lambda: next(now)))
    clock = capture.Clock()
    for stage in ("plan", "lower", "plan"):
        clock.charge(stage)
    assert dict(clock.spent) == {"plan": 1.0 + 4.0, "lower": 2.0}


@pytest.mark.parametrize("k", [1, 2])
def test_exponent_of_a_power_law(k):
    layers = [12, 24, 48]
    assert math.isclose(capture.exponent(layers, [0.1 * n**k for n in layers]), k)


def test_every_stage_takes_time():
    found = capture.measure(capture.gpt(GPT_SIZES["355M"]), 1, TP)
    assert all(found[stage] > 0 for stage in capture.STAGES)


def test_a_class_of_transformers_is_measured():
    found = capture.measure(capture.maker("BertModel"), 0, TP)
    assert 0 < found["parameters"] < 1e6
    assert capture.line(found).startswith(f"{sum(found[stage] for stage in capture.STAGES):.2f} s (capture ")


# --- growth.py


def test_a_plot_is_written(tmp_path):
    values = [1.0, 2.0, 4.0]
    sweeps = [growth.Sweep(name, values, values, [n**2 for n in values]) for name in ("layers", "ranks")]
    growth.plot(sweeps, str(tmp_path / "growth.png"))
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert [line.split()[-1] for line in str(sweeps[0]).splitlines()] == ["k", "1.00", "2.00"]


# --- activations.py, passes.py, share.py


def held_by_layers(rank: int, tp: int, ways: list[str]) -> list[activations.Row]:
    config = GPTConfig(block_size=16, vocab_size=32, n_head=4, n_embd=32)
    return [row for p in (0.1, 0.0) for row in activations.measure(replace(config, dropout=p), 2, tp, ways)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ways", [["and sequence"], pytest.param([*activations.WAYS], marks=pytest.mark.rare)], ids=len)
def test_what_a_layer_keeps_is_what_the_formulas_say(ways):
    for rows in run_ranks(held_by_layers, TP, ways, timeout=200):
        assert len(rows) == 2 * len(ways)
        for row in rows:
            assert math.isclose(row.measured, row.expected, rel_tol=0.02), str(row)


def held_of_sequences(rank: int, ranks: int) -> list[activations.SequenceRow]:
    config = GPTConfig(block_size=64, vocab_size=32, n_head=4, n_embd=32, dropout=0.0)
    return activations.measure_sequences(config, 2, ranks)


def test_a_rank_keeps_and_sends_its_part_of_a_sequence():
    """All but keys and values; and it sends these, and their gradients, once."""
    for rows in run_ranks(held_of_sequences, 4, timeout=100):
        assert [row.cp for row in rows] == [1, 2, 4]
        for row in rows:
            assert math.isclose(row.kept, row.expected, rel_tol=0.05), str(row)
            both = 2 * 64 * 2 * 32 * 4 * (row.cp - 1) / row.cp
            assert row.forward == row.backward == both, str(row)


def with_and_without(rank: int, tp: int) -> list[tuple[object, object, int]]:
    config = GPTConfig(**SIZES)
    made = lambda: step.build(config, 2, "cpu")  # noqa: E731
    cases = [passes._default("overlap", "tiny", made), passes.Case("full", "tiny", made, {"recompute": "full"}, {})]
    return [(row.sent, row.kept, len(row.times)) for row in (passes.measure(case, 2) for case in cases)]


def test_passes_are_timed_with_and_without():
    for (sent, kept, times), (_, less, _) in run_ranks(with_and_without, TP):
        assert sent[0] == sent[1] and kept[0] == kept[1]
        assert less[0] < less[1]
        assert times == 2


@pytest.mark.rare
def test_a_share_of_every_way():
    script = Path(share.__file__)
    found = subprocess.run([sys.executable, script, "--no-compile", "--rounds", "1"], check=True, capture_output=True)
    lines = found.stdout.decode().splitlines()
    assert "NO GPU" in lines[0]
    ways = [(line[:12].strip(), line[12:30].strip()) for line in lines[2:]]
    gpt, llama = ["whole", "autotp"], ["whole", "autotp", "DTensor"]
    assert ways == [("gpt tiny", way) for way in gpt] + [("llama tiny", way) for way in llama]


# --- checkpoint.py


def read_and_written(rank: int, tp: int, folder: Path) -> list[checkpoint.Row]:
    if rank == 0:
        checkpoint.generate(folder, checkpoint.SIZES["tiny"], "100KB")
    dist.barrier()
    return checkpoint.measure(folder)


def test_checkpoint_rows_are_those_of_the_fullest_rank(tmp_path):
    for rows in run_ranks(read_and_written, TP, tmp_path):
        read, written = rows
        assert (read.name, written.name) == ("read", "write")
        vocab, hidden, width, bf16 = 1000, 64, 160, 2
        layer = hidden * (2 * 64 + 2 * 32 + 3 * width)
        norms = 5 * hidden
        assert read.whole == bf16 * (2 * vocab * hidden + 2 * layer + norms)
        assert read.slice == bf16 * vocab * hidden // TP
        assert read.shard == bf16 * (vocab * hidden + layer + norms) + ROTARY
        assert read.allowed - written.allowed == read.shard
    assert len(list((tmp_path / "again").glob("*.safetensors"))) == 1


# --- muon.py


def muon_row(rank: int, n: int) -> muon.Row:
    config = GPTConfig(block_size=8, vocab_size=32, n_layer=2, n_head=4, n_embd=16, dropout=0.0)
    return muon.measure("tiny", config, 1)


def test_a_step_of_muon_sends_one_all_gather_and_is_that_of_one_device() -> None:
    rows = run_ranks(muon_row, 2)
    assert sum(row.sent for row in rows) == sum(row.gather for row in rows) and min(row.one for row in rows) > 0


# --- predicted/bubble.py and zero.py


def bytes_held(rank: int, n: int) -> dict[tuple[int, str], tuple[float, float]]:
    return {(stage, moment): both for stage in range(4) for moment, both in zero.measured(stage).items()}


def test_stages_of_zero_hold_what_their_formulas_say() -> None:
    for found in run_ranks(bytes_held, 2):
        for moment, (held, formula) in found.items():
            assert held == pytest.approx(formula, rel=0.03), moment


def idle(rank: int, n: int, microbatches: int, schedule: str) -> float:
    return bubble.idle(n, microbatches, schedule, 2 * n)


@pytest.mark.rare  # It is about time: nothing else may run.
@pytest.mark.parametrize(("schedule", "v"), [("1F1B", 1), ("interleaved", 2)])
@pytest.mark.parametrize(("n", "microbatches"), [(2, 4), (4, 8)])
def test_ranks_are_idle_as_long_as_the_formula_says(n: int, microbatches: int, schedule: str, v: int) -> None:
    found = max(run_ranks(idle, n, microbatches, schedule, timeout=200))
    assert found == pytest.approx((n - 1) / (microbatches * v), rel=0.15)
