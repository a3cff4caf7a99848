"""canonicalize: writes equal computations with the same operators.

    Before: linear(x, w, b)            After: add(linear(x, w), b)
    Before: linear(x, v)               After: matmul(x, v)                          v a vector
    Before: addmm(b, x, w)             After: add(mm(x, w), b)
    Before: dropout(x, 0.1, False)     After: x
    Before: view(x, [2, 8])            After: reshape(x, [2, 8])
    Before: type_as(x, y)              After: to(x, dtype of y)
    Before: repeat_interleave(x, 4, 1) After: flatten(expand(unsqueeze(x, 2), [-1, -1, 4]), 1, 2)
    Before: conv1d(x, w, b)            After: add(convolution(x, w), unsqueeze(b, -1))
    Before: group_norm(x, 4, w, b)     After: flatten(channels.group_norm(unflatten(x, 1, [4, c]), ...), 1, 2)
    Before: max_pool2d(x, [2, 2])      After: by_channel(x, max_pool2d, 1, ([2, 2],))
    Before: _weight_norm(v, g, 0)      After: mul(v, div(g, sqrt(sum(mul(v, v), [1], True))))
    Before: index_put(x, [m], v)       After: where(m, v, x)                        m of bool, v one number
    Before: new_zeros(x, [2, 8])       After: zeros([2, 8], dtype=..., device=...)

NOTE [Why the bias leaves the linear]
A row-parallel product is a sum over ranks. If its bias were inside, every rank would add it, and the sum would contain
it tp times. Outside, the bias is added after the reduction. Where nothing is reduced, `fuse_bias` puts the bias back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autotp.ops import channels, grouped_mm
from autotp.passes.builder import Builder, fake_mode_of
from autotp.rules.call import arguments_of
from autotp.rules.registry import is_grouped
from autotp.rules.traits import each_channel
from autotp.sharding.axis import Size

aten = torch.ops.aten
Rewrite = Callable[[Builder, dict[str, Any]], Any]


def canonicalize(graph: fx.Graph) -> fx.Graph:
    """Returns the same function with each operator in its canonical form."""
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.origin = node
        rewrite = _grouped if _is_loop_of_products(node.target) else REWRITES.get(node.target)
        result = rewrite(builder, builder.map(arguments_of(node))) if rewrite else None
        if result is None:
            builder.copy(node)
        else:
            builder.env[node] = result
    return builder.graph


def _is_loop_of_products(op: Any) -> bool:
    """True for a library's product of groups of rows, which loops over groups on the host."""
    return is_grouped(op) and op not in (aten._grouped_mm.default, grouped_mm.OPERATOR)


def _grouped(builder: Builder, args: dict[str, Any]) -> Any:
    """Writes our own operator: its products wait for the device once a layer, the library's twice a product."""
    x, weight, ends = args.values()
    return builder.call(grouped_mm.OPERATOR, x, weight, ends)


def _linear(builder: Builder, args: dict[str, Any]) -> Any:
    x, weight, bias = args["input"], args["weight"], args["bias"]
    vector = weight.meta["val"].dim() == 1
    if bias is None and not vector:
        return None
    product = builder.call(aten.matmul.default if vector else aten.linear.default, x, weight)
    return product if bias is None else builder.call(aten.add.Tensor, product, bias)


def _addmm(product: Any, left_name: str, right_name: str) -> Rewrite:
    """Returns the rewrite of `beta * input + alpha * left @ right` with the product as a separate operator."""

    def rewrite(builder: Builder, args: dict[str, Any]) -> Any:
        multiplied = builder.call(product, args[left_name], args[right_name])
        added = args["self"]
        if args["alpha"] != 1:
            multiplied = builder.call(aten.mul.Tensor, multiplied, args["alpha"])
        # torch ignores the added tensor then, even NaN in it.
        if args["beta"] == 0:
            return multiplied
        if args["beta"] != 1:
            added = builder.call(aten.mul.Tensor, added, args["beta"])
        return builder.call(aten.add.Tensor, multiplied, added)

    return rewrite


def _dropout(builder: Builder, args: dict[str, Any]) -> Any:
    return args["input"] if not args["train"] or args["p"] == 0 else None


def _cast(builder: Builder, args: dict[str, Any]) -> Any:
    """Removes a cast to the value's own dtype. (The dtypes of inputs are part of the graph's key.)"""
    value = args["self"].meta["val"]
    unchanged = args.get("dtype") in (None, value.dtype) and args.get("device") in (None, value.device)
    return args["self"] if unchanged and not args.get("copy") and args.get("memory_format") is None else None


