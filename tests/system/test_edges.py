"""Random models with random edges, in random loops: two ranks against one device, call after call.

A case is a number: it draws what forward does besides computing, and what the loop does between calls.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import as_gathered, assert_values_close
from torch import Tensor, nn

import autotp

CALLS = 6
USUAL, RARE = 2, 500
LAUNCH = 25
"""So many cases are run by one launch of ranks."""


class Config:
    def __init__(self) -> None:
        self.tau, self.table = 1.0, {"scale": 1.0}


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# ---- what forward does besides


def previous(m: Any, h: Tensor) -> Tensor:
    h = h if m.prev is None else h + 0.1 * m.prev[: len(h)].sum(0)
    m.prev = h.detach()
    return h


def counted(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h * 1.5 if m.calls % 2 == 0 else h


def collected(m: Any, h: Tensor) -> Tensor:
    m.losses.append(h.square().mean())
    return h


def noted(m: Any, h: Tensor) -> Tensor:
    m.memo["mean"], m.memo["rows"] = h.detach().mean(0), h.shape[0]
    return h


def remembered(m: Any, h: Tensor) -> Tensor:
    h = h + m.memo["mean"] if m.memo.get("mean") is not None else h
    return noted(m, h)


def averaged(m: Any, h: Tensor) -> Tensor:
    m.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h + m.average


def buffered(m: Any, h: Tensor) -> Tensor:
    m.seen += 1
    m.top = torch.maximum(m.top, h.detach().abs().amax())
    return h + 0.01 * m.top


def asked(m: Any, h: Tensor) -> Tensor:
    return h * 2 if torch.is_grad_enabled() else h


def trained(m: Any, h: Tensor) -> Tensor:
    return h if m.training else h * 0.5


def told(m: Any, h: Tensor) -> Tensor:
    return h * m.cfg.tau * m.cfg.table["scale"]


def rounded(m: Any, h: Tensor) -> Tensor:
    return Straight.apply(h)  # type: ignore[no-any-return]


def weighed(m: Any, h: Tensor) -> Tensor:
    return h * (2 if m.first.weight.requires_grad else 1)


EDGES = (
    previous, counted, collected, noted, remembered, averaged, buffered, asked, trained, told, rounded, weighed,
)  # fmt: skip


class Edged(nn.Module):
    """An MLP, or several, with edges around and inside."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)
        self.drop, self.norm, self.head = nn.Dropout(0.0), nn.LayerNorm(8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("top", torch.zeros(()))
        self.prev: Tensor | None = None
        self.calls, self.losses, self.memo, self.average = 0, [], {}, torch.zeros(8, dtype=torch.float64)
        self.cfg = Config()
        self.before, self.behind = draw.sample(EDGES, 2), draw.sample(EDGES, 2)
        if draw.random() < 0.3:
            self.second.register_forward_hook(lambda module, args, out: out * 0.75)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        for edge in self.before:
            h = edge(self, h)
        h = x + self.drop(self.second(self.act(self.first(h))))
        for block in self.blocks:
            h = h + block(h)
        for edge in self.behind:
            h = edge(self, h)
        return self.head(h) if hasattr(self, "head") else h


# ---- what the loop does between calls


def linear(seed: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(8, 8).double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return made


def frozen(m: Any) -> None:
    for module in m.modules():
        if isinstance(module, nn.LayerNorm | nn.Linear) and module.bias is not None:
            module.bias.requires_grad_(not module.bias.requires_grad)


def shrunk(m: Any) -> None:
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(0.9)


EVENTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "tau": lambda m: setattr(m.cfg, "tau", m.cfg.tau * 0.8),
    "table": lambda m: m.cfg.table.update(scale=1.25),
    "dropout": lambda m: setattr(m.drop, "p", 0.25 - m.drop.p),
    "activation": lambda m: setattr(m, "act", nn.Tanh()),
    "head": lambda m: setattr(m, "head", linear(3)),
    "no head": lambda m: m.__dict__.setdefault("n", 0) if not hasattr(m, "head") else delattr(m, "head"),
    "block": lambda m: m.blocks.__setitem__(1, nn.Sequential(linear(4), nn.ReLU(), linear(5))),
    "one more block": lambda m: m.blocks.append(linear(6)),
    "frozen": frozen,
    "shrunk": shrunk,
    "cleared": lambda m: m.losses.clear(),
    "new list": lambda m: setattr(m, "losses", []),
    "forgotten": lambda m: setattr(m, "prev", None),
    "counted anew": lambda m: setattr(m, "calls", 0),
    "mode": lambda m: m.train(not m.training),
    "a note": lambda m: setattr(m, "note", "my own"),
}
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def run(case: int, n: int) -> None:
    draw = random.Random(case)
    torch.manual_seed(case)
    whole = Edged(draw).double()
    options: dict[str, Any] = {"randomness": "exact"}
    options |= draw.choice(({}, {}, {"recompute": "full"}, {"without": ("repeats",)}))
    parallel: Any = copy.deepcopy(whole)
    assert (
        autotp.parallelize(parallel, n, example_inputs=(torch.randn(4, 8, dtype=torch.float64),), **options) is parallel
    )
    kind, clip = draw.choice(OPTIMIZERS), draw.random() < 0.5
    for call in range(CALLS):
        names = draw.sample(list(EVENTS), 2)
        rows, grad = draw.choice((2, 3, 5)), draw.random() < 0.8
        x = torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(call))
        found: list[Any] = []
        for model in (whole, parallel):
            for name in names:
                EVENTS[name](model)
            model.losses.clear()
            model.prev = None if model.prev is None else model.prev[:1].expand(5, -1).clone()
            torch.manual_seed(call)
            optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.05)
            with torch.set_grad_enabled(grad):
                out = model(x)
            if grad:
                (out.square().mean() + sum(model.losses)).backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5) if clip else torch.zeros(())
                optimizer.step()
                model.zero_grad()
            found.append((out, norm if grad else None, [as_gathered(value) for value in (model.prev, model.average)]))
        context = (
            f"case {case}, call {call}: {[e.__name__ for e in (*whole.before, *whole.behind)]}, {names}, {options}"
        )
        assert_values_close(found[1], found[0], rtol=1e-9, atol=1e-10, msg=lambda m, c=context: f"{c}: {m}")
        assert (whole.calls, whole.memo.get("rows")) == (parallel.calls, parallel.memo.get("rows")), context
        state = autotp.full_state_dict(parallel)
        for name, value in state.items():
            assert_values_close(value, whole.state_dict()[name], rtol=1e-9, atol=1e-10, msg=f"{context}: {name}")


def several(rank: int, n: int, cases: list[int]) -> None:
    for case in cases:
        run(case, n)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(list(range(USUAL)), id="usual"),
        *(
            pytest.param(list(range(start, min(start + LAUNCH, RARE))), id=f"from-{start}", marks=pytest.mark.rare)
            for start in range(USUAL, RARE, LAUNCH)
        ),
    ],
)
def test_random_models_in_random_loops_equal_one_device(cases: list[int]) -> None:
    run_ranks(several, 2, cases, timeout=850)
