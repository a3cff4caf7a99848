"""recompute: lets backward recompute blocks, or the scores of attention.

    Before: y = block(x, w)                                 After: y = recomputed(block)(x, w), which keeps x and w only
    Before: s = matmul(q, k); p = softmax(s); o = matmul(p, v)     After: o = recomputed(core)(q, k, v)      "selective"

Scores and values computed from them are most of the memory that attention keeps, and little of its computation.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autotp.errors import Error
from autotp.ops.eager_mode import no_transform
from autotp.ops.random_state import random_state_of, set_random_state
from autotp.options import Recompute
from autotp.passes.capture.autocast_regions import Autocast, ambient_everywhere, enter_autocast
from autotp.passes.emit.outline import blocks, outlined
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, draws_from_numpy, has

aten = torch.ops.aten


class Recomputed(nn.Module):
    """A graph of which only the inputs are kept for backward; backward runs it again with the same random numbers."""

    def __init__(self, inner: fx.GraphModule) -> None:
        super().__init__()
        self.inner: nn.Module = inner
        self.draws = any(draws(node) for node in inner.graph.nodes)
        # An exception would leave a region of autocast that the graph has entered open.
        self.stops_early = not inner.graph.find_nodes(op="call_function", target=enter_autocast)
        # torch's `checkpoint` keeps torch's random state, and not numpy's.
        self.again = not any(draws_from_numpy(node) for node in inner.graph.nodes)

    def forward(self, *args: Any) -> Any:
        """Runs the graph. Under transforms of torch.func, which do not support recomputation, everything is kept."""
        if torch.compiler.is_compiling():
            again = torch.is_grad_enabled() and self.again
            return self._by_torch(args) if again else self.inner(*args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not torch.is_grad_enabled() or not self.again or not no_transform(*tensors):
            return self.inner(*args)
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if hooked or not isinstance(self.inner, fx.GraphModule):  # Else it is a compiled block.
            # What is kept for backward is handed to these hooks, which may read it: save_on_cpu copies it.
            return self._by_torch(tuple(map(_arrived, args)) if hooked else args)
        replay = _Replay(self, args, tensors)
        push_hooks(replay.pack, replay.unpack)
        try:
            return self.run(*args)
        finally:
            pop_hooks()
            # The numbers count from 0, so the next one is how many there were.
            replay.wanted = next(replay.numbers)

    def run(self, *args: Any) -> Any:
        """Runs the graph, without a call of its module, which reads source files when an exception leaves it."""
        return self.inner.forward(*args)

    def _by_torch(self, args: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(self._plain, *args, use_reentrant=False, preserve_rng_state=self.draws)
        runs, early = self._second_time_apart(), self.stops_early
        return checkpoint(runs, *args, use_reentrant=False, preserve_rng_state=self.draws, early_stop=early)

    def _plain(self, *args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # As around forward: backward calls this from outside of it.
            return self.inner(*args)

    def _second_time_apart(self) -> Callable[..., Any]:
        """Returns `_plain`, which waits in its second run for all sums that it has started there."""
        calls = count()

        def run(*args: Any) -> Any:
            with recomputation() if next(calls) else nullcontext():
                return self._plain(*args)

        return run


def _arrived(x: Any) -> Any:
    """Returns an operand of a block, once it has its values: a node that makes it later has `wait_for_value`."""
    wait_for_value = getattr(getattr(x, "grad_fn", None), "wait_for_value", None)
    if wait_for_value is not None:
        with torch.no_grad():
            wait_for_value(x)
    return x


recomputations: list[ExitStack] = []
"""What the end of each recomputation that runs has to do: it may end before the last operator of its block."""


@contextmanager
def recomputation() -> Iterator[None]:
    """A region that computes a block again."""
    with ExitStack() as at_end:
        recomputations.append(at_end)
        try:
            yield
        finally:
            recomputations.pop()


NO_RUN = -1
"""torch's number of a run of backward, outside of all runs."""
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class _Complete(Exception):  # It is no error: it leaves a run that has computed all that backward needs.
    """Raised in a second run of a graph when the last value that backward needs is there."""


