"""The examples' own parts: the corpus, the masking, the loop; and the one that gives adapters back to peft."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import train_bert
import train_gpt
from ranks import run_ranks
from support import training
from text import corpus
from torch import Tensor, nn


def write(folder: Path, name: str, data: bytes) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def text_of(part: Tensor) -> bytes:
    return bytes(part.tolist())


def test_last_tenth_is_held_out(tmp_path):
    text = corpus.load([write(tmp_path, "a.txt", bytes(range(100)))])
    assert text_of(text.train) == bytes(range(90))
    assert text_of(text.held_out) == bytes(range(90, 100))


def test_tiny_corpus_has_both_parts(tmp_path):
    text = corpus.load([write(tmp_path, "a.txt", b"ab")])
    assert (text_of(text.train), text_of(text.held_out)) == (b"a", b"b")


def test_folder_gives_its_text_files_in_order(tmp_path):
    for name, data in [("b.md", b"2"), ("a/z.py", b"1"), (".git/x", b"no"), ("c.so", b"no\0"), ("d.txt", b"3")]:
        write(tmp_path, name, data)
    text = corpus.load([tmp_path])
    assert text_of(text.train) + text_of(text.held_out) == b"123"


def test_files_and_folders_in_the_order_given(tmp_path):
    folder, file = write(tmp_path, "x/a.txt", b"folder").parent, write(tmp_path, "y.txt", b"file ")
    text = corpus.load([file, folder])
    assert text_of(text.train) + text_of(text.held_out) == b"file folder"


def test_standard_library_is_large_and_has_no_packages():
    files = corpus.standard_library()
    assert sum(file.stat().st_size for file in files) > 5_000_000
    assert not [file for file in files if "site-packages" in file.parts]


def test_missing_path():
    with pytest.raises(ValueError) as error:
        corpus.load(["/no/such"])
    assert str(error.value) == "--data /no/such: no such file or folder"


def test_empty_folder(tmp_path):
    with pytest.raises(ValueError) as error:
        corpus.load([tmp_path])
    assert str(error.value) == f"no text in {tmp_path}: 0 text files, 0 bytes. Try --data FILE"


@pytest.mark.parametrize("draw", [lambda d: corpus.windows(d, 11, 2, 0), lambda d: corpus.spread(d, 11, 2)])
def test_window_longer_than_the_text(draw):
    with pytest.raises(ValueError) as error:
        draw(torch.zeros(10, dtype=torch.uint8))
    assert str(error.value) == "the text is too short: 10 bytes, a window is 11. Try a smaller --block"


def test_windows_are_pieces_of_the_text():
    data = torch.arange(200, dtype=torch.uint8)
    drawn = corpus.windows(data, 8, 64, step=3)
    assert drawn.dtype == torch.int64 and drawn.shape == (64, 8)
    assert bool((drawn.diff(dim=1) == 1).all())


def test_windows_depend_on_seed_and_step_alone():
    data = torch.arange(200, dtype=torch.uint8)
    first = corpus.windows(data, 8, 4, step=3, seed=1)
    torch.manual_seed(99)
    assert torch.equal(first, corpus.windows(data, 8, 4, step=3, seed=1))
    assert not torch.equal(first, corpus.windows(data, 8, 4, step=4, seed=1))
    assert not torch.equal(first, corpus.windows(data, 8, 4, step=3, seed=2))


def test_windows_reach_the_last_byte():
    drawn = corpus.windows(torch.arange(9, dtype=torch.uint8), 8, 64, step=0)
    assert set(drawn[:, 0].tolist()) == {0, 1}


def test_spread_goes_from_end_to_end():
    drawn = corpus.spread(torch.arange(101, dtype=torch.uint8), 5, 3)
    assert drawn[:, 0].tolist() == [0, 48, 96]
    assert drawn[-1, -1] == 100


def test_shifted_labels_are_the_next_byte():
    tokens, labels = train_gpt.shifted(torch.arange(10).view(2, 5))
    assert tokens.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert labels.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_generate_keeps_to_the_block_and_to_its_seed():
    lengths = []

    class Uniform(nn.Linear):
        def forward(self, tokens: Tensor) -> Tensor:
            lengths.append(tokens.shape[1])
            return torch.zeros(*tokens.shape, 256)

    first = train_gpt.generate(Uniform(1, 1), b"abc", 6, block=5)
    assert lengths == [3, 4, 5, 5, 5, 5]
    assert len(first) == 9 and first.startswith(b"abc")
    assert first == train_gpt.generate(Uniform(1, 1), b"abc", 6, block=5)


def masked_bytes() -> tuple[Tensor, Tensor, Tensor]:
    """Windows of one byte value, 7, and what masking makes of them."""
    windows = torch.full((200, 100), 7)
    return windows, *train_bert.masked(windows, seed=5)


def test_masking_touches_only_what_is_to_be_predicted():
    windows, tokens, labels = masked_bytes()
    chosen = labels != -100
    assert bool((labels[chosen] == 7).all())
    assert bool((tokens[~chosen] == windows[~chosen]).all())


def test_masking_shares():
    _, tokens, labels = masked_bytes()
    chosen = tokens[labels != -100]
    shares = [len(chosen) / tokens.numel()] + [
        float(mark.double().mean()) for mark in (chosen == 256, (chosen != 256) & (chosen != 7), chosen == 7)
    ]
    assert shares == pytest.approx([0.15, 0.8, 0.1, 0.1], abs=0.02)


def test_masking_depends_on_its_seed_alone():
    windows, tokens, labels = masked_bytes()
    again = train_bert.masked(windows, seed=5)
    assert torch.equal(tokens, again[0]) and torch.equal(labels, again[1])
    assert not torch.equal(tokens, train_bert.masked(windows, seed=6)[0])


class Regression(nn.Module):
    """The smallest model with a loss: learns one number for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Embedding(4, 1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return (self.value(tokens)[..., 0] - labels).abs().mean()


def fit(steps: int, lr: float = 0.1) -> list[float]:
    torch.manual_seed(0)
    args = Namespace(seed=0, lr=lr, steps=40, batch=2, block=4)
    tokens = torch.tensor([[0, 1, 2, 3]] * 2)
    return training.fit(
        Regression(), lambda step: (tokens, tokens), args, name="test", steps=steps, clip=training.clip_one_device
    )


@pytest.mark.parametrize("compare", ["0", "6"])
def test_cannot_compare_more_steps_than_are_taken(compare, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "--steps", "5", "--compare", compare])
    with pytest.raises(SystemExit):
        training.parse(training.parser("A test."))
    assert f"error: --compare {compare} must be from 1 to --steps, which is 5\n" in capsys.readouterr().err


