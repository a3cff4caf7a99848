"""opaque: a module or a function whose code is no part of the graph: one operator, which every rank runs eagerly.

Before: y = self.matcher(x)                 (numpy, or a loop over values: an exporter cannot take its code)
After:  [y] = opaque([x, *matcher.parameters(), *matcher.buffers()], [])     (the sizes among its arguments come last)

While a model is captured, a call is recorded as an operator. Its sizes come from a run without values, or from `like`.
Where the graph runs, the operator runs the code, with the tensors that it gets in the place of the module's parameters
and buffers. Autograd records what the code does. Passes see an operator without a rule: its operands, its results and
their gradients are whole on every rank.

NOTE [The module of an opaque call]
The operator runs a copy of the module, whose attributes are those of the capture. All of them count as read, so a
model of which one has changed is captured again. Buffers that the code writes are further results, and the graph
copies them into those of the model. Other attributes that it sets, and values that it writes into its arguments, are
refused; so are tensors, modules and symbols that the operator does not get.

NOTE [Memory of results]
The operator returns results in memory of their own. Where the code returns views of one memory, a write into one is
refused if another one is read later (`functionalize.py`). `like` does not tell of views.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import get_ident
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes

from autotp.arguments import expect_arguments
from autotp.errors import Error
from autotp.passes.capture.autocast_regions import ambient_everywhere
from autotp.passes.capture.python_state.freeze import SYMBOLIC
from autotp.passes.capture.python_state.walk import WHOLE, entries, everything, held, key_of, spelled
from autotp.passes.capture.pytree import flatten
from autotp.passes.capture.replacements.opaque_call import (
    CallValues,
    OpaqueCall,
    OpaqueCode,
    OpaqueOptions,
    size_key,
    user_name,
)
from autotp.passes.capture.skeleton import close_over, copying
from autotp.rules.registry import expect_rule

MARK = "_autotp_opaque"
"""The attribute of a module that is opaque: its options."""
Code = TypeVar("Code", bound=Callable[..., Any])

torch.library.define("autotp::opaque", "(Tensor[] operands, SymInt[] sizes, int number) -> Tensor[]")
RECORDED = torch.ops.autotp.opaque.default
"""What the exporter records: the operator with the number of its call."""


@torch.library.register_fake("autotp::opaque")
def _(operands: Sequence[Tensor], sizes: Sequence[int], number: int) -> list[Tensor]:
    made = dict[Any, Any]()
    return [_made_again(x, made) for x in _recording[-1].calls[number].examples]


def _made_again(x: Tensor, sizes: dict[Any, Any]) -> Tensor:
    """Returns a tensor without values of the same sizes. A size that depends on values has a symbol of its own."""
    if not any(map(free_unbacked_symbols, x.shape)):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    context = torch.library.get_ctx()
    for size in filter(free_unbacked_symbols, x.shape):
        if size_key(size) not in sizes:
            sizes[size_key(size)] = context.new_dynamic_size()
    shape = [sizes.get(size_key(n), n) for n in x.shape]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


class OpaqueCalls:
    """The calls that a capture records, and the thread in which it runs."""

    def __init__(self) -> None:
        self.calls: list[OpaqueCall] = []
        self.thread: int | None = get_ident()


_recording: list[OpaqueCalls] = []


@contextmanager
def recording_opaque_calls() -> Iterator[None]:
    """A region in which calls of opaque code become operators."""
    _recording.append(OpaqueCalls())
    try:
        yield
    finally:
        _recording.pop()


def recorded_calls() -> OpaqueCalls:
    """Returns the calls of the open region."""
    return _recording[-1]


def _is_recording() -> bool:
    """True where a call becomes an operator. (A function that names the list itself counts as one that changes it.)"""
    return bool(_recording) and _recording[-1].thread == get_ident()


@contextmanager
def opaque_modules(model: nn.Module) -> Iterator[None]:
    """A region in which the calls of a model's opaque modules are recorded."""
    with ExitStack() as stack:
        for module in [module for module in model.modules() if MARK in vars(module)]:
            stack.callback(vars(module).update, {k: v for k, v in vars(module).items() if k == "forward"})
            stack.callback(vars(module).pop, "forward")
            vars(module)["forward"] = _Forward(module, vars(module).get("forward"))
        yield


