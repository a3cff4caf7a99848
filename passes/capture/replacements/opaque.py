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
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from autotp.arguments import expect_arguments
from autotp.errors import Error
from autotp.ops.eager_mode import is_mapped
from autotp.passes.capture.autocast_regions import Autocast, ambient_everywhere
from autotp.passes.capture.python_state.freeze import SYMBOLIC
from autotp.passes.capture.python_state.walk import WHOLE, entries, everything, held, key_of, spelled
from autotp.passes.capture.pytree import PLAIN, flatten
from autotp.passes.capture.skeleton import close_over, copying, storage_of
from autotp.rules.call import Call, bound_arguments
from autotp.rules.language import Rule, spell

MARK = "_autotp_opaque"
"""The attribute of a module that is opaque: `How` it is."""
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
        if _size(size) not in sizes:
            sizes[_size(size)] = context.new_dynamic_size()
    shape = [sizes.get(_size(n), n) for n in x.shape]
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


@dataclass(frozen=True)
class _How:
    """The options of `opaque`."""

    like: Callable[..., Any] | None
    rows: bool


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


def opaque(code: Code, like: Callable[..., Any] | None = None, rows: bool = False) -> Code:
    """Makes a module or a function one operator of a parallel model, which every rank runs whole and eagerly.

    This is the last way out for code that cannot be captured, such as numpy or loops over values. It gets whole
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

    Raises:
        Error: `code` is neither, or an argument has another type. While a model is captured: the code does not run
            without values; it sets attributes, or writes into its arguments or parameters; it holds a tensor in a plain
            attribute, or a tensor, a module or a size in a closure. In a call: it does so with `like`, returns other
            sizes than without values, or changes a buffer that it did not change then.

    Example:
        >>> class Sorted(nn.Module):
        ...     def forward(self, x):
        ...         return x[torch.from_numpy(x.detach().numpy().argsort())]
        >>> model = nn.Sequential(nn.Linear(1, 4), nn.Flatten(0), autotp.opaque(Sorted(), like=torch.empty_like))
        >>> autotp.verify(model, tp=2, example_inputs=torch.ones(2, 1)).ok
        True
    """
    expect_arguments(opaque, like=like, rows=rows)
    how = _How(like, rows)
    if isinstance(code, nn.Module):
        setattr(code, MARK, how)
        return code
    if not callable(code) or isinstance(code, type):
        raise Error(f"opaque gets {code!r}", fix="a torch.nn.Module or a function").within("opaque")

    if isinstance(code, MethodType):  # Its object is an argument, and a copy of that has a copy of the method.
        return MethodType(opaque(code.__func__, like, rows), code.__self__)  # type: ignore[return-value]

    @wraps(code)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _is_recording():
            return _recorded(code, getattr(code, "__qualname__", str(code)), args, kwargs, how)
        return code(*args, **kwargs)

    return called  # type: ignore[return-value]


class _At(NamedTuple):
    """Stands for a module among the arguments, or a number that is a symbol in the capture, by its place among them."""

    at: int


class _TensorLike(NamedTuple):
    """Stands for a tensor among arguments or results."""

    dims: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Values:
    """Arguments, or a result: the leaves, with stand-ins for tensors, modules and sizes, and the structure."""

    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, tree: Any, placed: Sequence[Any] = ()) -> tuple[_Values, list[Tensor]]:
        """Returns the form of a value, and its tensors; `placed` are the modules and sizes among the arguments."""
        leaves, spec = flatten(tree)
        places = {id(x): _At(i) for i, x in enumerate(placed)}
        forms = [_TensorLike(x.dim(), x.dtype) if isinstance(x, Tensor) else places.get(id(x), x) for x in leaves]
        return cls(tuple(forms), spec), [x for x in leaves if isinstance(x, Tensor)]

    def filled(self, tensors: Sequence[Tensor], placed: Sequence[Any] = ()) -> Any:
        """Returns the value with these tensors, modules and sizes."""
        queue = iter(tensors)

        def filled(leaf: Any) -> Any:
            return placed[leaf.at] if type(leaf) is _At else next(queue) if type(leaf) is _TensorLike else leaf

        return pytree.tree_unflatten(list(map(filled, self.leaves)), self.spec)

    def is_like(self, result: _Values) -> bool:
        """True for a result of the same structure; numbers must be equal, those that are symbols of sizes aside."""
        pairs = zip(self.leaves, result.leaves, strict=False)
        plain = ((a, b) for a, b in pairs if type(a) in PLAIN or type(a) is _TensorLike)
        return self.spec == result.spec and all(type(a) is type(b) and a == b for a, b in plain)


