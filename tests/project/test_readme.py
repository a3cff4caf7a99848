"""What the README shows is what happens."""

import ast
import contextlib
import io
import re
import runpy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from ranks import job, run_ranks

import autotp

PAGE = Path(__file__).resolve().parents[2] / "README.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def block(text: str) -> str:
    (found,) = (code for code in PYTHON if text in code)
    return found


def printed(code: str, **names: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"torch": torch, "autotp": autotp, **names})
    return out.getvalue()


@pytest.mark.system
@pytest.mark.timeout(300)
def test_every_block_runs_as_pasted(tmp_path: Path) -> None:
    """In order, on two ranks of torchrun, in one folder."""
    with job(tmp_path / "here", "blocks.py", [str(PAGE)], 0) as ranks:
        said, _ = ranks.communicate(timeout=250)
    assert ranks.returncode == 0 and f"{len(PYTHON)} blocks ran" in said, said[-3000:]


def one_line(rank: int, n: int) -> str:
    """What examples/one_line.py prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(PAGE.parent / "examples" / "one_line.py"))
    return out.getvalue()


def test_the_first_command_prints_what_is_shown() -> None:
    """The losses below the plan, but for their last two digits, which are round-off."""
    (_, command), (_, shown) = BLOCKS[:2]
    assert command.startswith("torchrun --nproc-per-node 2 examples/one_line.py ")
    found, expected = (re.sub(r"(\.\d{3})\d\d\b", r"\1", text) for text in (run_ranks(one_line, 2)[0], shown))
    assert found.endswith(f"\n{expected}") and len(expected.splitlines()) == 2


def trained(rank: int, n: int) -> str:
    return printed(block("# ordinary single-GPU code"))


def test_a_pasted_training_prints_its_losses() -> None:
    """On the first of two ranks, and in one process."""
    _, shown = BLOCKS[BLOCKS.index(("python", block("# ordinary single-GPU code"))) + 1]
    assert run_ranks(trained, 2) == [shown, ""] and run_ranks(trained, 1) == [shown]


def test_the_picture_is_the_plan_of_today() -> None:
    """`python docs/figures/plan.py` draws it."""
    spec = spec_from_file_location("plan_figure", PAGE.parent / "docs" / "figures" / "plan.py")
    assert spec is not None and spec.loader is not None
    figure = module_from_spec(spec)
    spec.loader.exec_module(figure)
    assert figure.PICTURE.read_text() == figure.drawn()


def test_readme_says_what_other_pages_say() -> None:
    """What it says about other pages is what they say."""
    rows = [line.split("|") for line in (PAGE.parent / "docs" / "coverage.md").read_text().splitlines()]
    errors = [float(row[6]) for row in rows if len(row) > 6 and re.match(r" \d+e-", row[6])]
    told = f"{len(errors)} families, on 2, 3, 4 and 8 ranks; largest relative difference {max(errors):.0e}, "
    assert f"{told}median {median(errors):.0e}" in TEXT
    of_libraries = (PAGE.parent / "docs" / "coverage_libraries.md").read_text()
    assert f"| {of_libraries.split('**')[1].removesuffix(' models are right.')} equal one device in the loss" in TEXT
    of_all = re.search(r"\*\*(\d+) of the (\d+) classes", (PAGE.parent / "docs" / "coverage_all.md").read_text())
    assert of_all
    right, built = (f"{int(n):,}" for n in of_all.groups())
    assert f"of the {built} that could be built small, {right} equal one device" in TEXT
    assert "torchrun --nproc-per-node 2 examples/one_line.py" in TEXT.split("|---|---|")[0]
    measured = (PAGE.parent / "benchmarks" / "README.md").read_text()
    of_floor = re.search(r"the median is ([\d.]+), ([\d.]+) and ([\d.]+) of the floor", measured)
    of_peers = re.findall(r"([\d.]+), ([\d.]+) and ([\d.]+) of the\s+time of", measured)
    assert of_floor and len(of_peers) == 2
    floor, torchs, tp_plan = (median(map(float, runs)) for runs in (of_floor.groups(), *of_peers))
    told = f"{floor:.2f} of the time; {torchs:.2f} of PyTorch's `parallelize_module`, {tp_plan:.2f} of transformers'"
    assert told in TEXT


def test_readme_adds_an_operator_that_is_cut(registry: None) -> None:
    printed(block("autotp.rule("))
    op = torch.ops.mylib.scale_rows

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4)
            self.scale = torch.nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(op(self.up(x), self.scale))

    plan = autotp.explain(Scaled(), 2, example_inputs=torch.randn(3, 4))
    assert "scale" in {cut.name for cut in plan.cuts}


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[0][:30])
def test_readme_uses_names_that_exist(code: str) -> None:
    """Each `autotp.name` in a block exists."""
    used = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    assert all(hasattr(autotp, n.attr) for n in used if n.value.id == "autotp")  # type: ignore[attr-defined]
