"""What torch's and transformers' own tools do where docs/complaints.md has a complaint, on two processes.

PYTHONPATH=benchmarks torchrun --nproc-per-node 2 -m peers.complaints           # prints the table
PYTHONPATH=benchmarks torchrun --nproc-per-node 2 -m peers.complaints --write   # and puts it into the page

Each attempt compares with one device: the loss and every gradient, unless it says what it compares.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from peers.plans import by_transformers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "complaints.md"
HEADING = "## torch and transformers, tried"
OPENING = """Run on {day} with torch {torch} and transformers {transformers}, on two processes of a CPU
(`benchmarks/peers/complaints.py`). "As one device" means that the loss and every gradient are equal, where the row
names nothing else. `tp_plan` is transformers' own plan of the model, `parallelize_module` cuts an MLP by columns and
rows."""
EQUAL, OTHER = "as one device", "not as one device"
SIZES: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
Attempt = Callable[[DeviceMesh], str]
ATTEMPTS: dict[tuple[str, str], Attempt] = {}
"""(script, what is tried) -> the attempt, which returns what came out or raises."""


def attempt(script: str, tried: str) -> Callable[[Attempt], Attempt]:
    """Registers an attempt."""

    def register(function: Attempt) -> Attempt:
        ATTEMPTS[script, tried] = function
        return function

    return register


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def number_cut(alone: nn.Module, cut: nn.Module) -> str:
    """How many parameters a rank holds a part of."""
    pairs = list(zip(alone.parameters(), cut.parameters(), strict=True))
    held = [(p, q.to_local() if isinstance(q, DTensor) else q) for p, q in pairs]
    return f"{sum(part.numel() < p.numel() for p, part in held)} of {len(pairs)} parameters are cut"


def planned(alone: nn.Module, mesh: DeviceMesh) -> str:
    """Cuts a model by transformers' plan, and compares the loss and every gradient; names what differs."""
    tokens = torch.arange(16).view(2, 8)
    cut = by_transformers(alone, mesh).train()
    losses = [whole(one(input_ids=tokens, labels=tokens).loss) for one in (alone, cut)]
    for loss in losses:
        loss.backward()
    pairs = [("loss", losses)]
    pairs += [(n, [p.grad, q.grad]) for (n, p), q in zip(alone.named_parameters(), cut.parameters(), strict=True)]
    wrong = [n for n, (a, b) in pairs if not torch.allclose(a, whole(b), rtol=1e-3, atol=1e-6)]
    return f"{number_cut(alone, cut)}; " + (f"{OTHER}: `{'`, `'.join(wrong)}`" if wrong else EQUAL)


@attempt("heads", "`tp_plan`, 7 heads on 2 ranks")
def _(mesh: DeviceMesh) -> str:
    return planned(LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": 56}, num_attention_heads=7)), mesh)


@attempt("kv_heads", "`tp_plan`, one key/value head on 2 ranks")
def _(mesh: DeviceMesh) -> str:
    return planned(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS | {"num_key_value_heads": 1})), mesh)


@attempt("vocabulary", "`tp_plan`, 63 words on 2 ranks")
def _(mesh: DeviceMesh) -> str:
    return planned(LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 63}, **HEADS)), mesh)


@attempt("experts", "`tp_plan`, 3 experts on 2 ranks")
def _(mesh: DeviceMesh) -> str:
    return planned(MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=3, eos_token_id=2)), mesh)


@attempt("fused_qkv", "`tp_plan`, Phi 3")
def _(mesh: DeviceMesh) -> str:
    return planned(Phi3ForCausalLM(Phi3Config(**SIZES, **HEADS, pad_token_id=0, eos_token_id=2)), mesh)


@attempt("tied_head", "`tp_plan`, a Llama with a tied head")
def _(mesh: DeviceMesh) -> str:
    return planned(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)), mesh)


@attempt("qk_norm", "`tp_plan`, Qwen 3")
def _(mesh: DeviceMesh) -> str:
    return planned(Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=8)), mesh)


@attempt("replication", "`tp_plan`, GPT-2")
def _(mesh: DeviceMesh) -> str:
    config = GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=64, bos_token_id=0, eos_token_id=0)
    alone = GPT2LMHeadModel(config)
    return number_cut(alone, by_transformers(alone, mesh))