def test_fit_learns():
    losses = fit(40)
    assert len(losses) == 40 and losses[-1] < losses[0] / 2


def test_a_shorter_run_is_the_start_of_a_longer_one():
    assert fit(10) == fit(40)[:10]


def test_largest_difference_is_over_the_common_steps():
    assert training.largest_difference([1.0, 2.0], [1.5, 1.0, 9.0]) == 1.0


def test_smooth_is_a_running_mean():
    assert training.smooth([1.0, 2.0, 6.0, 10.0], window=3) == pytest.approx([1.0, 1.5, 3.0, 6.0])


def test_held_out_loss_counts_labels_not_batches():
    class Count(nn.Linear):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return (labels >= 0).sum().double()

    tokens = torch.zeros(1, 3, dtype=torch.int64)
    batches = [(tokens, torch.tensor([[1, 1, 1]])), (tokens, torch.tensor([[1, -100, -100]]))]
    assert training.held_out_loss(Count(1, 1), batches) == pytest.approx((3 * 3 + 1 * 1) / 4)


def test_plot_draws_a_picture(tmp_path):
    file = tmp_path / "new" / "curve.png"
    training.plot(file, "tp=2", [2.0, 1.0], [2.0, 1.0, 0.5], 0.7)
    assert file.read_bytes().startswith(b"\x89PNG")


def finetuned(rank: int, n: int, folder: Path) -> None:
    """The script as torchrun runs it; its assertions are the test."""
    import finetune_hf

    text = write(folder, f"{rank}/a.txt", b"to be or not to be, that is the question. " * 200).parent
    flags = ["--data", str(text), "--out", str(folder / "out"), "--steps", "15", "--block", "16"]
    for checkpoint in ([], [str(folder / "out" / "finetuned")]):  # A tiny one, then what came of it.
        sys.argv = ["finetune_hf.py", *checkpoint, *flags]
        finetune_hf.main()


def test_finetuned_checkpoint_is_read_by_transformers_alone(tmp_path):
    run_ranks(finetuned, 2, tmp_path, timeout=110)
    names = {file.name for file in (tmp_path / "out" / "finetuned").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def lora(rank: int, n: int, folder: Path) -> None:
    import hf_lora

    data, out = folder / "text", folder / "adapters"
    sys.argv = ["hf_lora.py", "--data", str(data), "--out", str(out), "--steps", "12", "--block", "24"]
    hf_lora.main()


@pytest.mark.timeout(300)
def test_lora_is_given_back_to_peft(tmp_path):
    """Its own assertions hold on two ranks, and what it saved is all of the adapters and nothing else."""
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    write(tmp_path, "text", b"the quick brown fox jumps over the lazy dog. " * 50)
    run_ranks(lora, 2, tmp_path, timeout=240)
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    shapes = {name.split("layers.0.")[1]: tuple(t.shape) for name, t in saved.items() if "layers.0." in name}
    assert len(saved) == 2 * len(shapes) == 2 * 2 * 7
    assert shapes["self_attn.q_proj.lora_B.weight"] == (96, 8)
    assert shapes["mlp.down_proj.lora_A.weight"] == (8, 172)


def test_losses_that_are_nan_are_not_equal() -> None:
    nan = float("nan")
    assert training.largest_difference([1.0, 2.0], [1.5, 2.25, 9.0]) == 0.5
    for alone, together in (([1.0, nan], [1.0, 2.0]), ([1.0, 2.0], [1.0, nan]), ([1.0, nan], [1.0, nan])):
        assert training.largest_difference(alone, together) == float("inf")
