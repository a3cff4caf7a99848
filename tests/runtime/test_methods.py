"""Methods beside forward: what a user calls of a parallel model is what one device gives, with its gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Checks
from support.optimizer_walk import Small
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

import autotp
from autotp.runtime.tree import state_of

checks = Checks()
Methods = dict[str, Callable[[Any], Any]]
IDS = torch.tensor([[1, 4, 2, 0, 6], [3, 3, 5, 6, 1]])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """One matrix of queries, keys and values, with heads of 4. x: [batch length 8]"""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 12 * heads, bias=False), nn.Linear(4 * heads, 8)

    def forward(self, x: Tensor, causal: bool = False, weights: bool = False) -> Any:
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / 2
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        found = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return (found, scores.softmax(-1)) if weights else found


class Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention(heads)
        self.mlp = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        x = x + self.attention(self.norm(x), causal=causal)
        y: Tensor = x + self.mlp(x)
        return y


# ---- a language model


class Writer(nn.Module):
    """A language model with tied words, as nanoGPT has methods. ids: [batch length] -> logits"""

    def __init__(self, heads: int, width: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(2))
        self.head = nn.Linear(8, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.ones(6, 6).tril())

    def forward(self, ids: Tensor) -> Tensor:
        return self.compute_logits(self.hidden(ids))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, causal=True)
        return x

    def compute_logits(self, hidden: Tensor, temperature: float | None = None) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits if temperature is None else logits / temperature

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def loss(self, ids: Tensor, reduction: str = "mean") -> Tensor:
        logits = self(ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)

    def sequence_log_prob(self, ids: Tensor) -> Tensor:
        return self(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).sum((1, 2))  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int, top_k: int | None = None, sample: bool = False) -> Tensor:
        for _ in range(count):
            logits = self(ids[:, -6:])[:, -1]
            if top_k is not None:
                logits[logits < logits.topk(top_k)[0][:, -1:]] = -math.inf
            chosen = torch.multinomial(logits.softmax(-1), 1) if sample else logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, chosen], 1)
        return ids

    @torch.inference_mode()
    def stream(self, ids: Tensor, count: int) -> Iterator[int]:
        for _ in range(count):
            ids = torch.cat([ids, self(ids[:, -6:])[:, -1:].argmax(-1)], 1)
            yield int(ids[0, -1])

    def word_of(self, hidden: Tensor) -> Tensor:
        """By hand, as tied weights are used."""
        return F.linear(hidden, self.words.weight) + self.words.weight.norm(dim=1)

    def penalty(self, share: float = 0.1) -> Tensor:
        return share * sum(p.abs().sum() for p in self.parameters() if p.dim() > 1)

    def get_num_params(self, without_places: bool = True) -> int:
        return sum(p.numel() for p in self.parameters()) - self.places.weight.numel() * without_places

    def estimate_mfu(self, per_second: float) -> float:
        return 6 * self.get_num_params() * per_second / 1e6

    def configure_optimizers(self, decay: float) -> torch.optim.Optimizer:
        groups = [[p for p in self.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
        scale = 1 / float(self.words.weight.norm())
        return torch.optim.AdamW(
            [{"params": groups[0], "weight_decay": decay, "lr": scale}, {"params": groups[1], "weight_decay": 0.0}]
        )

    def crop_block_size(self, size: int) -> None:
        self.places.weight = nn.Parameter(self.places.weight[:size])
        self.mask = self.mask[:size, :size]

    def resize_places(self, size: int) -> None:
        old = self.places.weight.detach().T[None]
        self.places.weight = nn.Parameter(F.interpolate(old, size, mode="linear")[0].T.contiguous())

    @property
    def scale(self) -> Tensor:
        return self.words.weight.std()

    @classmethod
    def sizes(cls, model: Any) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    @staticmethod
    def tied(model: Any) -> bool:
        return model.head.weight is model.words.weight

    def initialise(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.dim() > 1 else nn.init.zeros_(p)
        return self.blocks[0].mlp[0].weight.detach().clone()


def written(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What a model that was changed by a method computes."""

    def call(model: Any) -> Any:
        changed = copy.deepcopy(model)
        found = method(changed)
        return found, changed(IDS[:, :3]), dict(changed.named_parameters())["places.weight"].detach().clone()

    return call


