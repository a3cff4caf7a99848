"""Measures layers of a Llama-3-8B on the cards: tokens, share of the card's rate, memory, kernels, what nothing hides.

One row for each number of ranks and each option. On pretended cards the sizes are tiny, and the figures mean nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp
from first_day.checks import Check, Differs, Place, Skipped

LAYERS = 4
STEPS, WARM_UP = 10, 3


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama, and of a batch."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    vocab: int
    sequence: int
    batch: int = 1

    @property
    def matrix_elements(self) -> int:
        """The elements of the matrices that a token is multiplied with, without the embedding."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_heads * head
        return LAYERS * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocab

    @property
    def flops(self) -> float:
        """Floating-point operations of a step: three times forward's, with causal attention counted at half."""
        tokens = self.batch * self.sequence
        return 3 * tokens * (2 * self.matrix_elements + 2 * LAYERS * self.sequence * self.hidden)


LLAMA_3_8B = Sizes(4096, 14336, 32, 8, 128256, 4096)
SMALL = Sizes(64, 176, 8, 8, 256, 32)


def sizes(place: Place) -> Sizes:
    """Returns the sizes for this machine."""
    return SMALL if place.small else LLAMA_3_8B


def llama(size: Sizes) -> nn.Module:
    """Returns the model, in the default dtype, on the default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=LAYERS,
        num_attention_heads=size.heads, num_key_value_heads=size.key_heads, max_position_embeddings=size.sequence,
        rope_theta=500000.0, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """A region; yields the lines at which the host waited for the device in it."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines += [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]


@dataclass(frozen=True)
class Profile:
    """What ran on the card in a step.

    Attributes:
        attention: the name of the attention kernel.
        busy, communication, exposed: milliseconds of kernels, of NCCL's, and of NCCL's with no other kernel beside.
    """

    attention: str
    busy: float
    communication: float
    exposed: float


