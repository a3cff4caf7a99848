"""scipy_assignment: object detectors train with their labels, as on one device: scipy's assignment is an operator."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ranks import Checks
from small_models import assert_values_close
from torch import Tensor, nn
from transformers.loss import loss_deformable_detr, loss_for_object_detection

import autotp
from autotp.integrations.scipy_assignment import assign, assignments_as_operators

LOSSES = (loss_for_object_detection, loss_deformable_detr)
SIZES = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 6, "num_labels": 5, "d_model": 24,
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "dropout": 0.0,
}  # fmt: skip
checks = Checks()


def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> tuple[Any, Any]:
    """What scipy's function returns, by trying all: a stand-in where scipy is not installed."""
    cost = np.asarray(cost_matrix) * (-1 if maximize else 1)
    if cost.shape[0] < cost.shape[1]:
        rows, columns = linear_sum_assignment(cost.T)
        order = np.argsort(columns)
        return columns[order], rows[order]
    n = range(cost.shape[1])
    rows = min(itertools.permutations(range(cost.shape[0]), len(n)), key=lambda p: sum(cost[p[i], i] for i in n))
    order = np.argsort(rows)
    return np.asarray(rows, dtype=np.int64)[order], order.astype(np.int64)


@contextmanager
def scipy_or_stand_in() -> Iterator[Any]:
    """A region in which losses of transformers find scipy's function; gives it."""
    if importlib.util.find_spec("scipy") is not None:
        from scipy import optimize

        yield optimize.linear_sum_assignment
        return
    module: Any = ModuleType("scipy.optimize")
    module.linear_sum_assignment = linear_sum_assignment
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "scipy.optimize", module)
        for loss in LOSSES:
            patch.setattr(loss, "linear_sum_assignment", linear_sum_assignment, raising=False)
            patch.setattr(loss, "requires_backends", lambda *_: None, raising=False)
        yield linear_sum_assignment


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_the_operator_is_the_function(shape: tuple[int, int], maximize: bool) -> None:
    torch.manual_seed(0)
    cost = torch.randn(shape)
    with scipy_or_stand_in() as function:
        expected = function(cost, maximize)
        found = assign(cost, maximize)
        assert [x.tolist() for x in found] == [list(x) for x in expected]
        torch.library.opcheck(assign, (cost, maximize), test_utils=("test_schema", "test_faketensor"))


def test_files_of_transformers_have_the_operator_in_a_capture_only() -> None:
    with scipy_or_stand_in() as function:
        with assignments_as_operators():
            assert all(loss.linear_sum_assignment is not function for loss in LOSSES)
        assert all(loss.linear_sum_assignment is function for loss in LOSSES)


def batch(*counts: int, size: int = 32) -> dict[str, Any]:
    """Images with so many targets each."""
    made = torch.Generator().manual_seed(sum(counts) + size)
    labels = [
        {
            "class_labels": torch.randint(0, 5, (n,), generator=made),
            "boxes": torch.rand(n, 4, generator=made) * 0.3 + 0.2,
        }
        for n in counts
    ]
    return {"pixel_values": torch.randn(len(counts), 3, size, size, generator=made), "labels": labels}


def yolos() -> Any:
    config = transformers.YolosConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=[32, 32],
        patch_size=16, num_detection_tokens=6, num_labels=5,
    )  # fmt: skip
    return transformers.YolosForObjectDetection(config)


def conditional_detr() -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    return transformers.ConditionalDetrForObjectDetection(
        transformers.ConditionalDetrConfig(backbone_config=backbone, **SIZES)
    )


class Matched(nn.Module):
    """Queries that each target is assigned one of; the loss is of these pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, targets: list[Tensor]) -> Tensor:
        boxes = self.down(self.up(x).relu())  # [images queries 4]
        losses = []
        for found, wanted in zip(boxes, targets, strict=True):
            cost = torch.cdist(found.detach(), wanted, p=1).cpu()
            rows, columns = (torch.as_tensor(i) for i in loss_for_object_detection.linear_sum_assignment(cost))
            losses.append((found[rows] - wanted[columns]).abs().sum())
        return torch.stack(losses).mean()


def rows_of(*counts: int) -> tuple[Tensor, list[Tensor]]:
    made = torch.Generator().manual_seed(sum(counts))
    targets = [torch.randn(n, 4, generator=made, dtype=torch.float64) for n in counts]
    return torch.randn(len(counts), 5, 6, generator=made, dtype=torch.float64), targets


@checks.on(2)
def assigned_pairs_train_as_on_one_device(rank: int, n: int) -> None:
    """Loss and gradients of three steps; the second has other numbers of targets: one image has more than queries."""
    with scipy_or_stand_in():
        torch.manual_seed(0)
        model = Matched().double()
        parallel = autotp.parallelize(copy.deepcopy(model), n, example_inputs=rows_of(2, 3))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, parallel)]
        for call in (rows_of(2, 3), rows_of(6, 1), rows_of(2, 3)):
            found: list[list[Tensor]] = []
            for m, optimizer in zip((model, parallel), optimizers, strict=True):
                optimizer.zero_grad()
                loss = m(*call)
                loss.backward()
                found.append([loss, *(autotp.gather(p.grad) for p in m.parameters())])
                optimizer.step()
            assert_values_close(found[1], found[0], rtol=1e-10, atol=1e-12)
        assert parallel.layouts["up.weight"].dim is not None


def expect_one_devices(build: Any, n: int) -> None:
    """The loss, its parts and all gradients of a detector of transformers."""
    torch.set_default_dtype(torch.float64)  # A loss makes weights of the default dtype.
    try:
        with scipy_or_stand_in():
            torch.manual_seed(0)
            model = build().train()
            found: list[dict[str, Tensor]] = []
            for m in (model, autotp.parallelize(copy.deepcopy(model), n, example_inputs=batch(2, 3))):
                output = m(**batch(2, 3))
                output.loss.backward()
                gradients = {k: autotp.gather(p.grad) for k, p in m.named_parameters() if p.grad is not None}
                found.append({"loss": output.loss, **output.loss_dict, **gradients})
            assert found[0].keys() == found[1].keys() and found[0]["loss_bbox"] > 0
            assert_values_close(found[1], found[0], rtol=1e-9, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


@checks.on(2, rare=True)
def yolos_trains_with_labels(rank: int, n: int) -> None:
    expect_one_devices(yolos, n)


@checks.on(2, rare=True)
def conditional_detr_trains_with_labels(rank: int, n: int) -> None:
    """Its assignment is of another file of transformers."""
    expect_one_devices(conditional_detr, n)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_detectors_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
