"""logit_notes: a plan says what reads logits that stay whole, and how many bytes of others are in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from graphs import CLASSES, LABELS, WIDTH, WORD_ROWS, small
from torch import Tensor, nn

from autotp.compiler import analyse
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small():
        yield


class Logits(nn.Module):
    """A head and what reads its logits. reader: which; the layer before it is as wide as a head"""

    def __init__(self, reader: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 24)
        self.head, self.teacher, self.reader = nn.Linear(24, CLASSES, bias=False), nn.Linear(24, CLASSES), reader

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.up(self.table(tokens)).relu()
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        match self.reader:
            case "returned":
                return loss, logits
            case "read":
                return loss + logits.square().mean()
            case "products":  # Of two heads.
                products = logits * self.teacher(x)
                return products.sum()
        return loss


CHUNKS = {
    1: "296 B of a head at a time, of 3.1 KB, gradients in forward (predicted for 4,096 rows: 0.19 ms and 429.5 KB "
    "kept, or 0.253 ms and 65.5 KB with logits again in backward)",
    2: "296 B of a head at a time, of 1.6 KB, again in backward for 0 GFLOP",
}
PRODUCTS = "are whole: aten::mul reads them, products = logits * self.teacher(x)"
WHOLE = {
    "returned": "3.1 KB of head are whole: the model returns them",
    "read": "3.1 KB of head are whole: aten::square reads them, return loss + logits.square().mean()",
    "products": f"3.1 KB of head {PRODUCTS}",
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("reader", ["", *WHOLE])
def test_a_plan_says_what_logits_take(reader: str, tp: int) -> None:
    options = Options(cut={"head": "vocab"} if tp > 1 else {})
    notes = analyse(skeleton_of(Logits(reader)), (WORD_ROWS, LABELS), {}, tp, options).notes
    text = re.sub(r"test_logit_notes.py:\d+  ", "", notes["logits"])
    assert text == (WHOLE[reader] if reader else CHUNKS[tp])
    assert ("loss" in notes) == (reader == "")


def test_a_plan_says_that_a_head_is_cut_along_its_input() -> None:
    options = Options(cut={"head": "rowwise"})
    notes = analyse(skeleton_of(Logits("")), (WORD_ROWS, LABELS), {}, 2, options).notes
    assert notes["logits"] == "3.1 KB of head are whole: its weight is cut along its input"
