"""model_argument: the argument MODEL of the commands, and the model that it stands for.

MODEL is a folder of transformers, or its config.json, of which only the configuration is read; a published size, such
as `gpt-8.3b`; or the name of a callable that returns a model: `package.module:factory`, `path/file.py:factory`, also
with arguments that are literals: `package.module:Class(64, bias=False)`. A second name behind it is that of a callable
that returns example inputs: `file.py:factory:inputs`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autotp.checkpoint.files.plain_json import dtype_of
from autotp.errors import Error
from autotp.integrations.transformers.files.configuration import CONFIG
from autotp.integrations.transformers.files.from_configuration import LAYERS, model_from_configuration
from autotp.tools.cli.output import WrongUse, arguments_in_use, complain
from autotp.tools.cli.published_sizes import PUBLISHED, ConfiguredSize, MegatronSize

OF_FACTORIES = (*LAYERS, "layers", "depth")
"""The names of a factory's argument for a number of layers."""
OBJECT = re.compile(r"(?P<where>[^:(]+):(?P<name>[\w.]+)(?P<given>\(.*\))?(?::(?P<inputs>[\w.]+))?", re.DOTALL)
"""The parts of MODEL that names a callable."""
COPIES = 8
"""How often `verify` has the bytes of the parameters, about: model, ranks, gradients and momenta of both."""


@dataclass(frozen=True)
class ModelArgument:
    """What the command line says about the model.

    Attributes:
        text: MODEL itself.
        settings: the factory's arguments, or values that replace those of config.json.
        layers: the largest number of layers; None means all.
        dtype: of the parameters; None means the model's own.
        attention: transformers' `attn_implementation`.
        model_class: the name of a class of transformers.
        inputs: the name of a callable that returns example inputs, `:name` for one beside the factory.
        evaluation: whether the model is in evaluation mode.
    """

    text: str
    settings: Mapping[str, Any]
    layers: int | None = None
    dtype: torch.dtype | None = None
    attention: str | None = None
    model_class: str | None = None
    inputs: str | None = None
    evaluation: bool = False

    @property
    def path(self) -> Path | None:
        """The folder or file of a configuration; None for a callable."""
        path = Path(self.text)
        return path if path.is_dir() or (path.suffix == ".json" and path.is_file()) else None

    def model(self, meta: bool) -> nn.Module:
        """Builds the model. meta: on `meta`, else on the CPU, from the same random state each time

        Raises:
            WrongUse: MODEL is no configuration, no published size and no callable that returns a model; or the
                configuration cannot be used.
        """
        with arguments_in_use(), torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
            torch.manual_seed(0)
            built = self._made() if self.path is None else self._configured(self.path)
        if self.dtype is not None:
            built = built.to(self.dtype)
        return built.eval() if self.evaluation else built

    def example_inputs(self) -> Any:
        """Returns the example inputs that the user's callable makes; None if there is none."""
        parts = OBJECT.fullmatch(self.text)
        name = self.inputs or f":{parts['inputs'] or ''}" if parts else self.inputs or ""
        if not name.strip(":"):
            return None
        where = (parts["where"] if parts else self.text) + name if name.startswith(":") else name
        with arguments_in_use(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _called(where, {})

    def _configured(self, path: Path) -> nn.Module:
        how = {"layers": self.layers, "attention": self.attention, "model_class": self.model_class}
        return model_from_configuration(path, self.settings, dtype=self.dtype, **how)  # type: ignore[arg-type]

    def _made(self) -> nn.Module:
        published = PUBLISHED.get(self.text.lower())
        if isinstance(published, ConfiguredSize):
            # A configuration has one way in, from its file, where all of it is checked.
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, CONFIG).write_text(json.dumps(published.configuration))
                return self._configured(Path(folder))
        for name, value in (("--attention", self.attention), ("--model-class", self.model_class)):
            if value is not None:
                raise WrongUse(f"{name} is for models of transformers; give a factory its arguments with --kwargs")
        if isinstance(published, MegatronSize):
            return published.model(self.settings, self.layers)
        parts = OBJECT.fullmatch(self.text)
        name = f"{parts['where']}:{parts['name']}" if parts else self.text
        built = _called(name, self.settings, self.layers, literals_of(parts["given"] if parts else None))
        if not isinstance(built, nn.Module):
            raise WrongUse(f"{self.text} returned a {type(built).__name__}, and no torch.nn.Module")
        return built


