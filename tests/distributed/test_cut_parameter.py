"""A cut parameter that is taken for the whole: a warning the first time; an optimizer's work is none."""

import copy
import io
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import Checks, shared, silence
from safetensors.torch import load_model, save_file
from small_models import Mlp, x
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributions import Normal
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.optim.optimizer import _default_to_fused_or_foreach

import autotp
from autotp.distributed.cut_parameter import CutTensor, shown_by_wholes
from autotp.runtime.torch_hooks.optimizer_guard import CHECKED_STEPS

checks = Checks()


class Net(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def norm_of(x: Tensor) -> Tensor:
    return x.norm()


def gradient(w: Tensor) -> Tensor:
    """The weight's gradient, as a loop reads it."""
    w.grad = torch.ones(w.shape, dtype=w.dtype)
    return w.grad


def hooked(w: Tensor) -> None:
    with torch.enable_grad():
        handle = w.register_hook(lambda g: g * 0 if g.norm() < 0 else None)
        torch.autograd.backward(w * 2, torch.ones(w.shape, dtype=w.dtype))
        handle.remove()


def differentiated(w: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(w * 2, [w], torch.ones(w.shape, dtype=w.dtype))[0].norm()


def in_a_layer(w: Tensor) -> None:
    """A layer of torch's outside the model has the parameter, too."""
    layer = nn.Embedding(30, 8)
    layer.weight = w  # type: ignore[assignment]
    layer(torch.tensor([1, 2]))


def prehooked(w: Tensor) -> None:
    with torch.enable_grad():
        get_gradient_edge(w).node.register_prehook(lambda g: (g[0] * 0,))


def hooked_together(w: Tensor) -> None:
    with torch.enable_grad():
        handle = register_multi_grad_hook((w,), lambda grads: [g.norm() for g in grads])
        torch.autograd.backward(w * 2, torch.ones(w.shape, dtype=w.dtype))
        handle.remove()


def of_a_prior(w: Tensor) -> Tensor:
    return Normal(w * 0, 1.0, validate_args=False).log_prob(w).sum()


WRONG: list[tuple[str, Any]] = [
    ("norm", lambda w: w.norm()),
    ("sum", lambda w: w.sum()),
    ("__getitem__", lambda w: w[3]),
    ("__setitem__", lambda w: w.__setitem__(3, 0)),
    ("linear", lambda w: nn.functional.linear(torch.ones(1, 8, dtype=w.dtype), w)),
    ("matmul", lambda w: torch.matmul(w, w.new_zeros(8))),
    ("__get__", lambda w: w.T),
    ("view", lambda w: w.view(-1)),
    ("normal_", nn.init.normal_),
    ("kaiming_uniform_", nn.init.kaiming_uniform_),
    ("uniform_", nn.init.xavier_uniform_),
    ("normal_", lambda w: torch.empty_like(w).normal_()),
    ("bernoulli", lambda w: torch.bernoulli(torch.full_like(w.data, 0.5))),
    ("norm", lambda w: torch.zeros_like(w).add_(w).norm()),
    ("sum", lambda w: w.pow(2).sum()),
    ("norm", lambda w: w.data.norm()),
    ("max", lambda w: w.detach().abs().max()),
    ("mean", lambda w: (2 * w.clone() + 1).to(torch.float32).mean()),
    ("norm", lambda w: gradient(w).norm()),
    ("sum", lambda w: torch.where(w > 0, gradient(w), w.data).sum()),
    ("_foreach_norm", lambda w: torch._foreach_norm([gradient(w)])),
    ("_foreach_norm", lambda w: torch._foreach_norm(torch._foreach_mul([w, w], 2.0))),
    ("add", lambda w: w.data + torch.ones(2, 1, 1, dtype=w.dtype)),
    ("norm", hooked),
    ("embedding", in_a_layer),
    ("norm", differentiated),
    ("norm", lambda w: torch.zeros(w.shape, dtype=w.dtype).add_(w.data).norm()),
    ("view", lambda w: nn.utils.parameters_to_vector([w])),
    ("view_as", lambda w: nn.utils.vector_to_parameters(torch.zeros(240, dtype=w.dtype), [w])),
    ("get_gradient_edge", prehooked),
    ("norm", hooked_together),
    ("broadcast_tensors", of_a_prior),
    ("norm", lambda w: torch.autograd.functional.vjp(norm_of, w)),
    ("sum.default", lambda w: torch.ops.aten.sum.default(w)),
    ("get_total_norm", lambda w: nn.utils.get_total_norm([w.detach()])),
]


@checks.on(2)
def what_is_wrong_on_parts(rank: int, n: int) -> None:
    made = autotp.parallelize(Net(), n, example_inputs=(x(),))
    for name, do in WRONG:
        parallel = copy.deepcopy(made)
        in_model = parallel.up.weight.autotp_cut.in_model
        in_model.lines.clear()  # Of this line, by what torch's own functions did.
        in_model.of_sizes = True
        with torch.no_grad(), pytest.warns(UserWarning, match="this rank's part") as told:
            do(parallel.up.weight)
        (found,) = [str(warning.message) for warning in told]
        assert found == (
            f"`up.weight` is this rank's part [15, 8] of [30, 8], and `{name}` is computed of the part only. "
            "autotp.gather(tensor), on all ranks, is the whole, with its gradient; autotp.full_state_dict and "
            "autotp.load_full_state_dict read and write it"
        )
        assert told[0].filename == __file__
        with torch.no_grad(), silence():
            do(parallel.up.weight)  # Once.
            do(nn.Parameter(torch.zeros(30, 8, dtype=torch.float64)))


@checks.on(2)
def a_step_asks_no_part(rank: int, n: int) -> None:
    """Each question goes through Python, and takes as long as a small product."""
    parallel = autotp.parallelize(Net(), n, example_inputs=x())
    asked: list[str] = []
    answer = CutTensor.__torch_function__.__func__  # type: ignore[attr-defined]

    def noted(cls: Any, func: Any, *rest: Any) -> Any:
        asked.append(str(func))
        return answer(cls, func, *rest)

    with patch.object(CutTensor, "__torch_function__", classmethod(noted)):
        for _ in range(3):
            parallel.zero_grad()
            parallel(x()).square().sum().backward()
        assert asked == []
        assert next(p for p in parallel.parameters() if isinstance(p, CutTensor)).dtype is torch.float64
        assert len(asked) == 1


@checks.on(2)
def a_hook_that_was_there_before(rank: int, n: int) -> None:
    """A hook on a gradient gets the part as a part."""
    whole = Net()
    whole.up.weight.register_hook(lambda grad: grad / (grad.norm() + 1))
    parallel = autotp.parallelize(whole, n, example_inputs=(x(),))
    with pytest.warns(UserWarning, match="`up.weight` is this rank's part .* and `norm` is computed of the part only"):
        parallel(x()).sum().backward()


@checks.on(2)
def hooks_that_know_a_node(rank: int, n: int) -> None:
    """A part has another node that accumulates its gradient: what was registered on the old node would never run."""

    def together(w: nn.Parameter) -> Any:
        return register_multi_grad_hook((w,), lambda grads: None)

    def after(w: nn.Parameter) -> Any:
        return get_gradient_edge(w).node.register_hook(lambda *_: None)

    def before(w: nn.Parameter) -> Any:
        node = w.expand_as(w).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        return node.register_prehook(lambda grads: (grads[0] / grads[0].norm(),))

    whole = Net()
    for register in (together, after, before):
        keeps, handle = get_gradient_edge(whole.up.weight), register(whole.up.weight)
        with pytest.raises(autotp.Error) as raised:
            autotp.parallelize(whole, n, example_inputs=(x(),))
        assert str(raised.value) == (
            f"parallelize(Net, tp={n}): a hook on the node that sums up the gradient of `up.weight` would be lost: "
            "its part has another node\n"
            "  try      register it after autotp.parallelize\n"
            "  or       parameter.register_hook or register_post_accumulate_grad_hook, which are kept"
        )
        handle.remove()
        assert keeps.node is get_gradient_edge(whole.up.weight).node
    autotp.parallelize(whole, n, example_inputs=(x(),))


@checks.on(2)
def a_line_is_warned_of_once(rank: int, n: int) -> None:
    """Whatever parameters come there; another line for itself, if it reads another one."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    with pytest.warns(UserWarning) as told:
        for p in parallel.parameters():
            norm_of(p.detach())
        parallel.up.weight.sum()
        parallel.up.bias.sum()
    assert [str(warning.message).split("`")[1] for warning in told] == ["up.weight", "up.bias"]


@checks.on(2)
def sizes_are_of_parts(rank: int, n: int) -> None:
    """Once for a model, whoever asks but torch and autotp."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    for name, asked in (
        ("numel", lambda: sum(p.numel() for p in parallel.up.parameters())),
        ("numel", lambda: parallel.up.weight.nelement()),
        ("shape", lambda: torch.randn(parallel.up.weight.shape)),
        ("size", lambda: parallel.up.weight.detach().size(0) ** -0.5),
        ("__len__", lambda: len(parallel.up.weight)),
        ("nbytes", lambda: parallel.up.weight.nbytes),
    ):
        with pytest.warns(UserWarning) as told:
            asked()
        (found,) = [str(warning.message) for warning in told]
        assert found == (
            f"`{name}` of `up.weight` is that of this rank's part [15, 8]; the whole is [30, 8]. Sizes of parts are "
            "right for tensors beside the parts, such as an optimizer's state, and too small to count parameters, to "
            "draw noise, or for a learning rate by width: model.layouts[name].shape is the shape of the whole. "
            "This warning comes once for a model"
        )
        with silence():
            asked()
            parallel.down.weight.size()
            parallel.down.bias.numel()
            sum(p.numel() for p in copy.deepcopy(parallel).parameters())
        parallel.up.weight.autotp_cut.in_model.of_sizes = False


@checks.on(2)
def wholes_have_their_sizes(rank: int, n: int) -> None:
    """In a region, for code that makes other tensors by them: it may copy parts, and use none as the whole."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    w = parallel.up.weight
    with silence(), shown_by_wholes(lambda operator, name: autotp.Error(f"{operator} of {name}")):
        sizes = (tuple(w.shape), w.size(0), w.numel(), len(w), w.nbytes)
        made, zeros, copied = torch.zeros(w.shape, dtype=w.dtype), torch.zeros_like(w), copy.deepcopy(parallel.up)
        for operator, wrong in (
            ("linalg_svd", lambda: torch.linalg.svd(w.detach())),
            ("__getitem__", lambda: w[0]),
            ("add", lambda: w + made),
        ):
            with pytest.raises(autotp.Error, match=f"^{operator} of up.weight$"):
                wrong()
        parallel.down.bias.norm()  # It is whole.
    assert sizes == ((30, 8), 30, 240, 30, 1920) and made.shape == (30, 8)
    assert zeros.shape == copied.weight.shape == w.shape == (15, 8)


@checks.on(2)
def what_is_right_on_parts(rank: int, n: int) -> None:
    """Training, averages, freezing, initialisation with constants, printing: not a word."""
    with silence():
        everything_that_is_right(autotp.parallelize(Net(), n, example_inputs=(x(),)))


def everything_that_is_right(parallel: Any) -> None:
    average = {name: p.detach().clone() for name, p in parallel.named_parameters()}
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        for foreach in (True, False):
            optimizer = kind(parallel.parameters(), lr=0.01, foreach=foreach)
            parallel(x()).sum().backward()
            assert all(p.grad is p.grad and p.grad.isfinite() is not None for p in parallel.parameters())
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for name, p in parallel.named_parameters():
            average[name].mul_(0.9).add_(p, alpha=0.1)
            p.copy_(average[name])
            p.data = p.data * 2
            assert str(p.device) == "cpu" and len(repr(p)) > 0
            p.requires_grad_(False).requires_grad_()
        torch._foreach_lerp_(list(average.values()), list(parallel.parameters()), 0.1)
        nn.init.zeros_(parallel.up.weight)
        nn.init.constant_(parallel.up.weight, 0.5)
        (parallel.up.weight * 2 + 1).abs()
        torch.zeros_like(parallel.up.weight).lerp_(parallel.up.weight, 0.1).sqrt().add_(1e-8)
    assert isinstance(parallel.up.weight, nn.Parameter) and parallel.up.weight in set(parallel.parameters())


@checks.on(2)
def positions_of_the_whole_are_not_found_in_parts(rank: int, n: int) -> None:
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    weight, odd = parallel.up.weight, torch.arange(30) % 2 == 1
    one = torch.ones(1, 8, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, use in {
            "__setitem__": lambda: operator.setitem(weight, odd, 0),
            "__getitem__": lambda: weight.data[29],
            "select": lambda: weight.select(0, 29),
            "index_add_": lambda: weight.data.index_add_(0, torch.tensor([29]), one),
            "embedding": lambda: nn.functional.embedding(torch.tensor([29]), weight),
        }.items():
            with pytest.raises(autotp.Error) as raised:
                use()
            told = str(raised.value).splitlines()
            assert told[0].startswith(f"`{name}` of this rank's part [15, 8] of `up.weight`, which is [30, 8]: ")
            assert told[1:] == [
                "  try      autotp.gather(tensor), which is the whole, and autotp.load_full_state_dict to write it",
                "  or       model.layouts[name].take(whole, rank) of a mask of the whole's shape",
            ]


@checks.on(2)
def wholes_are_not_written_over_parts(rank: int, n: int) -> None:
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    weight, whole = parallel.up.weight, torch.zeros(30, 8, dtype=torch.float64)
    given = {"mul": "[30, 1], which goes with"}
    with torch.no_grad():
        for name, write in {
            "data": lambda: setattr(weight, "data", whole),
            "grad": lambda: setattr(weight, "grad", whole),
            "copy_": lambda: weight.data.copy_(whole),
            "set_": lambda: weight.set_(whole),
            "add_": lambda: weight.add_(whole),
            "lerp_": lambda: weight.detach().lerp_(whole, 0.5),
            "mul": lambda: weight * whole[:, :1],
        }.items():
            with pytest.raises(autotp.Error) as raised:
                write()
            assert str(raised.value) == (
                f"`{name}` of a tensor {given.get(name, '[30, 8], the shape of')} the whole `up.weight`, and this "
                "rank's part [15, 8]\n"
                "  try      autotp.load_full_state_dict(model, state), which writes the whole model's state\n"
                "  or       autotp.gather(tensor) is the whole of a part"
            )


@checks.on(2)
def whole_state_dicts_are_cut(rank: int, n: int) -> None:
    """Of the model and of a submodule, copied or assigned; of other shapes: an error, and nothing is changed."""
    for assign in (False, True):
        parallel, other = autotp.parallelize(Net(), n, example_inputs=(x(),)), Net()
        for module, whole in ((parallel, other), (parallel.up, nn.Linear(8, 30).double())):
            assert not module.load_state_dict(whole.state_dict(), assign=assign).missing_keys
            mine = parallel.layouts["up.weight"].take(getattr(whole, "up", whole).weight, rank)
            assert torch.equal(parallel.up.weight, mine)
            before = {name: value.clone() for name, value in module.state_dict().items()}
            with pytest.raises(autotp.Error, match=r"weight` is \[29, 8\]: neither the whole, \[30, 8\], nor the part"):
                module.load_state_dict({name: value[:-1] for name, value in whole.state_dict().items()}, assign=assign)
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            module.load_state_dict(module.state_dict(), assign=assign)
        mixed = {**Net().state_dict(), "up.weight": parallel.up.weight.data.clone()}
        with pytest.raises(autotp.Error, match=r"`up.weight` has the shape of this rank's part, and `up.bias` that of"):
            parallel.load_state_dict(mixed, assign=assign)
        other.up.load_state_dict(whole.state_dict())
        torch.testing.assert_close(parallel(x()), other(x()))


class Attention(nn.Module):
    """`wide` is cut by heads: three ranges of rows on each rank; in `Wide` it is cut by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(1, -1, 4, 2).transpose(1, 2) for y in self.wide(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(8, 24), nn.Linear(24, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.wide(x)))


KINDS: list[type[nn.Module]] = [Attention, Wide]


@checks.on(2)
def parts_of_other_rows_are_not_combined(rank: int, n: int) -> None:
    """An average over models, or a copy, of parts that have equal shapes by chance."""
    one, other = (autotp.parallelize(kind(), n, example_inputs=(x(),)) for kind in KINDS)
    a, b = one.wide.weight, other.wide.weight
    assert a.shape == b.shape and one.layouts["wide.weight"].pieces != other.layouts["wide.weight"].pieces
    with torch.no_grad():
        torch._foreach_lerp_([a, one.wide.bias], [a.clone(), one.wide.bias.clone()], 0.5)
        for name, write in {
            "copy_": lambda: a.copy_(b),
            "lerp_": lambda: a.data.lerp_(b.detach() * 2, 0.5),
            "data": lambda: setattr(a, "data", b.data),
            "_foreach_add_": lambda: torch._foreach_add_([one.out.weight, a], [one.out.weight * 1, b]),
        }.items():
            with pytest.raises(autotp.Error) as raised:
                write()
            assert str(raised.value) == (
                f"`{name}` of `wide.weight` and another `wide.weight`, which are cut in different ways\n"
                "  rank 0   [(0, 4), (8, 12), (16, 20)] of dimension 0 and [(0, 12)] of dimension 0\n"
                "  try      autotp.full_state_dict of one model, autotp.load_full_state_dict of the other one"
            )


@checks.on(2)
def wholes_are_not_given_to_a_call(rank: int, n: int) -> None:
    """`functional_call` of parts is right; a call that read the whole where it expects a part would add it up."""
    whole, parallel = Net(), autotp.parallelize(Net(), n, example_inputs=(x(),))
    autotp.load_full_state_dict(parallel, whole.state_dict())
    parts = {name: p * 2 for name, p in parallel.named_parameters()}
    twice = {name: p * 2 for name, p in whole.named_parameters()}
    torch.testing.assert_close(functional_call(parallel, parts, (x(),)), functional_call(whole, twice, (x(),)))
    with pytest.raises(autotp.Error) as raised:
        functional_call(parallel, twice, (x(),))
    assert str(raised.value) == (
        "the call was given a tensor [30, 8] for `up.weight`, the whole, not this rank's part [15, 8]\n"
        "  try      tensors computed element by element from dict(model.named_parameters())\n"
        "  or       model.layouts['up.weight'].take(whole, model.mesh.rank), the part of a whole tensor"
    )
    taken = {name: parallel.layouts[name].take(p, rank) for name, p in twice.items()}
    torch.testing.assert_close(functional_call(parallel, taken, (x(),)), functional_call(whole, twice, (x(),)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens)).logsumexp(-1).sum()  # type: ignore[no-any-return]


@checks.on(2)
def a_call_does_not_untie(rank: int, n: int) -> None:
    """One graph reads a tied parameter once: a call that unties it is an error, one that keeps it tied is right."""
    whole, tokens = Tied(), torch.arange(6)
    parallel = autotp.parallelize(Tied(), n, example_inputs=(tokens,))
    both: list[Tensor] = []
    for model in (whole, parallel):
        tensor = model.embedding.weight * 2
        both.append(functional_call(model, {"embedding.weight": tensor}, (tokens,)))
        given = {"embedding.weight": tensor, "head.weight": tensor}
        torch.testing.assert_close(functional_call(model, given, (tokens,), tie_weights=False), both[-1])
    torch.testing.assert_close(*both)
    for name in ("embedding.weight", "head.weight"):
        with pytest.raises(autotp.Error) as raised:
            functional_call(parallel, {name: parallel.embedding.weight * 2}, (tokens,), tie_weights=False)
        assert str(raised.value) == (
            "`embedding.weight` and `head.weight` are one parameter, and the call was given two tensors for them\n"
            "  try      functional_call(..., tie_weights=True), or one tensor under both names\n"
            "  or       make two parameters of them before autotp.parallelize"
        )


@checks.on(2)
def of_a_trainer(rank: int, n: int) -> None:
    """What a trainer of `distribute` holds warns as well; its steps do not."""
    example = {"x": x().float(), "y": x().float()}
    trainer = autotp.distribute(Loss().float(), tp=n, example_inputs=example)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01)
    with silence():
        for _ in range(3):
            trainer.step(**example)
            autotp.clip_grad_norm_(trainer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        trainer.evaluate(**example)
    with pytest.warns(UserWarning, match="`net.up.weight` is this rank's part") as told:
        trainer.get_parameter("net.up.weight").norm()
    assert len(told) == 1


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).square().mean()


