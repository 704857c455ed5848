"""Interpolation as eager's kernels compute it: which scales that a call gives count.

Invariant: a call without what is left out here computes the same in eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from functionalize.errors import UnsupportedProgramError

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

EXACT = frozenset(getattr(aten, f"_upsample_nearest_exact{dims}d").default for dims in (1, 2, 3))  # engines lack them

ANTIALIASED = frozenset({aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default})
_WEIGHING = ANTIALIASED | {
    aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default,
    aten.upsample_bicubic2d.default,
}


def differs(op: Any, args: Any) -> bool:
    """Whether engines give a call another meaning, or none can: corners, bytes, widths of one."""
    return op in _WEIGHING and ((op in ANTIALIASED and args[2]) or _of_bytes(op, args) or _is_one_column(op, args))


def _of_bytes(op: Any, args: Any) -> bool:
    return op in _WEIGHING and not args[0].is_floating_point()


def _is_one_column(op: Any, args: Any) -> bool:
    one = op in ANTIALIASED and statically_known_true(args[1][1] == 1)
    return one and not statically_known_true(args[0].size(2) == args[1][0])


def must_interpolate(op: Any, args: Any, at: str) -> None:
    """Refuse an interpolation whose kernel computes something else than weighted sums."""
    if _of_bytes(op, args):
        raise UnsupportedProgramError(
            f"{op} takes {str(args[0].dtype).removeprefix('torch.')}",
            why="torch's kernels for bytes round their weights to a few bits, differently on different machines; "
            "the exported program would differ by 1 in some elements",
            hint="interpolate floats: interpolate(x.float(), ...).round().clamp(0, 255).to(torch.uint8)",
            at=at,
        )
    if _is_one_column(op, args):
        raise UnsupportedProgramError(
            f"{op} changes the height of an image that is one column wide",
            why="torch's kernel reads along the wrong dimension there and returns one value for all rows; the "
            "exported program would interpolate",
            hint="transpose the image: interpolate(x.transpose(2, 3), ...).transpose(2, 3)",
            at=at,
        )


def scaled(op: Any, args: Any) -> bool:
    """Whether a call interpolates by other quotients than those of its sizes. ``args``: what they look like."""
    return any(type(scale) is float for scale in counting(op, args)[-SCALED[op] :])


def refuse(op: Any, args: Any, at: str) -> NoReturn:
    """Refuse an interpolation that cannot be decomposed."""
    scale = "a scale that differs from the quotient of the sizes"
    raise UnsupportedProgramError(
        f"{op} has {scale if scaled(op, args) else 'align_corners=True, with antialias=True'}",
        why="the exported program would use the quotient, and align the corners of pixels",
        hint="pass the size, or recompute_scale_factor=True; the size must not be data-dependent",
        at=at,
    )


def must_scale(op: Any, args: Any, at: str) -> None:
    """Refuse an interpolation whose kernel copies along a dimension at some sizes, and scales at others."""
    dims = _COPYING.get(op)
    if dims is None:
        return
    first, sizes = len(op._schema.arguments) - dims, args[0].size()[-dims:]
    for size, new, scale in zip(sizes, args[1], args[first:], strict=False):
        if type(scale) is not float or type(size) is int or _counting(op, size, new, scale) is None:
            continue
        least = math.ceil(1 / (scale - 1)) if scale > 1 else 1
        if not statically_known_true(size >= least):
            raise UnsupportedProgramError(
                f"the program interpolates by {scale}, and a dynamic size may be {least - 1}",
                why="eager copies along a dimension whose size does not change, whatever the scale; the exported "
                "program would scale at all sizes",
                hint=f"give the dimension a minimum, Dim(..., min={least}), or pass recompute_scale_factor=True",
                at=at,
            )


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
