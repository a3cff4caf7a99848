"""whole_matrices: steps of matrices that ranks hold parts of are those of one device, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import message
from ranks import run_ranks
from small_models import Mixture, gpt
from torch import Tensor, nn
from torch.optim import Optimizer
from trainers import mine, wide_muon

import autotp
from autotp import whole_matrices
from autotp.diagnostics.double import all_double
from autotp.models.bert import BERT, BERTConfig

BATCH, STEPS, TOLERANCE = 8, 10, 1e-12
SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 97, "n_layer": 4, "n_head": 4, "n_embd": 24}


def built(name: str) -> nn.Module:
    """A model in float64."""
    torch.manual_seed(0)
    if name == "gpt":
        return gpt(**SIZES).double()
    if name == "gpt-three-heads":
        return gpt(**SIZES | {"n_head": 3, "n_layer": 2}).double()
    if name == "bert":
        return BERT(BERTConfig(**SIZES, dropout=0.0)).double()
    if name == "mixture":
        return Experts().double()
    if name in LOW:
        transformers: Any = pytest.importorskip("transformers")
        made = getattr(transformers, f"{name}Config")(**LOW[name], vocab_size=97, use_cache=False, dropout_rate=0.0)
        kind = transformers.AutoModelForSeq2SeqLM if name == "T5" else transformers.AutoModelForCausalLM
        with all_double():
            return kind.from_config(made).train()
    if name == "mixtral":
        return Language("MixtralConfig", num_local_experts=4).double()
    return Language("LlamaConfig", tie_word_embeddings=name == "llama-tied").double()


LOW: dict[str, dict[str, Any]] = {
    "T5": {"d_model": 16, "d_kv": 4, "d_ff": 26, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "DeepseekV3": {
        "hidden_size": 16, "intermediate_size": 26, "moe_intermediate_size": 10, "num_hidden_layers": 2, "n_group": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 6, "v_head_dim": 6,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "experts_implementation": "batched_mm",
    },
}  # fmt: skip
"""Models of transformers that compute in float32 in places: they run in `all_double`."""


def exactly(name: str) -> AbstractContextManager[None]:
    return all_double() if name in LOW else nullcontext()


class Language(nn.Module):
    """A model of transformers with torch's norms, routers in float64 and torch's loss: its own compute in float32."""

    def __init__(self, config: str, **given: Any) -> None:
        super().__init__()
        transformers: Any = pytest.importorskip("transformers")
        sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
        made = getattr(transformers, config)(**sizes, **heads, **given)
        how = {"experts_implementation": "batched_mm"} if "num_local_experts" in given else {}  # torch's grouped_mm
        self.model = transformers.AutoModelForCausalLM.from_config(made, **how).train()  # takes no float64 on the CPU.
        for module in [module for module in self.model.modules() if hasattr(module, "input_layernorm")]:
            module.input_layernorm, module.post_attention_layernorm = nn.RMSNorm(16, 1e-6), nn.RMSNorm(16, 1e-6)
            if hasattr(module.mlp, "gate"):
                module.mlp.gate = Router()
        self.model.model.norm = nn.RMSNorm(16, 1e-6)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Router(nn.Module):
    """Mixtral's choice of two of four experts, in the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16) / 4)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, 16), self.weight)  # [tokens 4]
        weights, chosen = logits.softmax(-1).topk(2)  # [tokens 2] each
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """Experts whose weights have three dimensions, which Muon does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.mixture, self.head = nn.Embedding(97, 8), Mixture(), nn.Linear(8, 97)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.mixture(self.word(input_ids).flatten(0, 1))
        return F.cross_entropy(self.head(x), labels.flatten())


def batch_of(name: str, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(97, (2, BATCH, 8), generator=draw)
    if name == "bert":
        mask = (torch.arange(8) < 8 - torch.arange(BATCH).unsqueeze(-1) % 3).long()
        following = torch.randint(2, (BATCH,), generator=draw)
        return {"tokens": tokens, "types": tokens % 2, "mask": mask, "labels": labels, "next_sentence": following}
    return {"tokens" if name.startswith("gpt") else "input_ids": tokens, "labels": labels}


def loss_of(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0] if isinstance(found, tuple) else found.loss


def optimizers(parameters: Iterable[nn.Parameter], muon: type[Optimizer]) -> list[Optimizer]:
    """Muon for matrices, SGD for all else. (Adam would scale the round-off in gradients that are zero.)"""
    every = list(parameters)
    rest = [p for p in every if p.dim() != 2]
    found: list[Optimizer] = [muon([p for p in every if p.dim() == 2], lr=0.02, weight_decay=0.1)]
    return found + ([torch.optim.SGD(rest, lr=0.1)] if rest else [])


def on_one_device(rank: int, n: int, name: str) -> dict[str, Tensor]:
    """The state of a model after some steps of torch's own optimizers."""
    model = built(name)
    some = optimizers(model.parameters(), torch.optim.Muon)
    with wide_muon(), exactly(name):
        for step in range(STEPS):
            loss_of(model(**batch_of(name, step))).backward()
            for optimizer in some:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def parallel(rank: int, n: int, name: str, tp: int, cp: int) -> dict[str, Tensor]:
    example = {key: x[:2] for key, x in batch_of(name, 0).items()}
    with exactly(name):
        model = autotp.parallelize(built(name), tp, cp=cp, example_inputs=example)
    some = optimizers(model.parameters(), autotp.whole_matrices(torch.optim.Muon))
    with wide_muon(), exactly(name):
        for step in range(STEPS):
            loss_of(model(**batch_of(name, step))).backward()
            for optimizer in some:
                optimizer.step()
                optimizer.zero_grad()
    return autotp.full_state_dict(model)


