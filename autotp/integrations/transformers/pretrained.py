"""`from_pretrained` and `save_pretrained`: transformers' checkpoints, from and to the shards of a parallel model.

transformers itself builds the model, on tensors without data (`lazy_tensor.py`): it renames, concatenates, splits and
transposes the tensors of the files, ties parameters and makes buffers. Afterwards each rank reads only its parts.
Saving applies the inverse conversions.
"""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from typing_extensions import Unpack

from autotp.arguments import expect_arguments
from autotp.distributed.agreement import Fact, agree, gather_texts, on_first_replica
from autotp.distributed.mesh import Mesh, gather_ints, make_mesh, tell_errors
from autotp.errors import Error, within
from autotp.integrations.transformers import adapters
from autotp.integrations.transformers.files.checksum_file import (
    SIDE_FILE,
    STALE,
    changed_settings,
    checksums_in,
    expect_unchanged,
    folder_fingerprint,
)
from autotp.integrations.transformers.files.configuration import (
    ModelArguments,
    class_of,
    first_line,
    offline_and_silent,
    read_config,
    read_object,
    transformers_module,
)
from autotp.integrations.transformers.files.lazy_tensor import Lazy, source_text
from autotp.integrations.transformers.files.safetensors_files import Stored, stored_tensors
from autotp.integrations.transformers.files.tensor_sources import Cast, Source, read_whole
from autotp.integrations.transformers.files.weights import parse_size, read_parts, write_checkpoint
from autotp.integrations.transformers.files.whole_tensors import GatheredTensor, HeldTensor
from autotp.integrations.transformers.processor_files import copy_beside
from autotp.options import Options, ParallelOptions, expect_options, lists_options
from autotp.runtime.build import build
from autotp.runtime.holdings import expect_nothing_beside, holdings_of, parallel_of
from autotp.runtime.module import ParallelModule
from autotp.sharding.layout import Layout
from autotp.training.trainer import Trainer

T = TypeVar("T")
ReadFolder = Callable[[Mapping[str, Layout], Mesh, Collection[str] | None], dict[str, Tensor]]
"""(layouts, tensor-parallel mesh, the names that this rank holds; None means all) -> this rank's parts."""
SETTINGS = ("config.json", "generation_config.json")
OTHER_SETTINGS = (
    "in {}, {} is not what `save_pretrained` wrote: it was edited, or it is damaged. "
    "To change a setting without this warning, use from_pretrained(..., config={{...}})"
)
MOST_NAMES = 4  # The most names in an error.


