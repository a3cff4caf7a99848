"""`estimate`: what it predicts for whole models, what it prints, and what it refuses."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from errors import message
from graphs import noted_passes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp import compiler
from autotp.costs.hardware import KINDS
from autotp.models.gpt import GPT, GPTConfig
from autotp.options import Options
from autotp.tools.estimation.estimate import estimated_call
from autotp.tools.estimation.layout import AUTOTP, FOREACH
from autotp.training.pipeline.gradient_buckets import BUCKET

BF16 = torch.bfloat16


def gpt(layers: int = 8, heads: int = 16, hidden: int = 1024, vocab: int = 51200, seq: int = 1024) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(block_size=seq, vocab_size=vocab, n_layer=layers, n_head=heads, n_embd=hidden))


def estimated(model: nn.Module | None = None, **given: Any) -> autotp.Estimate:
    options: dict[str, Any] = {"gpu": "a100-80gb", "batch": 16, "dtype": BF16, **given}
    return autotp.estimate(gpt() if model is None else model, **options)


@pytest.fixture(scope="module")
def pipeline() -> autotp.Estimate:
    return estimated(tp=2, pp=2, dp=2, micro_batch=2)


def test_the_rows_of_the_time_add_up(pipeline: autotp.Estimate) -> None:
    assert sum(pipeline.spent.values()) == pytest.approx(pipeline.seconds)
    assert set(pipeline.spent) == {
        "products", "elementwise", "all-reduce tp", "all-gather tp", "pipeline", "gradients dp", "optimizer",
        "tied weights pp",
    }  # fmt: skip
    sharded = estimated(dp=8, batch=8, zero=3)
    assert sum(sharded.spent.values()) == pytest.approx(sharded.seconds) and sharded.spent["parameters dp"] > 0


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 2, "pp": 2, "dp": 2}, {"dp": 16}, {"dp": 16, "zero": 1}, {"dp": 16, "zero": 2}, {"dp": 16, "zero": 3},
        {"pp": 2, "dp": 8, "zero": 1}, {"pp": 2, "dp": 8, "zero": 3, "schedule": "interleaved"},
        {"pp": 2, "dp": 8, "zero": 1, "schedule": "zero-bubble"}, {"tp": 2, "dp": 8, "sequence_parallel": True},
    ],
    ids=str,
)  # fmt: skip
def test_more_bandwidth_never_makes_a_step_longer(given: dict[str, Any]) -> None:
    """Of the network or of the node; and hidden or not, a step never takes longer than with nothing hidden."""
    model, before = gpt(layers=4, vocab=8192), float("inf")
    for net, node in ((1, 50), (5, 50), (25, 50), (25, 300), (100, 300), (1000, 3000)):
        line = f"312TF 2TB/s 80GB node=8x{node}GB/s net={net}GB/s like=a100-80gb"
        est = estimated(model, gpu=line, batch=32, **given)
        assert est.seconds <= before * (1 + 1e-9)
        before = est.seconds
        assert all(saving.seconds < saving.without for saving in est.savings)


def test_estimate_runs_each_pass_but_the_last() -> None:
    """A row that is added to the tables changes what is counted, too. The last row writes Python."""
    with noted_passes() as ran:
        estimated(gpt(layers=2, vocab=8192), tp=2)
    tables = (*compiler.CANONICALIZE, *compiler.PLAN, *compiler.LOWER, *compiler.EMIT[:-1])
    assert ran == [row.name for row in tables if row.wanted(Options(summed=True))]


def test_each_saving_is_the_difference_of_two_estimates() -> None:
    given: dict[str, Any] = {"tp": 2, "dp": 8, "zero": 1, "sequence_parallel": True, "batch": 32}
    plain, compiled = (estimated(gpt(layers=4, vocab=8192), **given, compiled=fused) for fused in (False, True))
    fusing = {est.seconds: {x.name: x for x in est.savings}["pointwise operators fused"] for est in (plain, compiled)}
    for used, found in zip((False, True), fusing.values(), strict=True):
        assert (found.used, found.seconds, found.without) == (used, compiled.seconds, plain.seconds)
    names = [saving.name for saving in plain.savings]
    assert names == [
        "sums of gradients under backward", "parameters gathered ahead", "collectives beside products",
        "pointwise operators fused", "optimizer fused",
    ]  # fmt: skip
    device, optimizer = plain.device, plain.savings[-1]
    count = sum(p.elements for p in plain.source.model.parameters.values())
    moved = (80 - 28) * count / 8
    passes = moved / (device.memory_bandwidth * device.memory_sustained)
    assert optimizer.without - optimizer.seconds == pytest.approx(passes)
    assert json.loads(json.dumps(plain.to_dict()))["savings"][0]["used"] is True
    assert [row.split("  ")[0] for row in str(plain).split("what shortens a step")[1].splitlines()[1:6]] == names


def test_a_fused_optimizer_moves_each_number_once() -> None:
    """The bytes that torch's AdamW moves for a parameter: the gradient is read only, as no scale is given."""
    for fused, expected in ((True, AUTOTP.optimizer), (False, FOREACH)):
        parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
        optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=not fused)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            with Moved({parameter.grad.data_ptr() for parameter in parameters}) as moved:  # type: ignore[union-attr]
                optimizer.step()
        assert moved.bytes / 2000 == expected


