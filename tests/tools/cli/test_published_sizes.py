"""Published sizes by name: their parameters are as many as their papers say; what replaces a value."""

from __future__ import annotations

import pytest

from autotp.tools.cli.model_argument import ModelArgument, on_meta
from autotp.tools.cli.output import WrongUse
from autotp.tools.cli.published_sizes import PUBLISHED

BILLIONS = {"gpt-8.3b": 8.3, "gpt-1008b": 1008.0, "bert-3.9b": 3.9, "llama-3-8b": 8.0, "llama-3-70b": 70.6}
"""Parameters as the papers count them; Llama's are those of the released models."""


@pytest.mark.parametrize("name", BILLIONS)
def test_it_has_as_many_parameters_as_published(name: str) -> None:
    model = on_meta(ModelArgument(name, {}))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert next(model.parameters()).is_meta


def test_each_published_size_has_its_source() -> None:
    assert len(PUBLISHED) == 5 + 10 + 3 + 3
    assert all("arXiv" in one.source and "table" in one.source for one in PUBLISHED.values())


@pytest.mark.parametrize("name", ["gpt-355m", "GPT-355M", "bert-334m", "llama-3-8b"])
def test_published_sizes_take_layers_and_other_values(name: str) -> None:
    model = on_meta(ModelArgument(name, {"vocab_size": 128}, layers=2))
    blocks = {
        key.split(".")[i]
        for key, _ in model.named_parameters()
        for i, part in enumerate(key.split("."))
        if part.isdigit()
    }
    assert blocks == {"0", "1"} and any(128 in p.shape for p in model.parameters())


def test_published_sizes_refuse_wrong_settings() -> None:
    with pytest.raises(WrongUse, match="unexpected keyword argument 'width'"):
        on_meta(ModelArgument("gpt-8.3b", {"width": 3}))
    with pytest.raises(WrongUse, match="--attention is for models of transformers"):
        on_meta(ModelArgument("gpt-8.3b", {}, attention="eager"))
