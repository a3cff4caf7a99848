"""Fine-tunes a BERT, tensor-parallel, on MNLI, QQP, SQuAD 1.1 or 2.0, or RACE, whose files are there already.

    torchrun --nproc-per-node 2 examples/finetune_bert.py mnli          # made-up text: a minute or two
    torchrun --nproc-per-node 2 examples/finetune_bert.py mnli --data MNLI/ --init out/bert/model.pt \
        --tokenizer out/bert/tokenizer.json --seq 128 --epochs 3 --lr 5e-5 --dropout 0.1

The models (`heads.py`) know nothing of autotp; one line cuts them. `--init` is the state dict of an
`autotp.models.bert.BERT`, as `pretrain_bert.py` writes it, and `--tokenizer` what that was trained with. Without
`--data` small files of the task's format are made on the spot (`bert_samples.py`), and in the end it asserts that what
is in them is learnt.
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import bert_samples
import tasks
import torch
import torch.distributed as dist
import training
from formats import Example, Question, refuse
from initial import initial
from inputs import Item, Reader, texts
from tokenizers import Tokenizer
from tokens import load_tokenizer, word_pieces
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from training import rank, say, world
from windows import windows

import autotp
from autotp.models.bert import BERT, BERTConfig

SPECIAL = 3  # Tokens: [CLS] and twice [SEP].

Dev = dict[str, tuple[list[Example], list[Item]]]
"""What it is measured on, by name: the examples, and what the model reads of them."""


def arguments() -> Namespace:
    """The flags."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("task", choices=tasks.TASKS)
    add("--data", type=Path, help="folder with the task's files; none: small ones of made-up text")
    add("--at-least", type=float, help="the accuracy, or F1, to assert in the end; without --data the task's own")
    add("--skip-broken", action="store_true", help="leave broken lines out, and print them, instead of ending there")
    add("--init", type=Path, help="state dict of a BERT, which has its --layers and --width; none: random numbers")
    add(
        "--tokenizer",
        type=Path,
        help="of the tokenizers library; none: a WordPiece is trained on the task's text, each time a little otherwise",
    )
    add("--vocabulary", type=int, default=8000, help="tokens of that WordPiece, at most")
    add("--out", type=Path, default=Path("out"), help="folder for the samples and the tokenizer")
    add("--device", help='such as "cuda:0"; default: a GPU where there is one, else the CPU')
    add("--seed", type=int, default=0, help="of the weights, the order of the examples and the dropout")
    add("--layers", type=int, default=2, help="blocks")
    add("--heads", type=int, default=4, help="of attention, which a state dict does not tell")
    add("--width", type=int, default=64, help="of the residual stream")
    add("--dropout", type=float, default=0.0, help="probability, everywhere; 0.1 is usual for a BERT of real size")
    add("--seq", type=int, default=64, help="tokens at most that are read as one")
    add("--query", type=int, default=16, help="of those, tokens at most of a question, in RACE with an option")
    add("--stride", type=int, default=24, help="tokens from the start of a window on a context to the next one's")
    add("--answer", type=int, default=30, help="tokens at most of an answer")
    add("--null-threshold", type=float, default=0.0, help="by how much no answer must score above the best (squad2)")
    add("--epochs", type=int, default=8, help="times that every example is seen")
    add("--batch", type=int, default=32, help="examples a step, or windows")
    add("--lr", type=float, default=1e-3, help="of AdamW, at its highest; then down to 0 in a line")
    add("--warmup", type=float, default=0.1, help="share of the steps in which the learning rate rises in a line")
    add("--weight-decay", type=float, default=0.01, help="of weights and embeddings, not of biases and norms")
    args = parser.parse_args()
    if args.init is not None and args.tokenizer is None:
        parser.error("--init needs the --tokenizer that it was trained with")
    room = args.seq - SPECIAL - (args.query if args.task not in ("mnli", "qqp") else 0)
    if room < 2:
        parser.error(f"--seq {args.seq} leaves no room for a text beside --query {args.query}")
    if args.task in ("squad1", "squad2") and not 1 <= args.stride <= room:
        parser.error(f"--stride {args.stride} must be from 1 to --seq less --query less {SPECIAL}: {room}")
    return args


def tokenizer_of(args: Namespace, examples: Sequence[Example], mesh: DeviceMesh | None) -> Tokenizer:
    """The tokenizer of `--tokenizer`, or one that the first rank trains on these examples.

    Raises:
        ValueError: there is no tokenizer in the file.
    """
    file = args.tokenizer or args.out / f"{args.task}-tokenizer.json"
    if args.tokenizer is None and rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        word_pieces(texts(examples), args.vocabulary).save(str(file))
    if mesh is not None:
        dist.barrier()
    try:
        found = load_tokenizer(file)
    except Exception as error:  # The library raises nothing more special.
        raise ValueError(f"--tokenizer {file}: {error}") from None
    found.no_padding()
    found.no_truncation()
    return found