class _Forward:
    """Stands for the forward of an opaque module while a model is captured."""

    def __init__(self, module: nn.Module, instance_forward: Callable[..., Any] | None) -> None:
        self.module, self.instance_forward = module, instance_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, how = type(self.module).__name__, getattr(self.module, MARK)
        if self.instance_forward is not None:
            return _recorded(self.instance_forward, name, args, kwargs, how, [self.module])
        return _recorded(type(self.module).forward, name, (self.module, *args), kwargs, how)

    def __deepcopy__(self, memo: Any) -> Any:
        """Returns the forward of the instance, or None: the copy of a module runs its code."""
        return copy.deepcopy(self.instance_forward, memo)


def opaque(code: Code, like: Callable[..., Any] | None = None, rows: bool = False, rule: str | None = None) -> Code:
    """Makes a module or a function one operator of a parallel model, which every rank runs whole and eagerly.

    This is the last way out for code that cannot be captured, such as numpy or loops over values, and the short way for
    a kernel that nobody has made an operator (a `torch.autograd.Function` around Triton). Without `rule` it gets whole
    arguments, which are gathered before it, and its parameters stay whole on every rank. Gradients are those of one
    device. The plan lists it. On one device nothing changes: neither results nor names in `state_dict()`. torch's
    random numbers are those of one device, too; `random` and `numpy.random` draw others on each rank.

    Args:
        code: a module of a model, before `parallelize`, which is returned; or a function or method, in whose place
            another one is returned: `opaque` is a decorator, too. All tensors and modules that a function uses are its
            arguments, or those of the module of which it is a method. The code returns tensors, alone or in tuples,
            lists, dicts and dataclasses.
        like: for code that does not run without values: called with its arguments (without `self`, if that is a
            module), it returns tensors of the shapes and dtypes that the code returns, with any values, such as
            `lambda scores: scores.new_empty(scores.shape[0])`. A size that values decide is that of an operator
            such as `x.nonzero()`.
        rows: whether each row of the results (along their first dimension) is made of the same row of the arguments
            alone. `distribute` needs this promise, since it computes parts of a batch. A parameter that no row uses
            then has a gradient of zeros, and not none. With `like`, the code changes no buffer.
        rule: how the call may be cut, as in `autotp.rule`: a term for each tensor among the arguments, then for each
            parameter and buffer of a module; and one for each result, then for each buffer that the code changes. With
            `like`, it changes none. The code draws no random numbers. The rule is tested on parts of random numbers,
            where the model runs. The backward of a `torch.autograd.Function` is not: `verify` compares gradients.

    Raises:
        Error: `code` is neither, an argument has another type, or `rule` does not parse. While a model is captured: the
            code does not run without values; it sets attributes, or writes into its arguments or parameters; it holds a
            tensor in a plain attribute, or a tensor, a module or a size in a closure. In a call: it does so with
            `like`, returns other sizes than without values, or changes a buffer that it did not change then.

    Example:
        >>> class Sorted(nn.Module):
        ...     def forward(self, x):
        ...         return x[torch.from_numpy(x.detach().numpy().argsort())]
        >>> model = nn.Sequential(nn.Linear(1, 4), nn.Flatten(0), autotp.opaque(Sorted(), like=torch.empty_like))
        >>> autotp.verify(model, tp=2, example_inputs=torch.ones(2, 1)).ok
        True
    """
    expect_arguments(opaque, like=like, rows=rows, rule=rule)
    if rule is not None:
        expect_rule(rule)
        if rows:
            raise Error("rows=True, and `rule` says already what is cut", fix="rows=False").within("opaque")
    how = OpaqueOptions(like, rows, rule)
    if isinstance(code, nn.Module):
        setattr(code, MARK, how)
        return code
    if not callable(code) or isinstance(code, type):
        raise Error(f"opaque gets {code!r}", fix="a torch.nn.Module or a function").within("opaque")

    if isinstance(code, MethodType):  # Its object is an argument, and a copy of that has a copy of the method.
        return MethodType(opaque(code.__func__, like, rows, rule), code.__self__)  # type: ignore[return-value]

    @wraps(code)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _is_recording():
            return _recorded(code, getattr(code, "__qualname__", str(code)), args, kwargs, how)
        return code(*args, **kwargs)

    return called  # type: ignore[return-value]