def distributed(rank: int, n: int, name: str, layout: tuple[int, int, int, int], zero: int) -> dict[str, Tensor]:
    tp, cp, pp, dp = layout
    parts = 2
    example = {key: x[: BATCH // (dp * parts)] for key, x in batch_of(name, 0).items()}
    axes = {"cp": cp} if cp > 1 else {}
    with exactly(name):
        trainer = autotp.distribute(
            built(name), tp=tp, pp=pp, dp=dp, microbatches=parts, zero=zero, example_inputs=example, **axes
        )
    some = optimizers(trainer.parameters(), autotp.whole_matrices(torch.optim.Muon))
    with wide_muon(), exactly(name):
        for step in range(STEPS):
            trainer.step(**mine(batch_of(name, step), trainer.mesh["dp"].get_local_rank(), dp))
            for optimizer in some:
                optimizer.step()
                optimizer.zero_grad()
    return autotp.full_state_dict(trainer)


def expect_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal, relative to the largest element; or to 1e-3, for biases that start at 0 and whose gradient is 0."""
    off = {
        name: float((found[name] - x).abs().max() / x.abs().max().clamp(min=1e-3))
        for name, x in expected.items()
        if x.is_floating_point()
    }
    assert off and all(x <= TOLERANCE for x in off.values()), off


def gradients_and_parameters(
    rank: int, n: int, name: str, tp: int
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The whole gradients of some steps of torch's own Muon, which rounds to bfloat16, and the state after them."""
    example = {key: x[:2] for key, x in batch_of(name, 0).items()}
    model = autotp.parallelize(built(name), tp, example_inputs=example)
    (muon, rest) = optimizers(model.parameters(), autotp.whole_matrices(torch.optim.Muon))
    seen = []
    for step in range(3):
        loss_of(model(**batch_of(name, step))).backward()
        seen.append({key: autotp.gather(p.grad).as_subclass(Tensor).clone() for key, p in model.named_parameters()})
        for optimizer in (muon, rest):
            optimizer.step()
            optimizer.zero_grad()
    return seen, autotp.full_state_dict(model)


def given_gradients(rank: int, n: int, name: str, every: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of the model on one device after steps of torch's own optimizers on these gradients."""
    model = built(name)
    some = optimizers(model.parameters(), torch.optim.Muon)
    for gradients in every:
        for key, p in model.named_parameters():
            p.grad = gradients[key]
        for optimizer in some:
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("name", "tp"), [("gpt-three-heads", 2), ("llama-tied", 4)])
def test_the_same_gradients_give_the_same_bits(name: str, tp: int) -> None:
    seen, found = run_ranks(gradients_and_parameters, tp, name, tp)[0]
    (expected,) = run_ranks(given_gradients, 1, name, seen)
    for key, x in expected.items():
        assert torch.equal(found[key], x), key


PARALLEL = [("gpt-three-heads", 2, 1), ("llama-tied", 4, 1), ("gpt", 2, 2)]
PARALLEL_TOO = [
    ("gpt", 2, 1), ("gpt", 3, 1), ("llama", 3, 1), ("bert", 2, 1), ("mixture", 2, 1), ("llama", 2, 2), ("gpt", 1, 2),
    ("T5", 2, 1), ("T5", 3, 1), ("DeepseekV3", 2, 1), ("DeepseekV3", 3, 1),
]  # fmt: skip
RARE = pytest.mark.rare


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "tp", "cp"), [*PARALLEL, *(pytest.param(*one, marks=RARE) for one in PARALLEL_TOO)])
def test_whole_matrices_of_a_parallel_model_equal_one_device(name: str, tp: int, cp: int) -> None:
    (expected,) = run_ranks(on_one_device, 1, name)
    expect_same(run_ranks(parallel, tp * cp, name, tp, cp, timeout=250)[0], expected)