def bert_of(args: Namespace, vocabulary: int) -> BERT:
    """The BERT to start from: the same on every rank.

    Raises:
        ValueError: `--init` has no BERT, or one that is too small for `--seq` or for so large a vocabulary.
    """
    torch.manual_seed(args.seed)
    if args.init is None:
        return BERT(
            BERTConfig(
                block_size=args.seq, vocab_size=vocabulary, n_layer=args.layers, n_head=args.heads, n_embd=args.width,
                dropout=args.dropout, norm="pre",
            )
        )  # fmt: skip
    bert = initial(args.init, args.heads, args.dropout)
    for flag, wanted, there in (
        ("--seq", args.seq, bert.config.block_size),
        ("--tokenizer", vocabulary, bert.config.vocab_size),
    ):
        if wanted > there:
            raise ValueError(f"{flag} has {wanted} tokens, and --init {args.init} embeddings for {there}")
    return bert


def items_of(examples: Sequence[Example], reader: Reader, args: Namespace) -> list[Item]:
    """What the model reads as one: the examples, or the windows of questions."""
    questions = [example for example in examples if isinstance(example, Question)]
    others: list[Item] = [example for example in examples if not isinstance(example, Question)]
    return others + list(windows(questions, reader.tokenizer, args.seq, args.query, args.stride))


def train(model: nn.Module, items: Sequence[Item], reader: Reader, args: Namespace) -> Iterator[float]:
    """Trains for `--epochs` epochs, and gives the mean loss of each when it is over."""
    order = torch.Generator().manual_seed(args.seed)  # The same on every rank.
    data = cast("Dataset[Item]", items)  # A list is one to torch, though its types do not say so.
    loader = DataLoader(data, args.batch, shuffle=True, drop_last=True, generator=order, collate_fn=reader)
    steps, where = len(loader) * args.epochs, next(model.parameters()).device
    rising = max(1, round(args.warmup * steps))
    optimizer = torch.optim.AdamW(autotp.weight_decay_groups(model, args.weight_decay), args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, (steps - step) / max(1, steps - rising))
    )
    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros((), device=where)
        for batch in tqdm(loader, desc=f"epoch {epoch + 1}", disable=rank() != 0, mininterval=0.5):
            loss = model(**{name: value.to(where) for name, value in batch.items()})
            optimizer.zero_grad()
            loss.backward()
            autotp.clip_grad_norm_(model, training.MAX_NORM)
            optimizer.step()
            schedule.step()
            total += loss.detach()
        yield total.item() / len(loader)


@torch.no_grad()
def scores_of(model: nn.Module, items: Sequence[Item], reader: Reader, batch: int) -> list[Tensor]:
    """The model's logits for each item, on the CPU."""
    model.eval()
    where, found = next(model.parameters()).device, list[Tensor]()
    for start in range(0, len(items), batch):
        inputs = reader(items[start : start + batch])
        del inputs["labels"]
        found += model(**{name: value.to(where) for name, value in inputs.items()}).float().cpu()
    return found


def prepare(args: Namespace, mesh: DeviceMesh | None) -> tuple[BERT, Reader, list[Item], Dev]:
    """A BERT to start from, and what is read.

    Raises:
        ValueError: a file is not what it should be, or there are fewer examples than a batch has.
    """
    examples, dev = tasks.load(tasks.TASKS[args.task], args.data, say if args.skip_broken else refuse)
    reader = Reader(tokenizer_of(args, examples, mesh), args.seq, args.query)
    items, vocabulary = items_of(examples, reader, args), reader.tokenizer.get_vocab_size()
    if len(items) < args.batch:
        raise ValueError(f"{args.data}: {len(items)} to train on are no --batch {args.batch}")
    say(f"{len(examples)} examples, read as {len(items)}, {vocabulary} tokens")
    unseen = {name: (some, items_of(some, reader, args)) for name, some in dev.items()}
    return bert_of(args, vocabulary), reader, items, unseen


def fit(model: nn.Module, reader: Reader, items: Sequence[Item], dev: Dev, args: Namespace) -> dict[str, float]:
    """Trains, and measures after each epoch; what counts of the last measures, by name."""
    metric, found = tasks.TASKS[args.task].metric, dict[str, float]()
    threshold = None if args.task == "squad1" else args.null_threshold
    for epoch, loss in enumerate(train(model, items, reader, args), 1):
        for name, (examples, unseen) in dev.items():
            scores = scores_of(model, unseen, reader, args.batch)
            measures = tasks.measure(examples, unseen, scores, args.answer, threshold)
            found[name] = measures[metric]
            values = "  ".join(f"{key} {value:.3f}" for key, value in measures.items())
            say(f"epoch {epoch}  loss {loss:.3f}  {name:<10}  {values}")
    return found


def main() -> None:
    """Fine-tunes, and asserts what must have been learnt."""
    args = arguments()
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world(),)) if world() > 1 else None
    task, bound = tasks.TASKS[args.task], args.at_least
    if args.data is None:
        args.data, bound = args.out / "samples" / args.task, task.learnt if bound is None else bound
        if rank() == 0:
            bert_samples.write(args.data.parent)
        if mesh is not None:
            dist.barrier()
    try:
        bert, reader, items, dev = prepare(args, mesh)
    except ValueError as error:
        raise SystemExit(f"finetune_bert: {error}") from None

    model = autotp.parallelize(task.head(bert), mesh=mesh, device=training.device(args))
    say(model.plan)
    found = fit(model, reader, items, dev, args)
    worst = min(found.values())
    assert bound is None or worst >= bound, f"it has not learnt: {task.metric} {worst:.3f}, and not {bound}"


if __name__ == "__main__":
    main()