def _repeat_interleave(builder: Builder, args: dict[str, Any]) -> Any:
    """Makes the repetitions a separate dimension, so that the repeated dimension can still be cut."""
    x, times, dim = args["self"], args["repeats"], args["dim"]
    if dim is None or not isinstance(times, int) or args["output_size"] is not None:
        return None
    dim %= x.meta["val"].dim()
    sizes = [-1] * (dim + 1) + [times] + [-1] * (x.meta["val"].dim() - dim - 1)
    repeated = builder.call(aten.expand.default, builder.call(aten.unsqueeze.default, x, dim + 1), sizes)
    return builder.call(aten.flatten.using_ints, repeated, dim, dim + 1)


def _type_as(builder: Builder, args: dict[str, Any]) -> Any:
    """Replaces the other tensor by its dtype."""
    dtype = args["other"].meta["val"].dtype
    return _cast(builder, {**args, "dtype": dtype}) or builder.call(aten.to.dtype, args["self"], dtype)


def _masked(builder: Builder, args: dict[str, Any]) -> Any:
    """Writes an assignment of one number under a mask as `where`."""
    x, places, value = args["self"], args["indices"], args["values"]
    # Several values would go to the true places one by one, and which ones these are depends on the mask's values.
    mask = places[0] if len(places) == 1 else None
    if mask is None or mask.meta["val"].dtype != torch.bool or args["accumulate"] or value.meta["val"].dim():
        return None
    for _ in range(x.meta["val"].dim() - mask.meta["val"].dim()):
        # A mask has the first dimensions of x, and `where` aligns the last ones.
        mask = builder.call(aten.unsqueeze.default, mask, -1)
    return builder.call(aten.where.self, mask, value, x)


def _slice(builder: Builder, args: dict[str, Any]) -> Any:
    """Removes a slice that takes the whole dimension.

    The sizes are compared as expressions: `end == length` would assume of all calls what is true of the example.
    """
    x, dim = args["self"].meta["val"], args["dim"]
    start, end, length = args["start"] or 0, args["end"], x.shape[dim]
    # The greatest int64 is the end of a slice that names none.
    everything = end is None or (isinstance(end, int) and (end == 2**63 - 1 or Size.of(end) == Size.of(length)))
    return args["self"] if start == 0 and args["step"] == 1 and everything else None


def _view(builder: Builder, args: dict[str, Any]) -> Any:
    """Writes a view as a reshape: a view depends on strides, and a cut may change them."""
    unchanged = _same_shape(builder, args)
    return builder.call(aten.reshape.default, args["self"], args["size"]) if unchanged is None else unchanged


def _same_shape(builder: Builder, args: dict[str, Any]) -> Any:
    """Removes a view that does not change the shape."""
    x = args["self"].meta["val"]
    sizes = args.get("size", args.get("shape"))
    if sizes is None or len(sizes) != x.dim():
        return None
    shape = [n.meta["val"] if isinstance(n, fx.Node) else n for n in sizes]
    # A -1 stands for what is left: if all other sizes are equal, so is this one.
    equal = [(isinstance(n, int) and n == -1) or Size.of(n) == Size.of(m) for n, m in zip(shape, x.shape, strict=True)]
    return args["self"] if all(equal) and sum(n == -1 for n in shape if isinstance(n, int)) <= 1 else None


def _made(creation: Any, *values: str) -> Rewrite:
    """Returns the rewrite of `x.new_zeros(size)` and the like, which read only the dtype and device of `x`."""

    def rewrite(builder: Builder, args: dict[str, Any]) -> Any:
        value = args["self"].meta["val"]
        how = {name: args[name] for name in ("layout", "pin_memory")}
        how |= {name: getattr(value, name) if args[name] is None else args[name] for name in ("dtype", "device")}
        return builder.call(creation, args["size"], *(args[name] for name in values), **how)

    return rewrite


def _convolution(builder: Builder, args: dict[str, Any]) -> Any:
    """Replaces the argument `groups`: `channels.convolution` reads it off the shapes. The bias becomes a sum."""
    names = ("input", "weight", "stride", "padding", "dilation")
    return _with_bias(builder, builder.call(channels.convolution, *(args[name] for name in names)), args)


def _conv_transpose(builder: Builder, args: dict[str, Any]) -> Any:
    """Rewrites as `_convolution` does; splits the weight's first dimension into groups and channels of a group."""
    weight = builder.call(aten.unflatten.int, args["weight"], 0, [args["groups"], -1])
    rest = [args[name] for name in ("stride", "padding", "output_padding", "dilation")]
    return _with_bias(builder, builder.call(channels.conv_transpose, args["input"], weight, *rest), args)


def _with_bias(builder: Builder, made: fx.Node, args: dict[str, Any]) -> fx.Node:
    bias = args["bias"]
    if bias is None:
        return made
    # [channels] -> [channels 1 ...], to stand beside the channels of [n channels places...].
    for _ in range(args["weight"].meta["val"].dim() - 2):
        bias = builder.call(aten.unsqueeze.default, bias, -1)
    return builder.call(aten.add.Tensor, made, bias)


