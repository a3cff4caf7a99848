"""`autotp init`: what it writes is clean, and trains on two ranks of each launcher; what could not run is refused."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import JOB, NAMES, ROOT, of_srun

import autotp

pytest.importorskip("typer")
from autotp.tools.cli.app import run
from autotp.tools.new_training.init import STARTS

OWN = """
import torch
from torch import nn

from autotp.models.gpt import GPT, GPTConfig


def build(width=16):
    return GPT(GPTConfig(block_size=16, vocab_size=256, n_layer=2, n_head=2, n_embd=width, dropout=0.0))


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x, y):
        return (self.down(self.up(x).relu()) - y).square().mean()


def inputs():
    return {"x": torch.ones(4, 4), "y": torch.ones(4, 1)}


def listed():
    return [torch.ones(4, 4), torch.ones(4, 1)]


made = build()
"""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 99, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file with models, and a text beside it."""
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 100)
    return tmp_path / "own_models.py"


def folder_of(path: Path, weights: bool) -> Path:
    """A folder of transformers, with weights or without."""
    transformers = pytest.importorskip("transformers")
    path.mkdir()
    if weights:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(path)
    else:
        (path / "config.json").write_text(json.dumps(LLAMA))
    return path


def written(model: object, launcher: str, out: Path, *given: object) -> Path:
    """The folder that `autotp init` has filled."""
    assert run(["init", str(model), "--launcher", launcher, "--out", str(out), *map(str, given)]) == 0
    return out


def free_port(first: int = 20000) -> int:
    """A port from `first` on that no process listens at."""
    for port in count(first):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError


@contextmanager
def started(folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in a folder, as a user's shell starts it; ended with all its processes."""
    env = {name: value for name, value in os.environ.items() if not NAMES.match(name)} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    process = subprocess.Popen(
        command, cwd=folder, env={**env, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def trained(folder: Path, command: Sequence[str], variables: Mapping[str, str], steps: int = 2) -> None:
    """Fails unless a command trains on two ranks, from the first step to the last."""
    with started(folder, command, variables) as process:
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said[-3000:]
    told = [line for line in said.splitlines() if f"step {steps}: loss " in line]
    # Ray shows each line of a worker twice, with the worker's number.
    assert "begins at step 0" in said and len(set(told) if "RayTrainWorker" in said else told) == 1, said[-3000:]
    assert saved(folder) == [steps]


def saved(folder: Path) -> list[int]:
    """The steps of the checkpoints that two ranks have written."""
    steps = sorted(folder.glob("checkpoints/step-*"))
    assert all(len(list(step.glob("*rank*"))) == 2 for step in steps), [*steps[0].iterdir()]
    return [int(step.name.removeprefix("step-")) for step in steps]


def test_what_is_written_is_clean(own: Path, tmp_path: Path) -> None:
    """Whatever the model is: ruff finds nothing in it, and would format nothing."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if ruff is None:
        pytest.skip("ruff is not here")
    models = [f"{own}:build(32)", f"{own}:made", f"{own}:Regression:inputs"]
    folders = [folder_of(tmp_path / f"llama{weights:d}", weights) for weights in (True, False)]
    for i, model in enumerate([*models, *folders]):
        written(model, "ray", tmp_path / str(i), "--dp", 2)
    for call in (["check"], ["format", "--diff"]):
        done = subprocess.run(
            [ruff, *call, "--no-cache", "--config", ROOT / "pyproject.toml", *(tmp_path / str(i) for i in range(5))],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("own_models.py:build --gpus-per-machine 3", "tp * pp * dp is 2, no multiple of --gpus-per-machine 3"),
        ("own_models.py:build --dp 2 --batch 3", "--batch 3 does not divide into 2 replicas of 1 microbatches"),
        ("own_models.py:build --pp 3", "3 stages"),
        ("own_models.py:build --text no.txt", "--text no.txt: there is no such file"),
        ("own_models.py:Regression:inputs --text text.txt", "--text is for models of token ids"),
        ("own_models.py:Regression:inputs --sequence 8", "--sequence is for models of token ids"),
        ("own_models.py:build --sequence 17", "--sequence 17: the model's configuration has at most 16 tokens"),
        ("own_models.py:build --text short.txt", "--text short.txt is too short: a step takes 8 rows of 16 tokens"),
        ("own_models.py:build --out text.txt", "--out text.txt: File exists"),
        ("own_models.py:build --out text.txt/out", "--out text.txt/out: Not a directory"),
        ("my-models.py:build", "a script cannot import my-models"),
        ("train.py:build", "a script cannot import train"),
        ("email.py:build", "a script cannot import email"),
        ("train.models:build", "a script cannot import train.models"),
        ("own_models.py:Regression:listed", "the example inputs are no dict of tensors [batch ...]"),
        ("torch.nn:Linear(4,4)", "forward takes input, and not token ids with labels"),
        ("gpt-8.3b", "init writes a script for a folder of transformers or for a callable"),
        ("own_models.py:absent", "own_models.py has no absent"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_one_error(
    given: str, problem: str, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own.parent)
    for copy in ("my-models.py", "train.py", "email.py"):
        shutil.copy(own, copy)
    Path("short.txt").write_text("a" * 128)
    assert run(["init", "--out", "out", *given.split(), "--launcher", "torchrun"]) == 2
    said = capsys.readouterr().err
    assert problem in said and len(said.splitlines()) <= 4 and not Path("out").exists(), said


@pytest.mark.parametrize(
    ("file", "given", "problem"),
    [
        ("pytorch_model.bin", "llama", "autotp convert llama/pytorch_model.bin FOLDER --config llama"),
        ("pytorch_model.bin.index.json", "llama", "save_pretrained"),
        ("consolidated.00.pth", "llama", "for new weights name llama/config.json"),
        ("adapter_model.safetensors", "llama", "and only model.safetensors is read"),
        ("tokenizer.json", "llama --text text.txt", "--text needs a tokenizer, and llama has none"),
        ("notes.txt", "llama/config.json --text text.txt", "--text needs a tokenizer, and llama/config.json has none"),
    ],
)
def test_a_folder_that_a_script_cannot_use_is_one_error(
    file: str, given: str, problem: str, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own.parent)
    (folder_of(Path("llama"), weights=False) / file).touch()
    assert run(["init", *given.split(), "--launcher", "torchrun", "--out", "out"]) == 2
    assert problem in capsys.readouterr().err and not Path("out").exists()


def test_a_tokenizer_without_words_is_none(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes the tokenizer of a GPT-2 of no files, and it gives no tokens."""
    monkeypatch.chdir(own.parent)
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=300, architectures=["GPT2LMHeadModel"])
    config.save_pretrained("gpt2")
    assert run(["init", "gpt2", "--launcher", "torchrun", "--text", "text.txt", "--out", "out"]) == 2
    assert "--text needs a tokenizer, and gpt2 has none" in capsys.readouterr().err


def test_a_text_in_the_tokens_of_a_folder(own: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "llama", weights=False)
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.save(str(folder / "tokenizer.json"))
    out = written(folder, "torchrun", tmp_path / "out", "--text", own.with_name("text.txt"), "--sequence", 16)
    assert f'TEXT = "{tmp_path}/text.txt"' in (out / "train.py").read_text()


@pytest.mark.parametrize("folder", ["LlamaForCausalLM-mine", "TokenRows", "vars(GPTConfig())", '"labels":', "é😀"])
def test_paths_stay_as_they_are(folder: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    model = folder_of(tmp_path / folder, weights=False)
    out = written(model, "skypilot", tmp_path / "out")
    assigned = re.search(r"^MODEL = (.*)$", (out / "train.py").read_text(), re.MULTILINE)
    assert assigned is not None and ast.literal_eval(assigned[1]) == str(model)
    assert str(model) in yaml.safe_load((out / "sky.yaml").read_text())["file_mounts"]


def test_a_package_alone_is_taken_along_once(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where it lies, which is not the present folder; and a path that is needed twice is there once."""
    yaml, top = pytest.importorskip("yaml"), own.parent
    (top / "place" / "of_own" / "deep").mkdir(parents=True)
    own.rename(top / "place" / "of_own" / "deep" / "models.py")
    monkeypatch.chdir(top)
    monkeypatch.syspath_prepend(top / "place")
    text = top / "place" / "of_own" / "text.txt"
    (top / "text.txt").rename(text)
    out = written("of_own.deep.models:build", "skypilot", Path("out"), "--text", text)
    script, mounts = (out / "train.py").read_text(), (out / "sky.yaml").read_text()
    assert f'FOLDER = "{top}/place"' in script and "from of_own.deep.models import build" in script
    paths = [f"{top}/place/of_own", str(text), str(ROOT)]
    assert list(yaml.safe_load(mounts)["file_mounts"]) == paths and mounts.count(f'{ROOT}":') == 1


@pytest.mark.parametrize("launcher", ["torchrun", "skypilot", "accelerate"])
def test_torchrun_waits_for_a_save(launcher: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch itself reads its variable: else it kills the ranks 30 seconds after a SIGTERM."""
    from torch.distributed.launcher.api import LaunchConfig

    out = written(f"{own}:build", launcher, tmp_path / "out")
    file, start = STARTS[launcher]
    told = re.search(r"(TORCH_\w+TIMEOUT)=\D*(\d+)", f"{start}\n{(out / file).read_text()}")
    assert told is not None
    monkeypatch.setenv(told[1], told[2])
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 300


def test_no_file_is_overwritten(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = written(f"{own}:build", "slurm", tmp_path / "out")
    (out / "train.py").unlink()
    (out / "train.sbatch").write_text("mine")
    assert run(["init", f"{own}:build", "--launcher", "slurm", "--out", str(out)]) == 2
    assert "train.sbatch exists, and nothing is overwritten: --out FOLDER" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["train.sbatch"] and (out / "train.sbatch").read_text() == "mine"


def test_every_file_is_told_with_how_to_start_it(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for launcher, (file, start) in STARTS.items():
        out = written(f"{own}:build", launcher, tmp_path / launcher, "--tp", 8, "--pp", 2, "--json")
        told = json.loads(capsys.readouterr().out)
        assert told["files"] == [str(out / "train.py"), str(out / file)] and told["start"] == start
        assert {path.name for path in out.iterdir()} == {"train.py", file} and start.split()[-1] in ("train.py", file)


@pytest.mark.system
@pytest.mark.timeout(300)
def test_torchrun_trains_and_goes_on_after_a_signal(own: Path, tmp_path: Path) -> None:
    text = ("--text", tmp_path / "text.txt")
    out = written(f"{own}:build(32)", "torchrun", tmp_path / "out", "--steps", 1_000_000, *text)
    for _ in range(2):
        before, said = saved(out), list[str]()
        with started(out, ["sh", "run.sh"], {}) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if re.match(r"step \d+0: loss", line):
                    break
            process.terminate()
            rest, _ = process.communicate(timeout=60)
        assert f"begins at step {max(before, default=0)}\n" in said, "".join(said) + rest
        assert len(saved(out)) == len(before) + 1, rest


@pytest.mark.system
@pytest.mark.timeout(300)
def test_slurm_trains_on_two_machines(own: Path, tmp_path: Path) -> None:
    """Stand-ins for srun and scontrol: two processes with the variables of a step, each the first of its machine."""
    layout = ("--tp", 1, "--dp", 2, "--gpus-per-machine", 1)
    out = written(f"{own}:Regression:inputs", "slurm", tmp_path / "out", "--steps", 2, *layout)
    job = JOB | {"SLURM_JOB_ID": str(free_port() - 20000), "SLURM_CPUS_PER_TASK": "1"}
    places = [of_srun(rank, 2, "1(x2)") | job | {"SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"} for rank in range(2)]
    srun = f"""#!{sys.executable}
import os, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1"
ranks = [subprocess.Popen(sys.argv[2:], env=os.environ | place) for place in {places!r}]
sys.exit(max(rank.wait() for rank in ranks))
"""
    (tmp_path / "bin").mkdir()
    for name, code in {"srun": srun, "scontrol": "#!/bin/sh\necho 127.0.0.1\necho a2\n"}.items():
        (tmp_path / "bin" / name).write_text(code)
        (tmp_path / "bin" / name).chmod(0o755)
    path = os.pathsep.join(map(str, (tmp_path / "bin", Path(sys.executable).parent, os.environ["PATH"])))
    trained(out, ["bash", "train.sbatch"], {**job, "PATH": path})


@pytest.mark.system
@pytest.mark.timeout(300)
def test_accelerate_trains_from_the_weights_of_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder = folder_of(tmp_path / "llama", weights=True)
    out = written(folder, "accelerate", tmp_path / "out", "--steps", 2)
    variable, _, _, *arguments = STARTS["accelerate"][1].split()
    name, _, seconds = variable.partition("=")
    trained(out, [sys.executable, "-m", "accelerate.commands.launch", *arguments], {name: seconds})


@pytest.mark.system
@pytest.mark.timeout(300)
def test_skypilot_trains_a_pipeline_on_two_machines(own: Path, tmp_path: Path) -> None:
    """The commands of the file, in two shells with the variables that SkyPilot sets."""
    yaml = pytest.importorskip("yaml")
    layout = ("--tp", 1, "--pp", 2, "--gpus-per-machine", 1)
    out = written(f"{own}:build", "skypilot", tmp_path / "out", "--steps", 2, *layout)
    task = yaml.safe_load((out / "sky.yaml").read_text())
    assert (task["num_nodes"], task["resources"], task["workdir"]) == (2, {"accelerators": "H100:1"}, str(out))
    assert task["file_mounts"] == {path: path for path in (str(tmp_path), str(ROOT))}
    shared = {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_TASK_ID": "sky-1", "MASTER_PORT": str(free_port(30000)),
    }  # fmt: skip
    shells = [
        started(out, ["bash", "-c", task["run"]], {**shared, "SKYPILOT_NODE_RANK": str(node)}) for node in range(2)
    ]
    with shells[0] as first, shells[1] as second:
        said = first.communicate(timeout=200)[0] + second.communicate(timeout=60)[0]
    assert first.returncode == second.returncode == 0, said[-3000:]
    assert "begins at step 0" in said and said.count("step 2: loss") == 1 and saved(out) == [2]


@pytest.mark.system
@pytest.mark.timeout(300)
def test_ray_trains_a_model_of_a_configuration(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch")
    out = written(folder_of(tmp_path / "llama", weights=False), "ray", tmp_path / "out", "--steps", 2)
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path), "RAY_TMPDIR": "/tmp"}
    trained(out, STARTS["ray"][1].split(), variables)


def test_a_folder_with_weights_needs_no_model_in_the_script(tmp_path: Path) -> None:
    scripts = [
        (
            written(folder_of(tmp_path / f"llama{weights:d}", weights), "ray", tmp_path / str(weights)) / "train.py"
        ).read_text()
        for weights in (True, False)
    ]
    assert ["new_model" in script for script in scripts] == [False, True]
    assert ["dtype=torch.float32" in script for script in scripts] == [True, False]


def test_templates_are_scripts_that_run_as_they_are() -> None:
    """The schedule of the template: it grows, then falls to a tenth."""
    from autotp.tools.new_training import ray_train, train

    rates = [train.learning_rate(step) for step in range(train.STEPS + 1)]
    assert max(rates) == 1 and rates[0] == 1 / train.WARMUP and rates[-1] == pytest.approx(0.1)
    assert rates[train.WARMUP :] == sorted(rates[train.WARMUP :], reverse=True)
    assert ray_train.WORKERS == train.TP * train.PP * train.DP and torch.is_tensor(train.TokenRows()[0]["labels"])


def test_a_layout_that_does_not_fit_is_not_written(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says what `search` finds; where nothing fits, that more ranks are needed."""
    monkeypatch.chdir(own.parent)
    (own.parent / "wide_models.py").write_text(OWN.replace("width=16", "width=4096"))
    words = ["init", "wide_models.py:build", "--launcher", "torchrun", "--batch", "32"]

    def with_memory(gib: float, *layout: str) -> tuple[int, str]:
        device = f"312TF 2TB/s {gib}GiB node=4x300GB/s net=25GB/s"
        status = run([*words, *layout, "--gpu", device])
        return status, " ".join(capsys.readouterr().err.split())

    replicas = ("--tp", "1", "--dp", "2")
    status, said = with_memory(6.5, *replicas)
    assert status == 1 and "tp=1, pp=1, dp=2, micro_batch=16 does not fit: at most 9.8 of 6.5 GiB" in said
    fix = "try --tp 2 --pp 1 --dp 1 --batch 32 without --gpu; then in train.py: trainer = autotp.distribute(model"
    assert fix in said
    search = autotp.search

    def with_cp(others: int) -> Callable[..., autotp.Search]:
        """A search whose first layouts have context-parallel ranks."""

        def searched(*args: Any, **options: Any) -> autotp.Search:
            search_result = search(*args, **options)
            first = replace(search_result.best[0], layout=replace(search_result.best[0].layout, tp=1, cp=2))
            return replace(search_result, best=(first, *search_result.best[:others]))

        return searched

    # The files start tp * pp * dp ranks.
    with monkeypatch.context() as patch:
        patch.setattr(autotp, "search", with_cp(1))
        assert fix in with_memory(6.5, *replicas)[1]
        patch.setattr(autotp, "search", with_cp(0))
        assert with_memory(6.5, *replicas)[1].endswith("try more ranks: the fastest layouts of 2 that fit have cp")
    status, said = with_memory(1, *replicas)
    assert status == 1 and said.endswith("try more ranks: no layout of 2 fits")
    assert not (own.parent / "train.py").exists()
    assert with_memory(80, *replicas)[0] == 0 and (own.parent / "train.py").exists()
    assert run([*words, "--gpu", "a100"]) == 2  # No such kind.