class _Replay:
    """What is kept of one call of a graph: its inputs, to compute again what autograd would have kept.

    NOTE [A number in place of a tensor] While the graph runs, autograd gets a number for each tensor that it wants to
    keep. When backward asks for the first of them, the graph runs again, up to the last tensor that autograd wants: so
    the last product of a block, and the sum over ranks behind it, do not run again. torch's `checkpoint` works alike,
    and follows each tensor in Python; here a graph is known to ask for the same tensors in the same order.

    Attributes:
        pack: returns the number of the next tensor. (`next(numbers, tensor)` needs no Python frame.)
        wanted: how many tensors autograd wanted.
        values: these tensors, in order, as the run of backward `run` has them; None for one that it has got.
    """

    def __init__(self, block: Recomputed, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        self.block, self.args, self.tensors = block, args, tensors
        # autograd compares them for the tensors that it keeps, and it does not keep these.
        self.versions = [x._version for x in tensors]
        self.device = next((x.device for x in tensors if not x.is_cpu), torch.device("cpu"))
        self.state = random_state_of(self.device) if block.draws else None
        self.autocast = ambient_everywhere()
        self.numbers, self.wanted = count(), 0
        self.pack = partial(next, self.numbers)
        self.values: list[Tensor | None] = []
        self.run = NO_RUN

    def unpack(self, number: int) -> Tensor:
        """Returns a tensor that autograd wanted."""
        run = torch._C._current_graph_task_id()
        # In another backward (`retain_graph`), and for a tensor that was handed out before, the graph runs once more.
        if run != self.run or run == NO_RUN or self.values[number] is None:
            self.values, self.run = self._computed(), run
        value = self.values[number]
        assert value is not None
        self.values[number] = None  # Its memory is free when backward has used it.
        return value

    def _computed(self) -> list[Tensor | None]:
        """Runs the graph again; returns the tensors that autograd wants."""
        values: list[Tensor | None] = []
        last = self.wanted if self.block.stops_early else -1

        def keep(x: Tensor) -> None:
            values.append(x)
            if len(values) == last:
                raise _Complete

        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad(), self._as_in_forward(), recomputation():
            if [x._version for x in self.tensors] != self.versions:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    "an input or a parameter of a block that backward computes again"
                )
            push_hooks(keep, _never)
            try:
                self.block.run(*self.args)
            except _Complete:
                pass
            finally:
                pop_hooks()
        if len(values) != self.wanted:
            raise Error(
                f"a block that backward computes again keeps {len(values)} tensors, and {self.wanted} in forward",
                fix='recompute="none"',
            )
        return values

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """A region with the autocast and the random state of forward."""
        now, state = ambient_everywhere(), None if self.state is None else random_state_of(self.device)
        with ExitStack() as regions:
            if now != self.autocast:
                # First off where it is on now, then on as it was in forward.
                for settings in (*(Autocast(region.device) for region in now), *self.autocast):
                    regions.enter_context(settings.on())
            if self.state is not None and state is not None:
                set_random_state(self.device, self.state)
                regions.callback(set_random_state, self.device, state)
            yield


def _never(_: Any) -> Tensor:
    """Stands for a hook: nobody has a backward of the second run of a graph."""
    raise AssertionError


def recompute(graph: fx.Graph, how: Recompute, updated: Collection[str] = ()) -> fx.GraphModule:
    """Returns the graph as a module whose blocks are submodules, which recompute in backward what `how` says.

    A block that writes into buffers (batch norm) is not recomputed.

    Args:
        updated: placeholder names of the buffers that are written to between forward and backward.
    """
    for node in [n for n in graph.nodes if how != "none" and n.op == "placeholder" and n.name in updated]:
        _read_a_copy(node)
    module = outlined(graph, list(blocks(graph)), "block")
    if how == "full":
        _recompute(module)
    for name, block in _parts(module) if how == "selective" else ():
        inner = outlined(block.graph, list(_cores(block.graph)), "core")
        _recompute(inner)
        module.add_module(name, inner)
    return module


def _read_a_copy(node: fx.Node) -> None:
    """Makes all operators read a copy of a buffer, so that a recomputation sees its old value."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,))
    copy.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def _recompute(module: fx.GraphModule) -> None:
    for name, part in _parts(module):
        if not any(map(_writes, part.graph.nodes)):
            module.add_module(name, Recomputed(part))


def _writes(node: fx.Node) -> bool:
    """True for an instance norm that updates running statistics; its schema does not say so.

    (`functionalize` has replaced batch norms.)
    """
    arguments = arguments_of(node) if node.target is aten.instance_norm.default else {}
    return bool(arguments) and arguments["use_input_stats"] and arguments["running_mean"] is not None


def _parts(module: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    return [(name, part) for name, part in module.named_children() if isinstance(part, fx.GraphModule)]


def _cores(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yields the operators of each attention that keeps scores: from the product that makes them to their reader.

    Fused attention without dropout keeps no scores, and is not recomputed.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    in_cores: set[fx.Node] = set()
    for node in graph.nodes:
        fused = has(node.target, Trait.ATTENTION) and draws(node)
        core = [node] if fused else _around(node, order) if has(node.target, Trait.SOFTMAX) else []
        # A reader between two operators of the core would run before the call that stands for the core.
        users = {user for op in core for user in op.users} - set(core)
        if core and not in_cores & set(core) and all(order[user] > order[core[-1]] for user in users):
            in_cores.update(core)
            yield core


def _around(softmax: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Returns the nodes between the last products before a softmax and the first products after it; else nothing."""
    before, after = _until_product(softmax, lambda n: n.all_input_nodes), _until_product(softmax, lambda n: n.users)
    ends = [any(has(node.target, Trait.BATCHED) for node in side) for side in (before, after)]
    follows: set[fx.Node] = set()
    for node in sorted(before | after, key=order.__getitem__):
        if (has(node.target, Trait.BATCHED) and node in before) or any(n in follows for n in node.all_input_nodes):
            follows.add(node)
    return sorted(follows, key=order.__getitem__) if all(ends) else []


def _until_product(start: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Returns a node and all nodes reached from it by `step`, up to products."""
    reached, queue = {start}, [start]
    while queue:
        for node in step(queue.pop()):
            if node.op == "call_function" and node not in reached:
                reached.add(node)
                if not has(node.target, Trait.BATCHED):
                    queue.append(node)
    return reached