class Moved(TorchDispatchMode):
    """A mode that counts the bytes of the large tensors in lists that operators read and write."""

    def __init__(self, only_read: set[int]) -> None:
        super().__init__()
        self.bytes, self.only_read = 0, only_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        lists = [(a, x) for a, x in zip(func._schema.arguments, args, strict=False) if isinstance(x, list | tuple)]
        reads = {x.data_ptr(): x for _, part in lists for x in part if isinstance(x, torch.Tensor)}
        writes = [x for a, part in lists if a.alias_info is not None and a.alias_info.is_write for x in part]
        writes = [x for x in writes if x.data_ptr() not in self.only_read]
        made = found if isinstance(found, list | tuple) and not writes else []
        self.bytes += sum(x.nbytes for x in (*reads.values(), *writes, *made) if x.numel() > 1)
        return found


def test_communicators_have_buffers() -> None:
    """One for each axis with several ranks, and one of all ranks; few channels where a node has one rank of it."""
    assert estimated(gpu="cpu-gloo", tp=2).memory[0].buffers == estimated().memory[0].buffers == 0
    within = estimated(tp=8).memory[0]
    assert within.buffers == pytest.approx(2 * 688e6)
    across = estimated(tp=8, dp=8, batch=8).memory[0]  # 25 GB/s: two of 24 channels.
    assert across.buffers == pytest.approx(688e6 * (1 + 2 / 24 + 16 / 24))
    assert within.reserved == pytest.approx(1.08 * within.total + within.error_bytes + 2**30 + within.buffers)


def long_rows(**options: Any) -> autotp.Estimate:
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=4096, vocab_size=512, n_layer=4, n_head=8, n_embd=512, dropout=0.0))
    return estimated(model, batch=2, micro_batch=2, **options)


def test_cut_sequences_divide_activations_but_for_keys_and_values() -> None:
    """Each rank has the keys and values of whole sequences, 2 s b h elements a layer, where they are gathered. On a GPU
    it has the result of attention twice: once for each piece of its rows, or for its heads, and once for its rows."""
    one, keys = long_rows(), 4 * 2 * 4096 * 2 * 512 * 2
    for cp in (2, 4):
        gathered, exchanged = (long_rows(cp=cp, cp_attention=how) for how in ("gather", "heads"))
        twice = 4 * 2 * 4096 * 512 * 2 / cp
        own = one.memory[0].activations - keys
        assert gathered.memory[0].activations == pytest.approx(own / cp + keys + twice, rel=0.01)
        assert exchanged.memory[0].activations == pytest.approx(one.memory[0].activations / cp + twice, rel=0.01)
        for est, moves in ((gathered, {"all-gather cp", "reduce-scatter cp"}), (exchanged, {"all-to-all cp"})):
            assert est.layout.devices == cp and est.flops == one.flops
            assert {name for name in est.spent if name.endswith("cp")} == {*moves, "all-reduce cp"}


