"""Fine-tunes a Hugging Face checkpoint, tensor-parallel, and reads the saved checkpoint with transformers alone.

    torchrun --nproc-per-node 2 examples/finetune_hf.py path/to/checkpoint --data my_text/
    torchrun --nproc-per-node 2 examples/finetune_hf.py          # a tiny Llama of random weights

Every process reads only its part of the checkpoint. At the end, transformers alone must compute the same loss on
held-out text as the processes together, and this loss must be lower than before. Nothing is downloaded.
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from support.training import rank, say, world
from text import corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import autotp

HELD_OUT = 32  # windows


def arguments() -> Namespace:
    """Returns the flags of the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a folder; default: writes a tiny Llama to --out")
    parser.add_argument("--data", nargs="*", default=[], help="files or folders of text; default: Python's source code")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; the result is its folder finetuned/")
    parser.add_argument("--characters", type=int, default=400_000, help="most characters of the text to train on")
    parser.add_argument("--block", type=int, default=64, help="tokens in a window")
    parser.add_argument("--batch", type=int, default=8, help="windows in a step")
    parser.add_argument("--steps", type=int, default=60, help="number of optimizer steps")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    return parser.parse_args()


def make_tiny(folder: Path) -> None:
    """Writes a Llama of random weights, and a tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet), hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def tokens_of(text: Tensor, folder: Path, limit: int) -> Tensor:
    """Returns the text in tokens of the checkpoint's tokenizer. text: [bytes] uint8 -> [tokens] int64"""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    letters = bytes(text[:limit].tolist()).decode(errors="ignore")
    return torch.tensor(tokenizer(letters, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Tensor) -> float:
    """Returns the mean loss over the windows, in nats for each token. windows: [windows block]"""
    model.eval()
    return sum(float(model(input_ids=some, labels=some).loss) for some in windows.split(8)) / len(windows.split(8))


def train(model: nn.Module, tokens: Tensor, args: Namespace, where: torch.device) -> None:
    """Takes steps of AdamW on windows of `tokens`; every rank draws the same windows."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    for step in range(args.steps):
        batch = corpus.windows(tokens, args.block, args.batch, step).to(where)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        autotp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if step % 10 == 9:
            say(f"step {step + 1:4}  loss {loss.item():.3f}")


def main() -> None:
    """Reads a checkpoint, trains, saves, and reads the saved checkpoint with transformers alone."""
    args = arguments()
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world(),)) if world() > 1 else None
    folder, finetuned = args.checkpoint or args.out / "tiny", args.out / "finetuned"
    if args.checkpoint is None and rank() == 0:
        make_tiny(folder)
    if mesh is not None:
        dist.barrier()

    model = autotp.from_pretrained(folder, mesh=mesh, dtype=torch.float32)
    where = model.mesh.device
    text = corpus.load(args.data)
    tokens = tokens_of(text.train, folder, args.characters)
    unseen = corpus.spread(tokens_of(text.held_out, folder, args.characters), args.block, HELD_OUT)
    before = held_out_loss(model, unseen.to(where))
    train(model, tokens, args, where)
    together = held_out_loss(model, unseen.to(where))
    autotp.save_pretrained(model, finetuned)

    if rank() == 0:
        alone = held_out_loss(AutoModelForCausalLM.from_pretrained(finetuned, dtype=torch.float32), unseen)
        print(f"held-out loss  {before:.4f} before, {together:.4f} after, {alone:.4f} read by transformers alone")
        assert abs(alone - together) < 1e-4, f"transformers finds another loss: {alone} instead of {together}"
        assert together < before, f"it has not learnt: {together} after {before}"


if __name__ == "__main__":
    main()
