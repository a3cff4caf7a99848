"""Fine-tunes LoRA adapters of a tensor-parallel model, and saves them in peft's own format.

    torchrun --nproc-per-node 2 examples/hf_lora.py
    torchrun --nproc-per-node 2 examples/hf_lora.py --model FOLDER --data TEXT

`--model` is any folder that `transformers` reads; the default is a tiny Llama of random weights. Each byte of the text
is a token. At the end transformers and peft alone, on one device, read the saved adapters, and must compute the same
logits as the parallel model.
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from text import corpus
from torch import Tensor, nn

import autotp

FIRST = autotp.is_first_rank()


def arguments() -> Namespace:
    """Returns the flags of the command line."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="folder of a model of transformers; default: a tiny Llama of random weights")
    parser.add_argument("--data", nargs="*", default=[], help="files or folders of text; default: Python's source code")
    parser.add_argument("--out", type=Path, default=Path("out/lora"), help="folder for the adapters")
    parser.add_argument("--steps", type=int, default=100, help="number of optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="windows in a step")
    parser.add_argument("--block", type=int, default=64, help="bytes in a window")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate of AdamW")
    return parser.parse_args()


def base(folder: str | None) -> nn.Module:
    """Returns the model to adapt: with the same weights on every rank and in every call."""
    torch.manual_seed(0)
    if folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=172, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(model: nn.Module, text: corpus.Corpus, args: Namespace) -> list[float]:
    """Trains the adapters, which alone are not frozen; returns the loss of each step, in nats for each byte."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], args.lr)
    losses = []
    for step in range(args.steps):
        tokens = corpus.windows(text.train, args.block, args.batch, step)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        autotp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the logits, [batch seq vocab]. tokens: [batch seq]"""
    return model.eval()(input_ids=tokens).logits


def main() -> None:
    """Adds adapters, parallelizes, trains, saves, and reads the adapters again."""
    args = arguments()
    text = corpus.load(args.data)
    held_out = corpus.spread(text.held_out, args.block, 4)
    adapted = get_peft_model(
        base(args.model), LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    model = autotp.parallelize(adapted.train(), example_inputs={"input_ids": held_out, "labels": held_out})
    losses = train(model, text, args)
    together = logits(model, held_out)
    model.save_pretrained(args.out)  # By all ranks: the first one writes the whole adapters.
    trained, _ = model.get_nb_trainable_parameters()
    if FIRST:
        print(model.plan)
        alone = logits(PeftModel.from_pretrained(base(args.model), str(args.out)), held_out)
        difference = float((alone - together).abs().max() / alone.abs().max())
        print(f"loss        {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte, {args.steps} steps")
        print(f"adapters    {args.out}, {trained:,} numbers")
        print(f"logits      {difference:.1e} apart, read by transformers and peft alone")
        assert difference < 1e-4
        assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