def test_a_sequence_that_is_not_divided_evenly_counts_as_the_next_multiple() -> None:
    model = gpt(layers=2, hidden=64, heads=4, vocab=128, seq=16)
    odd, even = (estimated(model, cp=4, sequence=n) for n in (9, 12))
    assert odd.row == "[12], [12]" and odd == even
    image = torch.zeros(2, 3, 8, 8)
    assert estimated_call(nn.Conv2d(3, 4, 2), None, (image,), cp=2).arguments[0][0].shape == image.shape  # No sequence.


def test_parts_that_are_not_equal_inside_a_model_are_one_error() -> None:
    """Four patches of an image and the token of its class."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=8, patch_size=4))
    rows = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    text = message(lambda: estimated(model, cp=2, dtype=None, example_inputs=rows))
    assert "the graph of one of cp=2 parts of a sequence does not run" in text and "lengths that 2 divides" in text


def test_the_flops_are_those_of_the_paper(pipeline: autotp.Estimate) -> None:
    """Korthikanti et al. 2022, equation 8, for the whole batch."""
    formula = 72 * 16 * 8 * 1024 * 1024**2 * (1 + 1024 / 6 / 1024 + 51200 / 12 / 1024 / 8)
    logits = 2 * 16 * 1024 * 1024 * 51200  # Backward computes them once more, in chunks.
    assert pipeline.flops == pytest.approx(formula) and pipeline.flops_again == logits
    assert pipeline.tflops * 1e12 * pipeline.seconds * 8 == pytest.approx(formula)
    assert pipeline.mfu == pytest.approx(pipeline.tflops / 312)


def test_full_recomputation_computes_forward_again() -> None:
    again, before = estimated(recompute="full"), estimated()
    blocks = (1 + 1 / 6) / (1 + 1 / 6 + 51200 / 12 / 1024 / 8)  # The head is not computed again.
    assert again.flops == before.flops and again.flops_again / again.flops == pytest.approx(blocks / 3)
    assert again.memory[0].activations < before.memory[0].activations / 8
    assert again.seconds > before.seconds


def test_the_parameters_are_those_of_the_rank() -> None:
    model = gpt()
    whole, halves = estimated(model), estimated(model, tp=2, pp=2)
    count = sum(p.numel() for p in model.parameters())
    assert whole.memory[0].weights == whole.memory[0].gradients == 4 * count
    assert whole.memory[0].optimizer == 8 * count
    tied, norms = model.wte.weight.numel(), 0.01
    assert sum(rank.weights for rank in halves.memory) == pytest.approx(4 * (count + tied) / 2, rel=norms)


def test_the_first_rank_keeps_the_most_microbatches(pipeline: autotp.Estimate) -> None:
    first, last = pipeline.memory
    assert first.activations > 1.5 * last.activations and first.logits == 0 < last.logits


def test_a_step_has_one_copy_of_each_parameter(pipeline: autotp.Estimate) -> None:
    """All microbatches in flight read it."""
    assert [rank.copies / rank.weights for rank in pipeline.memory] == [0.5, 0.5]
    two, three = (estimated(batch=n).spent["elementwise"] for n in (2, 3))
    device, count = KINDS["a100-80gb"], sum(p.numel() for p in gpt().parameters())
    casts = (4 + 2) * count / (device.memory_bandwidth * device.memory_sustained)
    assert 3 * two - 2 * three == pytest.approx(casts)  # What does not grow with the microbatches.


def test_sums_over_replicas_copy_a_bucket_of_gradients() -> None:
    """Behind backward, which matters where it keeps little."""
    model = gpt(layers=24, hidden=256, vocab=512, seq=64)
    alone, replicas = (estimated(model, batch=n, dp=n, recompute="full").memory[0] for n in (1, 2))
    assert replicas.total - replicas.gradients - alone.total + alone.gradients == pytest.approx(
        BUCKET - alone.activations - alone.logits - alone.transients
    )
    assert estimated(model, batch=2, dp=2, recompute="full", zero=1).memory[0].transients == alone.transients


def test_zero_divides_the_state_and_sends_more() -> None:
    plain, divided = estimated(dp=8), estimated(dp=8, zero=3)
    assert divided.memory[0].optimizer == pytest.approx(plain.memory[0].optimizer / 8)
    assert divided.memory[0].weights + divided.memory[0].gradients < 0.3 * plain.memory[0].weights


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    within, across = estimated(tp=8), estimated(tp=16)
    assert across.spent["all-reduce tp"] > 1.4 * within.spent["all-reduce tp"]


def test_compiled_blocks_move_less() -> None:
    assert estimated(compiled=True).spent["elementwise"] < 0.95 * estimated().spent["elementwise"]


def test_layers_are_counted_once_and_multiplied() -> None:
    few, many = (estimated(gpt(layers=n, vocab=128)) for n in (4, 16))
    assert many.spent["products"] == pytest.approx(4 * few.spent["products"], rel=0.02)


@pytest.mark.parametrize("schedule", ["GPipe", "interleaved", "zero-bubble", "zero-bubble-v"])
def test_every_schedule_is_played(schedule: str) -> None:
    found = estimated(pp=2, schedule=schedule, micro_batch=2)
    assert found.spent["pipeline"] < 0.5 * found.seconds and len(found.memory) == 2


def test_a_mixture_of_experts_an_encoder_decoder_and_lora_need_no_formula() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    moe = transformers.MixtralConfig(**small, num_key_value_heads=2, vocab_size=128, num_local_experts=4)
    t5 = transformers.T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=128)
    llama = transformers.LlamaConfig(**small, vocab_size=128)
    with torch.device("meta"):
        models = [transformers.MixtralForCausalLM(moe), transformers.T5ForConditionalGeneration(t5)]
    lora = peft.get_peft_model(transformers.LlamaForCausalLM(llama), peft.LoraConfig(target_modules=["q_proj"]))
    found = [estimated(model, tp=2, sequence=64) for model in (*models, lora)]
    assert all(est.flops > 0 and est.memory[0].activations > 0 for est in found)
    learns = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    assert found[2].memory[0].gradients <= 4 * learns < found[2].memory[0].weights / 4


@pytest.mark.parametrize("gpu", ["h100-80gb", "cpu-gloo"])
def test_values_may_have_another_width_than_keys(gpu: str) -> None:
    """Latent attention: a GPU runs the memory-efficient operator."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "first_k_dense_replace": 1,
    }  # fmt: skip
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
    one, two = (estimated(model, gpu=gpu, tp=tp, sequence=64) for tp in (1, 2))
    assert one.flops == pytest.approx(two.flops) and two.memory[0].activations > 0


