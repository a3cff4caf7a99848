"""documents: packed documents in the steps of `distribute`, beside one device that has them all in one row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import kernel_packages
import pytest
import torch
import torch.nn.functional as F
from cards.pretend import asked_for
from cards.spies import host_waits
from errors import message
from kernel_packages.flash_attn import flash_attn_varlen_func
from ranks import Checks, run_ranks
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

import autotp
from autotp.model_library import library

checks, on_cards = Checks(), Checks(cards=True)
VOCAB, WIDTH = 40, 32


class Block(nn.Module):
    def __init__(self, function: str) -> None:
        super().__init__()
        self.function, self.norm = function, nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor, ends: Tensor, longest: int) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).flatten(0, -2).unflatten(-1, (-1, 8)) for part in (self.q, self.k, self.v))
        if self.function == "varlen_attn":
            out: Any = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0), enable_gqa=True)
        else:
            out = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)
        return x + self.o(out.flatten(-2).view(x.shape))


class Decoder(nn.Module):
    """The loss of tokens of packed documents: [tokens], or [rows tokens], with learned positions."""

    def __init__(self, function: str = "varlen_attn") -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(function) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor, ends: Tensor, longest: int) -> Tensor:
        x = self.embed(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, ends, longest)
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def batch(lengths: Sequence[int], seed: int, *shape: int) -> dict[str, Any]:
    """Documents of these lengths; no token is the label of the first one of the next document."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]
    labels = torch.cat([torch.cat([text[1:], torch.tensor([-100])]) for text in texts])
    tensors = {"tokens": torch.cat(texts), "labels": labels, "positions": torch.cat([torch.arange(n) for n in lengths])}
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    return {name: x.view(*shape, -1) for name, x in tensors.items()} | {"ends": ends, "longest": max(lengths)}


