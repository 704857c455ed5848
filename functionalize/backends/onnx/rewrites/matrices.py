"""Products and solutions of matrices that ONNX has not.

Invariant: each group of a grouped product costs what it costs in eager: its rows alone are read. Limits: rows of no
group, which eager leaves as they come, are zeros; what is solved has sizes known ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.ir import DataType

from functionalize.backends.onnx.rewrites.registry import OPSET, Rewrite, rewrite

aten = torch.ops.aten


@rewrite(aten.linalg_solve_triangular.default)
def solve_triangular(matrix: Any, right: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Row by row, each from those before."""
    if type(matrix.size(-1)) is not int:
        return NotImplemented
    if not left:
        options = {"upper": not upper, "unitriangular": unitriangular}
        found = solve_triangular(matrix.transpose(-2, -1), right.transpose(-2, -1), **options)
        return found.transpose(-2, -1)
    order = list(range(matrix.size(-1)))[:: -1 if upper else 1]
    batch = torch.broadcast_shapes(matrix.size()[:-2], right.size()[:-2])
    right = right.expand(*batch, *right.size()[-2:])
    rows: list[Any] = []
    for count, row in enumerate(order):
        found = right.narrow(-2, row, 1)
        if count:
            before = matrix.narrow(-2, row, 1).narrow(-1, min(order[:count]), count)
            found = found - before @ torch.cat(rows, -2)
        found = found if unitriangular else found / matrix.narrow(-2, row, 1).narrow(-1, row, 1)
        rows = [found, *rows] if upper else [*rows, found]
    return torch.cat(rows, -2) if rows else right


@rewrite(aten.mv.default)
def mv(matrix: Any, vector: Any) -> Any:
    """With a matrix of one column: ONNX Runtime is wrong where it joins a transposed matrix and its vector."""
    return aten.mm.default(matrix, vector.unsqueeze(-1)).squeeze(-1)


@rewrite(aten.addmv.default)
def addmv(base: Any, matrix: Any, vector: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if isinstance(beta, (bool, int, float)) and beta == 0:
        return NotImplemented
    found = aten.addmm.default(base.unsqueeze(-1), matrix, vector.unsqueeze(-1), beta=beta, alpha=alpha)
    return found.squeeze(-1)


def _added(product: Callable[..., Any]) -> Rewrite:
    """To a base that counts nothing, of which nothing does: infinities neither."""

    def added(base: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if not isinstance(beta, (bool, int, float)) or beta != 0:
            return NotImplemented
        found = product(one, other)
        return found if alpha == 1 else found * alpha

    return added


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: aten.mm.default,
    aten.addmv.default: aten.mv.default,
    aten.baddbmm.default: aten.bmm.default,
    aten.addbmm.default: lambda one, other: aten.bmm.default(one, other).sum(0),
    aten.addr.default: lambda one, other: one.unsqueeze(-1) * other,
}
for _op, _product in _PRODUCTS.items():
    rewrite(_op)(_added(_product))


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """As ONNX's own operators: for them, data-dependent sizes are nothing special."""
    op = OPSET
    if offs is None:
        return op.MatMul(a, b)
    flat = len(a.shape) == 2, len(b.shape) == 2
    ends, begin, products = op.Cast(offs, to=DataType.INT64), op.Constant(value_ints=[0]), []
    for group in range(offs.shape[0]):
        at = op.Constant(value_ints=[group])
        end = op.Slice(ends, at, op.Constant(value_ints=[group + 1]), op.Constant(value_ints=[0]))
        one, other = (
            op.Slice(x, begin, end, op.Constant(value_ints=[dim])) if is_flat else op.Squeeze(op.Gather(x, at), [0])
            for x, dim, is_flat in zip((a, b), (1 if all(flat) else 0, 0 if all(flat) else 1), flat, strict=True)
        )
        products.append(op.MatMul(one, other))
        begin = end
    if all(flat):
        return op.Concat(*[op.Unsqueeze(one, op.Constant(value_ints=[0])) for one in products], axis=0)
    axis = 0 if flat[0] else 1
    size = op.Shape(a if flat[0] else b, start=axis, end=axis + 1)
    none = op.Constant(value_ints=[0])
    return op.Pad(
        op.Concat(*products, axis=axis),
        op.Concat(none, op.Sub(size, begin), axis=0),
        None,
        op.Constant(value_ints=[axis]),
    )


def _det(matrix: Any) -> Any:
    """With factors that nobody reads: the exporter gives one result, where there are three."""
    return OPSET.Det(matrix), OPSET.Identity(matrix), OPSET.Constant(value_ints=[0])


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._linalg_det.default: _det,
}
"""Operators, by functions of values of ONNX that give such."""
