"""distribute: loss and every gradient are one device's, step after step, however a model is laid out over processes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from errors import message
from ranks import run_ranks
from small_models import assert_values_close, gpt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from trainers import mine

import autotp
from autotp.extensions import values_of
from autotp.models.bert import BERT, BERTConfig
from autotp.training.distribute import distribute
from autotp.training.pipeline.schedules import ENGINES

BATCH, PARTS = 8, 2
MODELS = ("gpt", "bert", "llama-tied", "llama-untied")
TOLERANCE = {"gpt": 1e-10, "bert": 1e-10}
"""In the models of transformers norms and losses compute in float32: 1e-5 there."""
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
"""Ranks of tensor, pipeline and data parallelism."""


SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 96, "n_layer": 4, "n_head": 4, "n_embd": 16}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in float64, and a batch of which some rows count few tokens or none."""
    torch.manual_seed(0)
    tokens, labels = torch.randint(96, (2, BATCH, 8))
    labels[0], labels[3, 2:], labels[6, 1:] = -100, -100, -100
    if name == "gpt":
        return gpt(**SIZES).double(), {"tokens": tokens, "labels": labels}
    if name == "bert":
        bert = BERTConfig(**SIZES, dropout=0.0)
        mask = (torch.arange(8) < 8 - torch.arange(BATCH).unsqueeze(-1) % 3).long()
        following = torch.randint(2, (BATCH,))
        given = {"tokens": tokens, "types": tokens % 2, "mask": mask, "labels": labels, "next_sentence": following}
        return BERT(bert).double(), given
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=name == "llama-tied")
    return transformers.LlamaForCausalLM(config).double().train(), {"input_ids": tokens, "labels": labels}


def loss_of(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0] if isinstance(found, tuple) else found.loss


def whole_of(tensor: Tensor) -> Tensor:
    """A tensor that the replicas hold parts of."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(
    rank: int, n: int, name: str, layout: tuple[int, int, int], schedule: str = "1F1B", along: bool = False, **more: Any
) -> None:
    """Five steps of SGD beside one device's, on batches in which other rows count."""
    tp, pp, dp = layout
    whole, batch = built(name)
    parts = 4 // dp
    example = {key: value[: BATCH // (dp * parts)] for key, value in batch.items()}
    model = copy.deepcopy(whole)
    for parameter in model.parameters() if rank else ():
        parameter.data.add_(1)  # The first rank's are taken.
    trainer = distribute(
        model, tp=tp, pp=pp, dp=dp, microbatches=parts, schedule=schedule,  # type: ignore[arg-type]
        example_inputs=example, sequence_parallel=along, **more,
    )  # fmt: skip
    close = {"rtol": 0, "atol": TOLERANCE.get(name, 1e-5)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (whole, trainer)]
    names = {id(p): key for key, p in whole.named_parameters()}
    for i in range(5):
        batch = {key: value.roll(i, 0) for key, value in batch.items()}
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = loss_of(whole(**batch))
        expected.backward()
        found = trainer.step(**mine(batch, trainer.mesh["dp"].get_local_rank(), dp))
        assert_values_close(found, expected.detach(), **close)
        grads = {names[id(p)]: p.grad for p in whole.parameters()}
        for key, parameter in trainer.named_parameters():
            gradient = whole_of(parameter.grad)
            assert_values_close(gradient, grads[key], **close, msg=lambda m, key=key: f"{key}: {m}")
        for optimizer in optimizers:
            optimizer.step()
    if not ENGINES[schedule].evaluates and pp > 1:
        with pytest.raises(autotp.Error, match="torch's schedule"):
            trainer.evaluate(**mine(batch, trainer.mesh["dp"].get_local_rank(), dp))
        return
    whole.eval()
    with torch.no_grad():
        expected = loss_of(whole(**batch))
    found = trainer.evaluate(**mine(batch, trainer.mesh["dp"].get_local_rank(), dp))
    assert_values_close(found, expected, **close)


def each_model(
    rank: int, n: int, names: Sequence[str], layout: tuple[int, int, int], schedule: str, along: bool
) -> None:
    for name in names:
        steps(rank, n, name, layout, schedule, along)


@pytest.mark.timeout(300)
def test_distribute_tp_pp_interleaved_equals_one_device() -> None:
    """The mechanisms together, on the one model whose stages share a weight."""
    run_ranks(each_model, 4, ("gpt",), (2, 2, 1), "interleaved", True, timeout=280)


def three_stages_a_rank(rank: int, n: int) -> None:
    steps(rank, n, "llama", (1, 2, 1), "interleaved", interleave=3)


@pytest.mark.timeout(300)
def test_distribute_three_stages_a_rank_equals_one_device() -> None:
    """Two ranks with three stages each, and four microbatches."""
    run_ranks(three_stages_a_rank, 2, timeout=280)


@pytest.mark.timeout(300)
def test_distribute_zero_bubble_equals_one_device() -> None:
    run_ranks(each_model, 4, ("gpt",), (2, 2, 1), "zero-bubble", True, timeout=280)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "schedule", "along"),
    [pytest.param(*case, marks=pytest.mark.rare) for case in itertools.product(LAYOUTS, ENGINES, (False, True))],
    ids=lambda it: "tp{}-pp{}-dp{}".format(*it) if isinstance(it, tuple) else str(it),
)
def test_distribute_in_any_layout_equals_one_device(layout: tuple[int, int, int], schedule: str, along: bool) -> None:
    tp, pp, dp = layout
    run_ranks(each_model, tp * pp * dp, MODELS, layout, schedule, along, timeout=280)