class _Runs(nn.Module):
    """The code of an opaque call, and the modules among its arguments."""

    def __init__(self, function: Callable[..., Any], parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), function

    def forward(self, args: Any, kwargs: Any, names: Sequence[str]) -> Any:
        """Returns the result, and the buffers of these names after the run."""
        result = self.function(*args, **kwargs)
        after = dict(self.named_buffers(remove_duplicate=False))
        return result, {name: after[name] for name in names}

    def attributes(self) -> dict[tuple[str, str], Any]:
        """Returns the attributes of the modules, by path and name."""
        return {(path, name): x for path, part in self.parts.named_modules() for name, x in vars(part).items()}


class _Noting(TorchDispatchMode):
    """Notes whether an operator draws random numbers, the FLOPs, and the statistics that batch norms update."""

    def __init__(self) -> None:
        super().__init__()
        self.drew, self.flops = False, 0
        self.updated: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        arguments = bound_arguments(func, args, kwargs or {}) if isinstance(func, OpOverload) else {}
        if arguments.get("training", arguments.get("train")):  # Their schemas do not say that they write.
            self.updated += [arguments.get("running_mean"), arguments.get("running_var")]
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(getattr(func, "_overloadpacket", func))) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


class _Reached(torch.autograd.Function):
    """The identity on results; its backward gives zeros for parameters, which may be used by other rows only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in tensors[:count])  # Not views: torch refuses writes into several.

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1 + inputs[0] :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *grads, *map(torch.zeros_like, ctx.saved_tensors)


class OpaqueCall:
    """A call of opaque code, as an operator of a graph: operands, parameters and buffers -> tensors of the result.

    Attributes:
        code: runs the code; its tensors are on meta.
        names: the parameters and buffers of `code`, which follow the operands.
        arguments: the form of the arguments.
        how: the options of `opaque`.
        autocast: the settings of autocast around the call.
        text: the name of the class or function.
        examples: the results in the capture; those of buffers are the last ones.
        result: the form of the result.
        sizes: of the results: numbers, or the operand and the dimension that have the same; None for others.
        written: the buffers that the code writes.
        shared: the places of operands and of results that lie in one memory, where there are several; none with `like`.
        flops: of the products in it; None if they are not known.
        tags: as those of an operator of torch.
    """

    __name__ = "opaque"

    def __init__(self, code: _Runs, arguments: _Values, how: _How, autocast: list[Autocast], text: str) -> None:
        self.code, self.arguments, self.how, self.autocast, self.text = code, arguments, how, autocast, text
        self.buffers = [name for name, _ in code.named_buffers()]
        self.names = [*(name for name, _ in code.named_parameters()), *self.buffers]
        self.result: _Values | None = None
        self.examples: list[Tensor] = []
        self.sizes: list[list[int | tuple[int, int] | None]] = []
        self.written: list[str] = []
        self.shared: list[tuple[set[int], set[int]]] = []
        self.flops: Any = None
        self.tags: tuple[torch.Tag, ...] = ()
        self.__qualname__ = f"opaque_{id(self):x}"  # Tells apart what two calls compute: see `fingerprint`.

    def __str__(self) -> str:
        return f"autotp.opaque({self.text})"

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if any(isinstance(x, FakeTensor) or x.is_meta for x in operands):
            return self._without_values(operands, sizes, [])[1]
        if torch.compiler.is_compiling():
            results: list[Tensor] = torch._dynamo.disable(self._eagerly)(operands, sizes)
            return results
        return self._eagerly(operands, sizes)

    def rule_function(self, call: Call) -> Rule | None:
        """Returns the rule of the call: it can be cut into rows, where the user says so, and in no other way."""
        if not self.how.rows:
            return None
        arguments = call.operands[: len(call.operands) - len(self.names)]
        size = next((x.shape[0] for x in arguments if x.dim()), None)

        def term(x: Tensor, name: str, is_row: bool) -> list[str]:
            first = ["b!"] if is_row and x.dim() and x.shape[0] == size else []
            return first + [f"{name}_{d}^" for d in range(len(first), x.dim())]

        results = len(call.outputs) - len(self.written)
        ins = [term(x, f"x{i}", i < len(arguments)) for i, x in enumerate(call.operands)]
        return Rule.of(spell(ins, [term(x, f"y{i}", i < results) for i, x in enumerate(call.outputs)]))

    def record(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Runs the code without values, and notes what it returns."""
        with _Noting() as noting:
            self.result, self.examples = self._without_values(operands, sizes, noting.updated)
        sized = any(free_unbacked_symbols(n) for x in self.examples for n in x.shape)
        places = {_size(n): (i, d) for i, x in enumerate(operands) for d, n in enumerate(x.shape)}
        numbers = [x for x in self.result.leaves if isinstance(x, SYMBOLIC)]
        if any(x.node.expr not in {*places, *map(_size, sizes)} for x in numbers):
            raise Error(
                f"autotp.opaque: `{self.text}` returns a number that it computes", fix="a tensor: torch.tensor(n)"
            )
        self.sizes = [[n if isinstance(n, int) else places.get(_size(n)) for n in x.shape] for x in self.examples]
        drew = noting.drew or self.how.like is not None or self.how.rows  # `rule_function` has a `!`.
        self.flops = None if self.how.like else noting.flops
        self.tags = (torch.Tag.nondeterministic_seeded,) * drew + (torch.Tag.dynamic_output_shape,) * sized

    def _without_values(
        self, operands: Sequence[Tensor], sizes: Sequence[int], updated: list[Any]
    ) -> tuple[_Values, list[Tensor]]:
        """Returns the form of the result, and its tensors, those of written buffers included, without values.

        Args:
            updated: filled with tensors that the code writes, though torch does not count it.
        """
        if self.how.like is not None:
            args, kwargs = self.arguments.filled(operands, [*self.code.parts, *sizes])
            # Of a module `like` gets what its caller gave it.
            args = args[1:] if args and isinstance(args[0], nn.Module) else args
            form, tensors = _Values.of(self.how.like(*args, **kwargs))
            self.written = [] if self.how.rows else self.buffers  # It does not tell which.
            return form, [*tensors, *operands[len(operands) - len(self.written) :]]
        try:
            form, tensors, after, changed = self._run(operands, sizes)
        except Error:
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise Error(
                f"autotp.opaque: `{self.text}` does not run without values: {type(error).__name__}: {first}",
                fix="like=, a function of the same arguments that returns tensors of the same shapes and dtypes",
            ) from error
        updated += [after[name] for name in self.written]  # From the first run on.
        self.written = [name for name, x in after.items() if name in changed or any(x is y for y in updated)]
        used = [*operands[: len(operands) - len(self.buffers)], *after.values()]
        memory = [[x.untyped_storage()._cdata for x in xs] for xs in (used, tensors)]
        places = [tuple({i for i, x in enumerate(xs) if x == y} for xs in memory) for y in {*memory[1]}]
        self.shared = [(ins, outs) for ins, outs in places if len(ins) + len(outs) > 1]
        return form, [*tensors, *(after[name] for name in self.written)]

    def _eagerly(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Returns the tensors of the result."""
        assert self.result is not None
        form, tensors, after, changed = self._run(operands, sizes)
        if lost := sorted(changed - {*self.written}):
            raise Error(
                f"autotp.opaque: `{self.text}` changes its buffer `{_short(lost[0])}`, and did not without values",
                fix="`like=` without `rows=True`, by which all buffers may change",
            )
        wanted = self._wanted(operands)
        pairs = [pair for shape, x in zip(wanted, tensors, strict=False) for pair in zip(shape, x.shape, strict=False)]
        if not self.result.is_like(form) or any(size not in (None, length) for size, length in pairs):
            raise Error(
                f"autotp.opaque: `{self.text}` returns something else than it does without values",
                expected=_text(self.result, wanted),
                got=_text(form, [[*x.shape] for x in tensors]),
                fix="tensors in place of other values, and `like=` that returns what the code returns",
            )
        results = [*tensors, *(after[name] for name in self.written)]
        memory, apart = [*map(storage_of, operands), None], list[Tensor]()
        for x in results:  # The graph may write into memory that only one operator reads.
            apart.append(x.clone() if storage_of(x) in memory else x)
            memory.append(storage_of(x))
        count = len(tensors) if self.how.rows else 0
        return [*self._reached(apart[:count], operands), *apart[count:]]

    def _wanted(self, operands: Sequence[Tensor]) -> list[list[int | None]]:
        """Returns the sizes that results have with these operands; None for those that values decide."""

        def wanted(size: int | tuple[int, int] | None) -> int | None:
            return operands[size[0]].shape[size[1]] if isinstance(size, tuple) else size

        return [list(map(wanted, sizes)) for sizes in self.sizes]

    def _reached(self, results: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results, by which each parameter has a gradient: replicas sum those of the same parameters."""
        differentiable = [x for x in results if x.is_floating_point()]
        weights = operands[len(operands) - len(self.names) : len(operands) - len(self.buffers)]
        reached = iter(_Reached.apply(len(differentiable), *differentiable, *weights) if differentiable else ())
        return [next(reached) if x.is_floating_point() else x for x in results]

    def _run(
        self, operands: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[_Values, list[Tensor], dict[str, Tensor], set[str]]:
        """Returns form and tensors of the result, the buffers after the run, and the names of those that changed."""
        count = len(operands) - len(self.names)
        state = dict(zip(self.names, operands[count:], strict=True))
        # Copies, into which the code may write.
        state |= {name: state[name].detach().clone() for name in self.buffers}
        fixed = operands[: len(operands) - len(self.buffers)]
        versions, before = {name: _version(x) for name, x in state.items()}, self.code.attributes()
        passed = [_version(x) for x in fixed]
        with ExitStack() as stack:
            for settings in self.autocast:
                stack.enter_context(settings.on())
            args, kwargs = self.arguments.filled(operands[:count], [*self.code.parts, *sizes])
            # It puts what the code assigns into the dict that it gets.
            result, after = functional_call(self.code, {**state}, (args, kwargs, self.buffers))
        now = self.code.attributes()
        if assigned := [key for key in {*before, *now} if before.get(key, key) is not now.get(key, key)]:
            raise Error(
                f"autotp.opaque: `{self.text}` sets `{min(name for _, name in assigned)}` of its copy of the module",
                fix="return the value, or keep it in a buffer",
            )
        if passed != [_version(x) for x in fixed]:
            raise Error(
                f"autotp.opaque: `{self.text}` writes into its arguments or parameters", fix="a new tensor: x.clone()"
            )
        changed = {name for name, x in after.items() if x is not state[name] or _version(x) != versions[name]}
        for name in changed:
            forms = {(x.dtype, *map(_size, x.shape)) for x in (state[name], after[name])}
            if after[name].requires_grad or len(forms) > 1:
                raise Error(
                    f"autotp.opaque: `{self.text}` gives its buffer `{_short(name)}` a gradient, or another shape or "
                    "dtype",
                    fix="value.detach(), of the shape and dtype of the buffer",
                )
        return *_Values.of(result), after, changed


def _version(x: Tensor) -> int:
    """Returns how often a tensor was written; 0 where torch does not count: in inference mode and in transforms."""
    return 0 if x.is_inference() or is_mapped(x) else x._version


def _short(name: str) -> str:
    """Returns a name in `_Runs` as the user knows it: without `parts.0`, and empty for the function."""
    return ".".join(name.split(".")[2:])


def _size(n: Any) -> Any:
    """Returns a size as an expression, which can be compared without an assumption about it."""
    return n if isinstance(n, int) else n.node.expr


def _text(form: _Values, shapes: Sequence[Sequence[int | None]]) -> str:
    sizes = iter(shapes)
    tensors = [f"{leaf.dtype}{next(sizes)}" if type(leaf) is _TensorLike else leaf for leaf in form.leaves]
    return ", ".join(str(x).removeprefix("torch.") for x in tensors)


def _recorded(
    function: Callable[..., Any],
    text: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    how: _How,
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
    arguments, tensors = _Values.of((args, kwargs), [*parts, *sizes])
    runs = _Runs(function, parts)
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


def _on_meta(runs: _Runs, text: str, plain: Sequence[Any]) -> _Runs:
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
    known = {*memo, *map(key_of, runs.modules())}
    # What `like` holds is not copied: it runs in the capture only.
    for path, x in everything(runs, "held", [plain]):
        if MARK in path:  # What `like` holds is not copied: it runs in the capture only.
            continue
        for key, item in (*entries(x), *((WHOLE, item) for item in held(x))):
            if isinstance(item, (Tensor, nn.Module, *SYMBOLIC)) and key_of(item) not in known:
                name = f" in `{_short(spelled(path, key))}`" if path and _short(spelled(path, key)) else ""
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
