"""SpecAugment: models of sound draw their masks from numpy, in each call anew, and all ranks draw the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ranks import Checks
from torch import Tensor
from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

import autotp
from autotp.integrations.transformers.spec_augment import mask_spans, masks_as_operators
from autotp.passes.emit.kept_values.recomputed import Recomputed

SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "conv_dim": (8, 8),
    "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
}  # fmt: skip
MASKS = {"mask_time_prob": 0.4, "mask_time_length": 3, "mask_feature_prob": 0.3, "mask_feature_length": 4}
X = torch.linspace(-1, 1, 800).sin().view(2, 400)
FILE = "transformers.models.wav2vec2.modeling_wav2vec2"
PADDING = (torch.arange(400) < torch.tensor([[400], [280]])).long()


def built(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(**SIZES, **MASKS | settings)
    return transformers.Wav2Vec2Model(config).double().train()


def test_the_operator_is_the_function_of_the_file() -> None:
    file = transformers.models.wav2vec2.modeling_wav2vec2
    np.random.seed(5)
    mask = file._compute_mask_indices((2, 50), 0.4, 3, min_masks=2)
    np.random.seed(5)
    found = mask_spans(None, 2, 50, 0.4, 3, 2, file.__name__)
    assert found.dtype == torch.bool and found.any() and not found.all()
    assert (found.numpy() == mask).all()
    before = file._compute_mask_indices
    with masks_as_operators():
        assert file._compute_mask_indices is not before
        assert _compute_mask_indices is file._compute_mask_indices  # By the name of another file, too.
    assert file._compute_mask_indices is _compute_mask_indices is before


@pytest.mark.parametrize(
    ("name", "padded"), [("Wav2Vec2", False), ("Wav2Vec2", True), ("Hubert", True), ("WavLM", False)]
)
def test_spec_augment_equals_one_device(name: str, padded: bool) -> None:
    torch.manual_seed(0)
    masks = {k: v for k, v in MASKS.items() if name != "WavLM" or "time" in k}  # Its configuration lacks a setting.
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**SIZES, **masks))
    given = {"input_values": X} | ({"attention_mask": PADDING} if padded else {})
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    report = autotp.verify(model.train(), 2, example_inputs=given)
    assert report.ok, report
    assert np.random.get_state()[1].tolist() == before, "the user's numbers are as before"  # type: ignore[index, union-attr]


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: autotp.gather(p.grad) for name, p in model.named_parameters() if p.grad is not None}


checks = Checks()


@checks.on(2)
def three_calls(rank: int, n: int) -> None:
    """Each draws another mask, that of one device with the first rank's random state."""
    given = {"input_values": X.double()}
    whole, split = built(), autotp.parallelize(built(), n, example_inputs=given, randomness="exact")
    outputs = []
    np.random.seed(3 + rank)  # The first rank's counts.
    state = None
    for _ in range(3):
        mine = np.random.get_state() if state is None else state
        torch.manual_seed(7)  # Of dropout.
        found = split(**given).last_hidden_state
        after = np.random.get_state()
        if rank == 0:
            np.random.set_state(mine)
            torch.manual_seed(7)
            expected = whole(**given).last_hidden_state
            assert torch.allclose(found, expected, rtol=0, atol=1e-10)
            assert repr(np.random.get_state()) == repr(after)
        for model, out in ((whole, expected if rank == 0 else None), (split, found)):
            if out is not None:
                model.zero_grad()
                out.square().sum().backward()
        own = gradients(split)
        if rank == 0:
            for name, p in whole.named_parameters():
                assert p.grad is None or torch.allclose(own[name], p.grad, rtol=0, atol=1e-9), name
        outputs.append(found.detach())
        state = after
    assert not outputs[0].equal(outputs[1]) and not outputs[1].equal(outputs[2])


@checks.on(2)
def another_generator_of_numpy(rank: int, n: int) -> None:
    """Ranks would draw different masks: it is an error on all of them."""
    given = {"input_values": X.double()}
    split, own = autotp.parallelize(built(), n, example_inputs=given), np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(rank))
    try:
        with pytest.raises(autotp.Error, match=r"draws from `numpy.random`, whose generator was replaced"):
            split(**given)
    finally:
        np.random.set_bit_generator(own)


@checks.on(2)
def evaluation_draws_nothing(rank: int, n: int) -> None:
    given = {"input_values": X.double()}
    split = autotp.parallelize(built(), n, example_inputs=given).eval()
    np.random.seed(rank)
    before = repr(np.random.get_state())
    assert split(**given).last_hidden_state.equal(split(**given).last_hidden_state)
    assert repr(np.random.get_state()) == before


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_other_numbers_of_numpy_are_refused() -> None:
    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * float(np.random.rand())

    with pytest.raises(autotp.Error, match=r"forward draws a number from Python's `numpy.random`"):
        autotp.verify(Noise(), 2, example_inputs=torch.ones(2, 4))


def test_parts_of_a_batch_are_refused() -> None:
    model = transformers.Wav2Vec2ForSequenceClassification(transformers.Wav2Vec2Config(**SIZES, **MASKS)).train()
    given = {"input_values": X, "labels": torch.tensor([0, 1])}
    with pytest.raises(autotp.Error, match=r"`autotp.mask_spans.default` draws from `numpy.random` for all rows"):
        autotp.verify(model, 1, dp=2, example_inputs=given)


def test_a_block_that_draws_is_not_computed_again() -> None:
    """Backward would draw another mask: `checkpoint` keeps torch's random state only."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    mask = graph.call_function(torch.ops.autotp.mask_spans.default, (None, 4, 50, 0.5, 2, 1, FILE))
    cos = graph.call_function(torch.cos, (x,))
    graph.output(graph.call_function(torch.mul, (cos, mask)))
    block = Recomputed(torch.fx.GraphModule(torch.nn.Module(), graph))
    x = torch.ones(4, 50, requires_grad=True)
    found = block(x)
    found.sum().backward()
    assert x.grad is not None and x.grad.ne(0).equal(found.ne(0))