def overlapped(
    rank: int, n: int, names: Sequence[str], layout: tuple[int, int, int], schedule: str, overlap: str
) -> None:
    for name in names:
        steps(rank, n, name, layout, schedule, overlap=overlap)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", values_of("overlap"))
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        pytest.param(*case, marks=pytest.mark.rare)
        for case in [((2, 1, 1), "1F1B"), ((2, 2, 1), "1F1B"), ((2, 2, 1), "interleaved"), ((2, 1, 2), "1F1B")]
    ],
    ids=lambda it: "tp{}-pp{}-dp{}".format(*it) if isinstance(it, tuple) else it,
)
def test_distribute_with_overlap_equals_one_device(layout: tuple[int, int, int], schedule: str, overlap: str) -> None:
    """With "batch" each microbatch is computed in two halves that take turns."""
    tp, pp, dp = layout
    run_ranks(overlapped, tp * pp * dp, MODELS, layout, schedule, overlap, timeout=280)


def sharded(rank: int, n: int, names: Sequence[str], layout: tuple[int, int, int], zero: int, schedule: str) -> None:
    for name in names:
        steps(rank, n, name, layout, schedule, zero=zero)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "zero", "schedule"),
    [
        pytest.param((1, 1, 2), 1, "1F1B", marks=pytest.mark.rare),
        pytest.param((1, 1, 2), 2, "1F1B", marks=pytest.mark.rare),
        pytest.param((2, 1, 2), 3, "1F1B", marks=pytest.mark.rare),
        pytest.param((1, 2, 2), 1, "interleaved", marks=pytest.mark.rare),
        pytest.param((1, 2, 2), 3, "1F1B", marks=pytest.mark.rare),
        pytest.param((1, 2, 2), 2, "zero-bubble", marks=pytest.mark.rare),
        pytest.param((2, 2, 2), 3, "interleaved", marks=pytest.mark.rare),
    ],
)
def test_distribute_zero_equals_one_device(layout: tuple[int, int, int], zero: int, schedule: str) -> None:
    tp, pp, dp = layout
    run_ranks(sharded, tp * pp * dp, ("gpt", "llama-tied"), layout, zero, schedule, timeout=280)


def test_zero_1_of_a_tied_weight_equals_one_device() -> None:
    run_ranks(sharded, 2, ("gpt",), (1, 1, 2), 1, "1F1B", timeout=100)


class Scaled(nn.Module):
    """A GPT whose logits have a factor: a parameter without dimensions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.factor = model, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens, labels: [batch seq]"""
        return F.cross_entropy((self.model(tokens) * self.factor).flatten(0, 1), labels.flatten())


