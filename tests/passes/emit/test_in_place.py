"""in_place: an all-reduce takes the memory of what it sums only where nobody else reads that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import draft, some

from autotp.ops import collectives, lookup
from autotp.ops.losses import cross_entropy
from autotp.passes.emit.bind import bind
from autotp.passes.emit.in_place import fresh, written

aten = torch.ops.aten
VALUES = {"x": some(3, 4), "w": some(4, 4), "b": some(4), "i": torch.arange(3)}
Make = Callable[..., Any]


def reduced(target: Any, *names: str, view: bool = False, op: tuple[str, ...] = ()) -> Make:
    def make(call: Any, **places: Any) -> Any:
        value = call(target, *(places[name] for name in names), *((0, 4) if target is lookup.embedding else ()))
        for shape in [[12], [4, 3]] if view else []:
            value = call(aten.reshape.default, value, shape)
        return call(collectives.reduce, value, "tp", *op)

    return make


def read_too(call: Any, x: Any, w: Any, **_: Any) -> Any:
    product = call(aten.linear.default, x, w)
    return call(collectives.reduce, product, "tp"), call(aten.exp.default, product)


def view_read_too(call: Any, x: Any, w: Any, **_: Any) -> Any:
    """The product has one reader, its view two."""
    product = call(aten.view.default, call(aten.linear.default, x, w), [12])
    return call(collectives.reduce, product, "tp"), call(aten.exp.default, product)


def viewed_product_read_too(call: Any, x: Any, w: Any, **_: Any) -> Any:
    """The view has one reader, the product two."""
    product = call(aten.linear.default, x, w)
    return call(collectives.reduce, call(aten.view.default, product, [12]), "tp"), call(aten.exp.default, product)


def read_by(*targets: Any, view: bool = False) -> Make:
    """A copy and its readers."""

    def make(call: Any, x: Any, w: Any, **_: Any) -> Any:
        value = call(collectives.copy, x, "tp")
        value = call(aten.flatten.using_ints, value, 0, 1) if view else value
        value = call(aten.view.default, value, [3, 4]) if view else value
        unary = (aten.gelu.default, aten.view.default)
        return tuple(call(t, value, *([] if t is unary[0] else [[12]] if t is unary[1] else [w])) for t in targets)

    return make


def unread(call: Any, x: Any, **_: Any) -> Any:
    call(collectives.copy, x, "tp")
    return x


def returned(call: Any, x: Any, w: Any, **_: Any) -> Any:
    value = call(collectives.copy, x, "tp")
    return call(aten.linear.default, value, w), value


def loss_of(target: Any, *names: str, also: str | None = "") -> Make:
    """The terms of logits, viewed on the way; `also` reads them too."""

    def make(call: Any, **places: Any) -> Any:
        made = call(target, *(places[name] for name in names))
        logits = call(aten.view.default, made, [3, 4])
        terms = call(cross_entropy.class_terms, logits, call(cross_entropy.peak, logits, 1), places["i"], 1, 0, 4)
        read = {
            "size": (aten.sym_size.int, logits, 0),
            "exp": (aten.exp.default, logits),
            "made": (aten.exp.default, made),
        }
        return (terms, call(*read[also])) if also else (terms, logits) if also is None else terms

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(reduced(aten.linear.default, "x", "w"), True, id="linear"),
        pytest.param(reduced(aten.mm.default, "x", "w"), True, id="mm"),
        pytest.param(reduced(aten.addmm.default, "b", "x", "w"), True, id="addmm"),
        pytest.param(reduced(lookup.embedding, "w", "i"), True, id="embedding"),
        pytest.param(reduced(aten.linear.default, "x", "w", view=True), True, id="view-of-a-product"),
        pytest.param(reduced(aten.linear.default, "x", "w", op=("max",)), False, id="maximum"),
        pytest.param(reduced(aten.exp.default, "x"), False, id="exp-keeps-its-result"),
        pytest.param(reduced(aten.alias.default, "x"), False, id="input"),
        pytest.param(read_too, False, id="product-read-too"),
        pytest.param(view_read_too, False, id="view-read-too"),
        pytest.param(viewed_product_read_too, False, id="viewed-product-read-too"),
        pytest.param(read_by(aten.linear.default), True, id="copy-for-a-product"),
        pytest.param(read_by(aten.linear.default, aten.mm.default), True, id="copy-for-products"),
        pytest.param(read_by(aten.linear.default, view=True), True, id="copy-viewed"),
        pytest.param(read_by(aten.gelu.default), False, id="copy-for-gelu"),
        pytest.param(read_by(aten.linear.default, aten.gelu.default), False, id="copy-for-a-product-and-gelu"),
        pytest.param(read_by(aten.linear.default, aten.view.default), False, id="copy-for-a-product-and-a-view"),
        pytest.param(unread, False, id="copy-for-nobody"),
        pytest.param(returned, False, id="copy-returned"),
        pytest.param(loss_of(aten.linear.default, "x", "w"), True, id="logits"),
        pytest.param(loss_of(aten.add.Tensor, "x", "b"), True, id="logits-with-a-bias"),
        pytest.param(loss_of(aten.linear.default, "x", "w", also="size"), True, id="logits-measured"),
        pytest.param(loss_of(aten.linear.default, "x", "w", also="exp"), False, id="logits-read-too"),
        pytest.param(loss_of(aten.linear.default, "x", "w", also="made"), False, id="viewed-logits-read-too"),
        pytest.param(loss_of(aten.linear.default, "x", "w", also=None), False, id="logits-returned"),
        pytest.param(loss_of(aten.exp.default, "x"), False, id="logits-that-exp-keeps"),
    ],
)
def test_fresh_finds_sums_that_nobody_else_reads(make: Make, expected: bool) -> None:
    graph = draft(make, **VALUES)
    kinds = (collectives.copy, collectives.reduce, cross_entropy.class_terms)
    assert [node in fresh(graph) for node in graph.nodes if node.target in kinds] == [expected]


def test_written_takes_the_caller_s_cache_if_unread_elsewhere() -> None:
    def once(call: Any, x: Any, w: Any, i: Any, **_: Any) -> Any:
        return call(aten.index_copy.default, x, 0, i, w)

    def read_before(call: Any, x: Any, w: Any, i: Any, **_: Any) -> Any:
        return call(aten.index_copy.default, x, 0, i, w), call(aten.exp.default, x)

    values = {"x": some(5, 4), "w": some(3, 4), "i": torch.arange(3)}
    for make, owned, expected in ((once, {"x"}, 1), (once, {"w"}, 0), (read_before, {"x"}, 0)):
        graph = draft(make, **values)
        assert len(written(graph, owned)) == expected
        bound = bind(graph, torch.device("cpu"), {}, owned)
        assert any(node.target is aten.index_copy_.default for node in bound.nodes) == bool(expected)
