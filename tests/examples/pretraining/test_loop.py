"""Pretraining: windows, schedules and flags; and runs on real ranks that stop and go on as if they had not."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evaluate_lm
import numpy as np
import pretrain_bert
import pretrain_gpt
import pytest
import torch
from pretraining import logs, loop
from ranks import run_ranks
from text import lm_samples, tokens
from tokenizers import Tokenizer, models
from torch import Tensor, nn

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig


def test_windows_follow_each_other():
    windows = pretrain_gpt.Windows(np.arange(11, dtype=np.uint16), 5)
    assert [windows[i]["tokens"].tolist() for i in range(len(windows))] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [windows[i]["labels"].tolist() for i in range(len(windows))] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert windows[0]["tokens"].dtype == torch.int64
    assert [len(pretrain_gpt.Windows(np.arange(n), 5)) for n in (0, 5, 6, 10)] == [0, 0, 1, 1]
    with pytest.raises(IndexError):
        windows[2]


def test_a_tenth_is_held_out():
    assert loop.parted(50) == (range(45), range(45, 50))
    assert loop.parted(3) == (range(2), range(2, 3))


def test_held_out_batches_are_spread_evenly():
    assert loop.evenly(26, 2, 3) == [range(0, 8, 4), range(8, 16, 4), range(16, 24, 4)]
    assert loop.evenly(5, 2, 3) == [range(2), range(2, 4)]


def test_what_is_unfinished_is_no_checkpoint_to_keep(tmp_path):
    for step in (1, 2, 4, 5):
        (tmp_path / f"step-{step:08d}").mkdir()
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}" / "manifest.json").touch()
    loop.keep(tmp_path, 1)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "4", "5"]


def test_too_little_is_held_out():
    with pytest.raises(ValueError) as error:
        loop.evenly(3, 4, 8)
    assert str(error.value) == "3 sequences are held out, and a batch is 4. Try more text or a smaller --batch"


def test_held_out_loss_counts_labels_of_the_replica():
    """Of the four rows of each batch the second replica is given the last two."""
    labels = torch.arange(8).view(8, 1).expand(8, 3).clone()
    labels[4:, 1:] = -100
    rows = [{"tokens": row, "labels": row, "other": row} for row in labels]
    seen: list[tuple[list[str], list[int]]] = []

    def evaluate(**given: Tensor) -> float:
        seen.append((list(given), given["tokens"][:, 0].tolist()))
        return float(len(seen))

    replicas = Namespace(size=lambda: 2, get_local_rank=lambda: 1)
    trainer: Any = Namespace(mesh={"dp": replicas}, evaluate=evaluate, parameters=lambda: iter([torch.zeros(1)]))
    loss = loop.held_out_loss(trainer, rows, Namespace(batch=4, eval_batches=9), ("tokens", "labels"))
    assert seen == [(["tokens", "labels"], [2, 3]), (["tokens", "labels"], [6, 7])]
    assert loss == pytest.approx((1 * 12 + 2 * 4) / 16)


def test_schedule_warms_up_and_falls_as_a_cosine():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.8)
    schedule = loop.scheduled(optimizer, Namespace(warmup=4, steps=14, min_lr=0.2))
    found = []
    for _ in range(14):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    cosine = [0.5 + 0.3 * math.cos(math.pi * i / 10) for i in range(11)]
    assert [*found, optimizer.param_groups[0]["lr"]] == pytest.approx([0.2, 0.4, 0.6, 0.8, *cosine])


def flags(monkeypatch: Any, *given: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *given])
    return pretrain_gpt.arguments()


def test_a_size_brings_its_recipe(monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)  # As torchrun sets them.
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    paper = flags(monkeypatch, "--size", "355M", "--pp", "2", "--lr", "0.1")
    assert (paper.batch, paper.steps, paper.lr, paper.block, paper.vocabulary) == (512, 300_000, 0.1, 1024, 50257)
    assert (paper.tp, paper.pp, paper.dp, paper.asked) == (4, 2, 1, False)
    small = flags(monkeypatch)
    assert (small.block, small.vocabulary, small.tp, small.asked) == (128, 4096, 8, True)
    assert not flags(monkeypatch, "--steps", str(small.steps - 1)).asked
    assert [flags(monkeypatch, "--steps", str(n)).warmup for n in (3, 20, small.steps // 2)] == [
        2,
        2,
        small.warmup // 2,
    ]
    with pytest.raises(SystemExit):
        flags(monkeypatch, "--help")
    assert f"of the optimizer (default: {small.steps})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--batch", "6", "--dp", "2", "--microbatches", "2"], "--batch 6 does not divide into 2 x 2 microbatches"),
        (["--steps", "5", "--warmup", "5"], "--warmup 5 must be from 2 to less than --steps, which is 5"),
        (["--warmup", "1"], f"--warmup 1 must be from 2 to less than --steps, which is {pretrain_gpt.SMALL.steps}"),
        (["--keep", "0"], "--keep, --save-every and --eval-every must be 1 or more"),
    ],
)
def test_flags_that_do_not_go_together(given, expected, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        flags(monkeypatch, *given)
    assert f"error: {expected}\n" in capsys.readouterr().err


def test_a_run_goes_on_with_its_own_settings(tmp_path, monkeypatch):
    args = flags(monkeypatch, "--out", str(tmp_path / "run"))
    text = tokens.Tokens("abc", np.arange(3), np.arange(2), np.arange(2))
    tokenizer, config = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), GPTConfig()
    loop.begin(args, tokenizer, text, config)
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == vars(config)
    args.pp = 2
    loop.begin(args, tokenizer, text, config)
    args.lr = 0.5
    with pytest.raises(ValueError) as error:
        loop.begin(args, tokenizer, tokens.Tokens("abd", text.values, text.pieces, text.documents), config)
    told = f"{args.out} has a run with lr={pretrain_gpt.SMALL.lr}, text=abc. Try another --out, or the same settings"
    assert str(error.value) == told


# ---- runs

SHORT = ["--vocabulary", "300", "--block", "16", "--batch", "4", "--steps", "6", "--warmup", "2", "--dropout", "0.1"]
OFTEN = ["--save-every", "1", "--eval-every", "3", "--eval-batches", "2"]


def started(script: Any, folder: Path, out: str, *more: str) -> None:
    data = ["--data", str(folder / "samples" / "train.jsonl"), "--cache", str(folder / "cache")]
    sys.argv = [script.__name__, *data, "--out", str(folder / out), *SHORT, *OFTEN, *more]
    script.main()


def stopped(script: Any, folder: Path, out: str) -> None:
    """Starts a run that ends in the midst of its fifth step."""
    step, calls = autotp.Trainer.step, []

    def failing(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(0)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    autotp.Trainer.step = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        started(script, folder, out)
    autotp.Trainer.step = step  # type: ignore[method-assign]


def curve(folder: Path) -> list[logs.Row]:
    """What the log has but the speed."""
    return [{key: row[key] for key in row if key != "tokens_per_second"} for row in logs.read(folder / "log.csv")]


def pretrained_gpt(rank: int, n: int, folder: Path) -> None:
    started(pretrain_gpt, folder, "whole")
    stopped(pretrain_gpt, folder, "parted")
    started(pretrain_gpt, folder, "parted")
    started(pretrain_gpt, folder, "parted")  # It is done; nothing is written twice.
    sys.argv = ["evaluate_lm.py", str(folder / "whole"), "--lambada", str(folder / "samples" / "lambada_test.jsonl")]
    evaluate_lm.main()


def test_gpt_goes_on_as_if_it_had_not_stopped(tmp_path):
    lm_samples.write(tmp_path / "samples", 100, seed=0)
    run_ranks(pretrained_gpt, 2, tmp_path, timeout=110)
    whole, parted = curve(tmp_path / "whole"), curve(tmp_path / "parted")
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in whole if "held_out" in row] == [3, 6]
    assert whole == parted
    states = [torch.load(tmp_path / name / "model.pt") for name in ("whole", "parted")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert sorted(path.name[-1] for path in (tmp_path / "parted" / "checkpoints").glob("step-*")) == ["5", "6"]
    names = {path.name.partition(".")[0] for path in (tmp_path / "whole").iterdir()}
    assert names >= {"model", "config", "tokenizer", "loss", "log", "events"}
    expected = held_out_by_hand(tmp_path)
    assert whole[-1]["held_out"] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def held_out_by_hand(folder: Path) -> float:
    """The loss of the model that was saved, of the windows that were not trained on."""
    config = GPTConfig(**json.loads((folder / "whole" / "config.json").read_text()))
    gpt = GPT(config).eval()
    gpt.load_state_dict(torch.load(folder / "whole" / "model.pt"))
    (found,) = (path for path in (folder / "cache").iterdir() if path.is_dir())
    windows = pretrain_gpt.Windows(np.fromfile(found / "tokens.bin", np.uint16), 16)
    unseen = range(len(windows))[-(len(windows) // 10) :]
    losses = [float(gpt(**{name: x[None] for name, x in windows[i].items()})) for i in unseen[:: len(unseen) // 8][:8]]
    return sum(losses) / len(losses)


def pretrained_bert(rank: int, n: int, folder: Path) -> None:
    started(pretrain_bert, folder, "whole", "--dropout", "0")
    started(pretrain_bert, folder, "piped", "--dropout", "0", "--tp", "1", "--pp", "2", "--microbatches", "2")
    started(pretrain_bert, folder, "copied", "--dropout", "0", "--tp", "1", "--dp", "2", "--zero", "2")


@pytest.mark.rare
def test_bert_trains_alike_in_every_layout(tmp_path):
    lm_samples.write(tmp_path / "samples", 200, seed=0)
    run_ranks(pretrained_bert, 2, tmp_path, timeout=110)
    whole, *others = (curve(tmp_path / name) for name in ("whole", "piped", "copied"))
    for rows in others:
        assert [set(row) for row in rows] == [set(row) for row in whole]
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
        assert rows[-1]["held_out"] == pytest.approx(whole[-1]["held_out"], rel=1e-4)
        assert [row["norm"] for row in rows] == pytest.approx([row["norm"] for row in whole], rel=1e-2)


def pair(tokens: Sequence[int], labels: Sequence[int], following: int) -> dict[str, Tensor]:
    given = {"tokens": tokens, "types": [0] * len(tokens), "mask": [1] * len(tokens), "labels": labels}
    return {name: torch.tensor(value) for name, value in given.items()} | {"next_sentence": torch.tensor(following)}


def test_pairs_told_apart_are_counted():
    torch.manual_seed(0)
    bert = BERT(BERTConfig(block_size=4, vocab_size=9, n_layer=1, n_head=1, n_embd=8)).eval()
    rows = [pair([2, i, 3, 3], [-100] * 4, 0) for i in range(4, 9)]
    found = [int(bert(row["tokens"][None])[1].argmax()) for row in rows]
    for row, answer in zip(rows, [*found[:3], 1 - found[3], 1 - found[4]], strict=True):
        row["next_sentence"] = torch.tensor(answer)
    assert [pretrain_bert.pairs_told_apart(bert, rows, batch) for batch in (1, 2, 9)] == [0.6] * 3


def test_masked_places_are_filled_in():
    names = [*tokens.SPECIAL, "the", "cat", "sat", "##s"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))

    class Knows(nn.Module):
        """Of every place, that it is a cat, or else sits."""

        def forward(self, given: Tensor, types: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tensor([0.0, 0, 0, 0, 0, 1, 3, 2, 0]).expand(1, 5, 9), torch.zeros(1, 2)

    row = pair([2, 5, 4, 8, 3], [-100, -100, 7, 5, -100], 0)
    told = pretrain_bert.filled(Knows(), row, tokenizer)  # type: ignore[arg-type]
    assert told == ["[CLS] the [sat] the [SEP]: 'cat', 'sat', 'the'"]
