"""`autotp plan`: the plan of `explain`, as text, as JSON, and on a terminal; options are those of autotp."""

from __future__ import annotations

import io
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import autotp
from autotp.options import Options
from autotp.tools.cli.flags import repeat_flags


def test_plan_takes_a_configuration(autotp_command, llama: Path) -> None:
    """Three quarters of the ranks hold no key/value head of their own."""
    done = autotp_command("plan", llama, "--tp", 8, "--layers", 1, "--dtype", "bfloat16")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("LlamaForCausalLM on tp=8\n\ncut ") and "whole on every rank" in done.out


def test_plan_json_is_that_of_explain(autotp_command, models: Path) -> None:
    done = autotp_command("plan", f"{models}:mlp:inputs", "--tp", 3, "--json")
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)))
    expected = autotp.explain(model, 3, example_inputs=torch.ones(3, 4))
    assert done.json == {"version": 1, "autotp": autotp.__version__, **expected.to_dict()}
    assert done.json["cuts"][0] == {
        "name": "0.0.weight", "layout": {"shape": [16, 4], "dim": 0, "axis": "width"}, "forward": "", "backward": "",
        "why": "16 width: linear -> activation -> linear",
    }  # fmt: skip
    assert done.json["bytes_total"] == 592 and done.json["traffic"]["forward"] == {"all-reduce": 1}


def test_every_option_of_explain_is_a_flag(autotp_command) -> None:
    """They are made from `Options`, each with what `parallelize` says about it."""
    told = " ".join(autotp_command("plan", "--help").out.split())
    names = {field.name for field in fields(Options)} & set(signature(autotp.explain).parameters)
    assert names == {"outputs", "experts", "sequence_parallel", "overlap", "cp", "cp_attention", "without", "cut"}
    assert all(f"--{name.replace('_', '-')}" in told for name in names)
    assert "Names of passes to leave out" in told


def test_cut_is_the_choice_of_the_user(autotp_command, llama: Path) -> None:
    choice = "--cut", "lm_head=whole", "layers.*.mlp=width", "embed_tokens=-1"
    done = autotp_command("plan", llama, "--tp", 2, "--layers", 1, "--json", *choice)
    cut = done.json["cut"]
    assert (cut["lm_head.weight"], cut["model.layers.*.mlp.up_proj.weight"]) == ("whole", "width")
    (table,) = [row for row in done.json["cuts"] if row["name"] == "model.embed_tokens.weight"]
    assert table["layout"]["dim"] == 1
    wrong = autotp_command("plan", llama, "--tp", 2, "--cut", "lm_head")
    assert wrong.status == 2 and "--cut lm_head: write NAME=AXIS" in wrong.err
    unknown = autotp_command("plan", llama, "--tp", 2, "--layers", 1, "--cut", "lm_haed=whole")
    assert unknown.status == 1 and "cut={'lm_head': 'whole'}" in unknown.err


def test_plan_cuts_sequences(autotp_command, llama: Path) -> None:
    done = autotp_command("plan", llama, "--tp", 2, "--cp", 2, "--layers", 1, "--json")
    assert done.json["cp"] == 2 and done.json["in_sequence"] > 20
    assert set(done.json["traffic_over_cp"]["backward"]) >= {"reduce-scatter", "all-reduce"}
    wrong = autotp_command("plan", llama, "--tp", 2, "--cp", 0)
    assert wrong.status == 2 and "Invalid value for '--cp'" in wrong.err


def test_options_reach_the_plan(autotp_command, llama: Path) -> None:
    given = "--sequence-parallel", "--without", "overlap", "bucket", "--outputs", "full"
    done = autotp_command("plan", llama, "--tp", 2, "--layers", 1, "--json", *given)
    assert done.json["along_sequence"] > 0 and done.json["outputs"] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("m --tp 2 3 4 --json", "m --tp 2 --tp 3 --tp 4 --json"),
        ("--tp 2 m", "--tp 2 m"),
        ("--tp x --tp 2 3", "--tp x --tp 2 --tp 3"),
        ("--without cse overlap m --tp 2", "--without cse --without overlap m --tp 2"),
        ("--layers 2 3", "--layers 2 3"),
        ("--cut a=whole b.*=-1 --tp=2", "--cut a=whole --cut b.*=-1 --tp=2"),
        ("--cut a=whole f.py:GPT(n=2)", "--cut a=whole f.py:GPT(n=2)"),
    ],
)
def test_spread_repeats_an_option_for_each_value(given: str, expected: str) -> None:
    assert repeat_flags(given.split()) == expected.split()


@pytest.mark.parametrize("width", [80, 120])
def test_plan_is_in_colour_on_a_terminal(in_colours: None, width: int) -> None:
    """In colour, and no line is broken by the terminal."""
    plan = autotp.explain(
        nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)), 2, example_inputs=torch.ones(2, 4)
    )
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain, width=width, no_color=True).print(plan)
    lines = plain.getvalue().splitlines()
    assert max(map(len, lines)) <= width and any(line.startswith("2.weight  [4, 16@tp]  all-reduce") for line in lines)
    Console(file=coloured, width=width, force_terminal=True, color_system="standard").print(plan)
    assert "\x1b[32m2.weight" in coloured.getvalue() and "\x1b[36mall-reduce" in coloured.getvalue()