DISTRIBUTED = [("gpt", (2, 1, 2, 2), 0), ("gpt", (2, 1, 1, 2), 3), ("llama-tied", (1, 1, 2, 2), 1)]
DISTRIBUTED_TOO = [
    ("gpt", (2, 1, 1, 1), 0), ("gpt", (1, 1, 1, 2), 0), ("gpt", (1, 1, 2, 1), 0), ("gpt", (1, 1, 1, 2), 1),
    ("gpt", (1, 1, 1, 2), 2), ("llama", (2, 1, 2, 2), 3), ("gpt", (1, 1, 2, 2), 1), ("bert", (2, 1, 2, 1), 0),
    ("gpt", (2, 2, 1, 2), 1), ("gpt-three-heads", (2, 1, 1, 2), 3), ("gpt", (2, 2, 2, 1), 0),
    ("mixture", (2, 1, 1, 2), 2), ("mixture", (2, 1, 1, 2), 3), ("mixtral", (2, 1, 1, 2), 2),
    ("mixtral", (2, 1, 1, 2), 3), ("mixtral", (2, 1, 2, 1), 0), ("gpt", (1, 2, 1, 1), 0), ("gpt", (1, 2, 1, 2), 3),
    ("T5", (2, 1, 1, 2), 3), ("DeepseekV3", (2, 1, 1, 2), 3), ("gpt", (2, 2, 2, 2), 1),
]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layout", "zero"), [*DISTRIBUTED, *(pytest.param(*one, marks=RARE) for one in DISTRIBUTED_TOO)]
)
def test_whole_matrices_of_a_trainer_equal_one_device(name: str, layout: tuple[int, int, int, int], zero: int) -> None:
    tp, cp, pp, dp = layout
    (expected,) = run_ranks(on_one_device, 1, name)
    expect_same(run_ranks(distributed, tp * cp * pp * dp, name, layout, zero, timeout=250)[0], expected)


# ---- classes of optimizers that are refused


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 3))]


class ByAllNorms(torch.optim.SGD):
    """Divides by the norm of all gradients, as some versions of LAMB do."""

    def step(self, closure: Any = None) -> Any:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        for grad in every:
            grad.div_(torch.stack([grad.norm() for grad in every]).norm())
        return super().step(closure)


class Twice(torch.optim.SGD):
    """Needs the gradients at another point, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "a closure"
        closure()
        return super().step(closure)


class Wrapper(torch.optim.SGD):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.fast = torch.optim.SGD([p for group in self.param_groups for p in group["params"]], lr)

    def step(self, closure: Any = None) -> Any:
        return self.fast.step(closure)


def test_parameters_that_depend_on_each_other_are_refused() -> None:
    make: Callable[..., Any] = whole_matrices(ByAllNorms)
    assert message(lambda: make(parameters(), lr=0.1)) == (
        "whole_matrices(ByAllNorms): ByAllNorms steps a parameter in another way beside other parameters than alone: "
        "it uses the gradients of several parameters at once, or random numbers\n"
        "  try      an optimizer of each parameter by itself, such as torch.optim.Muon; for the norm of all gradients "
        "autotp.clip_grad_norm_\n"
        "  or       autotp.distribute with tp=1, pp=1 and zero=0, where each rank steps all parameters, whole"
    )
    first, second = parameters()
    with pytest.raises(autotp.Error, match="beside other parameters"):
        make([{"params": [first]}, {"params": [second], "lr": 0.2}], lr=0.1)


def test_a_closure_that_is_needed_is_refused() -> None:
    make: Any = whole_matrices(Twice)
    assert message(lambda: make(parameters(), lr=0.1)) == (
        "whole_matrices(Twice): Twice does not step a small tensor without a closure: AssertionError: a closure\n"
        "  try      an optimizer that uses each gradient once, such as torch.optim.Muon\n"
        "  or       autotp.distribute with tp=1, pp=1 and zero=0, where each rank steps all parameters, whole"
    )
    assert "LBFGS does not step a small tensor without a closure" in message(
        lambda: whole_matrices(torch.optim.LBFGS)(parameters())
    )


def test_an_optimizer_that_keeps_parameters_is_refused() -> None:
    make: Any = whole_matrices(Wrapper)
    assert message(lambda: make(parameters(), lr=0.1)) == (
        "whole_matrices(Wrapper): Wrapper keeps parameters in `fast`, and would step this rank's parts of them\n"
        "  try      an optimizer that reads its param_groups in each step\n"
        "  or       autotp.distribute with tp=1, pp=1 and zero=0, where each rank steps all parameters, whole"
    )


ACCEPTED: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "muon": lambda p: whole_matrices(torch.optim.Muon)(p, lr=0.02),
    "adafactor": lambda p: whole_matrices(torch.optim.Adafactor)(p),
    "adamw": lambda p: whole_matrices(torch.optim.AdamW)(p, lr=1e-3, foreach=True),
    "adam-fused": lambda p: whole_matrices(torch.optim.Adam)(p, lr=torch.tensor(1e-3), fused=True),
    "adagrad": lambda p: whole_matrices(torch.optim.Adagrad)(p),
    "groups": lambda p: whole_matrices(torch.optim.SGD)([{"params": p[:1]}, {"params": p[1:], "lr": 1}], lr=0.1),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_trial_of_a_class_changes_nothing(name: str) -> None:
    every = parameters()
    values, random_state = [p.clone() for p in every], torch.get_rng_state()
    optimizer = ACCEPTED[name](every)
    assert torch.equal(random_state, torch.get_rng_state()) and not optimizer.state
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(every, values, strict=True))