@lists_options
def from_pretrained(
    path: str | os.PathLike[str],
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    model_class: type | None = None,
    config: Mapping[str, Any] | None = None,
    missing: Literal["error", "init"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    example_inputs: Any = None,
    strict: bool = False,
    cp: int | None = None,
    timeout: timedelta | None = None,
    **options: Unpack[ParallelOptions],
) -> ParallelModule:
    """Returns this rank's part of the transformers model in the folder `path`; each rank reads only its part.

    The folder has config.json and safetensors files, as transformers writes them. The model is in eval mode. At any
    time a rank has its shards and one block of 64 MB in memory. Call it on every rank.

    Args:
        path: a local folder.
        dtype: the dtype of the parameters; None means the checkpoint's, from config.json or else from the files.
        model_class: the class of transformers to build, or one of its Auto classes; None means the class that was
            saved.
        config: values that replace those of config.json, and arguments of transformers such as `attn_implementation`.
        missing: "init" initialises parameters that no file has as transformers does, the same on all ranks; "error"
            raises Error.
        unexpected: "ignore" leaves out tensors that the model has no parameter for; "error" raises Error.
        tp, mesh, device, example_inputs, strict, cp, timeout: as for `parallelize`.
        options: as for `parallelize`.

    Raises:
        Error: on every rank. The folder has no checkpoint, or its configuration names code; a file is truncated,
            damaged, or not the one that `save_pretrained` wrote; a tensor is missing, unexpected or of another
            shape (the error names the tensor and the file); or `parallelize` raises Error for the model.

    Example:
        With `tp=8` the same line runs under `torchrun --nproc-per-node 8 train.py`.

        >>> import transformers
        >>> config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        >>> transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")
        >>> model = autotp.from_pretrained("gpt2", tp=1)
        >>> model(input_ids=torch.ones(2, 8, dtype=torch.long)).logits.shape
        torch.Size([2, 8, 32])
    """
    size = "" if tp is None else f", tp={tp}"
    arguments = {"path": path, "dtype": dtype, "model_class": model_class, "config": config, "strict": strict}
    model_arguments = ModelArguments(dtype, model_class, config or {}, missing, unexpected)

    def run() -> ParallelModule:
        tell_errors()
        expect_options(from_pretrained, options)
        settings = Options(**options)
        place = make_mesh(tp, mesh, device, timeout, cp)
        agree(place, lambda: expect_arguments(from_pretrained, **arguments))
        model, read = open_folder(Path(path), model_arguments, place)
        return build(model, place, example_inputs, settings, strict, lambda layouts: read(layouts, place, None))

    return within(f"from_pretrained({path}{size})", run)


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a model of transformers into the folder `path`, for transformers' own `from_pretrained(path)` and vLLM.

    Of a model of peft it writes the adapters, for `PeftModel.from_pretrained(model, path)`.

    config.json and generation_config.json are the model's; a tokenizer's files are copied from the folder that the
    model was read from. The first rank writes. Of a parallel model no rank holds more than its shards and 64 MB; of a
    trainer, its shards and one whole tensor. A save that fails leaves the folder as it was. Files that do not belong to
    a checkpoint stay. Call it on every rank; with replicas of a mesh of your own, on every rank of one replica.

    Args:
        model: what `from_pretrained`, `parallelize` or `distribute` returned.
        path: the folder; it is made if it does not exist.
        max_shard_size: bytes of tensors in one file, or a text such as "500MB".
        dtype: the dtype of what is written; None means the parameters' own, or the `compute_dtype` of a trainer.

    Raises:
        Error: on every rank: the model is not a parallel model of transformers, or the file system fails.

    Example:
        >>> import transformers
        >>> config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        >>> model = autotp.parallelize(transformers.GPT2LMHeadModel(config), tp=1)
        >>> autotp.save_pretrained(model, "out")
        >>> type(transformers.AutoModelForCausalLM.from_pretrained("out")).__name__
        'GPT2LMHeadModel'
    """
    if isinstance(model, Trainer):
        name = type(model.skeleton).__name__
        return within(f"save_pretrained({name}, {path})", lambda: _save_trained(model, path, max_shard_size, dtype))
    parallel: Any = parallel_of(model, "save_pretrained")
    if adapters.has_adapters(parallel):
        return within(
            f"save_pretrained({type(parallel).__name__}, {path})", lambda: _save_adapters(parallel, path, dtype)
        )

    def run() -> None:
        mesh = parallel.mesh.alone()
        agree(mesh, lambda: expect_arguments(save_pretrained, path=path, dtype=dtype))
        folder = Path(path)
        largest = agree(mesh, lambda: parse_size(max_shard_size))
        tensors = _cast({name: lazy.source for name, lazy in _as_saved(parallel, gathered).items()}, dtype)
        dtype_of_config = dtype or next(p.dtype for p in parallel.parameters() if p.is_floating_point())
        write_checkpoint(
            folder, tensors, mesh, largest, lambda target: _write_beside(target, parallel, dtype_of_config), SETTINGS
        )

    def gathered(name: str, tensor: Tensor) -> Source:
        # A buffer has no layout: each rank has the whole.
        return GatheredTensor(tensor, parallel.layout_of(name) or Layout(tuple(tensor.shape)), parallel.mesh)

    within(f"save_pretrained({type(parallel).__name__}, {path})", lambda: on_first_replica(parallel.mesh, run))


# ---- loading


def open_folder(folder: Path, arguments: ModelArguments, mesh: Mesh) -> tuple[nn.Module, ReadFolder]:
    """Returns the model of a folder on meta, and the function that reads a rank's parts. All ranks of `mesh` call it.

    Raises:
        Error: on every rank: the folder has no checkpoint that fits a model.
    """
    # Compared after reading, to see whether the files were replaced meanwhile.
    before = folder_fingerprint(folder)
    ranks = _same_files(before[1], mesh)
    agree(mesh, lambda: expect_unchanged(folder, ranks.index(mesh.everyone.rank), len(ranks)))
    same_files = Fact("files", before[0], "sees another checkpoint", "the same files on all ranks")
    model, sources = agree(mesh, lambda: lazy_model(folder, arguments), lambda loaded: [same_files])
    if changed := agree(mesh, lambda: changed_settings(folder, SETTINGS)):
        warnings.warn(OTHER_SETTINGS.format(folder, _listed(changed)), stacklevel=5)

    def read(layouts: Mapping[str, Layout], place: Mesh, names: Collection[str] | None) -> dict[str, Tensor]:
        own_sources = {name: source for name, source in sources.items() if names is None or name in names}
        parts = agree(mesh, lambda: _unless_replaced(folder, before, lambda: read_parts(own_sources, layouts, place)))
        # A rank of a pipeline does not read what other stages hold.
        return {name: parts.get(name, torch.empty(0, device="meta")) for name in sources}

    return model, read


def _same_files(identities: Sequence[Any], mesh: Mesh) -> list[int]:
    """Returns the ranks that open the same files as this rank: those of this machine, for a folder of this name.

    These ranks share the work of comparing checksums. A copy of the folder on another machine can be damaged there
    alone, so the ranks there compare all of it, too.
    """
    number = zlib.crc32(repr((socket.gethostname(), identities)).encode())
    rows = gather_ints([number], mesh)
    return [rank for rank, row in enumerate(rows) if row == rows[mesh.everyone.rank]]


def _unless_replaced(folder: Path, before: Any, run: Callable[[], T]) -> T:
    """Returns what `run`, which reads files of a folder, returns.

    Raises:
        Error: the files were replaced meanwhile.
    """
    problem = Error("the checkpoint was replaced while it was read", at=str(folder), fix="read it again")
    try:
        result = run()
    except Error as error:
        raise error if folder_fingerprint(folder) == before else problem from error
    if folder_fingerprint(folder) != before:
        raise problem
    return result


def _load(folder: Path, arguments: ModelArguments) -> nn.Module:
    """Returns the model that transformers builds from a folder, with lazy parameters and real buffers."""
    _expect_choices(arguments)
    files = stored_tensors(folder)
    _expect_summed(folder, files)
    config = read_config(folder, arguments)
    build = class_of(config, arguments, folder)
    lazies = {name: Lazy(tensor) for name, tensor in files.items()}
    model, report = _build_model(build, config, lazies, arguments.dtype, StaysOnMeta())
    _expect_fit(model, report, files, folder, arguments)
    if any(p.is_meta for p in model.parameters()):  # Parameters that no file has: build them with data now.
        model, _ = _build_model(build, config, lazies, arguments.dtype, nullcontext())
    model.config.name_or_path = os.path.abspath(folder)  # `save_pretrained` copies the tokenizer's files from there.
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = read_object(folder / "generation_config.json", type(model.generation_config))
    return model


def _expect_summed(folder: Path, files: Mapping[str, Stored]) -> None:
    """Raises Error if some files have checksums and a file has none: it was not written with the others."""
    summed, used = checksums_in(folder), sorted({tensor.file.name for tensor in files.values()})
    unsummed = [name for name in used if summed and name not in summed]
    if unsummed:
        raise Error(f"{SIDE_FILE} has no checksums of {unsummed[0]}", at=str(folder), fix=STALE.format(SIDE_FILE))


class StaysOnMeta(TorchFunctionMode):
    """A mode in which parameters without a file stay on meta, so that an unfit checkpoint raises Error without memory.

    Attributes:
        errors: the Errors that were raised in this mode; transformers only logs them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Error] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty_like and isinstance(args[0], nn.Parameter) and args[0].is_meta:
            kwargs = {**kwargs, "device": "meta"}
        try:
            return func(*args, **kwargs)
        except Error as error:
            self.errors.append(error)
            raise