def stepped(model: Any) -> Any:
    changed = copy.deepcopy(model)
    optimizer = changed.configure_optimizers(0.1)
    changed.loss(IDS).backward()
    nn.utils.clip_grad_norm_(changed.parameters(), 0.5)
    optimizer.step()
    return [p.detach() for p in changed.parameters()], optimizer.param_groups[0]["lr"]


def called_with_parameters(model: Any) -> Any:
    """The first call of a part is one with other parameters; then it is called with its own."""
    part = copy.deepcopy(model).blocks[0].mlp
    other = {name: nn.Parameter(p.detach() * 2) for name, p in part.named_parameters()}
    found = functional_call(part, other, noise(3, 8))
    (found.sum() + part(noise(3, 8)).square().sum()).backward()
    return found.detach(), [p.grad for p in other.values()], [p.grad for p in part.parameters()], part(noise(3, 8))


OF_WRITER: Methods = {
    "hidden": lambda m: m.hidden(IDS),
    "compute_logits": lambda m: m.compute_logits(noise(2, 5, 8)),
    "compute_logits of a temperature": lambda m: m.compute_logits(m.hidden(IDS), temperature=0.7),
    "get_input_embeddings()": lambda m: m.get_input_embeddings()(IDS),
    "head": lambda m: m.head(noise(2, 8)),
    "head.weight": lambda m: m.head.weight[3] @ m.hidden(IDS)[0, 0],
    "blocks[0]": lambda m: m.blocks[0](noise(2, 3, 8), causal=True),
    "a block of a loop": lambda m: [x := block(noise(2, 3, 8)) for block in m.blocks][-1] + x,
    "attention, weights": lambda m: m.blocks[1].attention(noise(2, 3, 8), weights=True),
    "mlp[0]": lambda m: m.blocks[0].mlp[0](noise(2, 8)),
    "mlp[:2]": lambda m: m.blocks[0].mlp[:2](noise(2, 8)),
}
OF_WRITER_BY_HAND: Methods = {
    "loss": lambda m: m.loss(IDS),
    "loss of each": lambda m: m.loss(IDS, reduction="none"),
    "loss with penalty": lambda m: m.loss(IDS) + m.penalty(),
    "sequence_log_prob": lambda m: m.sequence_log_prob(IDS),
    "perplexity": lambda m: m.loss(IDS).exp().item(),
    "generate": lambda m: m.generate(IDS, 3),
    "generate, sampled": lambda m: m.generate(IDS, 3, top_k=3, sample=True),
    "stream": lambda m: list(m.stream(IDS[:1], 3)),
    "word_of": lambda m: m.word_of(noise(2, 8)),
    "get_num_params": lambda m: (m.get_num_params(), m.get_num_params(False), m.estimate_mfu(2.5)),
    "configure_optimizers": stepped,
    "crop_block_size": written(lambda m: m.crop_block_size(4)),
    "resize_places": written(lambda m: m.resize_places(9)),
    "initialise": written(lambda m: m.initialise(3)),
    "scale": lambda m: m.scale,
    "sizes": lambda m: type(m).sizes(m),
    "tied": lambda m: m.tied(m),
    "one projection": lambda m: m.blocks[1].attention.qkv(noise(2, 8)),
    "functional_call": lambda m: functional_call(m.blocks[0].mlp, {"0.bias": m.blocks[1].mlp[0].bias * 2}, noise(3, 8)),
    "functional_call of a copy": called_with_parameters,
    "grad": lambda m: grad(lambda x: m.blocks[0].mlp(x).square().sum())(noise(3, 8)),
    "vmap": lambda m: vmap(m.blocks[0].mlp)(noise(3, 2, 8)),
    "autocast": lambda m: amp(lambda: m.hidden(IDS)),
    "no_grad": torch.no_grad()(lambda m: m.hidden(IDS) @ m.head.weight.T),
    "inference_mode": torch.inference_mode()(lambda m: m.compute_logits(m.hidden(IDS)).argmax(-1)),
}


