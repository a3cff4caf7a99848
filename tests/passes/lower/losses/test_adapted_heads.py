"""A head with an adapter, trained or frozen: its logits are never whole, and gradients are those of one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import CLASSES, LABELS, WIDTH, WORD_ROWS, beside_one_device, first_graph, fused, small
from ranks import Checks
from torch import Tensor, nn

import autotp

checks = Checks()
BY_WORDS = {"head": "vocab"}


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small():
        yield


class Adapted(nn.Module):
    """A table, a layer, and a head with two adapters. reader: what reads the logits; frozen: whether the head is"""

    def __init__(self, reader: str = "loss", frozen: bool = True, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.reader = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), reader
        self.head, self.dropout = nn.Linear(WIDTH, CLASSES, bias), nn.Dropout(dropout)
        self.down = nn.ModuleList(nn.Linear(WIDTH, rank, bias=False) for rank in (3, 2))
        self.adapter = nn.ModuleList(nn.Linear(rank, CLASSES, bias=False) for rank in (3, 2))
        self.head.requires_grad_(not frozen)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.table(tokens)))
        base = z = self.head(hidden)
        for down, up, scale in zip(self.down, self.adapter, (0.5, 2.0), strict=False):
            z = z + up(down(self.dropout(hidden))) * scale
        match self.reader:
            case "capped":
                return F.cross_entropy((torch.tanh(z / 3) * 3).flatten(0, 1), labels.flatten(), label_smoothing=0.1)
            case "policy":
                every = z.log_softmax(-1)
                return (every.gather(-1, labels.clamp(0)[..., None])[..., 0] - (every.exp() * every).sum(-1)).mean()
            case "reference":  # As in GRPO, where the reference is the model without its adapters.
                return F.kl_div(
                    z.log_softmax(-1), base.detach().log_softmax(-1), log_target=True, reduction="batchmean"
                )
        return F.cross_entropy(z.flatten(0, 1), labels.flatten())


READERS = "loss", "capped", "policy", "reference"


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("reader", READERS)
def test_logits_are_never_whole_and_all_is_equal_to_one_device(reader: str, frozen: bool, tp: int) -> None:
    model, cut = Adapted(reader, frozen, bias=True).double(), BY_WORDS if tp > 1 else None
    values = [node.meta.get("val") for node in first_graph(model, tp, cut=cut).nodes if node.op != "placeholder"]
    assert not [x for x in values if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] == -(-CLASSES // tp)]
    assert len(fused(model, tp, cut=cut)) == 1
    report = autotp.verify(model, tp=tp, example_inputs=(WORD_ROWS, LABELS), cut=cut)
    assert report.ok and report.computed and report.worst.error < 1e-10, str(report)


def test_an_adapter_of_peft_on_the_head() -> None:
    peft = pytest.importorskip("peft")
    model: Any = Adapted()
    model.down = model.adapter = nn.ModuleList()
    config = peft.LoraConfig(r=2, target_modules=["head"], lora_dropout=0.1, init_lora_weights=False)
    model = peft.get_peft_model(model, config).double()
    cut = {"base_model.model.head.base_layer": "vocab"}
    assert fused(model, 2, cut=cut) == ["linear_class_terms"]
    assert autotp.verify(model.eval(), tp=2, example_inputs=(WORD_ROWS, LABELS), cut=cut).ok


@checks.on(2, 4)
def steps_are_those_of_one_device(rank: int, n: int) -> None:
    for reader in READERS:
        beside_one_device(n, Adapted(reader, frozen=reader != "policy").double(), cut=BY_WORDS)


@checks.on(2)
def dropout_in_an_adapter_is_that_of_one_device(rank: int, n: int) -> None:
    """Before the adapter, on rows that every rank has: each rank draws the same."""
    for recompute in (None, "full"):
        whole: nn.Module = Adapted(dropout=0.3).double()
        more: dict[str, Any] = {} if recompute is None else {"recompute": recompute}
        more |= {"randomness": "exact", "cut": BY_WORDS}
        with small():
            mine = autotp.parallelize(Adapted(dropout=0.3).double(), n, example_inputs=(WORD_ROWS, LABELS), **more)
        for seed in range(2):
            losses = []
            for model in (mine, whole):
                torch.manual_seed(seed)
                losses.append(model(WORD_ROWS, LABELS))
                losses[-1].backward()
            torch.testing.assert_close(*losses, rtol=0, atol=1e-10)
        expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        down = "down.0.weight"
        torch.testing.assert_close(mine.get_parameter(down).grad, expected[down], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
