"""MODEL: what it may be, and what is said where it is nothing of this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.tools.cli import model_argument
from autotp.tools.cli.model_argument import ModelArgument, dtype_named, on_meta, settings_of, with_values
from autotp.tools.cli.output import WrongUse


def argument(text: object, **given: Any) -> ModelArgument:
    return ModelArgument(str(text), given.pop("settings", {}), **given)


def test_model_may_be_a_factory_in_a_file(models: Path) -> None:
    model = on_meta(argument(f"{models}:mlp", settings={"width": 8}, layers=3, dtype=torch.bfloat16, evaluation=True))
    assert isinstance(model, nn.Sequential) and len(model) == 3 and not model.training
    assert {(tuple(p.shape), p.dtype, p.is_meta) for p in model[0].parameters()} == {
        ((8, 4), torch.bfloat16, True), ((8,), torch.bfloat16, True),
        ((4, 8), torch.bfloat16, True), ((4,), torch.bfloat16, True),
    }  # fmt: skip


def test_model_may_be_a_factory_in_a_package() -> None:
    model = with_values(argument("torch.nn:Linear", settings={"in_features": 3, "out_features": 2}))
    again = with_values(argument("torch.nn:Linear", settings={"in_features": 3, "out_features": 2}))
    assert isinstance(model, nn.Linear) and torch.equal(model.weight, again.weight)


def test_model_may_be_a_class_with_literal_arguments(models: Path) -> None:
    model = on_meta(argument("torch.nn:Linear(3, 2, bias=False)"))
    assert isinstance(model, nn.Linear) and (model.in_features, model.out_features, model.bias) == (3, 2, None)
    text = f"{models}:mlp(width=8):inputs"
    assert on_meta(argument(text, layers=2))[1][0].out_features == 8 and argument(text).example_inputs().shape == (3, 4)
    assert on_meta(argument(text, settings={"width": 5}))[0][0].out_features == 5


def test_model_may_be_a_model_that_is_there(models: Path) -> None:
    assert isinstance(on_meta(argument(f"{models}:made")), nn.Sequential)


def test_model_may_be_a_configuration(llama: Path) -> None:
    assert type(on_meta(argument(llama))).__name__ == "LlamaForCausalLM"
    assert type(on_meta(argument(llama / "config.json"))).__name__ == "LlamaForCausalLM"


def test_model_that_meta_cannot_build_is_built_on_the_cpu(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = on_meta(argument(f"{models}:reads_a_value"))
    assert not next(model.parameters()).is_meta
    assert capsys.readouterr().err.startswith("autotp: the model is built on the CPU")


@pytest.mark.parametrize("inputs", [":inputs", None], ids=["option", "third"])
def test_model_may_name_example_inputs(models: Path, inputs: str | None) -> None:
    text = f"{models}:mlp" if inputs else f"{models}:mlp:inputs"
    assert argument(text, inputs=inputs).example_inputs().shape == (3, 4)
    assert argument(f"{models}:mlp").example_inputs() is None


@pytest.mark.parametrize(
    ("text", "given", "told"),
    [
        ("meta-llama/Llama-3.1-8B", {}, "nothing is fetched from a hub"),
        ("nowhere.py:mlp", {}, "there is no file nowhere.py"),
        ("no_such_package:mlp", {}, "no_such_package cannot be imported: ModuleNotFoundError"),
        ("own_models.py:nothing", {}, "has no nothing"),
        ("own_models.py:number", {}, "is a int, and cannot be called"),
        ("own_models.py:inputs", {}, "returned a Tensor, and no torch.nn.Module"),
        ("own_models.py:fails", {}, "raised ValueError: no such size"),
        ("own_models.py:exits", {}, "raised SystemExit"),
        ("script.py:mlp", {}, "script.py cannot be imported: SystemExit: 0"),
        ("own_models.py:mlp", {"settings": {"depth": 3}}, "raised TypeError"),
        ("own_models.py:reads_a_value", {"layers": 2}, "takes no number of layers"),
        ("own_models.py:mlp(open('x'))", {}, "arguments in MODEL are literals"),
        ("own_models.py:mlp(**{})", {}, "arguments in MODEL are literals"),
        ("own_models.py:mlp(3)()", {}, "arguments in MODEL are literals"),
        ("own_models.py:mlp(3", {}, r"has no mlp\(3"),
        ("own_models.py:made(3)", {}, "raised TypeError"),
        ("own_models.py:mlp", {"attention": "eager"}, "--attention is for models of transformers"),
    ],
    ids=[
        "hub", "file", "module", "name", "number", "tensor", "raises", "exits", "script", "arguments", "layers", "call",
        "stars", "twice", "open", "made", "attention",
    ],
)  # fmt: skip
def test_model_that_is_nothing_of_this_is_wrong_use(
    models: Path, monkeypatch: pytest.MonkeyPatch, text: str, given: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(models.parent)
    Path("script.py").write_text("import sys\n\nsys.exit(0)\n")
    with pytest.raises(WrongUse, match=told):
        with_values(argument(text, **given)) if told.startswith("returned") else argument(text, **given).model(False)


def test_a_model_that_is_too_big_is_not_built(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_argument.os, "sysconf", lambda name: 10)
    with pytest.raises(autotp.Error, match="verifying this model needs about 0 GB"):
        with_values(argument(f"{models}:mlp"))


@pytest.mark.parametrize("text", ["{", "3", "[]"])
def test_arguments_that_are_no_json_object(text: str) -> None:
    with pytest.raises(WrongUse, match="--kwargs is no JSON"):
        settings_of(text)


def test_a_dtype_that_torch_does_not_have() -> None:
    assert dtype_named("bfloat16") is torch.bfloat16 and dtype_named(None) is None
    with pytest.raises(WrongUse, match="torch has no such dtype"):
        dtype_named("float12")


def test_a_file_without_the_name_of_a_callable(models: Path) -> None:
    with pytest.raises(WrongUse, match=f"does not say which callable of the file returns the model: {models}:factory"):
        argument(str(models)).model(False)