def amp(call: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return call().double()


# ---- two towers


class Towers(nn.Module):
    """Texts and images in one space, as CLIP has them. images: [batch 3 4 4]"""

    def __init__(self, heads: int, width: int, words: int) -> None:
        super().__init__()
        self.words, self.text = nn.Embedding(words, 8), Block(heads, width)
        self.patches, self.image = nn.Conv2d(3, 8, 2, 2), Block(heads, width)
        self.text_projection = nn.Parameter(noise(8, width, seed=1) / 3)
        self.image_projection = nn.Linear(8, width, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        return self.similarity(self.encode_image(images, True), self.encode_text(ids, True)) * self.logit_scale.exp()

    def encode_text(self, ids: Tensor, normalize: bool = False) -> Tensor:
        found = self.text(self.words(ids), causal=True)[torch.arange(len(ids)), ids.argmax(-1)] @ self.text_projection
        return F.normalize(found, dim=-1) if normalize else found

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        found = self.image_projection(self.image(self.patches(images).flatten(2).mT).mean(1))
        return F.normalize(found, dim=-1) if normalize else found  # type: ignore[no-any-return]

    @staticmethod
    def similarity(x: Tensor, y: Tensor) -> Tensor:
        return x @ y.T

    def get_logits(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(images, ids)
        return logits, logits.T

    def contrastive_loss(self, images: Tensor, ids: Tensor) -> Tensor:
        return sum(F.cross_entropy(x, torch.arange(2)) for x in self.get_logits(images, ids)) / 2  # type: ignore[return-value]

    @torch.no_grad()
    def classifier(self, classes: dict[str, list[int]]) -> dict[str, Tensor]:
        return {name: self.encode_text(torch.tensor([ids, ids]), True).mean(0) for name, ids in classes.items()}

    @property
    def dtype(self) -> torch.dtype:
        return self.patches.weight.dtype

    def lock_image(self) -> list[str]:
        for p in [*self.patches.parameters(), *self.image.parameters()]:
            p.requires_grad = False
        return [name for name, p in self.named_parameters() if not p.requires_grad]


PICTURES = noise(2, 3, 4, 4)


def locked(model: Any) -> Any:
    changed = copy.deepcopy(model)
    names = changed.lock_image()
    changed(PICTURES, IDS).sum().backward()
    return names, [None if p.grad is None else p.grad.norm() for p in changed.parameters()]


OF_TOWERS: Methods = {
    "encode_text": lambda m: m.encode_text(IDS),
    "encode_text, normalized": lambda m: m.encode_text(IDS, normalize=True),
    "encode_image": lambda m: m.encode_image(PICTURES),
    "encode_image, a batch of one": lambda m: m.encode_image(PICTURES[:1], True),
    "similarity": lambda m: m.similarity(m.encode_image(PICTURES), m.encode_text(IDS)),
    "get_logits": lambda m: m.get_logits(PICTURES, IDS),
    "contrastive_loss": lambda m: m.contrastive_loss(PICTURES, IDS),
    "classifier": lambda m: m.classifier({"cat": [1, 2, 3], "dog": [3, 2, 4]}),
    "dtype": lambda m: m.dtype,
    "lock_image": locked,
    "text_projection": lambda m: noise(2, 8) @ m.text_projection,
    "logit_scale": lambda m: m.logit_scale.exp().clamp(max=100) * m.image_projection.weight.norm(dim=1),
    "patches": lambda m: m.patches(PICTURES),
    "image_projection": lambda m: m.image_projection(noise(8)),
    "encode_text, frozen": torch.no_grad()(lambda m: m.encode_text(IDS).tolist()),
    "encode_image, autocast": lambda m: amp(lambda: m.encode_image(PICTURES)),
}


# ---- a recurrence


class Retention(nn.Module):
    """Three ways to compute one thing, as RetNet has them. x: [batch length 8]"""

    def __init__(self, heads: int, width: int, words: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 4 * heads, bias=False) for _ in range(3))
        self.out, self.gate, self.back = nn.Linear(4 * heads, 8), nn.Linear(8, width), nn.Linear(width, 8)
        self.decay = nn.Parameter(torch.linspace(0.5, 0.9, heads))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))

    def close(self, x: Tensor, y: Tensor) -> Tensor:
        y = x + self.out(y.transpose(1, 2).flatten(2))
        return y + self.back(F.silu(self.gate(y)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_parallel(x)

    def forward_parallel(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        places = torch.arange(x.shape[1])
        steps = (places[:, None] - places).clamp(min=0)
        weights = (self.decay[:, None, None] ** steps).tril()
        return self.close(x, (q @ k.mT * weights) @ v)

    def init_state(self, rows: int) -> Tensor:
        return torch.zeros(rows, len(self.decay), 4, 4)

    def forward_recurrent(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state, results = self.init_state(len(x)) if state is None else state, []
        for i in range(x.shape[1]):
            q, k, v = self.heads(x[:, i : i + 1])
            state = self.decay[:, None, None] * state + k.mT @ v
            results.append(q @ state)
        return self.close(x, torch.cat(results, 2)), state

    def forward_chunkwise(self, x: Tensor, size: int) -> Tensor:
        state, results = None, []
        for chunk in x.split(size, 1):
            result, state = self.forward_recurrent(chunk, state)
            results.append(result)
        return torch.cat(results, 1)

    def time_constants(self) -> list[float]:
        return [-1 / math.log(x) for x in self.decay.tolist()]


OF_RETENTION: Methods = {
    "forward_parallel": lambda m: m.forward_parallel(noise(2, 3, 8)),
    "forward_recurrent": lambda m: m.forward_recurrent(noise(2, 3, 8)),
    "forward_recurrent, a state": lambda m: m.forward_recurrent(noise(2, 1, 8), m.forward_recurrent(noise(2, 2, 8))[1]),
    "forward_chunkwise": lambda m: m.forward_chunkwise(noise(2, 5, 8), 2),
    "init_state": lambda m: m.init_state(2).shape,
    "time_constants": lambda m: m.time_constants(),
    "heads": lambda m: m.heads(noise(2, 3, 8)),
}


# ---- an autoencoder


class Autoencoder(nn.Module):
    """With a codebook and a normal distribution. x: [batch 8]"""

    def __init__(self, heads: int, width: int, words: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 6))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 8))
        self.codebook = nn.Embedding(words, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)[0])

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = self.encoder(x).chunk(2, -1)
        return mean, log

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)  # type: ignore[no-any-return]

    def reparameterize(self, mean: Tensor, log: Tensor) -> Tensor:
        return mean + torch.randn_like(mean) * (log / 2).exp()

    def kl(self, x: Tensor) -> Tensor:
        mean, log = self.encode(x)
        return -0.5 * (1 + log - mean.square() - log.exp()).sum(-1)

    def quantize(self, z: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.cdist(z, self.codebook.weight).argmin(-1)
        codes = self.codebook(ids)
        return z + (codes - z).detach(), (codes - z.detach()).square().mean()

    def nearest(self, z: Tensor) -> Tensor:
        """By hand: |z|² - 2zw + |w|²."""
        w = self.codebook.weight
        return (z.square().sum(1, keepdim=True) - 2 * z @ w.t() + w.pow(2).sum(1)).argmin(1)

    def decode_code(self, ids: Tensor) -> Tensor:
        return self.decode(F.embedding(ids, self.codebook.weight))

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        return self.decode(torch.randn(count, 3))

    @torch.no_grad()
    def interpolate(self, x: Tensor, y: Tensor, steps: int) -> Iterator[Tensor]:
        for share in torch.linspace(0, 1, steps):
            yield self.decode(torch.lerp(self.encode(x)[0], self.encode(y)[0], share))

    @torch.no_grad()
    def move_codes(self, z: Tensor, rate: float = 0.1) -> Tensor:
        """Moves the nearest words, as an exponential average does."""
        ids = self.nearest(z)
        self.codebook.weight[ids] = torch.lerp(self.codebook.weight[ids], z, rate)
        return self.codebook.weight.mean(0)


OF_AUTOENCODER: Methods = {
    "encode": lambda m: m.encode(noise(2, 8)),
    "decode": lambda m: m.decode(noise(2, 3)),
    "decode of encode": lambda m: m.decode(m.reparameterize(*m.encode(noise(2, 8)))),
    "kl": lambda m: m.kl(noise(2, 8)),
    "quantize": lambda m: m.quantize(noise(4, 3)),
    "nearest": lambda m: m.nearest(noise(4, 3)),
    "decode_code": lambda m: m.decode_code(torch.tensor([0, 6, 3])),
    "sample": lambda m: m.sample(2),
    "interpolate": lambda m: list(m.interpolate(noise(1, 8), noise(1, 8, seed=2), 3)),
    "move_codes": lambda m: copy.deepcopy(m).move_codes(noise(4, 3)),
    "encoder[0]": lambda m: m.encoder[0](noise(2, 8)).relu().sum(0),
    "codebook.weight": lambda m: m.codebook.weight.softmax(0)[-1],
}


# ---- a policy


class Policy(nn.Module):
    """An actor and a critic, as loops of reinforcement learning ask them. x: [batch 8]"""

    def __init__(self, heads: int, width: int, words: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8), nn.Tanh())
        self.actor, self.critic, self.mean = nn.Linear(8, words), nn.Linear(8, 1), nn.Linear(8, words)
        self.log_std = nn.Parameter(torch.linspace(-1, 0, words))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.actor(hidden), self.critic(hidden)

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(self.body(x)).squeeze(-1)  # type: ignore[no-any-return]

    def distribution(self, x: Tensor) -> Categorical:
        return Categorical(logits=self(x)[0], validate_args=False)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        chosen = self.distribution(x)
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.get_value(x)

    def act(self, x: Tensor, deterministic: bool = False) -> Tensor:
        chosen = self.distribution(x)
        return chosen.probs.argmax(-1) if deterministic else chosen.sample()

    def evaluate_actions(self, x: Tensor, actions: Tensor) -> dict[str, Tensor]:
        chosen = Normal(self.mean(self.body(x)), self.log_std.exp(), validate_args=False)
        return {"log_prob": chosen.log_prob(actions).sum(-1), "entropy": chosen.entropy().sum(-1)}

    def policy_loss(self, x: Tensor, actions: Tensor, clip: float = 0.2) -> Tensor:
        ratio = (self.distribution(x).log_prob(actions) + 1).exp()
        return -torch.min(ratio, ratio.clamp(1 - clip, 1 + clip)).mean()

    def soft_update(self, other: Any, rate: float) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.parameters(), other.parameters(), strict=True):
                p.mul_(1 - rate).add_(q, alpha=rate)
        return nn.utils.parameters_to_vector(self.parameters())


