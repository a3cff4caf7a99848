"""recorded: what stands for flex_attention in a capture, in models of transformers too, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention, noop_mask
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.compiler import analyse
from autotp.integrations.attention_kernels.flex.recorded import flex_without_kernels
from autotp.ops.attention.documents import ends_of_numbers
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of

checks = Checks()


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Plain(nn.Module):
    """Attention of [batch heads seq width] with a score function and a mask."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.o, self.attend = nn.Linear(4, 4), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.o(x), x)


X = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))


def refused(attend: Callable[[Tensor, Tensor], Tensor]) -> str:
    return message(lambda: autotp.explain(Plain(attend), 3, example_inputs=X))


def with_score(score_mod: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: flex_attention(x, x, x, score_mod)


def with_mask(make: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: flex_attention(x, x, x, block_mask=make(x))


BLOCKS = torch.zeros(1, 1, 1, dtype=torch.int32)
REFUSED = {
    "if": (with_score(lambda score, b, h, q, k: score if q >= k else score * 0), "asks for the value of a tensor"),
    "item": (with_score(lambda score, b, h, q, k: score * q.item()), "try      torch.where(condition, a, b)"),
    "writes": (with_score(lambda score, b, h, q, k: score.mul_(2)), "writes by `aten.mul_.Tensor`"),
    "draws": (with_score(lambda score, b, h, q, k: score + torch.rand(())), "draws random numbers by `aten.rand"),
    "number": (with_score(lambda score, b, h, q, k: 1.0), "returns float"),
    "rows": (with_score(lambda score, b, h, q, k: score + X[b, h, q]), "returns a tensor [4]"),
    "heads": (lambda x, y: flex_attention(x, x[:, :1], x[:, :1]), "try      enable_gqa=True"),
    "dimensions": (lambda x, y: flex_attention(x[0], x[0], x[0]), "[batch heads positions width]"),
    "lengths": (
        with_mask(lambda x: create_block_mask(causal, None, None, 5, 5, device="cpu")),
        "gets a BlockMask of [5, 5] and [6, 6] queries and keys",
    ),
    "blocks": (
        with_mask(lambda x: create_block_mask(causal, None, None, 6, 6, device="cpu")[:, :1]),
        "BlockMask of which forward reads `",
    ),
    "contiguous": (
        lambda x, y: flex_attention(x, x, x, kernel_options={"BLOCKS_ARE_CONTIGUOUS": True}),
        "gets BLOCKS_ARE_CONTIGUOUS in kernel_options, and each rank has other blocks",
    ),
    "options": (
        lambda x, y: flex_attention(x, x, x, kernel_options={"BLOCK_M": torch.ones(())}),  # type: ignore[call-overload]
        "gets kernel_options['BLOCK_M'] that is no number",
    ),
    "two_ways": (
        lambda x, y: flex_attention(x, x, x, return_lse=True, return_aux=AuxRequest()),  # type: ignore[call-overload]
        "gets return_lse and return_aux",
    ),
    "no_function": (
        with_mask(lambda x: BlockMask.from_kv_blocks(BLOCKS, BLOCKS.unsqueeze(-1))),
        "BlockMask.from_kv_blocks(..., mask_mod=...)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_write(name: str) -> None:
    attend, expected = REFUSED[name]
    text = refused(attend)
    assert "flex_attention" in text and expected in text and "test_recorded.py:" in text, text


def test_autocast_casts_queries_keys_and_values() -> None:
    """As torch's flex_attention does."""
    with torch.autocast("cpu", torch.bfloat16), flex_without_kernels():
        assert flex_attention(X, X, X).dtype == torch.bfloat16
    model = autotp.parallelize(Plain(lambda x, y: flex_attention(y, y, y)), 1, example_inputs=X)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X).dtype == torch.bfloat16
    assert model(X).dtype == torch.float32


def test_a_mask_of_all_keys_that_forward_makes_is_no_mask() -> None:
    attend = with_mask(lambda x: create_block_mask(noop_mask, None, None, 6, 6, device="cpu"))
    assert autotp.verify(Plain(attend), 3, example_inputs=X).ok


def test_outside_of_a_capture_the_functions_are_torch_s() -> None:
    codes = flex_attention.__code__, create_block_mask.__code__
    autotp.explain(Plain(lambda x, y: flex_attention(x, x, x)), 3, example_inputs=X)
    assert (flex_attention.__code__, create_block_mask.__code__) == codes
    assert codes[0].co_filename.endswith("flex_attention.py")


# ---- transformers


def llama(implementation: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=implementation, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if padded else {})


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own, of its compiler.
@pytest.mark.parametrize("padded", [False, True], ids=["rows", "padded"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 1, "cp": 2}], ids=str)
def test_llama_with_flex_attention_equals_one_device(layout: dict[str, Any], padded: bool) -> None:
    report = autotp.verify(llama("flex_attention"), example_inputs=rows(padded), **layout)
    assert report.ok and "needs whole" not in str(report.plan), report


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("layout", [{"tp": 1, "cp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_packed_rows_of_llama_read_the_keys_of_their_documents(layout: dict[str, Any]) -> None:
    """transformers makes numbers of documents of `position_ids`, where it keeps no cache. Layers share the ends."""
    ids, positions = rows(False)["input_ids"].view(1, 18), torch.cat([torch.arange(n) for n in (5, 9, 4)]).view(1, 18)
    packed = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    report = autotp.verify(llama("flex_attention"), cp_attention="gather", example_inputs=packed, **layout)
    assert report.ok and "2 read the keys and values that queries see" in str(report.plan), report.plan
    tp, options = layout["tp"], Options(cp=2, cp_attention="gather")
    graph = analyse(skeleton_of(llama("flex_attention")), (), packed, tp, options).graph
    assert len(list(graph.find_nodes(op="call_function", target=ends_of_numbers))) == 1


@checks.on(2)
def llama_learns_and_generates_as_with_sdpa(rank: int, n: int) -> None:
    plain, parallel = llama("sdpa"), autotp.parallelize(llama("flex_attention"), n, example_inputs=rows(True))
    for model in (plain, parallel):
        model(**rows(True)).loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    torch.testing.assert_close(parallel(**rows(True)).loss, plain(**rows(True)).loss)
    asked = {name: x for name, x in rows(True).items() if name != "labels"}
    got, expected = (model.eval().generate(**asked, max_new_tokens=3, do_sample=False) for model in (parallel, plain))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