def _build_model(
    build: Any, config: Any, lazies: Mapping[str, Lazy], dtype: Any, how: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns the model that transformers builds, and its report about missing and unexpected names."""
    with offline_and_silent() as messages, how:
        try:
            model, report = build.from_pretrained(
                # Without a path transformers reads no file. Its report has other sizes, and `_expect_fit` names them.
                None, config=copy.deepcopy(config), state_dict=dict(lazies), dtype=dtype or "auto",
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        except Exception as error:
            if getattr(how, "errors", None):
                raise how.errors[0] from error
            reasons = re.findall("^Error: (.*)", "\n".join(messages), re.MULTILINE)
            facts = {"said": reasons[0]} if reasons else {}
            problem = f"{build.__name__} cannot be made of these tensors: {first_line(error)}"
            raise Error(problem, **facts, fix="the configuration that the tensors were saved with") from error
    return model, report


def lazy_model(folder: Path, arguments: ModelArguments) -> tuple[nn.Module, dict[str, Source]]:
    """Returns the model of a folder with its parameters on meta, and parameter name -> source."""
    return _split_sources(_load(folder, arguments))


def _split_sources(model: nn.Module) -> tuple[nn.Module, dict[str, Source]]:
    """Replaces lazy parameters by meta tensors and reads lazy buffers; returns the model, and name -> source."""
    empty: dict[Tensor, Tensor] = {}
    sources: dict[str, Source] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in [(k, t) for k, t in table.items() if isinstance(t, Lazy)]:
                if isinstance(tensor, nn.Parameter) and not (tensor.is_floating_point() or tensor.is_complex()):
                    problem = (
                        f"{source_text(tensor.source)} is {tensor.dtype}, and a parameter needs a floating-point dtype"
                    )
                    raise Error(problem, fix="a checkpoint of floating tensors, without quantization")
                # A tied tensor is met again under each of its names.
                if tensor not in empty and isinstance(tensor, nn.Parameter):
                    sources[f"{prefix}.{key}" if prefix else key] = tensor.source
                    on_meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    empty[tensor] = nn.Parameter(on_meta, tensor.requires_grad)
                elif tensor not in empty:
                    # A buffer may be written to, and what is read may be memory of the file.
                    empty[tensor] = read_whole(tensor.source).clone()
                table[key] = empty[tensor]
    return model, sources


def _expect_choices(arguments: ModelArguments) -> None:
    for name, values in (("missing", ("error", "init")), ("unexpected", ("error", "ignore"))):
        if getattr(arguments, name) not in values:
            problem = f"{name}={getattr(arguments, name)!r} is not one of its values"
            raise Error(problem, expected=" or ".join(map(repr, values)))


def _expect_fit(
    model: nn.Module, report: Mapping[str, Any], files: Mapping[str, Stored], folder: Path, arguments: ModelArguments
) -> None:
    """Raises Error if shapes are not the model's, or names are not and the arguments do not allow it."""
    facts: dict[str, str] = {}
    if report["missing_keys"] and arguments.missing == "error":
        facts["missing"] = _listed(f"`{name}`" for name in sorted(report["missing_keys"]))
    if report["unexpected_keys"] and arguments.unexpected == "error":
        facts["too much"] = _listed(f"`{name}`{_in_file(name, files)}" for name in sorted(report["unexpected_keys"]))
    if report["mismatched_keys"]:
        facts["shape"] = _listed(
            f"`{name}` is {list(saved_shape)}{_in_file(name, files)}, and {list(model_shape)} in the model"
            for name, saved_shape, model_shape in sorted(report["mismatched_keys"])
        )
    if not facts:
        return
    remedies = {
        "missing": 'missing="init", which initialises them',
        "too much": 'unexpected="ignore", which leaves them out',
        "shape": "the configuration that the tensors were saved with",
    }
    remedy = "; ".join(remedies[problem] for problem in facts)
    raise Error(f"the tensors are not those of {type(model).__name__}", **facts, at=str(folder), fix=remedy)


def _in_file(name: str, files: Mapping[str, Stored]) -> str:
    """Returns " in FILE" for a tensor; the name in the file may lack the first part of the name, or have one more."""
    files_with_tensor = [
        t.file.name for key, t in files.items() if name == key or name.endswith(f".{key}") or key.endswith(f".{name}")
    ]
    return f" in {files_with_tensor[0]}" if files_with_tensor else ""


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:MOST_NAMES]) + (f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else "")


