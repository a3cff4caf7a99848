"""init: the command that writes a training script for a model, and what starts it.

The templates are the other files of this folder. A line that begins with `#:` is one of jinja: so train.py is a script
that ruff and mypy read. The values of its constants, and the names that it imports, are then replaced.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from enum import Enum
from functools import partial
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jinja2 import Environment, StrictUndefined
from torch import Tensor, nn

import autotp
from autotp.costs.hardware import GIB, hardware_of
from autotp.diagnostics.verify import expect_blocks, expect_layout, microbatches_of, training_of
from autotp.errors import Error
from autotp.integrations.transformers.files.safetensors_files import INDEX, ONE_FILE
from autotp.integrations.transformers.processor_files import has_tokenizer
from autotp.options import DEFAULTS
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.tools.cli.flags import Debug, Json, with_model
from autotp.tools.cli.model_argument import OBJECT, ModelArgument, object_named, on_meta
from autotp.tools.cli.output import WrongUse, arguments_in_use, print_json
from autotp.tools.conversion.formats import OF_TORCH
from autotp.tools.estimation.estimate import LENGTHS
from autotp.tools.estimation.layout import StepLayout
from autotp.tools.estimation.start_lines import python_line

STARTS = {
    "torchrun": ("run.sh", "sh run.sh"),
    "slurm": ("train.sbatch", "sbatch train.sbatch"),
    "accelerate": (
        "accelerate.yaml",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 accelerate launch --config_file accelerate.yaml train.py",
    ),
    "skypilot": ("sky.yaml", "sky launch sky.yaml"),
    "ray": ("ray_train.py", "python ray_train.py"),
}
"""Launcher -> the file that is written for it, and the command that starts a training."""
Launcher = Enum("Launcher", {name: name for name in STARTS})  # type: ignore[misc]
SCRIPT = "train.py"
SCRIPTS = {"train", "ray_train"}
SHADOWED = {*sys.stdlib_module_names, *SCRIPTS, "autotp", "ray", "torch", "transformers"}
"""Modules that the scripts import or are: a file of the user with this name would not be the one that is imported."""
OF_WEIGHTS = (*OF_TORCH, ".safetensors", ".index.json", ".h5", ".msgpack")
"""How the names of files of weights end."""
PER_MACHINE, LONGEST, SHORT = 8, 1024, 128
"""GPUs of a machine, and tokens in a row: at most, and where the model names no length; unless flags say otherwise."""
CONSTANT = re.compile(r"^([A-Z]+) = .*?(?=  #|$)", re.MULTILINE)
"""A constant of a template, up to its comment."""


@with_model("layers", "dtype", "attention", "model_class", "kwargs", "inputs", "evaluation")
def init(
    launcher: Annotated[Launcher, typer.Option("--launcher", help="What starts the processes")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the files go")] = Path("."),
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks")] = 2,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline ranks")] = 1,
    dp: Annotated[int, typer.Option("--dp", min=1, help="Replicas")] = 1,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="The rows of a step, over all replicas")] = None,
    sequence: Annotated[int | None, typer.Option("--sequence", min=2, help="The tokens of a row")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="The steps of the training")] = 1000,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Train on it; else random tokens")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus-per-machine", min=1, help="Processes on a machine; else all, up to 8")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="KIND|LINE", help="Refuse what does not fit it")] = None,
    json: Json = False,
    debug: Debug = False,
    *,
    argument: ModelArgument,
) -> None:
    """Writes train.py, which trains a model with checkpoints, and what starts it. No file is overwritten.

    Here MODEL is a folder of transformers, its config.json, or a callable. --gpu is a device of `autotp estimate`: a
    layout that does not fit it is an error, which names a layout that fits.

    Example: autotp init file.py:factory --launcher torchrun --tp 2
    """
    parts, ranks = microbatches_of(pp), tp * pp * dp
    per_machine = gpus or min(ranks, PER_MACHINE)
    rows = batch or 8 * dp * parts
    if ranks % per_machine:
        raise WrongUse(f"tp * pp * dp is {ranks}, no multiple of --gpus-per-machine {per_machine}")
    if rows % (dp * parts):
        raise WrongUse(f"--batch {rows} does not divide into {dp} replicas of {parts} microbatches")
    if text is not None and not text.is_file():
        raise WrongUse(f"--text {text}: there is no such file")
    file, start = STARTS[launcher.value]
    if existing_files := [path for path in (out / SCRIPT, out / file) if path.exists()]:
        raise WrongUse(f"{existing_files[0]} exists, and nothing is overwritten: --out FOLDER")
    if argument.path is None and (callable_of := OBJECT.fullmatch(argument.text)):
        _expect_importable(callable_of["where"])
    training = training_of(DEFAULTS, parts, "1F1B", 0, None)
    with arguments_in_use():
        expect_layout(DEFAULTS, training, (tp, pp, dp))
        model = on_meta(argument)
        expect_blocks(model, training, pp)
        facts = facts_of(model, argument, text, sequence)
    constants = {
        "TP": tp, "PP": pp, "DP": dp, "MICROBATCHES": parts, "BATCH": rows, "STEPS": steps, "WORKERS": ranks,
        "TEXT": str(text.resolve()) if text else "", **facts["constants"],
    }  # fmt: skip
    # A token is a byte or more.
    if text is not None and text.stat().st_size <= rows * constants["SEQUENCE"]:
        raise WrongUse(f"--text {text} is too short: a step takes {rows} rows of {constants['SEQUENCE']} tokens")
    if gpu is not None:
        with arguments_in_use():
            hardware_of(gpu)
        call = {"sequence": constants.get("SEQUENCE"), "example_inputs": argument.example_inputs()}
        _expect_to_fit(model.float(), gpu, StepLayout(batch=rows, tp=tp, pp=pp, dp=dp), parts, call)
    checkout = Path(autotp.__file__).resolve().parents[1]
    from_checkout = (checkout / "setup.cfg").is_file()
    places = {
        "machines": ranks // per_machine, "ranks": per_machine, "folder": str(out.resolve()),
        "mounts": dict.fromkeys(
            [*facts["paths"], *([str(text.resolve())] if text else []), *([str(checkout)] * from_checkout)]
        ),
        "requirement": shlex.quote(str(checkout) if from_checkout else f"autotp=={autotp.__version__}"),
    }  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (SCRIPT, file):
            (out / name).write_text(filled(name, {**facts, **places}, constants, facts["names"]), encoding="utf-8")
    except OSError as error:
        raise WrongUse(f"--out {out}: {error.strerror}") from error
    if json:
        print_json({"ok": True, "files": [str(out / SCRIPT), str(out / file)], "start": start})
    else:
        print(f"wrote {out / SCRIPT} and {out / file}\nstart it in {out}: {start}")


def _expect_to_fit(model: nn.Module, gpu: str, layout: StepLayout, parts: int, call: Mapping[str, Any]) -> None:
    """Raises Error if a device has no memory for what train.py trains; it names a layout that fits, if there is one.

    Args:
        model: with float32 parameters, as train.py has them.
        layout: its tp, pp, dp and batch.
        parts: the microbatches of a replica.
        call: `sequence` and `example_inputs`, as for `estimate`.
    """
    size: dict[str, Any] = {"gpu": gpu, "batch": layout.batch, "dtype": torch.bfloat16, **call}
    micro_batch = layout.batch // (layout.dp * parts)
    est = autotp.estimate(model, tp=layout.tp, pp=layout.pp, dp=layout.dp, micro_batch=micro_batch, **size)
    if est.fits:
        return
    reserved, available = est.fullest.reserved / GIB, est.device.memory / GIB
    problem = f"init: {est.layout} does not fit: at most {reserved:.1f} of {available:.1f} GiB of a {gpu}"
    try:
        fitting = [est.layout for est in autotp.search(model, gpus=layout.devices, **size).best]
    except Error:
        raise Error(problem, fix=f"more ranks: no layout of {layout.devices} fits") from None
    best = next((x for x in fitting if x.cp == 1), None)  # The files start tp * pp * dp ranks.
    if best is None:
        raise Error(problem, fix=f"more ranks: the fastest layouts of {layout.devices} that fit have cp")
    flags = f"--tp {best.tp} --pp {best.pp} --dp {best.dp} --batch {layout.batch}"
    raise Error(problem, fix=f"{flags} without --gpu; then in train.py: {python_line(best)}")


def facts_of(model: nn.Module, argument: ModelArgument, text: Path | None, sequence: int | None) -> dict[str, Any]:
    """Returns what the templates say of a model: which of their parts stay, constants, names, and paths it needs.

    Raises:
        WrongUse: MODEL is neither a folder of transformers nor a callable, or a script cannot know its data or weights.
    """
    path, parts = argument.path, OBJECT.fullmatch(argument.text)
    if path is None and parts is None:
        raise WrongUse(f"MODEL {argument.text}: init writes a script for a folder of transformers or for a callable")
    example, constants = argument.example_inputs(), dict[str, Any]()
    if example is None:
        names, constants = _tokens(model, argument, sequence)
        if text is not None and path is None and constants["VOCABULARY"] < 256:
            raise WrongUse(f"--text: the tokens are bytes, and the model has {constants['VOCABULARY']} tokens only")
        if text is not None and path is not None:
            _expect_tokenizer(path)
    elif flag := "--text" if text is not None else "--sequence" if sequence else "":
        raise WrongUse(f"{flag} is for models of token ids, and example inputs are named")
    elif not isinstance(example, Mapping) or not all(isinstance(x, Tensor) and x.dim() for x in example.values()):
        raise WrongUse("the example inputs are no dict of tensors [batch ...]: return one, with forward's names")
    else:
        names = {}
    if path is not None:
        constants["MODEL"] = needed = str(path.resolve())
        names["LlamaForCausalLM"] = type(model).__name__
    else:
        assert parts is not None
        module, constants["FOLDER"], needed = _module_of(parts["where"])
        first, call = parts["name"].partition(".")[0], f"{parts['name']}{parts['given'] or '()'}"
        if isinstance(object_named(f"{parts['where']}:{parts['name']}"), nn.Module) and not parts["given"]:
            call = parts["name"]
        inputs = parts["inputs"] or ""
        names |= {
            "from autotp.models.gpt import GPT, GPTConfig": f"from {module} import {first}",
            "from autotp.models.gpt import GPTConfig": f"from {module} import {inputs.partition('.')[0]}",
            "vars(GPTConfig())": f"{inputs}()",
            "GPT(GPTConfig())": call,
        }
    conditions = {"transformers": path is not None, "weights": _has_weights(path), "tokens": example is None}
    return {**conditions, "constants": constants, "names": names, "paths": [needed]}


def _has_weights(path: Path | None) -> bool:
    """Returns whether MODEL is a folder whose weights `distribute` reads.

    Raises:
        WrongUse: it has weights in other files: a script that began anew would lose them.
    """
    if path is None or path.is_file() or (path / ONE_FILE).is_file() or (path / INDEX).is_file():
        return path is not None and path.is_dir()
    if unread := next((file for file in sorted(path.iterdir()) if file.name.endswith(OF_WEIGHTS)), None):
        raise WrongUse(
            f"{path} has {unread.name}, and only {ONE_FILE} is read: autotp convert {unread} FOLDER --config {path} "
            f"(what is in several files: load it with transformers, and save_pretrained); for new weights name "
            f"{path / 'config.json'}"
        )
    return False


def _expect_tokenizer(path: Path) -> None:
    """Raises WrongUse unless a folder has its tokenizer."""
    if not has_tokenizer(path):
        raise WrongUse(
            f"--text needs a tokenizer, and {path} has none: tokenizer.save_pretrained(a folder with config.json)"
        )


def _module_of(where: str) -> tuple[str, str, str]:
    """Returns the name by which a script imports a loaded module, the folder it does so from, and the path it needs."""
    file = Path(where)
    if file.suffix == ".py":
        return file.stem, str(file.resolve().parent), str(file.resolve().parent)
    loaded = sys.modules[where]
    above = where.count(".") + hasattr(loaded, "__path__")
    folder = Path(str(loaded.__file__)).resolve().parents[above]
    # A package alone is taken along, and not what lies beside it: all packages of an environment, perhaps.
    return where, str(folder), str(folder / where.partition(".")[0] if above else folder)


def _expect_importable(where: str) -> None:
    """Raises WrongUse unless a script can import a module, by `from module import name`."""
    file = Path(where)
    module, taken_names = (file.stem, SHADOWED) if file.suffix == ".py" else (where, SCRIPTS)
    names = module.split(".")
    if names[0] in taken_names or not all(name.isidentifier() and not iskeyword(name) for name in names):
        raise WrongUse(
            f"MODEL: a script cannot import {module}, which is no name in Python or that of another module: rename it"
        )


def _tokens(model: nn.Module, argument: ModelArgument, sequence: int | None) -> tuple[dict[str, str], dict[str, int]]:
    """Returns the names of a model's token ids and labels, and the constants of its rows.

    Raises:
        WrongUse: it takes something else or shorter rows, or returns no loss.
    """
    args, kwargs = find_inputs(model)
    ids = [name for name, value in kwargs.items() if value.dim() == 2 and value.dtype == torch.int64]
    config = getattr(model, "config", None)
    longest = next((n for name in LENGTHS if isinstance(n := getattr(config, name, None), int)), None)
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if args or len(ids) != 2 or len(kwargs) != 2 or not sizes:
        raise WrongUse(
            f"{argument.text}: forward takes {', '.join(kwargs) or 'something else'}, and not token ids with labels "
            "that make a loss: MODEL file.py:factory:inputs names a callable that returns a dict of its inputs"
        )
    if sequence and longest and sequence > longest:
        raise WrongUse(f"--sequence {sequence}: the model's configuration has at most {longest} tokens in a row")
    names = {'"input_ids":': f'"{ids[0]}":', '"labels":': f'"{ids[1]}":'}
    return names, {"VOCABULARY": sizes[0], "SEQUENCE": sequence or min(longest or SHORT, LONGEST)}


def filled(name: str, facts: Mapping[str, Any], constants: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Returns a template with the parts that stay, and with its constants and names replaced."""
    jinja = Environment(
        line_statement_prefix="#:", trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=StrictUndefined, autoescape=False,
    )  # fmt: skip
    # As they are: JSON would write some letters of a path as two, which is no text in Python and YAML.
    as_text = partial(json.dumps, ensure_ascii=False)
    jinja.filters |= {"json": as_text, "shell": shlex.quote}
    made = jinja.from_string(files(__package__).joinpath(name).read_text(encoding="utf-8")).render(facts)
    if not name.endswith(".py"):
        return made
    # All at once, and constants last: a name in what was written, such as a path, stays.
    names = {"TokenRows": "Rows", "ExampleRows": "Rows", **names}
    made = re.sub("|".join(map(re.escape, names)), lambda m: names[m[0]], made)
    made = re.sub(r"\n+(?=(def|class) )", "\n\n\n", made)  # jinja takes the empty lines around its own lines away.
    return CONSTANT.sub(lambda m: f"{m[1]} = {as_text(constants[m[1]])}" if m[1] in constants else m[0], made)
