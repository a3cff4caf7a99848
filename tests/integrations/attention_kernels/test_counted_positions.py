"""counted_positions: which positions are known to be those of one text, and the pipeline that this makes possible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import kernel_packages
import pytest
import torch
from ranks import Checks
from torch import Tensor

import autotp
from autotp.integrations.attention_kernels.counted_positions import QUESTION, counted_positions

transformers: Any = pytest.importorskip("transformers")
utilities: Any = pytest.importorskip("transformers.modeling_flash_attention_utils")
PACKED = torch.tensor([[0, 1, 0, 1, 2]])


def counted(length: int = 5) -> Tensor:
    return (torch.arange(length) + 3).unsqueeze(0)


def written() -> Tensor:
    positions = counted()
    positions[0, 2:] = 0
    return positions


def added_in_place() -> Tensor:
    positions = torch.arange(5)
    row = positions.unsqueeze(0)
    positions += torch.tensor([0, 0, 1, 1, 1])
    return row


POSITIONS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "counted": (counted, True),
    "after a number of tokens": (lambda: torch.add(torch.arange(5), torch.tensor(2)).unsqueeze(0), True),
    "of the batch": (lambda: PACKED, False),
    "written into": (written, False),
    "written into by another name": (added_in_place, False),
    "plus a tensor": (lambda: (torch.arange(5) + PACKED[0]).unsqueeze(0), False),
    "by two": (lambda: torch.arange(0, 10, 2).unsqueeze(0), False),
    "of a remainder": (lambda: (torch.arange(5) % 3).unsqueeze(0), False),
    "a column": (lambda: torch.arange(5).unsqueeze(1), False),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_only_counted_positions_are_answered_without_their_values(name: str) -> None:
    make, is_counted = POSITIONS[name]
    real, asked = getattr(utilities, QUESTION), list[Tensor]()

    def noting(positions: Tensor, rows: int) -> Any:
        asked.append(positions)
        return real(positions, rows)

    with patch.object(utilities, QUESTION, noting), counted_positions():
        positions = make()
        answer = bool(getattr(utilities, QUESTION)(positions, 1))
    assert (answer, not asked) == (bool(real(positions, 1)), is_counted)


checks = Checks()


@checks.on(2)
def a_pipeline_takes_one_row_at_a_time(rank: int, n: int) -> None:
    """A Llama with a flash kernel and no mask; also with rows of another length than at capture."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=48, max_position_embeddings=64, attn_implementation="flash_attention_2", pad_token_id=0,
    )  # fmt: skip
    with kernel_packages.usable_in_transformers():
        plain = transformers.LlamaForCausalLM(config)
    batches = [torch.randint(1, 48, (2, length)) for length in (12, 17)]
    example = {"input_ids": batches[0][:1], "labels": batches[0][:1]}
    trainer = autotp.distribute(copy.deepcopy(plain), tp=1, pp=n, microbatches=2, example_inputs=example)
    for tokens in batches:
        loss = plain(input_ids=tokens, labels=tokens).loss
        torch.testing.assert_close(trainer.step(input_ids=tokens, labels=tokens), loss.detach())


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