def joined(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The documents of several batches as one."""
    rows = {name: torch.cat([x[name].flatten() for x in batches]) for name in ("tokens", "labels", "positions")}
    lengths = torch.cat([x["ends"].diff() for x in batches])
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    return rows | {"ends": ends, "longest": int(lengths.max())}


def expect_equal_training(
    model: nn.Module, steps: Sequence[Sequence[dict[str, Any]]], example: dict[str, Any] | None = None, **layout: Any
) -> Any:
    """Trains on the batches of each replica in each step, and one device on all documents of the step in one row."""
    plain = copy.deepcopy(model)
    trainer = autotp.distribute(model, example_inputs=example or steps[0][0], **layout)
    replica = trainer.mesh["dp"].get_local_rank()
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (plain, trainer)]
    for batches in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = plain(**joined(batches))
        loss.backward()
        torch.testing.assert_close(trainer.step(**batches[replica]), loss.detach(), rtol=1e-10, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    whole = autotp.full_state_dict(trainer)
    for name, value in plain.state_dict().items() if whole else ():  # The first rank has it.
        torch.testing.assert_close(whole[name], value, rtol=1e-10, atol=1e-10)
    return trainer


def decoder(function: str = "varlen_attn") -> nn.Module:
    torch.manual_seed(0)
    return Decoder(function).double()


ONE_ROW = [[[6, 3, 11], [9, 8]], [[5, 5, 4, 9], [1, 16]], [[1, 16], [7, 7, 7, 7]], [[13], [2] * 7], [[6, 3, 11], [4]]]
"""Of each step the documents of two replicas: other numbers of tokens and of documents, and another longest one."""
ROWS = [
    [[6, 4, 10, 7, 3], [10, 10, 1, 9]],
    [[10, 5, 5, 10], [2] * 15],
    [[9, 1, 10, 4, 4, 2], [10, 10, 10]],
    [[10, 3, 7, 10], [8, 2, 8, 2, 8, 2]],
]
"""The same in three rows of ten tokens: each row ends with a document."""


@checks.on(2, 4)
def one_row_of_documents_trains_as_one_device(rank: int, n: int) -> None:
    """Each replica gets documents of its own; also as `[1, tokens]`."""
    layouts: list[dict[str, Any]] = [{"tp": 2}, {"dp": 2}] if n == 2 else [{"tp": 2, "dp": 2}, {"cp": 2, "dp": 2}]
    for layout, shape in zip(layouts, [(), (1,)], strict=True):
        replicas = layout.get("dp", 1)
        steps = [[batch(x, 2 * i + j, *shape) for j, x in enumerate(s[:replicas])] for i, s in enumerate(ONE_ROW)]
        trainer = expect_equal_training(decoder(), steps, **layout)
        analyses = {id(pipeline.analysis) for pipeline in trainer._pipelines}
        assert len(analyses) <= 2  # The second one has the longest document's length as an input.


@checks.on(2, 4)
def rows_of_documents_over_stages_train_as_one_device(rank: int, n: int) -> None:
    """Each microbatch has the documents of its rows (Megatron-LM#5635: two rows a microbatch)."""
    layouts: list[dict[str, Any]] = [{"pp": 2, "microbatches": 3}, {"tp": 2, "microbatches": 3}]
    if n == 4:
        layouts = [{"pp": 2, "tp": 2, "microbatches": 3}, {"pp": 2, "dp": 2, "microbatches": 3, "zero": 1}]
    for layout, function, times in zip(layouts, ["varlen_attn", "flash_attn"], [1, 2], strict=True):
        replicas = layout.get("dp", 1)
        steps = [
            [batch(x * times, 2 * i + j, 3 * times) for j, x in enumerate(lengths[:replicas])]
            for i, lengths in enumerate(ROWS)
        ]
        trainer = expect_equal_training(decoder(function), steps, **layout)
        inputs = steps[1][trainer.mesh["dp"].get_local_rank()]
        torch.testing.assert_close(trainer.evaluate(**inputs), trainer.step(**inputs), rtol=1e-12, atol=1e-12)


@checks.on(4)
def rows_of_documents_over_stages_and_cp_train_as_one_device(rank: int, n: int) -> None:
    steps = [[batch(lengths[0], i, 3)] for i, lengths in enumerate(ROWS)]
    for function in ("varlen_attn", "flash_attn"):
        expect_equal_training(decoder(function), steps, batch([6, 4], 0, 1), pp=2, cp=2, microbatches=3)


@on_cards.on(2, 4)
def on_cards_the_host_waits_once_a_step_for_documents(rank: int, n: int) -> None:
    """Of three microbatches, over cp. A loop that has the ends on the CPU waits for none."""
    steps = [batch(lengths[0], i, 3) for i, lengths in enumerate(ROWS * 2)]
    layout = {"pp": n // 2, "cp": 2, "microbatches": 3, "cp_attention": "gather"}
    trainer = autotp.distribute(decoder("flash_attn").bfloat16(), example_inputs=batch([6, 4], 0, 1), **layout)
    for i, inputs in enumerate(steps):
        on_card = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        for given, waits in ((on_card, 1), ({**on_card, "ends": inputs["ends"]}, 0)):
            with host_waits() as seen:
                trainer.step(**given)
            of_ends = {at: times for (_, at), times in seen.own_waits.items() if "autotp/attached" in at}
            assert i < 2 or sum(of_ends.values()) == waits, seen


@checks.on(2)
def a_document_does_not_see_the_others_in_a_pipeline(rank: int, n: int) -> None:
    """KempnerForge#204: later stages did not know the documents."""
    inputs = batch([6, 4, 3, 7], 0, 2)
    trainer = autotp.distribute(decoder(), pp=n, microbatches=2, example_inputs=inputs)
    labels, tokens = inputs["labels"].flatten().clone(), inputs["tokens"].flatten().clone()
    labels[:6] = labels[10:13] = -100
    tokens[:6] = (tokens[:6] + 7) % VOCAB
    tokens[10:13] = (tokens[10:13] + 7) % VOCAB
    inputs["labels"] = labels.view(2, 10)
    assert torch.equal(trainer.step(**inputs), trainer.step(**{**inputs, "tokens": tokens.view(2, 10)}))


@checks.on(2)
def a_document_in_two_microbatches_is_refused_on_each_rank(rank: int, n: int) -> None:
    trainer = autotp.distribute(decoder(), pp=n, microbatches=2, example_inputs=batch([6, 4, 3, 7], 0, 2))
    text = message(trainer.step, **batch([6, 8, 6], 0, 2))
    assert "the document that begins at token 6 lies in two microbatches, of 10 tokens each" in text
    assert "rows of equal length" in text
    assert "a batch of 1 does not divide into 2 microbatches" in (text := message(trainer.step, **batch([20], 0, 1)))
    assert "packed documents in as many rows" in text
    assert trainer.step(**batch([6, 4, 3, 7], 0, 2)).isfinite()


@checks.on(2)
def wrong_ends_of_one_replica_are_an_error_on_each_rank(rank: int, n: int) -> None:
    trainer = autotp.distribute(decoder(), dp=n, example_inputs=batch([6, 4], 0))
    for ends in ([0, 6, 9], [0, 9, 6, 10], [4, 10]):
        inputs = batch([6, 4], rank)
        inputs["ends"] = torch.tensor(ends, dtype=torch.int32) if rank else inputs["ends"]
        text = message(trainer.step, **inputs)
        assert f"packed documents are {ends}" in text, text
    inputs["ends"] = torch.tensor([0, 6, 10]) if rank else inputs["ends"]
    assert "torch.int64" in message(trainer.step, **{**inputs, "ends": torch.tensor([0, 6, 10], dtype=torch.int64)})


@checks.on(2)
def a_document_of_one_replica_that_is_too_long_is_an_error_on_each_rank(rank: int, n: int) -> None:
    trainer = autotp.distribute(decoder(), dp=n, example_inputs=batch([6, 4], 0))
    for run in (trainer.step, trainer.evaluate, trainer.step):
        inputs = {**batch([6, 4], rank), "longest": 3 if rank else 6}
        assert "a packed document has 6 tokens, and the longest is said to have 3" in message(run, **inputs)
    assert trainer.step(**batch([6, 4], rank)).isfinite()


class Counting(Decoder):
    """Computes positions of where documents end."""

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor, ends: Tensor, longest: int) -> Tensor:
        return super().forward(tokens, labels, positions + 0 * ends[1], ends, longest)


def test_ends_that_the_model_computes_with_are_refused_in_microbatches() -> None:
    text = message(
        autotp.verify, Counting().double(), 1, microbatches=2, example_inputs=tuple(batch([6, 4], 0, 1).values())
    )
    assert "reads where documents end, and each microbatch has other documents" in text
    assert "cu_seqlens as an argument that attention alone reads" in text


def test_tokens_without_rows_are_refused_over_cp() -> None:
    inputs = tuple(batch([6, 4], 0).values())
    text = message(autotp.verify, decoder(), 1, cp=2, dp=2, example_inputs=inputs)
    assert "cp cannot cut rows" in text and "[1, tokens] in place of [tokens]" in text


def test_verify_has_the_documents_of_all_microbatches_and_replicas() -> None:
    inputs = tuple(batch([6, 4, 10], 0, 2).values())
    report = autotp.verify(decoder(), 2, pp=2, dp=2, microbatches=2, example_inputs=inputs)
    assert report.ok, report


def flattened(lengths: Sequence[int], seed: int, rows: int = 1, with_ends: bool = True) -> dict[str, Any]:
    """Documents as transformers' collator makes them; in several rows, as its tensors seen anew."""
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(seed)
    texts = [{"input_ids": torch.randint(VOCAB, (n,), generator=generator).tolist()} for n in lengths]
    inputs = dict(transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=with_ends)(texts))
    return {name: x.view(rows, -1) if isinstance(x, Tensor) and x.dim() == 2 else x for name, x in inputs.items()}


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if asked_for() else torch.float64  # A kernel on a card takes no other one.
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=dtype)


