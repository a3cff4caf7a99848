"""Fine-tunes a small Llama on documents that lie packed in one row, with tp=2 and cp=2.

    torchrun --nproc-per-node 4 examples/sequences/finetune_packed.py
    torchrun --nproc-per-node 4 examples/sequences/finetune_packed.py --attention flash_attention_2   # on GPUs

Each step has other documents, of other lengths: no padding, and one graph for all steps. A document sees itself alone:
`DataCollatorWithFlattening` of transformers gives position ids that start again, and no label to a document's first
token. At the end the first process trains the same model alone, and the losses must be the same.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

import autotp
from autotp.distributed.launch import launch


def arguments() -> Namespace:
    """Returns the flags of the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(argparse.__file__), help="a file of text")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of transformers")
    parser.add_argument("--steps", type=int, default=20, help="number of optimizer steps")
    parser.add_argument("--documents", type=int, default=8, help="most documents in a step")
    parser.add_argument("--length", type=int, default=64, help="most bytes in a document")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    return parser.parse_args()


def llama(attention: str, dtype: torch.dtype) -> nn.Module:
    """Returns a Llama whose tokens are bytes: the same weights on every rank and in every call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def documents(text: Tensor, step: int, args: Namespace) -> list[dict[str, list[int]]]:
    """Returns the documents of a step: pieces of the text of random lengths. text: [bytes]"""
    source = torch.Generator().manual_seed(step)
    count = int(torch.randint(1, args.documents + 1, (), generator=source))
    lengths = torch.randint(2, args.length + 1, (count,), generator=source).tolist()
    starts = torch.randint(len(text) - args.length, (count,), generator=source).tolist()
    return [{"input_ids": text[start : start + length].tolist()} for start, length in zip(starts, lengths, strict=True)]


def train(model: nn.Module, text: Tensor, args: Namespace, device: torch.device) -> list[float]:
    """Takes steps of AdamW; returns the loss of each, in nats for each byte."""
    # A kernel of packed rows reads where documents end, which the collator then gives, too.
    pack = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=args.attention.startswith("flash"))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    losses = []
    for step in range(args.steps):
        batch = pack(documents(text, step, args))
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains on all processes together, and on the first one alone."""
    args = arguments()
    started = launch()
    ranks = started.size if started else 1
    tp = cp = 2 if ranks == 4 else 1
    if ranks not in (1, 4):
        raise SystemExit("torchrun --nproc-per-node 4 examples/sequences/finetune_packed.py")
    text = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8)
    dtype = torch.bfloat16 if args.attention.startswith("flash") else torch.float32
    model = autotp.parallelize(llama(args.attention, dtype), tp=tp, cp=cp)
    device = model.mesh.device
    together = train(model, text, args, device)
    if autotp.is_first_rank():
        print(model.plan)
        alone = train(llama(args.attention, dtype).to(device), text, args, device)
        apart = max(abs(a - b) for a, b in zip(together, alone, strict=True))
        print(f"loss   {together[0]:.3f} -> {together[-1]:.3f} nats a byte, tp={tp}, cp={cp}, {args.steps} steps")
        print(f"apart  {apart:.1e} from one process")
        assert apart < (0.1 if dtype == torch.bfloat16 else 1e-3)
        assert together[-1] < together[0]


if __name__ == "__main__":
    main()