# ---- saving


def _save_adapters(model: Any, path: str | os.PathLike[str], dtype: torch.dtype | None) -> None:
    if dtype is not None:
        raise Error("adapters are saved in the dtype that they have", fix="dtype=None")
    adapters.save_of_trainer(model, path) if isinstance(model, Trainer) else model.save_pretrained(path)


def _save_trained(
    trainer: Trainer, path: str | os.PathLike[str], max_shard_size: int | str, dtype: torch.dtype | None
) -> None:
    """Writes the model of a trainer. A rank of a pipeline holds only the tensors of its stages."""
    if adapters.has_adapters(trainer.skeleton):
        return _save_adapters(trainer, path, dtype)
    parts, everyone = holdings_of(trainer, "save_pretrained"), trainer.everyone

    def largest_file() -> int:
        expect_arguments(save_pretrained, path=path, dtype=dtype)
        expect_nothing_beside(parts, "the modules' own names")
        return parse_size(max_shard_size)

    largest = agree(everyone, largest_file)
    own_dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in parts.held.items()}
    dtypes = {name: getattr(torch, text) for texts in gather_texts(json.dumps(own_dtypes), everyone)
              for name, text in json.loads(texts).items()}  # fmt: skip
    model: Any = trainer.skeleton
    # Buffers keep their own dtype in a training, so in its files, too: a router's bias, for example.
    computed = trainer.compute_dtype if dtype is None else None
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def source_of(name: str, tensor: Tensor) -> Source:
        first_name = parts.saved[name]
        source = HeldTensor(parts, first_name, dtypes[first_name])
        is_cast = computed is not None and name in parameters and source.dtype.is_floating_point
        return Cast(source, computed) if is_cast and computed is not None else source

    tensors = agree(everyone, lambda: {name: lazy.source for name, lazy in _as_saved(model, source_of).items()})
    dtype_of_config = dtype or computed or next(d for d in dtypes.values() if d.is_floating_point)
    write_checkpoint(
        Path(path), _cast(tensors, dtype), everyone, largest,
        lambda target: _write_beside(target, model, dtype_of_config), SETTINGS,
    )  # fmt: skip