def literals_of(text: str | None) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments in a text such as `(64, bias=False)`, all of them literals; nothing is evaluated.

    Raises:
        WrongUse: it is no list of arguments, or one of them is no literal.
    """
    try:
        # Python itself reads the arguments, as those of a call. `(1)(2)` is a call of a call, and `(**x)` has no names.
        call = ast.parse(f"f{text or '()'}", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or any(keyword.arg is None for keyword in call.keywords)
        ):
            raise ValueError("these are no arguments")
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return [ast.literal_eval(value) for value in call.args], named
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        rule = "arguments in MODEL are literals, such as (64, bias=False); for others write a factory"
        raise WrongUse(f"{text}: {rule}") from error


def _called(
    name: str,
    settings: Mapping[str, Any],
    layers: int | None = None,
    arguments: tuple[Sequence[Any], Mapping[str, Any]] = ((), {}),
) -> Any:
    """Returns what the callable of this name returns; a module of torch is returned itself.

    Args:
        arguments: those by place, and by name.
    """
    target = object_named(name)
    if isinstance(target, nn.Module) and not any(arguments):
        return target
    if not callable(target):
        raise WrongUse(f"{name} is a {type(target).__name__}, and cannot be called")
    try:
        fewer = {} if layers is None else {_layers_of(target, name): layers}
        return target(*arguments[0], **{**arguments[1], **settings, **fewer})
    except (Error, WrongUse):
        raise
    except (Exception, SystemExit) as error:  # A script may end itself.
        raise WrongUse(f"{name} raised {type(error).__name__}: {_first_line(error)}") from error


def _layers_of(factory: Callable[..., Any], name: str) -> str:
    """Returns the name of a factory's argument for the number of layers."""
    parameters = signature(factory).parameters
    if parameter := next((key for key in OF_FACTORIES if key in parameters), None):
        return parameter
    raise WrongUse(
        f"{name} takes no number of layers ({', '.join(OF_FACTORIES)}): leave --layers out, and make the model small "
        "by --kwargs or by a factory of your own"
    )


def object_named(name: str) -> Any:
    """Returns the object of `package.module:name` or `path/file.py:name`."""
    where, _, attribute = name.partition(":")
    if not attribute:
        if where.endswith(".py") and Path(where).is_file():
            raise WrongUse(f"MODEL {name!r} does not say which callable of the file returns the model: {where}:factory")
        problem = "no folder with config.json, no such file, no `package.module:factory` or `file.py:factory`, and no"
        raise WrongUse(
            f"MODEL {name!r} is {problem} published size (nothing is fetched from a hub): {', '.join(PUBLISHED)}"
        )
    try:
        value: Any = _file(Path(where)) if where.endswith(".py") else _module(where)
    except WrongUse:
        raise
    except (Exception, SystemExit) as error:
        raise WrongUse(f"{where} cannot be imported: {type(error).__name__}: {_first_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise WrongUse(f"{where} has no {attribute}")
        value = getattr(value, part)
    return value


def _module(name: str) -> ModuleType:
    """Imports a module by its name, as `python -m` would from the present folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    """Imports a file, as `python path` would: files beside it can be imported."""
    if not path.is_file():
        raise WrongUse(f"there is no file {path}")
    # The example inputs may be in the file of the factory: run twice, its classes would differ from each other.
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path.resolve()):
        return sys.modules[path.stem]
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise WrongUse(f"{path} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Before it runs: dataclasses and pickles look their module up.
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def on_meta(argument: ModelArgument) -> nn.Module:
    """Returns the model on `meta`; on the CPU if its constructor needs values, which a line on stderr says."""
    try:
        return argument.model(meta=True)
    except WrongUse as first:
        # Without an exception behind it, the command line itself is wrong, and would be on the CPU.
        if argument.path is not None or not isinstance(first.__cause__, Exception):
            raise
        model = argument.model(meta=False)
        reason = f"{type(first.__cause__).__name__}: {_first_line(first.__cause__)}"
        complain(f"the model is built on the CPU, for it cannot be built on meta ({reason})")
        return model


def with_values(argument: ModelArgument) -> nn.Module:
    """Returns the model on the CPU.

    Raises:
        Error: a comparison needs more memory than this machine has.
    """
    try:
        # In float64, whatever the model's own dtype is.
        need = COPIES * sum(p.numel() * 8 for p in argument.model(meta=True).parameters())
    except WrongUse:
        need = 0  # It cannot be built on meta.
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        problem = f"verifying this model needs about {need / 1e9:.0f} GB, and this machine has {have / 1e9:.0f} GB"
        raise Error(problem, fix="--layers 2", alternative="autotp plan, which builds nothing")
    return argument.model(meta=False)


def settings_of(text: str | None) -> dict[str, Any]:
    """Returns the arguments in a JSON object."""
    try:
        settings = json.loads(text or "{}")
    except ValueError as error:
        raise WrongUse(f"--kwargs is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise WrongUse('--kwargs is no JSON object: {"name": value}')
    return settings


def dtype_named(text: str | None) -> torch.dtype | None:
    """Returns the dtype of this name."""
    try:
        return None if text is None else dtype_of(text)
    except ValueError as error:
        raise WrongUse(f"--dtype {text}: torch has no such dtype") from error