def _batch_norm(builder: Builder, args: dict[str, Any]) -> Any:
    """Rewrites a batch norm without updates of running statistics; `functionalize` rewrites the others."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    return builder.call(channels.batch_norm, *(args[name] for name in names))


def _group_norm(builder: Builder, args: dict[str, Any]) -> Any:
    """Splits the channels into groups, a dimension that can be cut."""
    return _by_group(builder, args, [args["num_groups"], -1])


def _instance_norm(builder: Builder, args: dict[str, Any]) -> Any:
    """Writes an instance norm without running statistics as a group norm with one channel in a group."""
    if args["running_mean"] is not None or not args["use_input_stats"]:
        return None
    return _by_group(builder, args, [-1, 1])


def _by_group(builder: Builder, args: dict[str, Any], sizes: list[Any]) -> fx.Node:
    grouped = [
        None if x is None else builder.call(aten.unflatten.int, x, dim, sizes)
        for x, dim in ((args["input"], 1), (args["weight"], 0), (args["bias"], 0))
    ]
    result = builder.call(aten.flatten.using_ints, builder.call(channels.group_norm, *grouped, args["eps"]), 1, 2)
    result.meta["val"] = builder.origin.meta["val"]  # type: ignore[union-attr]
    return result  # (Of a symbolic number of channels, `flatten` gives groups times channels of a group.)


def _by_channel(op: Any, places: int) -> Rewrite:
    """Returns the rewrite of pooling and interpolation to `by_channel`, which also works on a rank without channels."""

    def rewrite(builder: Builder, args: dict[str, Any]) -> Any:
        x, *rest = args.values()
        result = builder.raw(channels.by_channel, (x, op, x.meta["val"].dim() - places - 1, tuple(rest)))
        result.meta["val"] = builder.origin.meta["val"]  # type: ignore[union-attr]
        return result  # (torch cannot evaluate interpolation with symbolic sizes.)

    return rewrite


def _weight_norm(builder: Builder, args: dict[str, Any]) -> Any:
    """Writes `v` scaled to the length `g` with operators that have rules; computes 16-bit lengths in 32 bits."""
    v, g, dim = args["v"], args["g"], args["dim"]
    dtype, ndim = v.meta["val"].dtype, v.meta["val"].dim()
    exact = builder.call(aten.to.dtype, v, torch.float32) if dtype.itemsize < 4 else v
    dims = [d for d in range(ndim) if dim == -1 or d != dim % ndim]
    squares = builder.call(aten.sum.dim_IntList, builder.call(aten.mul.Tensor, exact, exact), dims, dim != -1)
    length = builder.call(aten.sqrt.default, squares)
    scaled = builder.call(aten.mul.Tensor, exact, builder.call(aten.div.Tensor, g, length))
    return builder.call(aten.to.dtype, scaled, dtype) if exact is not v else scaled


def _numel(builder: Builder, args: dict[str, Any]) -> Any:
    """Writes the number of elements as a product of sizes."""
    x: fx.Node = args["self"]
    total: Any = 1
    for d, n in enumerate(x.meta["val"].shape):
        size: Any = n if isinstance(n, int) else builder.call(aten.sym_size.int, x, d)
        plain = isinstance(total, int) and isinstance(size, int)
        total = total * size if plain else builder.call(operator.mul, total, size)
    return total


REWRITES: dict[Any, Rewrite] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm(aten.mm.default, "mat1", "mat2"),
    aten.baddbmm.default: _addmm(aten.bmm.default, "batch1", "batch2"),
    aten.dropout.default: _dropout,
    aten.conv1d.default: _convolution,
    aten.conv1d.padding: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv2d.padding: _convolution,
    aten.conv3d.default: _convolution,
    aten.conv3d.padding: _convolution,
    aten.conv_transpose1d.default: _conv_transpose,
    aten.conv_transpose2d.input: _conv_transpose,
    aten.conv_transpose3d.input: _conv_transpose,
    aten.batch_norm.default: _batch_norm,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten._weight_norm.default: _weight_norm,
    aten.new_empty.default: _made(aten.empty.memory_format),
    aten.new_zeros.default: _made(aten.zeros.default),
    aten.new_ones.default: _made(aten.ones.default),
    aten.new_full.default: _made(aten.full.default, "fill_value"),
    aten.sym_numel.default: _numel,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.type_as.default: _type_as,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.to.device: _cast,
    aten.index_put.default: _masked,
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _same_shape,
    **{op: _by_channel(op, places) for op, places in each_channel()},
}
