"""flags: the options of the commands. Those of autotp itself are made from `autotp.options.Options`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from autotp.api import parallelize
from autotp.options import DEFAULTS, OPTIONAL, Options
from autotp.tools.cli.model_argument import ModelArgument, dtype_named, settings_of
from autotp.tools.cli.output import WrongUse
from autotp.training.pipeline.schedules import ENGINES

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder of transformers or its config.json, package.module:Class(args), file.py:factory, or a published "
        "size such as gpt-8.3b",
    ),
]
Kwargs = Annotated[
    str | None,
    typer.Option("--kwargs", metavar="JSON", help="Arguments of the factory, or values in place of config.json's"),
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, help="The largest number of layers")]
Attention = Annotated[str | None, typer.Option("--attention", help="attn_implementation of transformers: eager, sdpa")]
ModelClass = Annotated[str | None, typer.Option("--model-class", help="A class of transformers: AutoModelForCausalLM")]
InputsOf = Annotated[
    str | None,
    typer.Option("--inputs", metavar="NAME", help="A callable that returns example inputs; `:name` beside the factory"),
]
Evaluation = Annotated[bool, typer.Option("--eval", help="The model in evaluation mode")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the page of the result, too")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors")]
ScheduleName = Enum("ScheduleName", {name: name for name in ENGINES})  # type: ignore[misc]
PLAIN = ScheduleName("1F1B")
Interleave = Annotated[int | None, typer.Option("--interleave", min=2, help="Stages of a rank, if interleaved")]

CUT = re.compile(r"[^-=:()][^=:()]*=[-\w]+")
"""A value of `--cut`; no other flag, and no MODEL with arguments."""
SEVERAL: dict[str, Callable[[str], bool]] = {
    "--tp": str.isdigit, "--without": OPTIONAL.__contains__, "--cut": lambda text: CUT.fullmatch(text) is not None,
}  # fmt: skip
"""Option that takes several values, `--tp 2 3 4` -> whether a text is a value of it."""


class Command(TyperCommand):
    """A command whose options in SEVERAL take several values behind one name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments, with the option's name before each of its values."""
        parsed: list[str] = super().parse_args(ctx, repeat_flags(args))
        return parsed


def repeat_flags(args: Sequence[str]) -> list[str]:
    """Returns `--tp 2 --tp 3` for `--tp 2 3`."""
    parsed: list[str] = []
    name = ""
    for arg in args:
        # The value directly behind the name needs no second one.
        if name and parsed[-1] != name and SEVERAL[name](arg):
            parsed.append(name)
        elif name and parsed[-1] != name:
            name = ""
        parsed.append(arg)
        if arg in SEVERAL:
            name = arg
    return parsed


def with_options_of(function: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for each field of Options that `function` takes; their values come as `chosen`.

    A flag that the command has itself stays as it is.

    Args:
        function: a public function, such as `autotp.verify`.
    """
    names = [name for name in vars(DEFAULTS) if name in signature(function).parameters]

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        flags_of_command = signature(command).parameters
        return _instead_of("chosen", command, [_flag(name) for name in names if name not in flags_of_command], _chosen)

    return with_flags


def with_model(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command MODEL and its flags; what they say comes as `argument`.

    Args:
        left_out: the flags that the command has not.
    """
    flags = [p for p in signature(_model_argument, eval_str=True).parameters.values() if p.name not in left_out]
    return lambda command: _instead_of("argument", command, flags, lambda values: _model_argument(**values))


def _model_argument(
    model: Model,
    layers: Layers = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="The dtype of the parameters: bfloat16, ...")] = None,
    attention: Attention = None,
    model_class: ModelClass = None,
    kwargs: Kwargs = None,
    inputs: InputsOf = None,
    evaluation: Evaluation = False,
) -> ModelArgument:
    settings, own_dtype = settings_of(kwargs), dtype_named(dtype)
    return ModelArgument(model, settings, layers, own_dtype, attention, model_class, inputs, evaluation)


def _instead_of(
    name: str, command: Callable[..., None], flags: Sequence[Parameter], value_of: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """Returns a command with flags in place of a parameter, whose value is made of theirs."""
    parameters = [p for p in signature(command, eval_str=True).parameters.values() if p.name != name]

    def run(**values: Any) -> None:
        made = value_of({flag.name: _value(values.pop(flag.name)) for flag in flags})
        command(**values, **{name: made})

    # Behind parameters with defaults, flags without one may only follow by keyword.
    ordered = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*parameters, *flags)]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    # typer reads the flags from the signature, and their types from the annotations.
    run.__signature__ = signature(command).replace(parameters=ordered, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in ordered}
    return run


def _chosen(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of flags, with `lm_head=whole` as an entry of a dict."""
    if (memory := values.get("memory")) is not None and memory.isdigit():
        values["memory"] = int(memory)
    if "cut" in values:
        rows = [text.partition("=") for text in values["cut"]]
        if wrong := [pattern for pattern, equals, _ in rows if not equals]:
            raise WrongUse(f"--cut {wrong[0]}: write NAME=AXIS, such as lm_head=whole")
        values["cut"] = {
            pattern: int(along) if re.fullmatch("-?[0-9]+", along) else along for pattern, _, along in rows
        }
    return values


def _flag(name: str) -> Parameter:
    """Returns the parameter of typer for a field of Options, with the help of its docstring."""
    hint, default = get_type_hints(Options)[name], getattr(DEFAULTS, name)
    spelled = f"--{name.replace('_', '-')}"
    option = typer.Option(spelled, help=_help(name), min=1 if hint is int else None)
    if name == "without":
        option = typer.Option(spelled, metavar="PASS ...", help=f"{_help(name)}: {', '.join(OPTIONAL)}")
        choices: Any = list[_choices(name, OPTIONAL)]  # type: ignore[misc]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=[], annotation=Annotated[choices, option])
    if name == "cut":
        option = typer.Option(spelled, metavar="NAME=AXIS ...", help=f"{_help(name)}, such as lm_head=whole")
        return Parameter(name, Parameter.KEYWORD_ONLY, default=[], annotation=Annotated[list[str], option])
    if name == "memory":
        option = typer.Option(spelled, metavar="BYTES|PERCENT|auto", help=_help(name))
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option])
    if get_origin(hint) is Literal:
        choices = _choices(name, get_args(hint))
        return Parameter(name, Parameter.KEYWORD_ONLY, default=choices(default), annotation=Annotated[choices, option])
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option])


def _choices(name: str, values: Sequence[str]) -> Any:
    # typer checks a text against an Enum, and lists its values in the help.
    return Enum(name, {value: value for value in values})


def _help(name: str) -> str:
    """Returns the first sentence of what `parallelize` says about an option."""
    match = re.search(rf"^    {name}: (.*?)[.;](?=\s)", getdoc(parallelize) or "", re.MULTILINE | re.DOTALL)
    text = " ".join(match[1].split()) if match else name
    return text[0].upper() + text[1:]


def _value(value: Any) -> Any:
    """Returns the value that autotp's option takes."""
    if isinstance(value, list):
        return tuple(_value(item) for item in value)
    return value.value if isinstance(value, Enum) else value
