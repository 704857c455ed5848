"""Interpolation as eager's kernels compute it: which scales that a call gives count.

Invariant: a call without what is left out here computes the same in eager. Limits: a size that may differ is taken for
one that the interpolation changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
# With the number of the last dimensions that are interpolated: along one whose size stays, these copy, whatever the
# scale. Of the others of nearest neighbours the kernels do not.
_COPYING = {
    aten.upsample_linear1d.default: 1,
    aten.upsample_bilinear2d.default: 2,
    aten.upsample_trilinear3d.default: 3,
    aten.upsample_nearest2d.default: 2,
}
SCALED = _COPYING | {
    aten.upsample_nearest1d.default: 1,
    aten.upsample_nearest3d.default: 3,
    aten._upsample_nearest_exact1d.default: 1,
    aten._upsample_nearest_exact2d.default: 2,
    aten._upsample_nearest_exact3d.default: 3,
    aten.upsample_bicubic2d.default: 2,
    aten._upsample_bilinear2d_aa.default: 2,
    aten._upsample_bicubic2d_aa.default: 2,
}


def counting(op: Any, args: Any, value: Callable[[Any], Any] = lambda arg: arg) -> Any:
    """The arguments of an operator, without scales that do not count; ``value``: what an argument looks like."""
    dims = SCALED.get(op)
    if dims is None:
        return args
    first, sizes = len(op._schema.arguments) - dims, value(args[0]).size()[-dims:]
    scales = [_counting(op, *each) for each in zip(sizes, map(value, args[1]), args[first:], strict=False)]
    return (*args[:first], *scales)


def _counting(op: Any, size: Any, new: Any, scale: Any) -> Any:
    if type(scale) is not float:
        return scale
    copied = op in _COPYING and statically_known_true(size == new)
    exact = int(scale) if scale.is_integer() else scale
    whole = type(size) is int or type(exact) is int  # symbols of floats are not compared
    return None if copied or (whole and statically_known_true(size * exact == new)) else scale
