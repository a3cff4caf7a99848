"""Perplexity and last-word accuracy of a GPT that `pretrain_gpt.py` trained, tensor-parallel over all processes.

    python examples/lm_samples.py
    torchrun --nproc-per-node 2 examples/evaluate_lm.py out/gpt \
        --wikitext out/samples/wiki.test.tokens --lambada out/samples/lambada_test.jsonl

The two measures are those of the Megatron paper (Shoeybi et al. 2019, appendix E), from files as these sets come in.
WikiText-103: the perplexity of its words, whatever the tokens; LAMBADA: how often the last word of a passage is the
most likely one.
"""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import corpus
import torch
import training
from masking import IGNORED
from tokenizers import Tokenizer
from tokens import END, id_of, load_tokenizer
from torch import Tensor, nn
from training import Batch, say

import autotp
from autotp.models.gpt import GPT, GPTConfig

T = TypeVar("T")

SPACES = (  # What WikiText parted, and how it stands in ordinary text.
    (r" @([-,.])@ ", r"\1"),  # within words and numbers
    (r" ?\n ?", "\n"),
    (r"(?<==) (?==)", ""),  # = = Heading = =
    (r" ([.,:;?!%)\]}])", r"\1"),
    (r"([(\[{]) ", r"\1"),
    (r"([$£€]) (?=\d)", r"\1"),
    (r" ('(?:s|t|re|ve|m|ll|d)\b)", r"\1"),
    (r"(?<=s) '(?=\s)", "'"),
    (r'" ([^"\n]*) "', r'"\1"'),
)


