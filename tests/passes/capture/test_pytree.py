"""pytree: calls that are spelled differently are one call; objects with tensors are taken apart and put together."""

from __future__ import annotations

import copy
from collections import UserList, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from errors import message
from graphs import Function, run
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp
from autotp.model_library import library
from autotp.passes.capture.capture import capture
from autotp.passes.capture.pytree import (
    builder_of,
    flatten,
    flatten_call,
    leaf_names,
    outcome,
    signature_of,
    states,
    unflatten_outcome,
)

X, Y = torch.ones(2), torch.zeros(3)


class Model(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, **more: Any) -> Tensor:
        return x


class Positional(nn.Module):
    def forward(self, x: Tensor, /, mask: Tensor | None = None) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X, Y), {}), ((X,), {"mask": Y}), ((), {"mask": Y, "x": X}), ((X, Y), {"scale": 1.0})],
)
def test_spellings_of_one_call(args: Any, kwargs: Any) -> None:
    found = signature_of(Model()).by_name(args, kwargs)
    assert found == ((), {"x": X, "mask": Y})
    assert list(found[1]) == ["x", "mask"]


def test_arguments_that_are_not_defaults() -> None:
    signature = signature_of(Model())
    assert signature.by_name((X, None), {"scale": 2.0, "b": 1, "a": 2}) == ((), {"x": X, "scale": 2.0, "a": 2, "b": 1})


def test_calls_that_stay_as_they_are() -> None:
    """The model itself will say what is wrong; what must be positional stays so."""
    twice = signature_of(Model()).by_name((X,), {"x": Y})
    assert twice == ((X,), {"x": Y})
    assert signature_of(Model()).by_name((X, Y, 3), {}) == ((X, Y, 3), {})
    assert signature_of(Positional()).by_name((X,), {"mask": Y}) == ((X,), {"mask": Y})


@dataclass
class Output:
    logits: Tensor
    note: str = ""


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((X, 2), {"mask": None}), ((), {"b": Y, "a": 1.5}), (((X, Y),), {"names": ["a"]}), ((X.shape,), {})],
)
def test_a_plain_call_is_flattened_like_any_other(args: Any, kwargs: Any) -> None:
    leaves, spec = flatten((args, kwargs))
    fast, same = flatten_call(args, kwargs)
    assert same == spec and hash(same) == hash(spec)
    assert len(fast) == len(leaves) and all(a is b for a, b in zip(fast, leaves, strict=True))
    assert states((args, kwargs)) == []


def test_a_call_with_a_cache_is_flattened_like_any_other() -> None:
    """The structure of a second call is the same object, so that comparing the two takes no time."""
    transformers = pytest.importorskip("transformers")
    assert library()
    config = transformers.LlamaConfig(num_hidden_layers=2, sliding_window=4, layer_types=SLIDING)
    made = torch.ones(1, 1, 2, 4)
    for cache in (
        transformers.DynamicCache(),
        transformers.DynamicCache(config=config),
        transformers.StaticCache(config, max_cache_len=8),
    ):
        for layer in range(2):
            cache.update(made, made, layer)
        given = {"x": X, "cache": cache, "more": [(Y, 1.5), {"a": None}]}
        leaves, spec = flatten(((), given))
        fast, same = flatten_call((), given)
        assert same == spec and flatten_call((), given)[1] is same
        assert [type(leaf) for leaf in fast] == [type(leaf) for leaf in leaves]
        assert all(a is b or a.equal(b) for a, b in zip(fast, leaves, strict=True))
        assert states(((), given)) == [cache]
        again, whole = builder_of(spec)(iter(fast)), torch.utils._pytree.tree_unflatten(fast, spec)
        assert str(flatten(again)[1]) == str(flatten(whole)[1]) == str(spec)
        assert vars(again[1]["cache"].layers[1]).keys() == vars(cache.layers[1]).keys()


SLIDING = ["full_attention", "sliding_attention"]


def test_leaves() -> None:
    tree = {"b": [X, Pair(Y, 3)], "a": Output(X, "note")}
    leaves, spec = flatten(tree)
    assert [leaf for leaf in leaves if not isinstance(leaf, Tensor)] == [3, "note"] and len(leaves) == 5
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert type(again["a"]) is Output and type(again["b"][1]) is Pair
    assert flatten(again)[1] == spec


