"""stages: a model at each stage, as text; blocks that are alike are printed once."""

import importlib.util
from pathlib import Path

import pytest
import torch
from small_models import gpt
from torch import Tensor, nn

import autotp

ROOT = Path(__file__).parents[3]
NAMES = ["model", "capture", "canonicalize", "axes", "plan", "lower", "check", "emit"]
X = torch.ones(2, 5, 8)


@pytest.fixture(scope="module")
def stages() -> autotp.Stages:
    torch.manual_seed(0)
    return autotp.stages(gpt(n_layer=3, n_head=4, n_embd=32, vocab_size=64, dropout=0.1), 2)


def test_stages_has_a_page_for_every_stage(stages: autotp.Stages) -> None:
    assert list(stages.pages) == NAMES
    assert [line for line in str(stages).splitlines() if line.startswith("====")] == [f"==== {name}" for name in NAMES]


@pytest.mark.parametrize("stage", ["capture", "canonicalize", "axes", "lower", "check", "emit"])
def test_blocks_that_are_alike_are_printed_once(stages: autotp.Stages, stage: str) -> None:
    lines = stages[stage].splitlines()
    assert "h.0:" in lines and "h.1 ... h.2 are as h.0" in lines and "h.1:" not in lines
    assert lines[0] == ("tokens: i64[b, s]")
    assert not any("sym_size" in line or "getitem" in line for line in lines)


def test_stages_types_have_placements(stages: autotp.Stages) -> None:
    lines = [line.strip() for line in stages["check"].splitlines()]
    assert "mlp.c_fc.weight: f32[128@tp, 32]" in lines
    assert "copy2 = copy(layer_norm2, 'tp'): f32[b, s, 32]{tp}" in lines
    assert "linear4 = linear(gelu, mlp.c_proj.weight): f32[b, s, 32]{+tp}" in lines
    assert "mlp.c_fc.weight: f32[width:128, 32]" in stages["axes"]
    assert "mlp.c_fc.weight: f32[64, 32]" in stages["lower"]
    assert "block = block(x): f32[b, s, 32]" in stages["emit"] and "fresh=True" in stages["emit"]


def test_types_have_the_cuts_over_both_mesh_axes() -> None:
    found = autotp.stages(gpt(n_layer=2, n_head=4, n_embd=32, vocab_size=64), 2, cp=2)
    lines = [line.strip() for line in found["check"].splitlines()]
    assert "scatter = scatter(zigzag, 'cp', 1, s): i64[b, s@cp]" in lines
    assert "gelu = gelu(add4, approximate='tanh'): f32[b, s@cp, 128@tp]" in lines
    assert "linear2 = linear(gelu, copy4): f32[b, s@cp, 32]{+tp}" in lines or "s@cp, 32]{+tp}" in found["check"]
    assert "reduce = reduce(embedding, 'tp'): f32[b, s@cp, 32]" in found["lower"]
    assert "x [b, s@cp, 128@tp]" in found["plan"]


class Odd(nn.Module):
    """Another width in the last block; a dict as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.GELU(), nn.Linear(n, 8)) for n in (16, 16, 32))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.h:
            x = x + block(x)
        return x


def test_another_block_is_printed_by_itself() -> None:
    page = autotp.stages(Odd(), 2, example_inputs={"batch": {"x": X}}, recompute="full")
    lines = page["capture"].splitlines()
    assert [line for line in lines if line.startswith("h.")] == ["h.0:", "h.1 is as h.0", "h.2:"]
    assert lines[0] == "batch.x: f32[b, s, 8]"
    assert "block, computed again in backward:" in page["emit"] and "block_1, computed" in page["emit"]


class Alternating(nn.Module):
    """Every second block is of another kind."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.GELU, nn.ReLU) * 3
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), kind(), nn.Linear(16, 8)) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x


def test_a_block_is_said_to_be_as_the_one_that_it_is_as() -> None:
    lines = autotp.stages(Alternating(), 2, example_inputs=X)["capture"].splitlines()
    heads = [line for line in lines if line.startswith("h.") and "=" not in line]
    assert heads == ["h.0:", "h.1:", "h.2 is as h.0", "h.3 is as h.1", "h.4 is as h.0", "h.5 is as h.1"]


def test_stages_leaves_out_a_pass() -> None:
    found = autotp.stages(Odd(), 2, example_inputs={"batch": {"x": X}}, without=("overlap", "outline"))
    assert "columns" not in found["lower"] and "block" not in found["emit"].replace("h.", "")
    with pytest.raises(autotp.Error, match="there is no such pass"):
        autotp.stages(Odd(), 2, example_inputs={"batch": {"x": X}}, without=("overlapp",))


def test_the_page_of_the_docs_is_current() -> None:
    spec = importlib.util.spec_from_file_location("stages_page", ROOT / "docs" / "stages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "python docs/stages.py"