@checks.on(2)
def loops_over_replicas(rank: int, n: int) -> None:
    """`broadcast` and `all_reduce` of each parameter, as replicas are kept alike: over these ranks an Error."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    parallel(x()).sum().backward()
    alone = [dist.new_group([i]) for i in range(n)][rank]
    for p in parallel.parameters():
        dist.broadcast(p.data, rank, group=alone)
        dist.all_reduce(p.grad, group=alone)
    for name, send in {
        "broadcast": lambda p: dist.broadcast(p.data, 0),
        "all_reduce": lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG),
        "reduce": lambda p: dist.reduce(p.detach().clone(), 0),
    }.items():
        with pytest.raises(autotp.Error) as raised:
            for p in parallel.parameters():
                send(p)
        assert str(raised.value) == (
            f"{name} of `up.weight` over ranks [0, 1], which have different parts of it\n"
            "  try      no such loop over parameters: autotp has broadcast them, and has summed their gradients\n"
            "  or       with replicas: parallelize(model, mesh=mesh), and group=mesh['dp'].get_group()"
        )
    with pytest.raises(autotp.Error, match=r"all_reduce of `up.weight` over ranks \[0, 1\]"):
        average_parameters(parallel.parameters(), dist.group.WORLD)
    average_parameters(parallel.parameters(), alone)
    parts = [torch.empty(15, 8, dtype=torch.float64) for _ in range(n)]
    dist.all_gather(parts, parallel.up.weight.data)
    assert torch.equal(parts[rank], parallel.up.weight.detach())


@checks.on(2, 3)
def gathered_parameters_are_right_in_a_loss(rank: int, n: int) -> None:
    """A penalty on whole parameters, square sums and norms: loss and gradients are one device's."""
    torch.manual_seed(0)
    whole = Net()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(x(),))
    losses = []
    for model, read in ((whole, lambda p: p), (parallel, autotp.gather)):
        parameters = [read(p) for p in model.parameters()]
        losses.append(model(x()).square().sum() + sum(p.pow(2).sum() + p.norm() for p in parameters))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-13, atol=0)
    for (name, mine), theirs in zip(parallel.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(autotp.gather(mine.grad), theirs.grad, rtol=1e-12, atol=1e-12)

        if parallel.layouts[name].dim is not None:
            torch.testing.assert_close(autotp.gather(mine.detach() * 2), theirs.detach() * 2, rtol=0, atol=0)


@checks.on(2)
def copies_files_and_new_parameters(rank: int, n: int) -> None:
    """Parts stay parts in copies and in new parameters; in files they are plain tensors."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    parallel(x()).sum().backward()
    weight = parallel.up.weight
    file = io.BytesIO()
    kept = {"p": weight, "grad": weight.grad, "data": weight.data, "state": parallel.state_dict()}
    with pytest.warns(UserWarning, match="`up.weight` is this rank's part .* and `pickle` is computed of the part"):
        torch.save(kept, file)
    weight.autotp_cut.warned = False
    weight.autotp_cut.in_model.lines.clear()
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert {type(found[key]) for key in ("grad", "data")} == {Tensor} and type(found["p"]) is nn.Parameter
    assert torch.equal(found["p"], weight.detach()) and found["p"].requires_grad
    for part in (copy.deepcopy(weight), copy.deepcopy(weight.grad), nn.Parameter(weight), nn.Parameter(weight.data)):
        with pytest.warns(UserWarning, match="`up.weight` is this rank's part"):
            part.norm()
        weight.autotp_cut.warned = False
        weight.autotp_cut.in_model.lines.clear()
    expected = parallel(x())
    parallel.up.weight = nn.Parameter(weight.data * 1)
    torch.testing.assert_close(parallel(x()), expected)
    parallel.up.weight = nn.Parameter(autotp.gather(weight.detach()))
    torch.testing.assert_close(parallel(x()), expected)
    with silence():
        parallel.up.weight.norm()  # Whole now.


@checks.on(2)
def a_step_costs_nothing(rank: int, n: int) -> None:
    """Torch's optimizers step plain parameters, and take their fast ways; where a step raises, no harm is done."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    parallel(x()).sum().backward()
    gradients = [p.grad for p in parallel.parameters()]
    with patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: ["cpu"]):
        assert _default_to_fused_or_foreach(list(parallel.parameters()), False, True) == (True, False)
        assert _default_to_fused_or_foreach(gradients, False, False) == (False, True)
    called: list[Any] = []
    original = CutTensor.__dict__["__torch_function__"]

    def counted(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called.append(func)
        return original.__func__(cls, func, types, args, kwargs)

    for given in ({}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.AdamW(parallel.parameters(), **given)
        for _ in range(CHECKED_STEPS):  # In which ranks are compared.
            optimizer.step()
        _ = [p.grad for p in parallel.parameters()]
        with patch.object(CutTensor, "__torch_function__", classmethod(counted)):
            parallel.up.weight.detach()
            assert len(called) == 1, "it counts"
            optimizer.step()
        assert called == [Tensor.detach]
        called.clear()
        with pytest.warns(UserWarning, match="`up.weight` is this rank's part"):
            parallel.up.weight.norm()
        parallel.up.weight.autotp_cut.warned = False
        parallel.up.weight.autotp_cut.in_model.lines.clear()
    optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert isinstance(parallel.up.weight, CutTensor)


@checks.on(2)
def zero_grad_of_a_module_looks_for_no_frame(rank: int, n: int) -> None:
    """It asks each parameter in each step."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    for to_none in (False, True):
        parallel(x()).square().sum().backward()
        with patch("autotp.distributed.cut_parameter._asked", side_effect=AssertionError):
            parallel.zero_grad(set_to_none=to_none)
        gradients = [p.grad for p in parallel.parameters()]
        assert all(g is None if to_none else not g.any() for g in gradients)


@checks.on(2)
def the_users_code_in_a_step_gets_parts(rank: int, n: int) -> None:
    """A closure, and hooks on the step, whenever they are registered: they are warned of norms."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        parallel(x()).square().sum().backward()
        return parallel.up.weight.grad.norm()

    def normed(*_: Any) -> None:
        parallel.up.weight.detach().norm()

    def warned(call: Callable[[], Any]) -> None:
        parallel.up.weight.autotp_cut.warned = False
        parallel.up.weight.autotp_cut.in_model.lines.clear()
        with pytest.warns(UserWarning, match="`up.weight` is this rank's part .* and `norm`"):
            call()

    warned(lambda: optimizer.step(closure))
    warned(lambda: optimizer.step(closure=closure))
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(normed)
        warned(optimizer.step)
        handle.remove()
    with silence():
        optimizer.step()
    copy.deepcopy(optimizer)
    assert isinstance(parallel.up.weight, CutTensor)


@checks.on(2)
def a_state_of_parts(rank: int, n: int) -> None:
    """One of them in a file would be half a model, also as a submodule."""
    for around in (lambda model: model, lambda model: nn.ModuleDict({"inner": nn.Sequential(model)})):
        parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
        whole = around(parallel)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                whole.state_dict()
        (one,) = found
        assert re.fullmatch(
            r"`state_dict\(\)` has this rank's parts only: `[\w.]+` and \d+ more are cut. .*", str(one.message)
        )
        assert one.filename == __file__
    file = str(shared(rank) / "whole.safetensors")
    with silence():
        copy.deepcopy(parallel)
        autotp.load_full_state_dict(parallel, state := autotp.full_state_dict(parallel))
    if rank == 0:
        save_file({name: tensor + 1 for name, tensor in state.items()}, file)
    dist.barrier()
    with silence():  # It reads the state to fill it, and is given wholes.
        assert load_model(parallel, file) == (set(), [])
        loaded = autotp.full_state_dict(parallel)
    torch.testing.assert_close(loaded, {name: tensor + 1 for name, tensor in state.items()})


@pytest.mark.timeout(300)
class Scored(nn.Module):
    """A parametrization of each row."""

    def forward(self, w: Tensor) -> Tensor:
        return w.softmax(1)


@checks.on(2)
def what_is_in_a_parameters_place(rank: int, n: int) -> None:
    """The whole where a part belongs is refused, at the latest when the model is saved: its rows would be mixed up."""
    net = Net()
    register_parametrization(net.up, "weight", Scored())
    made = autotp.parallelize(net, n, example_inputs=(x(),))
    assert isinstance(made.up.parametrizations.weight.original, CutTensor)
    autotp.full_state_dict(made)
    remove_parametrizations(made.up, "weight")  # Its `set_` puts the whole into the part's memory, and asks nobody.
    for call in (lambda: autotp.full_state_dict(made), lambda: made(x())):
        with pytest.raises(autotp.Error, match=r"`up.weight` is \[30, 8\] now, and this rank's part is \[15, 8\]"):
            call()
    made.down._parameters["weight"] = nn.Parameter(torch.ones(8, 30, dtype=torch.double))
    with pytest.raises(autotp.Error, match=r"` is \[.*\] now, and this rank's part is \["):
        autotp.full_state_dict(made)


@checks.on(2)
def what_a_removed_parametrization_leaves(rank: int, n: int) -> None:
    """A weight norm keeps two tensors, and torch puts the whole weight into their place: it is one device's."""
    one, net = Net(), Net()
    net.load_state_dict(one.state_dict())
    for model in (one, net):
        weight_norm(model.up)
    made = autotp.parallelize(net, n, example_inputs=(x(),))
    for model in (one, made):
        remove_parametrizations(model.up, "weight")
    assert isinstance(made.up, nn.Linear)
    torch.testing.assert_close(made(x()), one(x()))
    state = autotp.full_state_dict(made)
    if rank == 0:
        torch.testing.assert_close(state, dict(one.state_dict()))


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_nothing_is_said_on_one_rank() -> None:
    parallel = autotp.parallelize(Net(), 1, example_inputs=(x(),))
    with silence():
        parallel.up.weight.norm()
