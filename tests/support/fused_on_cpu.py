"""torch's fusion of collectives with products on the CPU: symmetric memory needs GPUs, so its fallbacks run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from autotp.ops import collectives
from autotp.runtime import executable


def without_code(graph: fx.GraphModule, inputs: Any, **how: Any) -> Any:
    """What Inductor does with a graph before it generates code; then the graph runs as it is."""
    from torch._dynamo.utils import detect_fake_mode
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(graph)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(graph, how.get("is_inference", False))
    graph.recompile()
    return make_boxed_func(graph.forward)


@contextmanager
def as_on_gpus(generates_code: bool = False) -> Iterator[None]:
    """A region in which torch fuses on the CPU, with its fallbacks, and sums by the backend's own reduce-scatter."""
    from torch._inductor import compile_fx
    from torch.distributed import _symmetric_memory as memory

    operators = torch.library.Library("symm_mem", "IMPL")
    operators.impl("fused_all_gather_matmul", memory._fused_all_gather_matmul_fallback, "CPU")
    operators.impl("fused_matmul_reduce_scatter", memory._fused_matmul_reduce_scatter_fallback, "CPU")
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Raw SymInt value")  # Of torch's own pass.
        stack.enter_context(memory._test_mode())
        stack.enter_context(patch("torch.distributed.is_nccl_available", lambda: True))
        stack.enter_context(patch.object(executable, "_prepare_async_tp", lambda *_: None))
        stack.enter_context(patch.object(collectives, "_is_gloo", lambda *_: False))
        if not generates_code:
            short = partial(compile_fx.compile_fx, inner_compile=without_code)
            stack.enter_context(patch.object(compile_fx, "compile_fx", short))
        yield