def profiled(step: Callable[[], Any]) -> Profile:
    """Returns the kernels of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    on_cards = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in on_cards if not event.is_user_annotation]  # Such as a whole compiled block.
    spans = {True: [], False: []}  # type: dict[bool, list[tuple[float, float]]]
    for kernel in kernels:
        spans["nccl" in kernel.name.lower()].append((kernel.time_range.start, kernel.time_range.end))
    names = [k.name for k in kernels if any(word in k.name.lower() for word in ("flash", "fmha", "attention", "cudnn"))]
    communication = _length(spans[True])
    both = _length(spans[True] + spans[False])
    return Profile(
        names[0][:60] if names else "none", both / 1e3, communication / 1e3, (both - _length(spans[False])) / 1e3
    )


def _length(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def measured(step: Callable[[], Any]) -> float:
    """Returns the median seconds of a step."""
    seconds = []
    for i in range(WARM_UP + STEPS):
        if dist.is_initialized():  # Ranks start together. (A barrier would make a communicator of its own.)
            dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def product_rate(place: Place) -> float:
    """Returns the FLOP/s of one large product in bfloat16 on this card."""
    n = 128 if place.small else 8192
    x = torch.randn(n, n, device=place.device, dtype=torch.bfloat16)
    return 2 * n**3 / measured(lambda: x @ x)


def training_step(place: Place, mask: bool, make: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    """Returns a step of forward, backward and a fused AdamW; `make` makes the model parallel."""
    size = sizes(place)
    torch.manual_seed(0)
    with torch.device(place.device):
        plain = llama(size).to(torch.bfloat16)
    model = make(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(size.vocab, (size.batch, size.sequence), device=place.device)
    inputs = {"input_ids": tokens, "labels": tokens} | ({"attention_mask": torch.ones_like(tokens)} if mask else {})

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def layers(mask: bool = True, blocks: bool = False, **options: Any) -> Callable[[Place], str]:
    """Returns the check of layers under `parallelize` with these options."""

    def check(place: Place) -> str:
        if place.device.type != "cuda":
            raise Skipped("no card")

        def make(plain: nn.Module) -> Any:
            if place.ranks == 1:
                return plain
            model = autotp.parallelize(plain, device=place.device, **options)
            if blocks:
                model.compile_blocks(**({"backend": "aot_eager"} if place.small else {}))
            return model

        step = training_step(place, mask, make)
        seconds = measured(step)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()  # Building the whole model, in float32, took more than a step.
        with host_waits() as lines:
            step()
        peak = torch.cuda.max_memory_allocated() / 2**30
        return _figures(place, seconds, peak, lines, step, options)

    return check


def _figures(
    place: Place, seconds: float, peak: float, waits: list[str], step: Callable[[], Any], options: dict[str, Any]
) -> str:
    size, rate = sizes(place), product_rate(place)
    achieved = size.flops / seconds / place.ranks
    parts = [
        f"{size.batch * size.sequence / seconds:,.0f} tokens/s",
        f"{achieved / 1e12:.0f} TFLOP/s a card ({achieved / rate:.0%} of a product's)",
        f"{peak:.2f} GiB{_estimated(place, size, options)}",
        f"{len(waits)} host waits",
    ]
    if not place.small:
        profile = profiled(step)
        parts += [f"NCCL {profile.communication:.1f} ms, exposed {profile.exposed:.1f}", profile.attention]
    return ", ".join(parts)


def _estimated(place: Place, size: Sizes, options: dict[str, Any]) -> str:
    """Returns what `autotp.estimate` says of this step, as text."""
    known = {name: options[name] for name in ("sequence_parallel", "recompute", "overlap") if name in options}
    with torch.device("meta"):
        model = llama(size)
    try:
        estimate = autotp.estimate(
            model,
            gpu="h100-80gb",
            batch=size.batch,
            tp=place.ranks,
            sequence=size.sequence,
            dtype=torch.bfloat16,
            **known,
        )
    except autotp.Error as error:
        return f" (no estimate: {str(error).splitlines()[0]})"
    return f" (estimated {estimate.memory[0].total / 2**30:.2f} GiB, {estimate.seconds * 1e3:.1f} ms on an H100)"


def long_training(place: Place) -> str:
    """`distribute` for 70 steps: the seconds of the first four and of step 64, beside the median of the others."""
    if place.device.type != "cuda":
        raise Skipped("no card")
    size, dp = sizes(place), 2 if place.ranks > 1 else 1
    torch.manual_seed(0)
    model = llama(size)
    trainer = autotp.distribute(model, tp=place.ranks // dp, dp=dp, microbatches=1, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(size.vocab, (size.batch, size.sequence))
    seconds, waits = [], 0
    for i in range(12 if place.small else 70):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with host_waits() as lines:
            trainer.step(input_ids=tokens, labels=tokens)
            autotp.clip_grad_norm_(trainer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        waits = len(lines) if i == 10 else waits
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    middle = statistics.median(seconds[5:63])
    special = [f"{seconds[i] / middle:.1f}" for i in (*range(4), 64) if i < len(seconds)]
    return f"{middle * 1e3:.1f} ms; steps 0-3 and 64: {' '.join(special)} times it; {waits} host waits in step 10"


def decoding(place: Place) -> str:
    """`generate`: tokens a second."""
    if place.device.type != "cuda":
        raise Skipped("no card")
    size = sizes(place)
    with torch.device(place.device):
        plain = llama(size).to(torch.bfloat16).eval()
    model: Any = plain if place.ranks == 1 else autotp.parallelize(plain, device=place.device)
    prompt = torch.randint(size.vocab, (1, 16), device=place.device)
    asked = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 64, "pad_token_id": 0}
    model.generate(prompt, **asked)
    torch.cuda.synchronize()
    began = time.perf_counter()
    with host_waits() as lines:
        tokens: Tensor = model.generate(prompt, **asked)
    torch.cuda.synchronize()
    made = tokens.shape[1] - 16
    return f"{made / (time.perf_counter() - began):.1f} tokens/s, {len(lines) / made:.2f} host waits a token"


def graph_capture(place: Place) -> str:
    """A CUDA graph of forward and backward: a replay with other tokens has the loss of an eager step."""
    place.need_real_cards("CUDA graphs")
    size = sizes(place)
    with torch.device(place.device):
        plain = llama(size).to(torch.bfloat16)
    model: Any = plain if place.ranks == 1 else autotp.parallelize(plain, device=place.device)
    tokens = torch.randint(size.vocab, (size.batch, size.sequence), device=place.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    tokens.copy_(torch.randint_like(tokens, size.vocab))
    graph.replay()
    replayed, eager = loss.item(), model(input_ids=tokens, labels=tokens).loss.item()
    if not abs(replayed - eager) <= 0.01 * abs(eager):
        raise Differs(f"loss {replayed:.4f} of a replay, {eager:.4f} of an eager step")
    return f"loss {replayed:.4f}, eager {eager:.4f}; {measured(graph.replay) * 1e3:.1f} ms a replay"


CHECKS = [
    Check("llama layers", layers(), (1, 2, 4, 8), 120),
    Check("llama layers, no attention_mask", layers(mask=False), (1, 2, 4, 8), 120),
    Check("llama layers, sequence_parallel", layers(sequence_parallel=True), seconds=120),
    Check("llama layers, overlap=batch", layers(overlap="batch"), seconds=120),
    Check("llama layers, recompute=full", layers(recompute="full"), seconds=120),
    Check("llama layers, compile_blocks", layers(blocks=True), seconds=240),
    Check("llama layers, compile_blocks, sequence_parallel", layers(blocks=True, sequence_parallel=True), seconds=240),
    Check("llama 70 steps of distribute", long_training, (1, 2, 4, 8), 180),
    Check("llama decoding", decoding, (1, 2, 4, 8), 120),
    Check("llama CUDA graph", graph_capture, (1, 2, 4, 8), 120),
]
