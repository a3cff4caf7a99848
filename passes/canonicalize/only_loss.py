"""only_loss: leaves out what a training call returns beside its loss, with outputs="loss".

    Before: y = linear(x, w); l = cross_entropy_loss(y, t); return l, y
    After:  y = linear(x, w); l = cross_entropy_loss(y, t); return l, l        logits: NotReturned("logits")

So nothing reads the logits but the loss, and `linear_cross_entropy` never makes them. Numbers, such as an accuracy, are
still returned. The positions of outputs stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from torch import fx
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.capture.captured import Captured, OutputAt
from autotp.passes.capture.pytree import leaf_names
from autotp.rules.call import is_loss, outputs_of, returned
from autotp.rules.traits import draws, draws_from_numpy


class NotComputed(Error, AttributeError):
    """The Error of an attribute: for `hasattr`, by which libraries search a result for tensors, there is none."""


class NotReturned:
    """Stands for a tensor that a call did not compute: whoever reads it gets an Error.

    Args:
        name: the name of the tensor in the result.
    """

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __repr__(self) -> str:
        return f'NotReturned({self._name!r}, outputs="loss")'

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotComputed(
            f'`{self._name}` was not computed: with outputs="loss", as in a Trainer, a call in training returns its '
            "loss only",
            fix='parallelize(..., outputs="full")',
            alternative="model.eval() before a call whose tensors are read",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python, pickle and torch ask for such names, and take that they are missing.
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls))._refuse()

    # numpy asks for `__array__`.
    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __setattr__ = __float__ = __int__ = __array__ = _refuse
    __neg__ = __abs__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __pow__ = __rpow__ = __invert__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


def only_loss(graph: fx.Graph, captured: Captured) -> tuple[fx.Graph, Captured]:
    """Returns a training call's graph without results that are no numbers, and its meaning; unchanged without a loss.

    What Python reads, states and new values of attributes are computed all the same.
    """
    outputs, values = captured.outputs, returned(graph)
    results = {i: x for i, x in enumerate(values[: outputs.results]) if isinstance(x, fx.Node)}
    loss = next(filter(is_loss, results.values()), None)
    stay = {*outputs.kept, *outputs.stays, *captured.read_at, *(position for _, position in outputs.into)}
    omitted = {i for i, x in results.items() if any(value.dim() for value in outputs_of(x))} - stay
    if loss is None or not omitted:
        return graph, captured
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        if node.op == "output":
            builder.graph.output(builder.map(tuple(loss if i in omitted else x for i, x in enumerate(values))))
        else:
            builder.copy(node)
    _erase_unread(builder.graph)
    names = leaf_names(outputs.spec[0])
    leaves = [
        NotReturned(names[i]) if type(leaf) is OutputAt and leaf.at in omitted and i < len(names) else leaf
        for i, leaf in enumerate(outputs.leaves)
    ]
    return builder.graph, replace(captured, outputs=replace(outputs, leaves=leaves, omitted=frozenset(omitted)))


def _erase_unread(graph: fx.Graph) -> None:
    """Erases operators whose results nothing reads; random numbers stay, because others are drawn after them."""
    for node in reversed(list(graph.nodes)):
        effect = node.op != "call_function" or draws(node) or draws_from_numpy(node)
        if not node.users and not effect and (outputs_of(node) or node.meta.get("val") is not None):
            graph.erase_node(node)
