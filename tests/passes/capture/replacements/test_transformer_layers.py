"""transformer_layers: those of torch.nn, captured by plain operators; a word where these give other numbers."""

import pytest
import torch
from torch import nn

import autotp


def encoder(nested: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


GIVEN = {
    "src": torch.linspace(-1, 1, 80).view(2, 5, 8),
    "src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
}


def test_transformer_encoder_with_nested_tensors_warns() -> None:
    with pytest.warns(UserWarning, match="enable_nested_tensor=False"):
        assert autotp.verify(encoder(nested=True), tp=2, example_inputs=GIVEN).ok


def test_transformer_encoder_without_nested_tensors_is_silent() -> None:
    assert autotp.verify(encoder(nested=False), tp=2, example_inputs=GIVEN).ok


def test_transformer_layers_restore_torch_after_an_error() -> None:
    before = nn.TransformerEncoder.forward, torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(autotp.Error):
        autotp.verify(encoder(nested=False), tp=2, example_inputs={"src": torch.ones(2, 5, 7)})
    assert (nn.TransformerEncoder.forward, torch.backends.mha.get_fastpath_enabled()) == before