def updated(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(p.norm())
    return other.soft_update(model, 0.25)


OF_POLICY: Methods = {
    "get_value": lambda m: m.get_value(noise(2, 8)),
    "distribution": lambda m: m.distribution(noise(2, 8)).log_prob(torch.tensor([0, 6])),
    "get_action_and_value": lambda m: m.get_action_and_value(noise(2, 8)),
    "get_action_and_value of actions": lambda m: m.get_action_and_value(noise(2, 8), torch.tensor([6, 1])),
    "act": torch.no_grad()(lambda m: m.act(noise(3, 8))),
    "act, deterministic": lambda m: m.act(noise(3, 8), deterministic=True),
    "evaluate_actions": lambda m: m.evaluate_actions(noise(2, 8), m.mean(noise(2, 8)).detach()),
    "policy_loss": lambda m: m.policy_loss(noise(2, 8), torch.tensor([2, 5])),
    "soft_update": updated,
    "log_std": lambda m: m.log_std.exp() * m.actor.bias,
}


# ---- a classifier


class Classifier(nn.Module):
    """Features and a head, as timm's models have them. images: [batch 3 4 4]"""

    def __init__(self, heads: int, width: int, words: int) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 8, 2, 2), nn.Parameter(noise(1, 1, 8, seed=4))
        self.places = nn.Parameter(noise(1, 5, 8, seed=5))
        self.blocks = nn.Sequential(Block(heads, width), Block(heads, width))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, words)

    def prepare_tokens(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.interpolated(x.shape[1])

    def interpolated(self, count: int) -> Tensor:
        if count == self.places.shape[1] - 1:
            return self.places
        rest = F.interpolate(self.places[:, 1:].mT, count, mode="linear").mT
        return torch.cat([self.places[:, :1], rest], 1)

    def forward_features(self, images: Tensor) -> Tensor:
        return self.norm(self.blocks(self.prepare_tokens(images)))  # type: ignore[no-any-return]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return x[:, 0] if pre_logits else self.head(x[:, 0])

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, classes: int) -> None:
        self.head = nn.Linear(8, classes)

    def get_intermediate_layers(self, images: Tensor, count: int = 1) -> list[Tensor]:
        x, found = self.prepare_tokens(images), []
        for block in self.blocks:
            x = block(x)
            found.append(self.norm(x))
        return found[-count:]

    def get_last_self_attention(self, images: Tensor) -> Tensor:
        x = self.blocks[0](self.prepare_tokens(images))
        weights: Tensor = self.blocks[1].attention(self.blocks[1].norm(x), weights=True)[1]
        return weights

    def no_weight_decay(self) -> set[str]:
        return {"places", "token"}

    def class_weights(self, name: str) -> Tensor:
        return self.head.weight[{"cat": 0, "dog": 6}[name]]


