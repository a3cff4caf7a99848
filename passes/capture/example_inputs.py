"""Finds example inputs from a model's `dummy_inputs` or its signature.

Capture reads only their structure, shapes and dtypes. No size is 0 or 1, because the exporter takes these for
constants; batch and sequence differ.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.ops.random_state import forked
from autotp.passes.capture.pytree import map_leaves
from autotp.passes.capture.skeleton import copy_on

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

BATCH, SEQ = 2, 5
SIDES = (64, 224, 32, 28)  # Sides of images, tried in this order; a model that takes any size gets a small one.
IMAGE_SIZE = ("image_size", "img_size")  # The attribute's name in Hugging Face and in timm.
LABELS = ("label", "labels", "target", "targets")  # Endings of the names of label arguments.
TOKENWISE = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")

# NOTE [Which labels]
# A model captured without labels has no loss, and its logits are an output, which every rank must gather. So labels are
# added. Their shape is not written anywhere: [batch seq] for a language model, [batch] for a classifier. So the model
# runs on meta with labels of one shape, then of the other; the labels that give a scalar are taken. If the model cannot
# run on meta (it reads a value), the names of Hugging Face's classes tell the shape; for other models only the labels
# that `forward` requires are added. A wrapper that takes anything (peft's) is asked for the labels of the model within.


def example_inputs(model: nn.Module, given: Any = None) -> Inputs:
    """Returns arguments to call `model` with, positional and by keyword; real tensors on the CPU if not `given`.

    They are `model.dummy_inputs` if its names are those of `forward`. Otherwise the first argument is inferred from the
    first layer (ids for an embedding, features for a linear layer or a norm, images for a convolution), and arguments
    with a default are left out. Labels are added if the model then returns a loss: NOTE [Which labels].

    Args:
        given: a dict of keyword arguments, a tuple or list of positional arguments, or one tensor; used unchanged.

    Raises:
        Error: `given` has another type, or an argument cannot be inferred: shows what to pass.
    """
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple | list):
        return tuple(given), {}
    if isinstance(given, Tensor):
        return (given,), {}
    if given is not None:
        raise Error(
            f"example_inputs is of type {type(given).__name__}",
            expected="a dict of keyword arguments, a tuple of positional ones, or one tensor",
        )
    return _with_labels(model, *(_dummy(model) or _inferred(model)))


def _dummy(model: nn.Module) -> Inputs | None:
    """Returns `model.dummy_inputs` (Hugging Face's convention), with ids below the size of the first embedding."""
    inputs, names = getattr(model, "dummy_inputs", None), set(_parameters(model))
    if not isinstance(inputs, Mapping) or (names and not names.issuperset(inputs)):
        return None  # Hugging Face's vision models inherit `input_ids`, which they do not take.
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return (), {name: _below(value, sizes[0]) if sizes else value for name, value in inputs.items()}


def _below(value: Any, size: int) -> Any:
    is_ids = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
    return value.clamp(max=size - 1) if is_ids else value


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Returns the parameters of `forward`, or of a `__call__` in its place, without *args and **kwargs."""
    own_call = type(model).forward is nn.Module.forward and "forward" not in vars(model)
    parameters = inspect.signature(model.__call__ if own_call else model.forward).parameters
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _parameters_within(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Returns the parameters of the first module that names some, for a wrapper that passes on what it gets."""
    return next((parameters for module in model.modules() if (parameters := _parameters(module))), {})


def _inferred(model: nn.Module) -> Inputs:
    parameters = _parameters(model)
    main = getattr(model, "main_input_name", None)  # Hugging Face's
    first = main if main in parameters else next(iter(parameters), None)
    value = _that_runs(model, first, _for_first_layer(model)) if first is not None else None
    needed = [n for n, p in parameters.items() if n == first or (p.default is p.empty and not _is_label(n))]
    if first is None or value is None or needed != [first]:
        raise _cannot_infer(model, [parameters[n] for n in needed], value)
    return ((value,), {}) if parameters[first].kind is inspect.Parameter.POSITIONAL_ONLY else ((), {first: value})


def _that_runs(model: nn.Module, name: str, candidates: list[Tensor]) -> Tensor | None:
    """Returns the first candidate that the model runs with on meta; a single candidate is returned untried."""
    if len(candidates) < 2:
        return next(iter(candidates), None)
    skeleton = copy_on(model, "meta", {})
    return next((x for x in candidates if _returns_loss(skeleton, (), {name: x}) is not None), None)


def _for_first_layer(model: nn.Module) -> list[Tensor]:
    """Returns candidates for the input of the first layer.

    Ids [batch seq] for an embedding, features [batch seq hidden] for a linear layer, a norm or attention, images
    [batch channel height width] for a convolution.
    """
    for module in model.modules():
        match module:
            case nn.Embedding() | nn.EmbeddingBag():
                return [torch.arange(BATCH * SEQ).view(BATCH, SEQ) % module.num_embeddings]
            case nn.Linear():
                return [_features(BATCH, SEQ, module.in_features, dtype=module.weight.dtype)]
            case nn.LayerNorm() | nn.RMSNorm():
                weight = next(module.parameters(), torch.empty(0))
                return [_features(BATCH, SEQ, *module.normalized_shape, dtype=weight.dtype)]
            case nn.MultiheadAttention():
                return [_features(BATCH, SEQ, module.embed_dim, dtype=module.out_proj.weight.dtype)]
            case nn.Conv2d():
                dtype = module.weight.dtype
                return [_features(BATCH, module.in_channels, *size, dtype=dtype) for size in _image_sizes(model)]
            case nn.modules.conv._ConvNd() | nn.RNNBase():
                return []  # Sound, video, and sequences whose dimensions may come in either order.
    return []


def _image_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Returns height and width of images: from the model or its configuration, else all sizes to try."""
    for holder in (getattr(model, "config", None), *model.modules()):
        for size in (getattr(holder, name, None) for name in IMAGE_SIZE):
            if isinstance(size, int):
                return [(size, size)]
            if isinstance(size, list | tuple) and len(size) == 2:
                return [(size[0], size[1])]
    return [(side, side) for side in SIDES]


def _features(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns evenly spaced numbers from -1 to 1. They are not random: the random state belongs to the user."""
    return torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype)


