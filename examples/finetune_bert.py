"""Fine-tunes a BERT, tensor-parallel, on local files of MNLI, QQP, SQuAD 1.1 or 2.0, or RACE.

    torchrun --nproc-per-node 2 examples/finetune_bert.py mnli          # made-up text: a minute or two
    torchrun --nproc-per-node 2 examples/finetune_bert.py mnli --data MNLI/ --init out/bert/model.pt \
        --tokenizer out/bert/tokenizer.json --seq 128 --epochs 3 --lr 5e-5 --dropout 0.1

The models (`finetuning/heads.py`) know nothing of autotp; one line cuts them. `--init` is the state dict of an
`autotp.models.bert.BERT`, as `pretrain_bert.py` writes it, and `--tokenizer` is the tokenizer of that model. Without
`--data` the script first writes small files in the task's format (`finetuning/bert_samples.py`), and asserts at the
end that the model has learnt the task.
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from finetuning import bert_samples, tasks
from finetuning.formats import Example, Question, refuse
from finetuning.initial import initial
from finetuning.inputs import Item, Reader, texts
from finetuning.windows import windows
from support import training
from support.training import rank, say, world
from text.tokens import load_tokenizer, word_pieces
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import autotp
from autotp.models.bert import BERT, BERTConfig

SPECIAL = 3  # Tokens: [CLS] and twice [SEP].

Dev = dict[str, tuple[list[Example], list[Item]]]
"""The evaluation sets: name -> the examples, and the items that the model reads."""


def arguments() -> Namespace:
    """Returns the flags of the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("task", choices=tasks.TASKS)
    add("--data", type=Path, help="folder with the task's files; default: small files of made-up text")
    add("--at-least", type=float, help="accuracy or F1 to assert at the end; without --data the task's own")
    add("--skip-broken", action="store_true", help="print broken lines and leave them out; default: end with an error")
    add("--init", type=Path, help="state dict of a BERT, which sets --layers and --width; default: random weights")
    add(
        "--tokenizer",
        type=Path,
        help="file of the tokenizers library; default: train a WordPiece on the task's text; no two are quite the same",
    )
    add("--vocabulary", type=int, default=8000, help="largest size of that WordPiece, in tokens")
    add("--out", type=Path, default=Path("out"), help="folder for the samples and the tokenizer")
    add("--device", help='such as "cuda:0"; default: a GPU if there is one, else the CPU')
    add("--seed", type=int, default=0, help="seed of the weights, the order of the examples and the dropout")
    add("--layers", type=int, default=2, help="blocks")
    add("--heads", type=int, default=4, help="number of attention heads; a state dict does not show it")
    add("--width", type=int, default=64, help="width of the residual stream")
    add("--dropout", type=float, default=0.0, help="probability of all dropouts; 0.1 is usual for a full-size BERT")
    add("--seq", type=int, default=64, help="largest number of tokens in a sequence")
    add("--query", type=int, default=16, help="of these, most tokens of a question; RACE: of question and option")
    add("--stride", type=int, default=24, help="tokens from the start of a window of a context to the next start")
    add("--answer", type=int, default=30, help="largest number of tokens in an answer")
    add("--null-threshold", type=float, default=0.0, help="squad2: no answer if its score exceeds the best by more")
    add("--epochs", type=int, default=8, help="how often each example is used")
    add("--batch", type=int, default=32, help="examples or windows in a step")
    add("--lr", type=float, default=1e-3, help="highest learning rate of AdamW; it falls linearly to 0")
    add("--warmup", type=float, default=0.1, help="share of the steps in which the learning rate rises linearly")
    add("--weight-decay", type=float, default=0.01, help="for weights and embeddings, not for biases and norms")
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
    """Returns the tokenizer of `--tokenizer`, or a tokenizer that the first rank trains on these examples.

    Raises:
        ValueError: the file is not a tokenizer.
    """
    file = args.tokenizer or args.out / f"{args.task}-tokenizer.json"
    if args.tokenizer is None and rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        word_pieces(texts(examples), args.vocabulary).save(str(file))
    if mesh is not None:
        dist.barrier()
    try:
        found = load_tokenizer(file)
    except Exception as error:  # The library raises no more specific class.
        raise ValueError(f"--tokenizer {file}: {error}") from None
    found.no_padding()
    found.no_truncation()
    return found


def bert_of(args: Namespace, vocabulary: int) -> BERT:
    """Returns the BERT to start from: the same on every rank.

    Raises:
        ValueError: `--init` is not a BERT, or its embeddings are too small for `--seq` or for the vocabulary.
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
    """Returns the items that the model reads: the examples themselves, or the windows of questions."""
    questions = [example for example in examples if isinstance(example, Question)]
    others: list[Item] = [example for example in examples if not isinstance(example, Question)]
    return others + list(windows(questions, reader.tokenizer, args.seq, args.query, args.stride))


def train(model: nn.Module, items: Sequence[Item], reader: Reader, args: Namespace) -> Iterator[float]:
    """Trains for `--epochs` epochs, and yields the mean loss after each epoch."""
    order = torch.Generator().manual_seed(args.seed)  # The same on every rank.
    data = cast("Dataset[Item]", items)  # torch takes a list as a Dataset, but its types do not say so.
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
    """Returns the model's logits for each item, on the CPU."""
    model.eval()
    where, found = next(model.parameters()).device, list[Tensor]()
    for start in range(0, len(items), batch):
        inputs = reader(items[start : start + batch])
        del inputs["labels"]
        found += model(**{name: value.to(where) for name, value in inputs.items()}).float().cpu()
    return found


def prepare(args: Namespace, mesh: DeviceMesh | None) -> tuple[BERT, Reader, list[Item], Dev]:
    """Returns the BERT to start from, the reader, the training items and the evaluation sets.

    Raises:
        ValueError: a file has a wrong format, or there are fewer items than in a batch.
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
    """Trains, and measures after each epoch; returns the task's metric after the last epoch: set -> value."""
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
    """Fine-tunes, and asserts that the metric is high enough."""
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