def arguments() -> Namespace:
    """The flags; ends the program where there is nothing to measure."""
    parser = ArgumentParser(description="Evaluates a GPT.", formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out/gpt"), help="what pretrain_gpt.py wrote")
    parser.add_argument("--wikitext", type=Path, help="a file as wiki.test.tokens of WikiText-103")
    parser.add_argument("--lambada", type=Path, help='a file of {"text": ...}, one a line, as lambada_test.jsonl')
    parser.add_argument("--stride", type=int, default=32, help="tokens from one window to the next; the block at most")
    parser.add_argument("--batch", type=int, default=8, help="windows or passages at once")
    parser.add_argument("--device", help='such as "cuda:0"; default: a GPU where there is one, else the CPU')
    args = parser.parse_args()
    if args.wikitext is None and args.lambada is None:
        parser.error("nothing to measure. Try --wikitext FILE or --lambada FILE")
    if min(args.stride, args.batch) < 1:
        parser.error("--stride and --batch must be 1 or more")
    return args


def load(folder: Path, device: torch.device) -> tuple[nn.Module, Tokenizer]:
    """The model in a folder, cut over all processes, in eval mode, and its tokenizer.

    Raises:
        ValueError: there is no model in the folder.
    """
    if not (folder / "model.pt").is_file():
        raise ValueError(f"no model in {folder}. Try examples/pretrain_gpt.py --out {folder} first")
    with torch.device("meta"):
        model = GPT(GPTConfig(**json.loads((folder / "config.json").read_text())))
    torch.manual_seed(0)  # Nothing is drawn in the end, but ranks must agree on what would be.
    parallel = autotp.parallelize(model, device=device)
    state = torch.load(folder / "model.pt", mmap=True) if training.rank() == 0 else {}
    autotp.load_full_state_dict(parallel, state)
    return parallel.eval(), load_tokenizer(folder / "tokenizer.json")


def detokenized(text: str) -> str:
    """A text as it stands in WikiText's files, with ordinary spaces."""
    for parted, ordinary in SPACES:
        text = re.sub(parted, ordinary, text)
    return text.strip()


def count_words(text: str) -> int:
    """The words of a WikiText file as its perplexities count them: each end of a line is one."""
    text = text.strip()
    return len(text.split()) + text.count("\n")


def windows(tokens: Sequence[int], start: int, block: int, stride: int, batch: int) -> Iterator[Batch]:
    """Overlapping windows in batches of one size; each token is the label of the first window that reaches it.

    So a token is predicted from `block - stride` tokens or more where as many stand before it.

    Args:
        start: the token before the first.
    """
    inputs, labels = torch.tensor([start, *tokens[:-1]]), torch.tensor(tokens)
    width, counted = min(block, len(tokens)), 0
    rows: list[Batch] = []
    while counted < len(tokens):
        end = min(max(counted + stride, block), len(tokens))
        part = slice(end - width, end)
        rows.append((inputs[part], labels[part].clone()))
        rows[-1][1][: counted - part.start] = IGNORED
        counted = end
        if len(rows) == batch or counted == len(tokens):
            rows += [(rows[-1][0], torch.full_like(rows[-1][1], IGNORED))] * (batch - len(rows))
            yield torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
            rows = []


def perplexity(loss: float, tokens: int, words: int) -> float:
    """The perplexity of a word, of the mean loss of a token in nats (the paper's appendix E.1)."""
    return math.exp(loss * tokens / words)


def last_words(texts: Sequence[str], tokenizer: Tokenizer, block: int) -> list[Batch]:
    """Each passage, and as labels the tokens of its last word only; of a long one the end. [seq] each

    Raises:
        ValueError: a passage has less than two words.
    """
    rows = []
    for text in texts:
        context, _, word = text.strip().rpartition(" ")
        if not context:
            raise ValueError(f"a passage needs two words: {text!r}")
        target = tokenizer.encode(f" {word}").ids
        whole = [id_of(tokenizer, END), *tokenizer.encode(context.rstrip()).ids, *target][-block - 1 :]
        rows.append((whole[:-1], ([IGNORED] * len(whole) + target)[1 - len(whole) :]))
    return [(torch.tensor(tokens), torch.tensor(labels)) for tokens, labels in rows]


def padded(rows: Sequence[Tensor], value: int) -> Tensor:
    """The rows, [seq] of any lengths, as one tensor: [rows seq]"""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


@torch.no_grad()
def count_right(model: nn.Module, rows: Sequence[Batch], batch: int) -> int:
    """Of how many rows every label is the most likely token. rows: tokens and labels, [seq] each."""
    whole = padded([tokens for tokens, _ in rows], 0), padded([labels for _, labels in rows], IGNORED)
    right = 0
    for tokens, labels in zip(*(tensor.split(batch) for tensor in whole), strict=True):
        tokens, labels = training.to_device((tokens, labels), model)
        likely = model(tokens).argmax(-1)  # [batch seq]
        right += int(((likely == labels) | (labels == IGNORED)).all(-1).sum())
    return right


def some(found: Sequence[T], file: Path) -> Sequence[T]:
    """What was found in a file.

    Raises:
        ValueError: nothing was.
    """
    if not found:
        raise ValueError(f"no text in {file}")
    return found


def main() -> None:
    """Measures what was asked for."""
    args = arguments()
    model, tokenizer = load(args.folder, training.device(args))
    block: int = json.loads((args.folder / "config.json").read_text())["block_size"]
    if args.wikitext:
        raw = args.wikitext.read_text(encoding="utf-8")
        tokens, words = some(tokenizer.encode(detokenized(raw)).ids, args.wikitext), count_words(raw)
        batches = windows(tokens, id_of(tokenizer, END), block, min(args.stride, block), args.batch)
        loss = training.held_out_loss(model, batches)
        say(f"perplexity  {perplexity(loss, len(tokens), words):.2f} a word: {words} words, {len(tokens)} tokens")
    if args.lambada:
        rows = last_words(some(list(corpus.json_texts(args.lambada)), args.lambada), tokenizer, block)
        right = count_right(model, rows, args.batch)
        say(f"accuracy    {right / len(rows):.1%} of last words: {right} of {len(rows)}")


if __name__ == "__main__":
    main()