def undivided(rank: int, n: int, layout: tuple[int, int, int], zero: int) -> None:
    """Four heads on three ranks: the third holds no head. Steps, a norm and a state dict beside one device's."""
    (tp, pp, dp), (model, batch) = layout, built("gpt")
    whole = Scaled(model)
    example = {name: x[: BATCH // (dp * pp)] for name, x in batch.items()}
    trainer = distribute(
        copy.deepcopy(whole), tp=tp, pp=pp, dp=dp, microbatches=pp, zero=zero,  # type: ignore[arg-type]
        example_inputs=example,
    )  # fmt: skip
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True) for m in (whole, trainer)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = whole(**batch)
        expected.backward()
        found = trainer.step(**mine(batch, trainer.mesh["dp"].get_local_rank(), dp))
        assert_values_close(found, expected.detach())
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        assert_values_close(autotp.clip_grad_norm_(trainer, 0.1), norm)
        for optimizer in optimizers:
            optimizer.step()
    assert all(isinstance(p, DTensor) for p in trainer.parameters())
    assert (trainer.place.rank == 2) == any(not p.to_local().numel() for p in trainer.parameters())
    state = autotp.full_state_dict(trainer)
    for name, value in whole.state_dict().items() if rank == 0 else ():
        assert_values_close(state[name], value, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "zero"),
    [
        ((3, 1, 2), 3),
        pytest.param((3, 1, 2), 1, marks=pytest.mark.rare),
        pytest.param((3, 1, 2), 2, marks=pytest.mark.rare),
        pytest.param((3, 2, 2), 3, marks=pytest.mark.rare),
    ],
)
def test_zero_of_empty_parts_and_scalars_equals_one_device(layout: tuple[int, int, int], zero: int) -> None:
    """A part without elements, and a parameter without dimensions: one optimizer steps them beside the others."""
    tp, pp, dp = layout
    run_ranks(undivided, tp * pp * dp, layout, zero, timeout=280)