# ---- labels


def _is_label(name: str) -> bool:
    return name.endswith(LABELS)


def _with_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Adds labels to the arguments if `model` then returns a loss. NOTE [Which labels]"""
    parameters = _parameters(model) or _parameters_within(model)
    free = {n: parameters[n].default for n in list(parameters)[len(args) :] if _is_label(n) and n not in kwargs}
    names = [n for n, default in free.items() if default is None or default is inspect.Parameter.empty]
    shapes = [x.shape[:2] for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 1]
    if not names or not shapes:
        return args, kwargs
    skeleton = copy_on(model, "meta", {})
    for chosen in itertools.product((shapes[0], shapes[0][:1]), repeat=len(names)):
        labelled = {
            **kwargs,
            **{n: torch.zeros(shape, dtype=torch.int64) for n, shape in zip(names, chosen, strict=True)},
        }
        if _returns_loss(skeleton, args, labelled):
            return args, labelled
    untried = _returns_loss(skeleton, args, kwargs) is None
    is_tokenwise = type(model).__name__.endswith(TOKENWISE) and untried
    label_names = [n for n in names if free[n] is not None or (n == "labels" and is_tokenwise)]
    if untried and (rest := [n for n in names if n not in label_names]):
        text = f"{' and '.join(f'`{n}`' for n in rest)} is left out of the example inputs, for its shape is not known"
        arguments = ", ".join(f'"{n}": ...' for n in [*kwargs, *rest])
        warnings.warn(f"{text}: so no loss is planned. Pass example_inputs={{{arguments}}}", stacklevel=6)
    return args, {**kwargs, **{n: torch.zeros(shapes[0], dtype=torch.int64) for n in label_names}}


def _returns_loss(skeleton: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """True if a floating scalar is among the outputs; None if the model fails on meta."""
    args, kwargs = map_leaves(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
    try:
        with torch.no_grad(), forked(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = skeleton(*args, **kwargs)
    except Exception:  # The model's own code may raise anything on shapes that do not fit.
        return None
    leaves = [*pytree.tree_leaves(output), getattr(output, "loss", None)]
    return any(isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point() for x in leaves)


# ---- the error that shows what to pass


def _cannot_infer(model: nn.Module, needed: list[inspect.Parameter], value: Tensor | None) -> Error:
    """Returns an error that shows the arguments to pass; the first one in full if it could be inferred."""
    texts = {p.name: "..." for p in needed}
    if needed and value is not None:
        texts[needed[0].name] = _spelled(value)
    missing = [f"`{name}`" for name, text in texts.items() if text == "..."]
    positional = not needed or any(p.kind is p.POSITIONAL_ONLY for p in needed)
    dictionary, listed = ", ".join(f'"{name}": {text}' for name, text in texts.items()), ", ".join(texts.values())
    example = f"({listed or '...'},)" if positional else f"{{{dictionary}}}"
    return Error(
        f"cannot infer what {type(model).__name__}.forward takes as {' and '.join(missing) or '*args'}",
        fix=f"example_inputs={example}, with a small tensor, or what your own calls pass, for each ...",
    )


def _spelled(x: Tensor) -> str:
    sizes = ", ".join(map(str, x.shape))
    return f"torch.randn({sizes})" if x.is_floating_point() else f"torch.zeros({sizes}, dtype=torch.int64)"