def test_sizes_stay_sizes() -> None:
    """A `torch.Size` is a leaf to torch, and a tuple to its exporter."""

    def sizes(x: Tensor) -> Any:
        return x * 2, x.shape, {"of": x[:, 1:].size()}

    captured = capture(Function(sizes), (torch.ones(3, 4),), {})
    _, shape, more = captured.outputs(run(captured.graph, [torch.ones(5, 6)]), ())
    assert type(shape) is torch.Size and shape == (5, 6)
    assert type(more["of"]) is torch.Size and more["of"] == (5, 5)


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
)
def test_tensors_that_are_not_dense(x: Tensor, kind: str) -> None:
    assert message(lambda: capture(Function(lambda x: x * 2), (x,), {})) == (
        f"an argument is a {kind} tensor, and a graph takes dense tensors\n"
        "  try      x.to_dense(); for sequences of several lengths a padded tensor and a mask"
    )


class Closed:
    def __init__(self) -> None:
        self.x = X


def test_an_object_that_torch_cannot_take_apart() -> None:
    assert message(lambda: flatten([Closed()])) == (
        "a Closed holds tensors, and torch does not know how to take one apart\n"
        "  try      torch.utils._pytree.register_pytree_node(Closed, ...), or a tuple or dict"
    )


class Several(list[Tensor]):
    pass


class Named(dict[str, Any]):
    pass


class Pile(UserList[Tensor]):
    pass


@pytest.mark.parametrize("held", [Several([X]), Named(x=[X]), Pile([X]), {X}, Named(more=Several([X]))])
def test_a_container_that_torch_cannot_take_apart(held: Any) -> None:
    """As one leaf it would be a constant of the graph, with the tensors of the capture in it."""
    assert message(lambda: flatten((3, held))).startswith(
        f"a {type(held).__name__} holds tensors, and torch does not know how to take one apart"
    )


def test_containers_without_tensors_are_leaves() -> None:
    assert flatten([{3}, Named(x=3), Several()])[0] == [{3}, {"x": 3}, []]


@pytest.mark.parametrize("once", [iter([X]), (x for x in [X]), map(abs, [X]), zip([X], [Y], strict=True)])
def test_an_iterator(once: Any) -> None:
    assert "hands out its values once, and a graph runs many times" in message(lambda: flatten({"x": once}))


def test_a_state_keeps_its_identity() -> None:
    """A call changes the caller's own cache, and returns it."""
    transformers = pytest.importorskip("transformers")
    assert library()
    cache, other = transformers.DynamicCache(), transformers.DynamicCache()
    made = torch.ones(1, 1, 2, 4)
    other.update(made, made, 0)
    leaves, spec = outcome((X, other), [other])
    result = unflatten_outcome(leaves, spec, [cache])
    assert result[0] is X and result[1] is cache
    assert cache.layers[0].keys.equal(made)


class Two:
    """A class whose children have no names for torch."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Record(dict[str, Any]):
    """As the outputs of transformers 5.0 are registered: a mapping whose children have no names for torch."""


pytree.register_pytree_node(Two, lambda x: ([x.first, x.second], None), lambda below, _: Two(*below))
pytree.register_pytree_node(
    Record, lambda x: (list(x.values()), list(x)), lambda below, keys: Record(zip(keys, below, strict=True))
)
Point = namedtuple("Point", "x y")


def test_names_of_leaves() -> None:
    tree = {"a": Two(X, [Y, None]), "b": Record(loss=X, more=(Y,)), "c": Point(X, {}), "d": torch.Size([2, 3])}
    leaves, spec = flatten(tree)
    assert leaf_names(spec) == ["a.0", "a.1.0", "a.1.1", "b.loss", "b.more.0", "c.x", "d.0", "d.1"]
    assert len(leaves) == 8 and leaf_names(flatten(X)[1]) == [""]


class Doubling(Tensor):
    """A tensor whose linear layers give twice their result."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is torch.nn.functional.linear else found


class OtherName(Tensor):
    """A tensor with another name, and torch's operators."""


def test_a_tensor_with_operators_of_its_own() -> None:
    """It is refused in the first call and in a later one; a class without code of its own is a tensor."""
    x = torch.randn(2, 4)
    for before in ((), (x,)):
        parallel = autotp.parallelize(nn.Linear(4, 4), 1, example_inputs=x)
        for given in before:
            parallel(given)
        torch.testing.assert_close(parallel(x.as_subclass(OtherName)).as_subclass(Tensor), parallel(x))
        with pytest.raises(autotp.Error, match="an argument is a Doubling, a tensor with operators of its own"):
            parallel(x.as_subclass(Doubling))


class InOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        """x, more: [batch 4]"""
        for one in more.values():
            x = self.linear(x).tanh() + one
        return x


def test_the_order_of_further_names() -> None:
    whole, (x, y, z) = InOrder(), torch.randn(3, 2, 4)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs={"x": x, "a": y, "b": z})
    for given in ({"a": y, "b": z}, {"b": z, "a": y}, {"b": y, "a": z}):
        torch.testing.assert_close(parallel(x, **given), whole(x, **given))