@attempt("generation", "`tp_plan`, sampling, each rank with its own seed: the ranks' texts")
def _(mesh: DeviceMesh) -> str:
    model: Any = by_transformers(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), mesh)
    torch.manual_seed(dist.get_rank())
    texts: list[Any] = [None, None]
    text = model.generate(torch.tensor([[1, 5, 9]]), do_sample=True, max_new_tokens=8)
    dist.all_gather_object(texts, text.tolist())
    return "alike" if texts[0] == texts[1] else "different"


# ---- torch: parallelize_module, DTensor, pipeline


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def by_torch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def rows(scale: float = 1) -> Tensor:
    return scale * torch.arange(24.0).view(3, 8) / 24


@attempt("row_bias", "`RowwiseParallel` with a bias: the output")
def _(mesh: DeviceMesh) -> str:
    return EQUAL if torch.allclose(mlp()(rows()), by_torch(mlp(), mesh)(rows())) else OTHER


@attempt("label_smoothing", "`loss_parallel`, `label_smoothing=0.1`: the loss")
def _(mesh: DeviceMesh) -> str:
    logits, labels = torch.arange(48.0).view(3, 16) % 7, torch.tensor([1, 9, 15])
    with loss_parallel():
        loss = F.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), labels, label_smoothing=0.1)
    return EQUAL if torch.allclose(whole(loss), F.cross_entropy(logits, labels, label_smoothing=0.1)) else OTHER


@attempt("batches", "`parallelize_module`, other rows on each rank: the output")
def _(mesh: DeviceMesh) -> str:
    found = by_torch(mlp(), mesh)(rows(1 + dist.get_rank()))
    equal = any(torch.allclose(found, mlp()(rows(1 + rank))) for rank in range(2))
    return "no error; that of one of the batches" if equal else "no error; that of neither batch"


@attempt("clipping", "`parallelize_module` of all but a norm, `clip_grad_norm_`: the norm")
def _(mesh: DeviceMesh) -> str:
    norms = []
    for cut in (False, True):
        model = nn.Sequential(by_torch(mlp(), mesh) if cut else mlp(), nn.LayerNorm(8))
        model(rows()).square().sum().backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    return EQUAL if torch.allclose(*norms) else OTHER


@attempt("pipeline", "`pipeline` of a Llama in two stages: the logits, in one process")
def _(mesh: DeviceMesh) -> str:
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 2}, **HEADS, use_cache=False)).eval()
    given = {"input_ids": torch.arange(8).view(1, 8)}
    pipe = pipeline(model, mb_args=(), mb_kwargs=given, split_spec={"model.layers.1": SplitPoint.BEGINNING})
    return EQUAL if torch.allclose(pipe(**given).logits, model(**given).logits) else OTHER


# ---- the table


@contextmanager
def silence() -> Iterator[None]:
    """A region without warnings and without transformers' log."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
        logging.set_verbosity(before)


def outcome(run: Attempt, mesh: DeviceMesh) -> str:
    """What an attempt returned, or its error: class and first line."""
    torch.manual_seed(0)
    try:
        return run(mesh)
    except Exception as error:
        return f"{type(error).__name__}: {shorten(str(error).strip().splitlines()[0], 110, placeholder=' ...')}"
    finally:
        dist.barrier()


def table() -> list[tuple[str, str, str]]:
    """(script, what was tried, what came out); call it on both ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with silence():
        return [(script, tried, outcome(run, mesh)) for (script, tried), run in ATTEMPTS.items()]


def section(found: list[tuple[str, str, str]]) -> str:
    """The table as a section of the page."""
    day = datetime.now(timezone.utc).date()
    opening = OPENING.format(day=day, torch=torch.__version__.split("+")[0], transformers=transformers.__version__)
    lines = ["| script | tried | outcome |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in found)]
    return "\n\n".join([HEADING, fill(" ".join(opening.split()), 120), "\n".join(lines)]) + "\n\n"


def main() -> None:
    """Prints the table; with `--write`, puts it into the page before its links."""
    dist.init_process_group("gloo")
    found = table()
    if dist.get_rank() == 0:
        print(section(found))
        if "--write" in sys.argv:
            before, links = re.split(r"(?=^\[[\w.-]+#\d+\]: )", PAGE.read_text(), maxsplit=1, flags=re.MULTILINE)
            PAGE.write_text(before.partition(HEADING)[0] + section(found) + links)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