def _recorded(
    function: Callable[..., Any],
    text: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    how: OpaqueOptions,
    around: Sequence[nn.Module] = (),
) -> Any:
    """Returns the result of a call as that of an operator, and writes the buffers that it writes.

    Args:
        around: modules that `function` runs with and that are not among the arguments.
    """
    leaves, _ = flatten((args, kwargs))
    parts = [*around, *(x for x in leaves if isinstance(x, nn.Module))]
    sizes: list[Any] = [x for x in leaves if isinstance(x, torch.SymInt)]
    plain = [x for x in leaves if not isinstance(x, Tensor | nn.Module | torch.SymInt)]
    for module in {module for part in parts for module in part.modules()}:
        for name in [*vars(module)]:
            getattr(module, name, None)  # Counts as read. NOTE [The module of an opaque call]
    arguments, tensors = CallValues.of((args, kwargs), [*parts, *sizes])
    runs = OpaqueCode(function, parts)
    operands = [*tensors, *runs.parameters(), *runs.buffers()]
    mode = detect_fake_mode(operands)
    recording = recorded_calls()
    calls, thread, recording.thread = recording.calls, recording.thread, None  # Opaque code inside is a part of it.
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            call = OpaqueCall(_on_meta(runs, text, plain), arguments, how, ambient_everywhere(), text)
            with mode or ExitStack(), _without_new_symbols(mode):
                call.record(operands, sizes)
    finally:
        recording.thread = thread
    calls.append(call)
    results = RECORDED(operands, sizes, len(calls) - 1)
    count = len(results) - len(call.written)
    buffers = dict(runs.named_buffers())
    with torch.no_grad():
        for name, value in zip(call.written, results[count:], strict=True):
            buffers[name].copy_(value)
    assert call.result is not None
    return call.result.filled(results[:count])


def _without_new_symbols(mode: Any) -> Any:
    """A region whose sizes that depend on values are not those of the graph: `_made_again` makes these."""
    env = getattr(mode, "shape_env", None)
    return ExitStack() if env is None else env.ignore_fresh_unbacked_symbols()


def _on_meta(runs: OpaqueCode, text: str, plain: Sequence[Any]) -> OpaqueCode:
    """Returns a copy whose parameters and buffers are on meta.

    Args:
        plain: the arguments that are neither tensors nor modules nor sizes.

    Raises:
        Error: the code, or what is `plain`, holds a tensor, a module or a symbol that the operator does not get.
    """
    memo: dict[int, Any] = {}
    for p in runs.parameters():
        memo[id(p)] = nn.Parameter(torch.empty(tuple(p.shape), dtype=p.dtype, device="meta"), p.requires_grad)
    for x in runs.buffers():
        memo[id(x)] = torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")
    passed_on = {*memo, *map(key_of, runs.modules())}
    for path, x in everything(runs, "held", [plain]):
        if MARK in path:  # What `like` holds is not copied: it runs in the capture only.
            continue
        for key, item in (*entries(x), *((WHOLE, item) for item in held(x))):
            if isinstance(item, (Tensor, nn.Module, *SYMBOLIC)) and key_of(item) not in passed_on:
                name = f" in `{user_name(spelled(path, key))}`" if path and user_name(spelled(path, key)) else ""
                raise Error(
                    f"autotp.opaque: `{text}` gets a {type(item).__name__}{name}, which the operator cannot pass on",
                    fix="a whole number as an argument (`x.shape[0]`), from which the code computes the rest"
                    if isinstance(item, SYMBOLIC)
                    else "an argument; or a method of a module that has it as a child or self.register_buffer",
                )
    with copying():
        close_over(memo, runs)
        copied = copy.deepcopy(runs, memo)
    for part in copied.modules():
        if vars(part).get("forward", part) is None:  # The copy of a `_Forward`.
            del vars(part)["forward"]
    return copied


def with_opaque_calls(graph: fx.Graph, recorded: OpaqueCalls) -> fx.Graph:
    """Puts the calls into a graph, in place of the operator that the exporter has recorded; returns the graph."""
    for node in graph.find_nodes(op="call_function", target=RECORDED):
        *args, number = node.args
        node.target, node.args = recorded.calls[number], tuple(args)
    return graph
