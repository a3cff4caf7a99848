"""Measures perplexity and last-word accuracy of a GPT from `pretrain_gpt.py`, tensor-parallel over all processes.

    python examples/text/lm_samples.py
    torchrun --nproc-per-node 2 examples/evaluate_lm.py out/gpt \
        --wikitext out/samples/wiki.test.tokens --lambada out/samples/lambada_test.jsonl

The two measures are those of the Megatron paper (Shoeybi et al. 2019, appendix E); the files have the formats in which
these data sets are published. WikiText-103: the perplexity for each word, which does not depend on the tokenizer.
LAMBADA: how often the model predicts the last word of a passage.
"""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from support import training
from support.training import Batch, say
from text import corpus
from text.masking import IGNORED
from text.tokens import END, id_of, load_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn

import autotp
from autotp.models.gpt import GPT, GPTConfig

T = TypeVar("T")

SPACES = (  # What WikiText separates by spaces -> how ordinary text writes it.
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
    """Returns the flags; ends the program if there is nothing to measure."""
    parser = ArgumentParser(description="Evaluates a GPT.", formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out/gpt"), help="of pretrain_gpt.py's files")
    parser.add_argument("--wikitext", type=Path, help="file in the format of WikiText-103's wiki.test.tokens")
    parser.add_argument("--lambada", type=Path, help='file with one {"text": ...} in each line, as lambada_test.jsonl')
    parser.add_argument("--stride", type=int, default=32, help="tokens from one window to the next; at most a block")
    parser.add_argument("--batch", type=int, default=8, help="windows or passages in a batch")
    parser.add_argument("--device", help='such as "cuda:0"; default: a GPU if there is one, else the CPU')
    args = parser.parse_args()
    if args.wikitext is None and args.lambada is None:
        parser.error("nothing to measure. Try --wikitext FILE or --lambada FILE")
    if min(args.stride, args.batch) < 1:
        parser.error("--stride and --batch must be 1 or more")
    return args


def load(folder: Path, device: torch.device) -> tuple[nn.Module, Tokenizer]:
    """Returns the model in a folder, cut over all processes and in eval mode, and its tokenizer.

    Raises:
        ValueError: there is no model in the folder.
    """
    if not (folder / "model.pt").is_file():
        raise ValueError(f"no model in {folder}. Try examples/pretrain_gpt.py --out {folder} first")
    with torch.device("meta"):
        model = GPT(GPTConfig(**json.loads((folder / "config.json").read_text())))
    torch.manual_seed(0)  # Evaluation draws no random numbers, but the ranks' random states must be equal.
    parallel = autotp.parallelize(model, device=device)
    state = torch.load(folder / "model.pt", mmap=True) if training.rank() == 0 else {}
    autotp.load_full_state_dict(parallel, state)
    return parallel.eval(), load_tokenizer(folder / "tokenizer.json")


def detokenized(text: str) -> str:
    """Returns the text of a WikiText file with ordinary spaces."""
    for parted, ordinary in SPACES:
        text = re.sub(parted, ordinary, text)
    return text.strip()


def count_words(text: str) -> int:
    """Returns the number of words of a WikiText file, as its perplexities count them: each end of a line is a word."""
    text = text.strip()
    return len(text.split()) + text.count("\n")


def windows(tokens: Sequence[int], start: int, block: int, stride: int, batch: int) -> Iterator[Batch]:
    """Yields overlapping windows in batches of one size; each token is a label only in the first window that has it.

    So each token is predicted from at least `block - stride` tokens, or from all tokens before it if there are fewer.

    Args:
        start: the token to put before the first token.
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
    """Returns the perplexity for each word; `loss` is the mean for each token, in nats (appendix E.1 of the paper)."""
    return math.exp(loss * tokens / words)


def last_words(texts: Sequence[str], tokenizer: Tokenizer, block: int) -> list[Batch]:
    """Returns the tokens of each passage, [seq], and labels, [seq]: only the tokens of the last word have a label.

    Of a passage that is longer than a block, only the end is used.

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
    """Returns rows of any lengths, [seq], padded to one tensor: [rows seq]"""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


@torch.no_grad()
def count_right(model: nn.Module, rows: Sequence[Batch], batch: int) -> int:
    """Returns the number of rows in which every label is the most likely token. rows: tokens and labels, [seq] each."""
    whole = padded([tokens for tokens, _ in rows], 0), padded([labels for _, labels in rows], IGNORED)
    right = 0
    for tokens, labels in zip(*(tensor.split(batch) for tensor in whole), strict=True):
        tokens, labels = training.to_device((tokens, labels), model)
        likely = model(tokens).argmax(-1)  # [batch seq]
        right += int(((likely == labels) | (labels == IGNORED)).all(-1).sum())
    return right


def some(found: Sequence[T], file: Path) -> Sequence[T]:
    """Returns `found`, the texts of a file.

    Raises:
        ValueError: `found` is empty.
    """
    if not found:
        raise ValueError(f"no text in {file}")
    return found


def main() -> None:
    """Measures the files that the flags name."""
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
