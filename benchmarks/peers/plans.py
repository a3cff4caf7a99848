"""Cuts the same Llama by the plans of other libraries: PyTorch's `parallelize_module`, and transformers' own.

Both hold parameters as DTensors, or modules convert to them; each product reduces the gradient of its own input.
"""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def by_dtensor(llama: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts by PyTorch's usual plan: products by columns and rows, the embedding by rows; the logits are gathered."""
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    plan |= {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
    return parallelize_module(llama, mesh, plan)


def by_transformers(llama: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts by transformers' plan, which it applies to models that it loads: the first rank writes a folder for it."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        llama.save_pretrained(folder[0])  # type: ignore[operator]
    dist.barrier()
    loaded: nn.Module = type(llama).from_pretrained(folder[0], tp_plan="auto", device_mesh=mesh)  # type: ignore[attr-defined]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return loaded.to(torch.float32).train()
