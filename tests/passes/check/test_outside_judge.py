"""A judge from outside: Meta's spmd_types accepts the lowered graphs of whole families, from the layouts alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.compiler import analyse, flat_graphs
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig
from autotp.ops.losses.linear_cross_entropy import linear_class_terms
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.losses import linear_cross_entropy
from autotp.passes.lower.overlap import separate

pytest.importorskip("spmd_types", reason="its checker judges our graphs: pip install spmd_types")
pytest.importorskip("transformers")
from spmd_judge import Inexpressible, given_to, judge
from support.hf_families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # in transformers
USUAL = ("gpt2", "llama", "bert", "t5", "deepseek_v3")
"""One of each kind: fused and separate heads, encoders, cross-attention, experts. The others are rare tests."""
PARTLY_HELD: dict[int, tuple[str, ...]] = {
    2: ("gpt_bigcode", "falcon-mqa"),
    3: ("gpt_bigcode", "falcon-mqa", "falcon-new", "phi3"),
}
"""tp -> families with a tensor of which some positions are on several ranks, and others on one rank."""


def ours(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    tokens = torch.arange(14).view(2, 7)
    if name == "gpt":
        return GPT(GPTConfig(16, 97, 2, 3, 48, 0.1)), {"tokens": tokens, "labels": tokens}
    sentences = {"tokens": tokens, "types": tokens % 2, "mask": tokens > 0}
    return BERT(BERTConfig(16, 97, 2, 2, 3, 48, 0.1)), sentences


def verdict(model: nn.Module, inputs: dict[str, Any], tp: int, sequence: bool) -> None:
    """Raises what the judge raises of the graphs of a model in training."""
    program = analyse(skeleton_of(model.train()), (), inputs, tp, Options(sequence_parallel=sequence))
    graphs = [separate(graph) for graph in flat_graphs(program, "exact")]
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    judge(graphs, program, given_to(program, model, tensors))


@pytest.mark.parametrize("sequence", [False, True], ids=["heads", "sequence"])
@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.rare)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * (n not in USUAL)) for n in FAMILIES])
def test_spmd_types_accepts_families(name: str, tp: int, sequence: bool) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    if name in PARTLY_HELD[tp]:
        with pytest.raises(Inexpressible):
            verdict(model, inputs, tp, sequence)
    else:
        verdict(model, inputs, tp, sequence)


class HeadWithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.layer = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        return nn.functional.cross_entropy(self.head(hidden + self.layer(hidden)).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("tp", [2, 3])
def test_spmd_types_accepts_a_head_with_its_loss(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "LEAST", 12)
    inputs = {"tokens": torch.arange(10).view(2, 5)}
    program = analyse(skeleton_of(HeadWithLoss()), (), inputs, tp)
    assert any(node.target is linear_class_terms for node in program.graph.nodes)
    verdict(HeadWithLoss(), inputs, tp, sequence=False)


@pytest.mark.parametrize("sequence", [False, True], ids=["heads", "sequence"])
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_spmd_types_accepts_gpt_and_bert(name: str, tp: int, sequence: bool) -> None:
    model, inputs = ours(name)
    verdict(model, inputs, tp, sequence)