def test_estimate_counts_a_backward_of_the_models_own() -> None:
    """Bloom's GeLU is a torch.autograd.Function: FLOPs of one device are counted with it."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)
        )
    one, two = (estimated(model, tp=tp, sequence=64) for tp in (1, 2))
    assert one.flops == pytest.approx(two.flops) and one.flops > 0


@pytest.mark.parametrize(
    "given", [{}, {"sequence_parallel": True}, {"overlap": "batch", "micro_batch": 2}, {"recompute": "full"}, {"cp": 2}]
)
@pytest.mark.parametrize("gpu", ["h100-80gb", "cpu-gloo"])
def test_an_encoder_decoder_is_estimated_in_every_way(gpu: str, given: dict[str, Any]) -> None:
    """A piece of it may lack the gradient of a parameter, which the other stack reads."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 128, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**small, use_cache=False))
    assert estimated(model, gpu=gpu, tp=2, sequence=16, dtype=None, **given).seconds > 0


@pytest.mark.rare
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("given", "most"),
    [({}, 2), ({"sequence_parallel": True}, 3), ({"overlap": "batch", "micro_batch": 2}, 3), ({"cp": 2}, 5)],
)
def test_every_family_is_estimated_or_refused(given: dict[str, Any], most: int) -> None:
    pytest.importorskip("transformers")
    from support.hf_families import FAMILIES

    refused = {}
    for name, make in FAMILIES.items():
        model, call = make()
        try:
            found = autotp.estimate(model, gpu="h100-80gb", tp=2, batch=4, dtype=BF16, example_inputs=call, **given)
        except autotp.Error as error:
            refused[name] = str(error)
        else:
            assert found.seconds > 0, name
    assert len(refused) <= most, refused