def reset(model: Any) -> Any:
    changed = copy.deepcopy(model)
    torch.manual_seed(5)
    changed.reset_classifier(5)
    return changed(PICTURES), changed.forward_features(PICTURES)


OF_CLASSIFIER: Methods = {
    "forward_features": lambda m: m.forward_features(PICTURES),
    "forward_head": lambda m: m.forward_head(noise(2, 5, 8)),
    "forward_head of features": lambda m: m.forward_head(m.forward_features(PICTURES), pre_logits=True),
    "prepare_tokens": lambda m: m.prepare_tokens(noise(2, 3, 4, 6)),
    "larger images": lambda m: m(noise(2, 3, 4, 6)),
    "get_classifier()": lambda m: m.get_classifier()(noise(2, 8)),
    "reset_classifier": reset,
    "get_intermediate_layers": lambda m: m.get_intermediate_layers(PICTURES, count=2),
    "get_last_self_attention": lambda m: m.get_last_self_attention(PICTURES),
    "no_weight_decay": lambda m: sorted(m.no_weight_decay()),
    "class_weights": lambda m: m.class_weights("dog"),
    "blocks": lambda m: m.blocks(noise(2, 5, 8)),
}

SIZES = {"uneven": (3, 31, 7), "even": (4, 32, 8)}
"""Heads, width, and words."""