def _cast(tensors: Mapping[str, Source], dtype: torch.dtype | None) -> Mapping[str, Source]:
    if dtype is None:
        return tensors
    return {name: Cast(source, dtype) if source.dtype.is_floating_point else source for name, source in tensors.items()}


def _as_saved(parallel: Any, source_of: Callable[[str, Tensor], Source]) -> dict[str, Lazy]:
    """Returns the model's whole tensors, lazy, with the names and shapes that files have; each tied tensor once.

    Args:
        source_of: (name, tensor of the model) -> where the whole tensor comes from.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    if getattr(parallel, "_hf_peft_config_loaded", False):
        raise Error(
            "the model has adapters of `add_adapter`, and transformers would save these alone",
            fix="autotp.full_state_dict(model, wanted) and peft on one device, as examples/hf_lora.py does",
        )
    if not isinstance(parallel, transformers_module().PreTrainedModel):
        raise Error(
            f"a {type(parallel).__name__} is no model of transformers",
            fix="autotp.full_state_dict(model), and torch.save on the first rank",
        )
    # Without the warnings about local parts: transformers reads only names and storages here.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        state = parallel.state_dict(keep_vars=True)
        names = remove_tied_weights_from_state_dict(dict(state), parallel)
        left_out = set(parallel._keys_to_ignore_on_save or ())
        lazy_by_name = {name: Lazy(source_of(name, state[name])) for name in names if name not in left_out}
        return revert_weight_conversion(parallel, lazy_by_name)  # type: ignore[arg-type]


def _write_beside(folder: Path, parallel: nn.Module, dtype: torch.dtype) -> None:
    """Writes the configurations, and copies the tokenizer's files from the folder that the model was read from."""
    model: Any = parallel
    config = copy.deepcopy(model.config)
    # The class of the original: `class_of` finds it by this name.
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    with _error_if_unwritable("config"):
        config.save_pretrained(folder)
    if model.can_generate():
        with _error_if_unwritable("generation_config"):
            model.generation_config.save_pretrained(folder)
    if model.config.name_or_path:
        copy_beside(Path(model.config.name_or_path), folder)


@contextmanager
def _error_if_unwritable(name: str) -> Iterator[None]:
    """Raises Error in place of the exception of transformers, if it cannot write a configuration."""
    try:
        yield
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise Error(f"model.{name} cannot be written: {reason}", fix=f"change model.{name}") from error