def test_a_mixture_in_float32_multiplies_groups_by_an_operator_of_its_library() -> None:
    """It loops over groups whose lengths are numbers; the FLOPs are those of bfloat16, where torch has an operator."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**small, num_key_value_heads=2, vocab_size=128, num_local_experts=3)
        )
    wide, narrow = (estimated(model, tp=2, sequence=64, dtype=dtype) for dtype in (None, BF16))
    assert wide.flops == pytest.approx(narrow.flops, rel=0.01)  # Rows are padded to whole groups.


def test_an_uneven_model_is_priced_by_its_fullest_rank() -> None:
    even, uneven = estimated(gpt(heads=16), tp=4), estimated(gpt(heads=16), tp=5)
    assert uneven.memory[0].weights > even.memory[0].weights * 4 / 5


# ---- what it prints


def test_the_table_has_an_error_bar_on_every_number(pipeline: autotp.Estimate) -> None:
    lines = str(pipeline).splitlines()
    assert lines[0] == "tp=2, pp=2, dp=2, micro_batch=2, 1F1B on 8 x a100-80gb"
    assert "a step       16 rows; the tensors of a row are [1024], [1024]" in lines
    shorter = next(i for i, line in enumerate(lines) if line.startswith("what shortens a step"))
    times = [*lines[:shorter], *lines[lines.index("", shorter) :]]
    rows = [line for line in times if line.rstrip().endswith("%") or "TFLOP/s" in line]
    assert len(rows) == len(pipeline.spent) + 4 and all("±" in row for row in rows)
    head, bars = (next(line.split() for line in lines if line.startswith(name)) for name in ("pp rank", "error bar"))
    assert len(bars) == len(head) - 3 and all(bar.startswith("±") for bar in bars[2:])  # "GiB in all" has its own.
    assert all(" ±" in line for line in lines if line[:2] in ("0 ", "1 "))
    data = pipeline.to_dict()
    for memory in data["memory"]:
        bars = data["memory_error"]
        assert memory["error_bytes"] == pytest.approx(sum(memory[kind] * bar for kind, bar in bars.items()))
    assert any(line.startswith("memory       fits: at most") and "allocator" in line for line in lines)


def test_table_of_many_pipeline_ranks_has_two_at_each_end(pipeline: autotp.Estimate) -> None:
    lines = str(replace(pipeline, memory=pipeline.memory * 5)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("pp rank"))
    assert [line.split()[0] for line in lines[first + 1 : first + 7]] == ["0", "1", "...", "8", "9", "error"]


def test_it_is_html_and_plain_data(pipeline: autotp.Estimate) -> None:
    assert "where the time goes" in pipeline._repr_html_()
    data = json.loads(json.dumps(pipeline.to_dict()))
    assert data["layout"]["dtype"] == "bfloat16" and data["fits"] is True
    assert data["homes"] == [0, 1] and len(data["stages"]) == 2 and data["device"]["name"] == "a100-80gb"
    assert repr(pipeline).startswith("Estimate(tp=2, pp=2")


def test_devices_that_nobody_measured_have_wider_bars() -> None:
    assert estimated(gpu="h100-80gb").error > 2 * estimated().error
    assert estimated(dp=8, zero=3).error > 2 * estimated(dp=8, zero=1).error  # Its own rows are worse.


# ---- what it refuses


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpu": "a1000"}, "gpu='a1000' is not known\n  expected v100-32gb"),
        ({"tp": 0}, "tp=0 is not a whole number of 1 or more\n  try      tp=2"),
        (
            {"dp": 3},
            "a batch of 16 rows on dp=3 replicas, in microbatches of 1: 3 x 1 does not divide 16\n  try      batch=18",
        ),
        ({"pp": 16}, "16 stages, and the model has 8 blocks\n  try      fewer pipeline ranks, or"),
        ({"schedule": "2F2B"}, "schedule='2F2B' is not one of its values\n  expected '1F1B'"),
        ({"pp": 8, "micro_batch": 8}, "this schedule on 8 ranks cannot run 2 microbatches: "),
        ({"interleave": 3}, 'interleave=3 is for schedule="interleaved", and the schedule is "1F1B"\n  try      sched'),
        ({"zero": 4}, "zero=4 is not one of its values\n  expected 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute='some' is not one of its values\n  expected 'none', 'selective', 'full'"),
        ({"sequence": 1}, "sequence=1 is not a whole number of 2 or more\n  try      sequence=2048"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is not one of its values\n  expected None, torch.bfloat16"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_cannot_be_is_one_error(given: dict[str, Any], expected: str) -> None:
    text = message(lambda: estimated(**given))
    sizes = ", ".join(f"{name}={given.get(name, 1)}" for name in ("tp", "pp", "dp"))
    assert text.startswith(f"estimate(GPT, {sizes}): {expected}")


def test_a_model_without_a_known_length_is_refused() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(8, 4)
    model.forward = lambda tokens: model.embed(tokens).mean()  # type: ignore[method-assign]
    text = message(lambda: estimated(model))
    assert "the length of a sequence is not known\n  try      sequence=2048" in text


def test_a_parallel_model_is_refused() -> None:
    model = autotp.parallelize(nn.Sequential(nn.Linear(4, 4)), 1, example_inputs=torch.ones(2, 4))
    assert "estimate the original model" in message(lambda: estimated(model))


# ---- halves of a batch that take turns


def sums(est: autotp.Estimate, rows: int) -> list[int]:
    """The bytes of each sum over tp of a block in the middle."""
    found = est.source.pieces(rows)
    return [op.size for op in found.records[found.pieces[3].kind].ops if op.kind == "collective"]


def test_halves_of_a_batch_send_twice_as_many_sums_of_half_the_bytes() -> None:
    options: dict[str, Any] = {"tp": 8, "batch": 8, "micro_batch": 8}
    plain, halves = estimated(**options), estimated(**options, overlap="batch")
    assert sums(halves, 8) == [size // 2 for size in sums(plain, 8) for _ in (0, 1)]
    assert "overlap=batch" in str(halves.layout) and halves.flops == plain.flops
    assert halves.spent["all-reduce tp"] < 0.5 * plain.spent["all-reduce tp"]
    assert sum(halves.spent.values()) == pytest.approx(halves.seconds)


def test_sums_are_hidden_up_to_the_work_beside_them() -> None:
    """On a slow link a step waits for nearly all; on a fast one not for a sum of each block."""
    options: dict[str, Any] = {"tp": 8, "batch": 8, "micro_batch": 8, "overlap": "batch"}
    fast, deep = (estimated(gpt(layers=n, heads=32, hidden=4096), **options).spent["all-reduce tp"] for n in (8, 16))
    assert deep < 1.2 * fast
    slow = "312TF 2TB/s 80GB node=8x1GB/s net=1GB/s like=a100-80gb"
    plain = estimated(**{**options, "overlap": "none", "gpu": slow})
    assert estimated(**{**options, "gpu": slow}).spent["all-reduce tp"] > 0.8 * plain.spent["all-reduce tp"]


def test_one_row_has_no_halves() -> None:
    plain, halves = estimated(tp=2), estimated(tp=2, overlap="batch")
    assert halves.seconds == plain.seconds


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"overlap": "rows"}, "overlap='rows'"),
        ({"tp": 2, "sequence_parallel": True}, 'overlap="batch" with sequence_parallel=True'),
        ({"pp": 2, "schedule": "zero-bubble"}, 'overlap="batch" with schedule="zero-bubble"'),
    ],
    ids=["name", "sequence_parallel", "schedule"],
)
def test_halves_are_refused_as_in_distribute(given: dict[str, Any], expected: str) -> None:
    assert expected in message(lambda: estimated(**{"overlap": "batch", **given}))


def test_a_model_that_compares_its_rows_is_refused() -> None:
    """Its graph has the number of rows that were captured."""

    class Comparing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = self.up(x).split(1)
            return (one - two).square().mean()

    with pytest.raises(autotp.Error, match="the graph of 2 rows does not run for 1: "):
        estimated(Comparing(), example_inputs=torch.ones(2, 4, 8))