# ---- how methods are compared


def results(method: Callable[[Any], Any], model: nn.Module) -> list[Any]:
    """Returns the numbers that a method gives, and the gradients of a sum of them, all whole."""
    model.zero_grad()
    torch.manual_seed(3)
    values = pytree.tree_leaves(method(model))
    learned = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
    if learned:
        sum((x.double() * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in learned).backward()  # type: ignore[union-attr]
    return [
        x.detach() if isinstance(x, Tensor) else x
        for x in autotp.gather([*values, *(p.grad for p in model.parameters())])
    ]


def compare(n: int, make: Any, methods: Methods, *example: Tensor) -> None:
    """Calls each method of a model whose parts have other sizes on each rank, and of one that divides evenly."""
    torch.set_default_dtype(torch.float64)
    for size in SIZES.values():
        torch.manual_seed(0)
        whole = make(*size)
        parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=example)
        for name, method in methods.items():
            rows = [results(method, model) for model in (parallel, whole)]
            numbers = [[x for x in row if isinstance(x, Tensor | float | int)] for row in rows]
            torch.testing.assert_close(*numbers, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
            others = [[x for x in row if not isinstance(x, Tensor | float | int)] for row in rows]
            assert others[0] == others[1], name


@checks.on(2)
def methods_of_a_language_model_equal_one_device(rank: int, n: int) -> None:
    compare(n, Writer, OF_WRITER, IDS)


@checks.on(2)
def hand_written_methods_of_a_language_model_equal_one_device(rank: int, n: int) -> None:
    compare(n, Writer, OF_WRITER_BY_HAND, IDS)


@checks.on(2)
def methods_of_two_towers_equal_one_device(rank: int, n: int) -> None:
    compare(n, Towers, OF_TOWERS, PICTURES, IDS)


@checks.on(2)
def methods_of_a_recurrence_equal_one_device(rank: int, n: int) -> None:
    compare(n, Retention, OF_RETENTION, noise(2, 3, 8))


@checks.on(2)
def methods_of_an_autoencoder_equal_one_device(rank: int, n: int) -> None:
    compare(n, Autoencoder, OF_AUTOENCODER, noise(2, 8))


@checks.on(2)
def methods_of_a_policy_equal_one_device(rank: int, n: int) -> None:
    compare(n, Policy, OF_POLICY, noise(2, 8))


@checks.on(2)
def methods_of_a_classifier_equal_one_device(rank: int, n: int) -> None:
    compare(n, Classifier, OF_CLASSIFIER, PICTURES)


@checks.on(4)
def parts_with_heads_on_several_ranks_equal_one_device(rank: int, n: int) -> None:
    """A projection alone has no such axis: its forward runs as user code."""
    torch.set_default_dtype(torch.float64)
    whole = Small()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=IDS)
    for name in ("query", "values", "second"):
        part, x = getattr(parallel, name), noise(3, getattr(whole, name).in_features)
        for _ in range(2):
            found, expected = (results(lambda m, name=name, x=x: getattr(m, name)(x), m) for m in (parallel, whole))
            torch.testing.assert_close(found, expected, msg=lambda m, name=name: f"{name}: {m}")
        assert state_of(part).unfit == state_of(part).tree.version


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
