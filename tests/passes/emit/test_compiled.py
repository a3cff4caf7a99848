"""compiled: compiled blocks take sequences of any length that are cut over ranks; gradients are those of one device."""

from __future__ import annotations

import copy
import re
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_models import gpt
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed import fake_pg

import autotp
from autotp.ops.collectives import copy as copy_to_ranks
from autotp.passes.emit.compiled import OVERLAP, Compiled, _overlapping, compile_blocks
from autotp.passes.emit.kept_values.checkpointed import Checkpointed
from autotp.passes.emit.kept_values.recomputed import Recomputed

LENGTHS = (8, 7, 13, 5, 2, 16)
"""The third needs sizes that are symbols."""


def compiled(rank: int, n: int, layout: tuple[int, int], backend: str, how: dict[str, Any]) -> None:
    whole = gpt(seed=0, block_size=16, vocab_size=61, n_layer=1, n_head=4, n_embd=16).double()
    cut = autotp.parallelize(copy.deepcopy(whole), tp=layout[0], cp=layout[1], **how)
    cut.compile_blocks(backend=backend)
    for length in LENGTHS:
        tokens = torch.randint(61, (2, length), generator=torch.Generator().manual_seed(length))
        for model in (whole, cut):
            model.zero_grad()
            loss = model(tokens, tokens)
            loss.backward()
        torch.testing.assert_close(loss, whole(tokens, tokens))
        for (name, p), one in zip(cut.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, one.grad, msg=lambda m, at=(name, length): f"{at}: {m}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "backend", "how"),
    [
        ((1, 2), "eager", {}),
        pytest.param((1, 2), "aot_eager", {}, marks=pytest.mark.rare),
        pytest.param((2, 2), "aot_eager", {"recompute": "full"}, marks=pytest.mark.rare),
        pytest.param((1, 3), "aot_eager", {"sequence_parallel": True}, marks=pytest.mark.rare),
        pytest.param((2, 2), "aot_eager", {"recompute": "selective", "without": ("balance",)}, marks=pytest.mark.rare),
        pytest.param((1, 2), "inductor", {}, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_compiled_blocks_with_cut_sequences_equal_one_device(
    layout: tuple[int, int], backend: str, how: dict[str, Any]
) -> None:
    run_ranks(compiled, prod(layout), layout, backend, how, timeout=280)


CALLS = re.compile(r"(?:extern_kernels\.(?:add)?|torch\.ops\._c10d_functional\.)(\w+?)_?(?:\.default)?\(")


@pytest.mark.system  # Inductor compiles.
@pytest.mark.filterwarnings("ignore")  # Those of torch's compiler about torch.
def test_compiled_backward_sums_run_beside_products() -> None:
    """Of two ranks whose collectives compiled code sees, as those of NCCL: a block's backward has two sums."""
    assert fake_pg  # It registers the backend.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        torch._dynamo.reset()
        tokens = torch.ones(2, 8, dtype=torch.long)
        cut = autotp.parallelize(gpt(seed=0, block_size=8, vocab_size=61, n_layer=2, n_head=4, n_embd=32), 2)
        cut(tokens, tokens).backward()
        cut.compile_blocks()
        _, codes = run_and_get_code(lambda: cut(tokens, tokens).backward())
    finally:
        dist.destroy_process_group()
    texts = [" ".join(CALLS.findall(code.partition("def call(")[2])) for code in codes]
    backward = [text for text in texts if text.count("mm") > 4]  # Forward has four products.
    assert backward
    for text in backward:
        assert text.count("all_reduce") == 2 and "all_reduce wait_tensor" not in text, text


def test_compile_options_of_the_user_win() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(copy_to_ranks, (graph.placeholder("x"), "tp")))
    block = torch.fx.GraphModule(nn.Module(), graph)
    name = "reorder_for_peak_memory"
    assert _overlapping(block, {})["options"] == OVERLAP
    assert _overlapping(block, {"options": {name: True}})["options"] == {**OVERLAP, name: True}
    of_mode = _overlapping(block, {"mode": "max-autotune-no-cudagraphs", "dynamic": False})
    assert "mode" not in of_mode and of_mode["options"]["max_autotune"] and of_mode["dynamic"] is False
    assert _overlapping(block, {"backend": "eager"}) == {"backend": "eager"}
    assert _overlapping(torch.fx.symbolic_trace(nn.ReLU()), {"mode": "default"}) == {"mode": "default"}


def at_the_limit(rank: int, n: int, how: dict[str, Any]) -> str:
    """Blocks that torch may compile twice only, called with other lengths: what a rank's first Error says."""
    cut = autotp.parallelize(gpt(seed=0, block_size=16, n_layer=1, n_head=4, n_embd=16), tp=n, **how)
    cut.compile_blocks(backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (8, 6, 4, 2):
            tokens = torch.ones(2, length, dtype=torch.long)
            try:
                cut(tokens, tokens).backward()
            except autotp.Error as error:
                return f"{length}: {error}"
    return "ran"


def test_recompile_limit_is_an_error_only_with_cut_sequences() -> None:
    """Where ranks have parts of sequences, none of them goes on uncompiled by itself."""
    for text in run_ranks(at_the_limit, 2, {"sequence_parallel": True}, timeout=100):
        assert text.startswith("4: torch has compiled a block for other sizes as often as it may")
        assert "recompile_limit" in text
    assert run_ranks(at_the_limit, 2, {}, timeout=100) == ["ran", "ran"]


def test_compile_blocks_wraps_each_graph_once() -> None:
    """Also where the blocks are compiled again, with other options."""
    work = torch.fx.symbolic_trace(nn.Linear(2, 2))
    module = nn.Sequential(work, work, Recomputed(torch.fx.symbolic_trace(nn.ReLU())))
    for _ in range(2):
        compile_blocks(module, {"backend": "eager"})
    first, second, third = module
    assert first is second and isinstance(first, Compiled) and first.inner is work
    assert isinstance(third, Checkpointed) and isinstance(third.inner, Compiled)
    with torch.no_grad():
        x = torch.ones(3, 2)
        torch.testing.assert_close(module(x), work(work(x)).relu())
