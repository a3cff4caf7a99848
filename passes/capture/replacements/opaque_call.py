"""opaque_call: a call of opaque code as an operator of a graph; it runs the code where the graph runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autotp.errors import Error
from autotp.ops.eager_mode import is_mapped
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.python_state.freeze import SYMBOLIC
from autotp.passes.capture.pytree import PLAIN, flatten
from autotp.passes.capture.skeleton import storage_of
from autotp.rules.call import Call, bound_arguments
from autotp.rules.language import Rule, spell


@dataclass(frozen=True)
class OpaqueOptions:
    """The options of `opaque`."""

    like: Callable[..., Any] | None
    rows: bool
    rule: str | None


class PlaceOf(NamedTuple):
    """Stands for a module among the arguments, or a number that is a symbol in the capture, by its place among them."""

    place: int


class _TensorLike(NamedTuple):
    """Stands for a tensor among arguments or results."""

    dims: int
    dtype: torch.dtype


@dataclass(frozen=True)
class CallValues:
    """Arguments, or a result: the leaves, with stand-ins for tensors, modules and sizes, and the structure."""

    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, tree: Any, placed: Sequence[Any] = ()) -> tuple[CallValues, list[Tensor]]:
        """Returns the form of a value, and its tensors; `placed` are the modules and sizes among the arguments."""
        leaves, spec = flatten(tree)
        places = {id(x): PlaceOf(i) for i, x in enumerate(placed)}
        forms = [_TensorLike(x.dim(), x.dtype) if isinstance(x, Tensor) else places.get(id(x), x) for x in leaves]
        return cls(tuple(forms), spec), [x for x in leaves if isinstance(x, Tensor)]

    def filled(self, tensors: Sequence[Tensor], placed: Sequence[Any] = ()) -> Any:
        """Returns the value with these tensors, modules and sizes."""
        queue = iter(tensors)

        def filled(leaf: Any) -> Any:
            return placed[leaf.place] if type(leaf) is PlaceOf else next(queue) if type(leaf) is _TensorLike else leaf

        return pytree.tree_unflatten(list(map(filled, self.leaves)), self.spec)

    def is_like(self, result: CallValues) -> bool:
        """True for a result of the same structure; numbers must be equal, those that are symbols of sizes aside."""
        pairs = zip(self.leaves, result.leaves, strict=False)
        plain = ((a, b) for a, b in pairs if type(a) in PLAIN or type(a) is _TensorLike)
        return self.spec == result.spec and all(type(a) is type(b) and a == b for a, b in plain)


class OpaqueCode(nn.Module):
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

    def __init__(
        self, code: OpaqueCode, arguments: CallValues, how: OpaqueOptions, autocast: list[Autocast], text: str
    ) -> None:
        self.code, self.arguments, self.how, self.autocast, self.text = code, arguments, how, autocast, text
        self.buffers = [name for name, _ in code.named_buffers()]
        self.names = [*(name for name, _ in code.named_parameters()), *self.buffers]
        self.result: CallValues | None = None
        self.examples: list[Tensor] = []
        self.sizes: list[list[int | tuple[int, int] | None]] = []
        self.written: list[str] = []
        self.shared: list[tuple[set[int], set[int]]] = []
        self.flops: Any = None
        self.tags: tuple[torch.Tag, ...] = ()
        self.__qualname__ = f"opaque_{id(self):x}"  # Tells separate_results what two calls compute: see `fingerprint`.

    def __str__(self) -> str:
        return f"autotp.opaque({self.text})"

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if any(isinstance(x, FakeTensor) or x.is_meta for x in operands):
            return self._without_values(operands, sizes, [])[1]
        if torch.compiler.is_compiling():
            results: list[Tensor] = torch.compiler.disable(self._eagerly)(operands, sizes)
            return results
        return self._eagerly(operands, sizes)

    @property
    def has_user_rule(self) -> bool:
        """Whether the user says how the call may be cut; the rule is tested as that of an operator."""
        return self.how.rule is not None

    def rule_function(self, call: Call) -> Rule | None:
        """Returns the rule of the call: the user's, or that it can be cut into rows, where the user says so."""
        if self.how.rule is not None:
            return Rule.of(self.how.rule)
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
        places = {size_key(n): (i, d) for i, x in enumerate(operands) for d, n in enumerate(x.shape)}
        numbers = [x for x in self.result.leaves if isinstance(x, SYMBOLIC)]
        if any(x.node.expr not in {*places, *map(size_key, sizes)} for x in numbers):
            raise Error(
                f"autotp.opaque: `{self.text}` returns a number that it computes", fix="a tensor: torch.tensor(n)"
            )
        self.sizes = [[n if isinstance(n, int) else places.get(size_key(n)) for n in x.shape] for x in self.examples]
        if self.has_user_rule:  # A rank's part has other lengths. Its rule is proved on them.
            self.sizes = [[None for _ in x.shape] for x in self.examples]
        drew = noting.drew or self.how.rows  # `rule_function` has a `!`.
        drew |= self.how.like is not None and not self.has_user_rule
        self.flops = None if self.how.like else noting.flops
        self.tags = (torch.Tag.nondeterministic_seeded,) * drew + (torch.Tag.dynamic_output_shape,) * sized

    def _without_values(
        self, operands: Sequence[Tensor], sizes: Sequence[int], updated: list[Any]
    ) -> tuple[CallValues, list[Tensor]]:
        """Returns the form of the result, and its tensors, those of written buffers included, without values.

        Args:
            updated: filled with tensors that the code writes, though torch does not count it.
        """
        if self.how.like is not None:
            args, kwargs = self.arguments.filled(operands, [*self.code.parts, *sizes])
            # Of a module `like` gets what its caller gave it.
            args = args[1:] if args and isinstance(args[0], nn.Module) else args
            form, tensors = CallValues.of(self.how.like(*args, **kwargs))
            # It does not tell which.
            self.written = [] if self.how.rows or self.has_user_rule else self.buffers
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
                f"autotp.opaque: `{self.text}` changes its buffer `{user_name(lost[0])}`, and did not without values",
                fix="`like=` without `rows=True` and without `rule=`, by which all buffers may change",
            )
        expected_sizes = self._wanted(operands)
        pairs = [
            pair
            for shape, x in zip(expected_sizes, tensors, strict=False)
            for pair in zip(shape, x.shape, strict=False)
        ]
        if not self.result.is_like(form) or any(size not in (None, length) for size, length in pairs):
            raise Error(
                f"autotp.opaque: `{self.text}` returns something else than it does without values",
                expected=_text(self.result, expected_sizes),
                got=_text(form, [[*x.shape] for x in tensors]),
                fix="tensors in place of other values, and `like=` that returns what the code returns",
            )
        results = [*tensors, *(after[name] for name in self.written)]
        memory, separate_results = [*map(storage_of, operands), None], list[Tensor]()
        for x in results:  # The graph may write into memory that only one operator reads.
            separate_results.append(x.clone() if storage_of(x) in memory else x)
            memory.append(storage_of(x))
        count = len(tensors) if self.how.rows else 0
        return [*self._reached(separate_results[:count], operands), *separate_results[count:]]

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
    ) -> tuple[CallValues, list[Tensor], dict[str, Tensor], set[str]]:
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
            forms = {(x.dtype, *map(size_key, x.shape)) for x in (state[name], after[name])}
            if after[name].requires_grad or len(forms) > 1:
                raise Error(
                    f"autotp.opaque: `{self.text}` gives its buffer `{user_name(name)}` a gradient, "
                    "or another shape or dtype",
                    fix="value.detach(), of the shape and dtype of the buffer",
                )
        return *CallValues.of(result), after, changed


def _version(x: Tensor) -> int:
    """Returns how often a tensor was written; 0 where torch does not count: in inference mode and in transforms."""
    return 0 if x.is_inference() or is_mapped(x) else x._version


def user_name(name: str) -> str:
    """Returns a name in `OpaqueCode` as the user knows it: without `parts.0`, and empty for the function."""
    return ".".join(name.split(".")[2:])


def size_key(n: Any) -> Any:
    """Returns a size as an expression, which can be compared without an assumption about it."""
    return n if isinstance(n, int) else n.node.expr


def _text(form: CallValues, shapes: Sequence[Sequence[int | None]]) -> str:
    sizes = iter(shapes)
    tensors = [f"{leaf.dtype}{next(sizes)}" if type(leaf) is _TensorLike else leaf for leaf in form.leaves]
    return ", ".join(str(x).removeprefix("torch.") for x in tensors)
