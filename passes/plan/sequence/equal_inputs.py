"""equal_inputs: makes it a condition of a graph that inputs of one shape have one shape in each call.

    Before: tokens: i64[s0, s1], labels: i64[s2, s3]; cross_entropy(f32[s0*s1, v], i64[s2*s3])
    After:  tokens: i64[s0, s1], labels: i64[s0, s1]; cross_entropy(f32[s0*s1, v], i64[s0*s1])

A loss compares flattened logits and labels, and says nothing of their rows and columns by themselves. An operator can
be cut along a sequence only if all its operands have the sequence. A call with other shapes gets another graph.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autotp.sharding.axis import Size


def equal_inputs(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Assumes of all calls that tensors among `inputs` of the same sizes at capture have the same sizes.

    Args:
        inputs: placeholder names of the model's inputs.
    """
    first_shapes: dict[tuple[int, ...], tuple[object, ...]] = {}
    for node in graph.nodes:
        if node.op != "placeholder" or node.name not in inputs:
            continue
        shape = tuple(node.meta["val"].shape)
        first = first_shapes.setdefault(tuple(map(_at_capture, shape)), shape)
        for size, first_size in zip(shape, first, strict=True):
            if Size.of(size) != Size.of(first_size):
                assert size == first_size  # The comparison of two symbolic sizes is what torch notes.


def _at_capture(size: object) -> int:
    return size if isinstance(size, int) else size.node.hint  # type: ignore[attr-defined]
