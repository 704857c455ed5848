"""Numbers: sizes, what a program reads off a tensor as a number of Python's, and what it computes with these.

Invariant: a number that only the data tell is an array without dimensions of JAX's weak type, which takes the dtype of
what it is combined with.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import category

aten = torch.ops.aten
Array = Any
_KINDS = (bool, int, float, complex)


@lowering(aten._local_scalar_dense, aten.item)
def number(x: Array) -> Any:
    return jax.lax.convert_element_type(x.reshape(()), _KINDS[category(x.dtype)])


@lowering(aten.sym_size.int)
def sym_size(x: Array, dim: int) -> int:
    return x.shape[dim]  # type: ignore[no-any-return]


@lowering(aten.sym_numel)
def sym_numel(x: Array) -> int:
    return math.prod(x.shape)


def _traced(x: Any) -> bool:
    return isinstance(x, jax.Array)


@lowering(torch.sym_float)
def sym_float(x: Any) -> Any:
    return jax.lax.convert_element_type(x, float) if _traced(x) else float(x)


@lowering(torch.sym_int, math.trunc)
def sym_int(x: Any) -> Any:
    return jax.lax.convert_element_type(jnp.trunc(x), int) if _traced(x) else int(x)


@lowering(torch.sym_not)
def sym_not(x: Any) -> Any:
    return jnp.logical_not(x) if _traced(x) else not x


@lowering(torch.sym_max)
def sym_max(x: Any, y: Any) -> Any:
    return jnp.maximum(x, y) if _traced(x) or _traced(y) else max(x, y)


@lowering(torch.sym_min)
def sym_min(x: Any, y: Any) -> Any:
    return jnp.minimum(x, y) if _traced(x) or _traced(y) else min(x, y)


@lowering(torch.sym_ite)
def sym_ite(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y) if _traced(condition) else (x if condition else y)


def _of_math(name: str, function: Any) -> None:
    """A function of the module `math`, and of torch, which names the same for symbols with a prefix."""
    mine = getattr(jnp, {"acos": "arccos", "asin": "arcsin", "atan": "arctan"}.get(name, name))

    def either(*values: Any) -> Any:
        return mine(*values) if any(map(_traced, values)) else function(*values)

    symbolic = getattr(torch, f"_sym_{name}", None)
    lowering(function, *([] if symbolic is None else [symbolic]))(either)


for _name in [
    "sqrt",
    "exp",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "tanh",
    "asin",
    "acos",
    "atan",
    "floor",
    "ceil",
    "pow",
]:
    _of_math(_name, getattr(math, _name))
