"""A cut parameter, its gradient and its states: outside of graphs they behave as the whole on one device."""

import copy
import io
import operator
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import Checks, shared, silence
from safetensors.torch import load_model, save, save_file
from small_models import Mlp, x
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.tensor import Shard
from torch.distributions import Normal
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.distributed.cut_tensors.cut_parameter import CutTensor, own_parameter
from autotp.distributed.cut_tensors.sharded_tensor import CompiledOutput
from autotp.runtime.torch_hooks.optimizer_guard import CHECKED_STEPS

checks = Checks()


class Net(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def hooked(w: Tensor) -> Any:
    """The gradient that a hook gets, and what it makes of it."""
    seen = []

    def scaled(g: Tensor) -> Tensor:
        seen.append(g.norm())
        return g / g.norm()

    with torch.enable_grad():
        handle = w.register_hook(scaled)
        w.grad = None
        torch.autograd.backward(w * 2, torch.ones(w.shape, dtype=w.dtype))
        handle.remove()
    return seen, w.grad


def hooked_together(w: Tensor) -> Any:
    seen: list[Any] = []
    with torch.enable_grad():
        handle = register_multi_grad_hook((w,), lambda grads: seen.extend(g.norm() for g in grads))
        torch.autograd.backward(w * 2, torch.ones(w.shape, dtype=w.dtype))
        handle.remove()
    return seen


def differentiated(w: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(w.pow(3).sum() + w.norm() + w[3].sum(), [w])[0]


def differentiated_twice(w: Tensor) -> Tensor:
    """As AdaHessian does: the second derivative is asked for where no graph is recorded."""
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(w.pow(3).sum(), [w], create_graph=True)
    return torch.autograd.grad([gradient], [w], [w.detach() * 2])[0]


def in_a_layer(w: Tensor) -> Tensor:
    """A layer of torch's outside the model has the parameter, too."""
    layer = nn.Embedding(30, 8)
    layer.weight = w  # type: ignore[assignment]
    found: Tensor = layer(torch.tensor([1, 29]))
    return found


def written(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """What a parameter is after it was written."""

    def after(w: Tensor) -> Tensor:
        torch.manual_seed(7)
        write(w)
        return w.detach().clone()

    return after


def lagged(w: Tensor) -> None:
    """A row that was taken before the parameter was written, and is written then."""
    row = w[3]
    w.mul_(2)
    row.add_(w[4])


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda w: w.norm(),
    "norm of a copy": lambda w: torch.zeros_like(w).add_(w).norm(),
    "norm of data": lambda w: w.data.norm(),
    "norm beside a new tensor": lambda w: torch.zeros(w.shape, dtype=w.dtype).add_(w.data).norm(),
    "norm of gradients": lambda w: w.grad.norm(),
    "sum of squares": lambda w: (w.grad**2).sum(),
    "share of zeros": lambda w: (w.abs() < 0.1).double().mean(),
    "mean of a cast": lambda w: (2 * w.clone() + 1).to(torch.float32).double().mean(),
    "quantile": lambda w: w.detach().quantile(0.3),
    "largest": lambda w: w.detach().abs().max(),
    "row": lambda w: w[3],
    "last row": lambda w: w[-1],
    "columns": lambda w: w[:, 2:5],
    "chosen": lambda w: w[torch.arange(30) % 7 == 1],
    "select": lambda w: w.select(0, 29),
    "flat": lambda w: w.view(-1),
    "transposed": lambda w: w.T @ w,
    "in a product": lambda w: nn.functional.linear(torch.ones(1, 8, dtype=w.dtype), w),
    "in a layer": in_a_layer,
    "singular values": lambda w: torch.linalg.svdvals(w),
    "repeated": lambda w: w.data + torch.ones(2, 1, 1, dtype=w.dtype),
    "where": lambda w: torch.where(w > 0, w.grad, w.data).sum(),
    "norms": lambda w: torch._foreach_norm([w.grad, w, torch.ones(3)]),
    "norms of products": lambda w: torch._foreach_norm(torch._foreach_mul([w, w.grad], 2.0)),
    "total norm": lambda w: nn.utils.get_total_norm([w.detach(), w.grad]),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "gradient": differentiated,
    "gradient of the gradient": differentiated_twice,
    "of a hook": hooked,
    "of a hook on several": hooked_together,
    "of a prior": lambda w: Normal(w * 0, 1.0, validate_args=False).log_prob(w).sum(),
    "by name": lambda w: torch.ops.aten.sum.default(w),
    "number": lambda w: w.detach()[3, 4].item() + float(w.sum()),
    "array": lambda w: torch.from_numpy(w.detach().numpy()),
    "sizes": lambda w: (tuple(w.shape), w.size(0), w.numel(), len(w), w.nbytes, w.stride(), w.data.nelement()),
    "as it says": lambda w: w.detach().add(1).tolist()[29],
    "noise": lambda w: torch.randn(w.shape).shape,
    "equal": lambda w: torch.equal(w, w.data.clone()) and torch.allclose(w, w),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "row": lambda w: operator.setitem(w, 29, 0),
    "rows by a mask": lambda w: operator.setitem(w, torch.arange(30) % 2 == 1, 0),
    "elements by a mask": lambda w: operator.setitem(w, w > 0.1, -1),
    "columns": lambda w: w[:, 2].fill_(3),
    "a view": lambda w: w.data.view(-1)[7:200].mul_(2),
    "a view of before": lagged,
    "whole": lambda w: w.copy_(torch.arange(240.0).view(30, 8)),
    "whole data": lambda w: setattr(w, "data", torch.arange(240.0, dtype=w.dtype).view(30, 8)),
    "added": lambda w: w.data.index_add_(0, torch.tensor([29]), torch.ones(1, 8, dtype=w.dtype)),
    "by its norm": lambda w: w.div_(w.norm(dim=1, keepdim=True)).sub_(w.mean(0)),
    "by its gradient": lambda w: w.addcdiv_(w.grad, w.grad.abs().add(1), value=-0.1).add_(w.grad, alpha=w.grad.norm()),
    "clamped": lambda w: w.clamp_(-w.detach().std(), w.detach().std()),
    "normal": nn.init.normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "constant": lambda w: nn.init.constant_(w, 0.5),
    "vector": lambda w: nn.utils.vector_to_parameters(torch.arange(240.0, dtype=w.dtype), [w]),
    "lists": lambda w: torch._foreach_lerp_([w, w.grad], [w.grad, w.data * 2], 0.5),
    "gradient": lambda w: (setattr(w, "grad", torch.ones(w.shape, dtype=w.dtype)), w.sub_(w.grad)),
}


@checks.on(2)
@checks.on(4)
def as_one_device(rank: int, n: int) -> None:
    """Whatever the user's code reads and writes, on parts that are cut along rows, columns, and heads that repeat."""
    torch.manual_seed(0)
    whole = Net()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(x(),))
    for model in (whole, parallel):
        model(x()).square().sum().backward()
    for name, do in {**READS, **{f"{name}, written": written(write) for name, write in WRITES.items()}}.items():
        for path in ("up.weight", "down.weight"):
            results = []
            for model in (whole, parallel):
                w = copied_with_gradient(model.get_parameter(path))
                if path == "down.weight":
                    w = turned(w)
                with torch.no_grad(), silence():
                    torch.manual_seed(5)
                    results.append(autotp.gather(do(w)))
            torch.testing.assert_close(
                results[1], results[0], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


def copied_with_gradient(w: nn.Parameter) -> nn.Parameter:
    copied = copy.deepcopy(w)
    assert w.grad is not None
    copied.grad = copy.deepcopy(w.grad)
    return copied


def turned(w: Any) -> Any:
    """The parameter of a column-parallel layer as a row-parallel one: cut along the other dimension."""
    new: Any = nn.Parameter(w.detach().T.contiguous())
    new = own_parameter("turned", new)
    new.grad = w.grad.T.contiguous()
    return new


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


class Scaled(nn.Module):
    """A product with a cut vector: backward reads the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(8, 30), nn.Parameter(torch.rand(30)), nn.Linear(30, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.scale)


class Watched(TorchDispatchMode):
    """The user's mode around operators: it passes each one on."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.passed_on(op, args, kwargs or {})

    def passed_on(self, op: Any, args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)


@checks.on(2)
def in_a_mode_of_the_user(rank: int, n: int) -> None:
    """Inside of a graph its operands are parts, also where backward takes a kept parameter, or computes again."""
    whole = Scaled()
    for recompute in ("none", "full"):
        parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(x(),), recompute=recompute)
        whole.zero_grad()
        for model in (whole, parallel):
            with Watched():
                model(x()).square().sum().backward()
                norms = [p.norm() for p in model.parameters()]
        assert isinstance(parallel.scale, CutTensor)
        for (name, p), q in zip(whole.named_parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(norms, [p.norm() for p in whole.parameters()])


class Passing(TorchFunctionMode):
    """The user's mode around functions, as `with torch.device(...)` is one of torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@checks.on(2)
def made_and_called_in_a_function_mode_of_the_user(rank: int, n: int) -> None:
    """autotp's own code gets parts through the mode, and the user's the whole."""
    whole = Scaled()
    with Passing():
        parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(x(),))
    expected = whole(x())
    with torch.inference_mode():
        torch.testing.assert_close(parallel.eval()(x()), expected.detach())
    with Passing():
        torch.testing.assert_close(parallel(x()), expected)
        norms = [p.norm() for p in parallel.parameters()]
    torch.testing.assert_close(norms, [p.norm() for p in whole.parameters()])


@checks.on(2)
def beside_what_compiled_code_returns(rank: int, n: int) -> None:
    """It asks `__torch_function__` of its own first, and passes the call on."""
    whole = nn.Sequential(nn.Linear(8, 30), nn.GELU()).double()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(x(),), outputs="local")
    logits = torch.compile(parallel, backend="eager")(x())
    assert isinstance(logits, CompiledOutput) and isinstance(parallel.get_submodule("0").weight, CutTensor)
    for name, operate in {"mul": lambda y, p: y * p.bias, "matmul": lambda y, p: y @ p.weight}.items():
        found, expected = operate(logits, parallel.get_submodule("0")), operate(whole(x()), whole[0])
        torch.testing.assert_close(found, expected, msg=lambda m, name=name: f"{name}: {m}")


IN_COMPILED_CODE: dict[str, Callable[[Any], Tensor]] = {
    "norm": lambda w: w.norm(),
    "sum of squares": lambda w: w.pow(2).sum(),
    "size": lambda w: w.sum() * w.shape[0],
    "product": lambda w: (torch.ones(3, 8, dtype=w.dtype) @ w.T).square().mean() + 1,
    "row": lambda w: (w[3] * 2).sum(),
    "of several": lambda w: (w * 2 + w.abs()).clamp(min=0.1).mean(),
}


@checks.on(2)
def compiled_code_of_the_user_gets_wholes(rank: int, n: int) -> None:
    torch.manual_seed(0)
    whole = Net()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(x(),))
    for name, do in IN_COMPILED_CODE.items():
        torch._dynamo.reset()
        compiled = torch.compile(do, backend="aot_eager")
        results = []
        for model, call in ((whole, do), (parallel, compiled)):
            model.zero_grad()
            loss = call(model.up.weight)
            loss.backward()
            results.append((loss.detach(), autotp.gather(model.up.weight.grad)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@checks.on(2)
def a_hook_that_was_there_before(rank: int, n: int) -> None:
    """A hook on a gradient gets what behaves as the whole."""
    whole, other = Net(), Net()
    other.load_state_dict(whole.state_dict())
    for model in (whole, other):
        model.up.weight.register_hook(lambda grad: grad / (grad.norm() + 1))
    parallel = autotp.parallelize(other, n, example_inputs=(x(),))
    for model in (whole, parallel):
        model(x()).sum().backward()
    torch.testing.assert_close(parallel.up.weight.grad, whole.up.weight.grad)


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
        assert message(lambda: autotp.parallelize(whole, n, example_inputs=(x(),))) == (
            f"parallelize(Net, tp={n}): a hook on the node that sums up the gradient of `up.weight` would be lost: "
            "its part has another node\n"
            "  try      register it after autotp.parallelize\n"
            "  or       parameter.register_hook or register_post_accumulate_grad_hook, which are kept"
        )
        handle.remove()
        assert keeps.node is get_gradient_edge(whole.up.weight).node
    autotp.parallelize(whole, n, example_inputs=(x(),))


@checks.on(2)
def it_says_what_it_is(rank: int, n: int) -> None:
    """In the words of DTensor, and as one where it can be one."""
    parallel = autotp.parallelize(Attention(), n, example_inputs=(x(),))
    w, qkv = parallel.out.weight, parallel.wide.weight
    assert str(w).startswith("CutParameter(local_tensor=tensor([[") and w.to_local().shape == (8, 4)
    assert str(w).endswith("shape=[8, 8], placements=[Shard(dim=1)])")
    assert str(qkv).endswith(f"pieces={[[(i + 4 * r, i + 4 * r + 4) for i in (0, 8, 16)] for r in range(2)]})])")
    assert torch.equal(w.to_dtensor().full_tensor(), w.full_tensor().detach())
    assert w.to_dtensor().placements == (Shard(1),) and w.to_dtensor().shape == w.shape
    assert torch.equal((w.detach() * 2).to_dtensor().full_tensor(), w.full_tensor().detach() * 2)
    with pytest.raises(autotp.Error, match="a DTensor has one part a rank"):
        qkv.to_dtensor()
    local = w.to_local()
    local.sum().backward()
    assert torch.equal(w.grad, torch.ones(8, 8, dtype=w.dtype))


@checks.on(2)
def a_parameter_that_is_learned_is_not_written(rank: int, n: int) -> None:
    """As torch has it on one device; views of it, too."""
    w = autotp.parallelize(Net(), n, example_inputs=(x(),)).up.weight
    for write in (lambda: w.zero_(), lambda: w.normal_(), lambda: w[3].zero_(), lambda: operator.setitem(w, 3, 0)):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            write()
    with torch.no_grad(), pytest.raises(autotp.Error, match="`t_` changes the shape of a tensor"):
        w.t_()
    with pytest.raises(autotp.Error, match=r"get_gradient_edge of `up.weight`: this node gets the gradient of this"):
        get_gradient_edge(w)


@checks.on(2)
def code_that_reads_memory_gets_no_part(rank: int, n: int) -> None:
    """A kernel of Triton and a writer of files ask for the address, and read what is there with the whole's sizes."""
    w = autotp.parallelize(Net(), n, example_inputs=(x(),)).up.weight
    library: dict[str, Any] = {"__name__": "transformers.modeling_utils"}
    exec("def address(x): return x.data_ptr()", library)
    assert library["address"](w) == library["address"](w.data) == w.to_local().data_ptr()
    for part in (w, w.data):
        with pytest.raises(autotp.Error, match=r"`data_ptr` of .*, of which each rank holds a part: a kernel would"):
            part.data_ptr()
        with pytest.raises(autotp.Error, match=r"of which each rank holds a part"):
            save({"w": part.contiguous()})
    assert len(save({"w": w[:2].contiguous()})) > 2 * 8 * 8


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
def whole_state_dicts_are_cut(rank: int, n: int) -> None:
    """Of the model and of a submodule, copied or assigned; of other shapes: an error, and nothing is changed."""
    for assign in (False, True):
        parallel, other = autotp.parallelize(Net(), n, example_inputs=(x(),)), Net()
        for module, whole in ((parallel, other), (parallel.up, nn.Linear(8, 30).double())):
            assert not module.load_state_dict(whole.state_dict(), assign=assign).missing_keys
            mine = parallel.layouts["up.weight"].take(getattr(whole, "up", whole).weight, rank)
            assert torch.equal(parallel.up.weight.to_local(), mine)
            before = {name: value.clone() for name, value in module.state_dict().items()}
            with pytest.raises(autotp.Error, match=r"weight` is \[29, 8\]: neither the whole, \[30, 8\], nor the part"):
                module.load_state_dict({name: value[:-1] for name, value in whole.state_dict().items()}, assign=assign)
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            module.load_state_dict(module.state_dict(), assign=assign)
        mixed = {**Net().state_dict(), "up.weight": parallel.up.weight.to_local().clone()}
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
def parts_of_other_rows_are_combined(rank: int, n: int) -> None:
    """An average over models, or a copy, of parts that have equal shapes by chance."""
    one, other = (autotp.parallelize(kind(), n, example_inputs=(x(),)) for kind in KINDS)
    a, b = one.wide.weight, other.wide.weight
    assert a.to_local().shape == b.to_local().shape
    assert one.layouts["wide.weight"].pieces != other.layouts["wide.weight"].pieces
    with torch.no_grad():
        for write in (
            lambda p, q: p.copy_(q),
            lambda p, q: p.data.lerp_(q.detach() * 2, 0.5),
            lambda p, q: setattr(p, "data", q.data),
            lambda p, q: torch._foreach_add_([p, p], [q * 2, q]),
        ):
            plain, wanted = autotp.gather(b.detach()), autotp.gather(a.detach())
            write(wanted, plain)
            write(a, b)
            torch.testing.assert_close(a.detach(), wanted)


@checks.on(2)
def tensors_that_a_call_is_given(rank: int, n: int) -> None:
    """`functional_call` takes wholes, values computed of parameters, and parts; gradients reach all of them."""
    whole, parallel = Net(), autotp.parallelize(Net(), n, example_inputs=(x(),))
    autotp.load_full_state_dict(parallel, whole.state_dict())
    twice = {name: (p * 2).detach().requires_grad_() for name, p in whole.named_parameters()}
    mine = {name: p.detach().clone().requires_grad_() for name, p in twice.items()}
    for given in (twice, mine):
        functional_call(whole if given is twice else parallel, given, (x(),)).square().sum().backward()
    for name, p in twice.items():
        torch.testing.assert_close(mine[name].grad, p.grad, msg=name)
    expected = functional_call(whole, twice, (x(),)).square().sum()
    computed = functional_call(parallel, {name: p * 2 for name, p in parallel.named_parameters()}, (x(),))
    taken = {name: parallel.layouts[name].take(p, rank) for name, p in twice.items()}
    torch.testing.assert_close(functional_call(parallel, taken, (x(),)).square().sum(), expected)
    torch.testing.assert_close(computed.square().sum(), expected)
    computed.square().sum().backward()
    torch.testing.assert_close(parallel.up.weight.grad, twice["up.weight"].grad * 2)
    with pytest.raises(autotp.Error, match=r"a tensor \[29, 8\] for `up.weight`, which is \[30, 8\]"):
        functional_call(parallel, {"up.weight": twice["up.weight"][1:]}, (x(),))


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
    """What a trainer of `distribute` holds behaves as the whole as well."""
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
    weight = trainer.get_parameter("net.up.weight")
    assert weight.shape == (30, 8)
    torch.testing.assert_close(weight.detach().norm(), autotp.gather(weight.detach()).norm())


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
        tensor = "`up.weight`" if name == "all_reduce" else "a tensor [30@tp, 8]"
        assert str(raised.value).replace("allreduce", "all_reduce") == (
            f"{name} of {tensor} over ranks [0, 1], which have different parts of it\n"
            "  try      no such loop over parameters: autotp has broadcast them, and has summed their gradients\n"
            "  or       with replicas: parallelize(model, mesh=mesh), and group=mesh['dp'].get_group()"
        )
    with pytest.raises(autotp.Error, match=r"all_reduce of `up.weight` over ranks \[0, 1\]"):
        average_parameters(parallel.parameters(), dist.group.WORLD)
    average_parameters(parallel.parameters(), alone)
    parts = [torch.empty(15, 8, dtype=torch.float64) for _ in range(n)]
    dist.all_gather(parts, parallel.up.weight.to_local())
    assert torch.equal(parts[rank], parallel.up.weight.to_local())
    for part in (parallel.up.weight, parallel.up.weight.data):
        with pytest.raises(autotp.Error, match=r"of which each rank holds a part|which have different parts of it"):
            dist.all_gather(parts, part)


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
    """Parts stay parts in copies and in new parameters; in files they are whole."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    parallel(x()).sum().backward()
    weight, file = parallel.up.weight, io.BytesIO()
    torch.save({"p": weight, "grad": weight.grad, "data": weight.data, "state": parallel.state_dict()}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert {type(found[key]) for key in ("grad", "data")} == {Tensor} and type(found["p"]) is nn.Parameter
    assert found["p"].requires_grad and torch.equal(found["p"].detach(), autotp.gather(weight.detach()))
    torch.testing.assert_close(dict(found["state"]), autotp.gather(dict(parallel.state_dict())))
    Net().load_state_dict(found["state"])
    for part in (copy.deepcopy(weight), copy.deepcopy(weight.grad), nn.Parameter(weight), nn.Parameter(weight.data)):
        assert part.shape == (30, 8)
        torch.testing.assert_close(part.detach().norm(), autotp.gather(part.detach()).norm())
    expected = parallel(x())
    for new in (weight.data * 1, autotp.gather(weight.detach()), weight.detach()[:], weight.detach().flip(0).flip(0)):
        parallel.up.weight = nn.Parameter(new)
        torch.testing.assert_close(parallel(x()), expected)
    assert type(parallel.up.weight) is nn.Parameter  # Gathered, and whole from then on.


@checks.on(2)
def states_of_optimizers(rank: int, n: int) -> None:
    """They behave as the parameters do, also after a step, in a file, and when they are loaded whole."""
    torch.manual_seed(0)
    whole = Net()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(x(),))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (whole, parallel)]
    for _ in range(2):
        norms = []
        for model, optimizer in zip((whole, parallel), optimizers, strict=True):
            for _ in range(2):
                optimizer.zero_grad()
                model(x()).square().sum().backward()
                optimizer.step()
            state = optimizer.state[model.up.weight]
            norms.append([state[key].norm() for key in ("exp_avg", "exp_avg_sq")])
            with torch.no_grad():
                state["exp_avg"][:2] = 0
        torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(dict(parallel.named_parameters()), dict(whole.named_parameters()))
    file = io.BytesIO()
    torch.save(optimizers[1].state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    torch.testing.assert_close(saved["state"], optimizers[0].state_dict()["state"])
    optimizers[1].load_state_dict(saved)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(dict(parallel.named_parameters()), dict(whole.named_parameters()))


class ByColumns(torch.optim.Optimizer):
    """Steps by the products of columns, as Shampoo does: its state is square."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["products"] = state.get("products", 0) + p.grad.T @ p.grad
            p.sub_(p.grad @ (state["products"] + torch.eye(len(state["products"]), dtype=p.dtype)).inverse())


@checks.on(2)
def a_state_as_large_as_a_part(rank: int, n: int) -> None:
    """It is whole all the same: an optimizer of the user's computes with wholes."""
    whole = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False)).double()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(x(),))
    optimizers = [ByColumns(model.parameters()) for model in (whole, parallel)]
    for _ in range(3):
        for model, optimizer in zip((whole, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            model(x()).square().sum().backward()
            optimizer.step()
        states = [[s["products"] for s in optimizer.state.values()] for optimizer in optimizers]
        torch.testing.assert_close(states[1], states[0])
    torch.testing.assert_close(list(parallel.parameters()), list(whole.parameters()))


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
        assert parallel.up.weight.shape == optimizer.state[parallel.up.weight]["exp_avg"].shape == (30, 8)
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
        with patch("autotp.distributed.cut_tensors.cut_parameter._asks", side_effect=AssertionError):
            parallel.zero_grad(set_to_none=to_none)
        gradients = [p.grad for p in parallel.parameters()]
        assert all(g is None if to_none else not g.any() for g in gradients)


@checks.on(2)
def the_users_code_in_a_step_gets_wholes(rank: int, n: int) -> None:
    """A closure, and hooks on the step, whenever they are registered."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    seen = list[Any]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        parallel(x()).square().sum().backward()
        seen.append(parallel.up.weight.grad.shape)
        return torch.ones(())

    def normed(*_: Any) -> None:
        seen.append(parallel.up.weight.detach().shape)

    optimizer.step(closure)
    optimizer.step(closure=closure)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(normed)
        optimizer.step()
        handle.remove()
    assert seen == [(30, 8)] * 4
    copy.deepcopy(optimizer)
    assert isinstance(parallel.up.weight, CutTensor)


@checks.on(2)
def a_state_of_parts(rank: int, n: int) -> None:
    """It behaves as the whole, also as a submodule's."""
    for around in (lambda model: model, lambda model: nn.ModuleDict({"inner": nn.Sequential(model)})):
        parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
        with silence():
            states = [around(parallel).state_dict(), parallel.up.state_dict()]
        for state in states:
            (weight,) = [value for name, value in state.items() if name in ("weight", "up.weight", "inner.0.up.weight")]
            assert weight.shape == (30, 8) and torch.equal(weight, autotp.gather(parallel.up.weight.detach()))
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