def accumulated(rank: int, n: int) -> None:
    """Two steps without a `zero_grad` between them: the gradients of both, each summed over the replicas once."""
    model, batch = built("gpt")
    trainer = distribute(copy.deepcopy(model), dp=2, example_inputs={name: x[:4] for name, x in batch.items()})
    with pytest.warns(UserWarning, match="all 2 replicas were given the same rows"):
        trainer.step(**mine(batch, 0, 2))
    with pytest.raises(autotp.Error, match="a trainer does not generate: its ranks have stages"):
        trainer.generate(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(autotp.Error, match="a trainer cannot be called"):
        trainer(**mine(batch, rank, 2))
    trainer.zero_grad()
    grads = []
    for _ in range(2):
        trainer.step(**mine(batch, rank, 2))
        grads.append([p.grad.clone() for p in trainer.parameters() if p.grad is not None])
    for first, both in zip(*grads, strict=True):
        assert_values_close(both, 2 * first)


def test_trainer_steps_accumulate_gradients_until_zero_grad() -> None:
    run_ranks(accumulated, 2, timeout=100)


class Pointing(nn.Module):
    """A block that tells the next which row of its table to add."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(8, 8)

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch 8], at: [batch]"""
        x = x + self.linear(x).tanh() + self.table(at)
        return x, x.argmax(-1)


class Pointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Pointing() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch 8], y: [batch]"""
        at = y % 8
        for block in self.h:
            x, at = block(x, at)
        return nn.functional.cross_entropy(x, y)


def indices(rank: int, n: int) -> None:
    torch.manual_seed(0)
    whole, given = Pointed().double(), {"x": torch.randn(6, 8).double(), "y": torch.arange(6)}
    trainer = distribute(copy.deepcopy(whole), pp=n, microbatches=3, example_inputs=given)
    loss = whole(**given)
    loss.backward()
    assert_values_close(trainer.step(**given), loss.detach())
    expected = dict(whole.named_parameters())
    for name, parameter in trainer.named_parameters():
        assert_values_close(parameter.grad, expected[name].grad)


def test_pipeline_stages_send_indices() -> None:
    """The engine runs a stage on memory as it comes first, where no number need be an index."""
    run_ranks(indices, 2, timeout=100)


def last_tokens(rank: int, n: int, layout: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 8, "num_labels": 3}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = transformers.GPT2Config(**sizes, **dropout, pad_token_id=0, use_cache=False)
    whole = transformers.GPT2ForSequenceClassification(config).double().train()
    given = {"input_ids": torch.randint(1, 50, (8, 6)), "labels": torch.randint(3, (8,))}
    given["input_ids"][::2, 4:] = 0
    tp, pp, dp = layout
    trainer = distribute(copy.deepcopy(whole), tp=tp, pp=pp, dp=dp, microbatches=2, example_inputs=given)
    found = trainer.step(**mine(given, trainer.mesh["dp"].get_local_rank(), dp))
    loss = whole(**given).loss
    loss.backward()
    assert_values_close(found, loss.detach())
    expected = dict(whole.named_parameters())
    for name, parameter in trainer.named_parameters():
        assert_values_close(parameter.grad, expected[name].grad)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "layout", [(1, 1, 2), *(pytest.param(it, marks=pytest.mark.rare) for it in ((1, 2, 1), (2, 1, 1)))]
)
def test_sequence_classification_picks_each_row_s_last_token(layout: tuple[int, int, int]) -> None:
    run_ranks(last_tokens, 2, layout, timeout=100)


# ---- bad input


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tp": 2}, "distribute(GPT, tp=2, pp=1, dp=1): tp * pp * dp is 2, and the world has 1"),
        ({"pp": 0}, "distribute(GPT, tp=1, pp=0, dp=1): pp=0 is not a whole number of 1 or more"),
        ({"schedule": "1F1P"}, "distribute(GPT, tp=1, pp=1, dp=1): schedule='1F1P' is not one of its values"),
        ({"recompute": "some"}, "distribute(GPT, tp=1, pp=1, dp=1): recompute='some' is not one of its values"),
    ],
    ids=str,
)
def test_distribute_refuses_impossible_arguments(given: dict[str, Any], expected: str) -> None:
    assert message(lambda: distribute(built("gpt")[0], **given)).splitlines()[0] == expected


def test_verify_refuses_sparse_gradients_over_replicas() -> None:
    model = built("gpt")[0]
    model.wte.sparse = True  # type: ignore[union-attr, assignment]
    with pytest.raises(autotp.Error, match="`aten::embedding` has a sparse gradient, which replicas and stages cannot"):
        autotp.verify(model, 1, dp=2)


def refused(rank: int, n: int) -> list[str]:
    """On every rank, and nothing is left hanging: what comes behind is right."""
    model, batch = built("gpt")
    found = []

    def tried(call: Any) -> Any:
        found.append(message(call).splitlines()[0])

    small = gpt(**SIZES | {"n_layer": 1, "dropout": 0.1})
    tried(lambda: distribute(small, pp=2))
    tried(lambda: distribute(nn.Sequential(nn.Linear(4, 4)), tp=2, example_inputs=torch.zeros(2, 4)))
    example = {name: x[:2] for name, x in batch.items()}
    tried(lambda: distribute(model, pp=2, microbatches=5, schedule="interleaved", example_inputs=example))
    trainer = distribute(copy.deepcopy(model), pp=2, microbatches=4, example_inputs=example)
    tried(lambda: trainer.step(**{name: x[:6] for name, x in batch.items()}))
    tried(lambda: trainer.step(batch["tokens"], batch["labels"][:4]))
    assert torch.isfinite(trainer.step(**batch))
    return found


def test_distribute_refusals_are_raised_on_every_rank() -> None:
    for found in run_ranks(refused, 2, timeout=100):
        assert found == [
            "distribute(GPT, tp=1, pp=2, dp=1): 2 stages, and the model has 1 blocks",
            "distribute(Sequential, tp=2, pp=1, dp=1): the model returns no loss (a tensor without dimensions)",
            'distribute(GPT, tp=1, pp=2, dp=1): schedule="interleaved" on 2 ranks cannot run 5 microbatches: '
            "Interleaved 1F1B requires the number of microbatches to be a multiple of the number of rounds (2), "
            "but got 5.",
            "Trainer.step: a batch of 6 does not divide into 4 microbatches",
            "Trainer.step: inputs of 8 and 4 rows, and all inputs of a batch need the same number of rows",
        ]