def with_the_collator(rank: int, n: int, layout: dict[str, Any], rows: int, with_ends: bool) -> None:
    documents = ROWS if rows > 1 else ONE_ROW
    replicas = layout.get("dp", 1)
    with kernel_packages.usable_in_transformers():
        plain = llama()
        example = flattened([6, 4] if "cp" in layout else documents[0][0], 0, 1 if "cp" in layout else rows, with_ends)
        trainer = autotp.distribute(copy.deepcopy(plain), example_inputs=example, **layout)
        optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (plain, trainer)]
        for i, lengths in enumerate(documents):
            for optimizer in optimizers:
                optimizer.zero_grad()
            inputs = [flattened(x, 2 * i + j, rows, with_ends) for j, x in enumerate(lengths[:replicas])]
            # One device has a step of each replica's documents, weighted by their labels.
            counts = [int((x["labels"] != -100).sum()) for x in inputs]
            # Of several rows transformers looks at no positions: it is told where documents end.
            told = [flattened(x, 2 * i + j, rows) for j, x in enumerate(lengths[:replicas])]
            losses = [plain(**x).loss * count / sum(counts) for x, count in zip(told, counts, strict=True)]
            torch.stack(losses).sum().backward()
            loss = trainer.step(**inputs[trainer.mesh["dp"].get_local_rank()])
            expected = torch.stack(losses).sum().detach().double()
            # bfloat16 has 8 bits; transformers' norms compute in float32.
            rtol = 2e-2 if asked_for() else 1e-5
            torch.testing.assert_close(loss.double().cpu(), expected, rtol=rtol, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize(
    ("layout", "rows", "with_ends"),
    [
        ({"tp": 2, "dp": 2}, 1, True),
        ({"pp": 2, "tp": 2, "microbatches": 3}, 3, True),
        ({"pp": 2, "dp": 2, "microbatches": 3}, 3, True),
        ({"cp": 2, "dp": 2}, 1, True),
        ({"cp": 2, "dp": 2}, 1, False),  # Positions that start again are all that tells documents.
        ({"tp": 2, "dp": 2}, 1, False),
        ({"pp": 2, "tp": 2, "microbatches": 3}, 3, False),
        ({"pp": 2, "cp": 2, "microbatches": 3}, 3, False),
        ({"tp": 2, "dp": 2}, 3, False),  # Several rows in a call.
    ],
    ids=str,
)
def test_the_collator_for_flash_kernels_trains_as_one_device(
    layout: dict[str, Any], rows: int, with_ends: bool
) -> None:
    run_ranks(with_the_collator, 4, layout, rows, with_ends, timeout=100)


@pytest.mark.parametrize("rows", [1, 2])
def test_positions_alone_tell_documents_of_a_flash_kernel(rows: int) -> None:
    """In a step. Of several rows transformers looks at none, and of a row in a microbatch it would look in forward."""
    with kernel_packages.usable_in_transformers():
        model = llama()
        for lengths in ([6, 4, 10], [9]) if rows == 1 else ([6, 4, 10], [7, 7], [1, 5, 1, 1, 4]):
            positions = flattened(lengths, 0, rows, with_ends=False)
            expected = flattened(lengths, 0, rows)
            inputs = library().with_documents(model, positions)
            assert inputs.keys() == expected.keys() and inputs["max_length_k"] == expected["max_length_k"]
            assert torch.equal(inputs["cu_seq_lens_q"], expected["cu_seq_lens_q"])
            assert inputs["cu_seq_lens_q"].dtype == torch.int32
            assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"]
            masked = {**positions, "attention_mask": torch.ones(1, sum(lengths))}
            shared = {**positions, "input_ids": positions["input_ids"].repeat(2, 1)}  # Positions of all rows.
            for other in (expected, masked, shared):
                assert library().with_documents(model, other) is other
        goes_on = {"position_ids": torch.tensor([[0, 1, 0, 1], [2, 3, 0, 1]])}  # Into another row: it ends there.
        assert library().with_documents(model, goes_on)["cu_seq_lens_q"].tolist() == [0, 2, 4, 6, 8]
        model.config._attn_implementation = "sdpa"
        assert library().with_documents(model, positions) is positions
        if rows == 1:
            assert autotp.verify(llama(), 2, dp=2, cp=2, example_inputs=flattened([6, 4, 10], 0, with_ends=False)).ok


@pytest.mark.parametrize(("n", "name"), on_cards.cases())
def test_documents_on_cards(n: int, name: str) -> None:
    on_cards.expect(n, name)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_documents_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
