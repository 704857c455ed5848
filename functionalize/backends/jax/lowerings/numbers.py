"""Numbers: sizes, what a program reads off a tensor as a number of Python's, and what it computes with these.

Invariant: a data-dependent number is an array without dimensions of JAX's weak type, which takes the dtype of
what it is combined with.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import category, known, weak
from functionalize.graph_capture.trace.numbers.number_methods import rest

aten = torch.ops.aten
Array = Any
_KINDS = (bool, int, float, complex)


@lowering(aten._local_scalar_dense, aten.item)
def number(x: Array) -> Any:
    return weak(x.reshape(()), _KINDS[category(x.dtype)])


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
    x = known(x)
    return weak(x, float) if _traced(x) else float(x)


@lowering(torch.sym_int, math.trunc)
def sym_int(x: Any) -> Any:
    return weak(jnp.trunc(x), int) if _traced(x) else int(x)


@lowering(torch.sym_ite)
def sym_ite(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y) if _traced(condition) else (x if condition else y)


@lowering(min, max, takes_call=True)
def choose(call: Any, *numbers: Any) -> Any:
    """As Python does: the first one, unless another is smaller, or larger."""
    smaller = call.node.target is min
    found, *others = numbers
    for other in others:
        found = sym_ite(other < found if smaller else other > found, other, found)
    return found


@lowering(rest)
def rest_of(x: Any) -> Any:
    return x % 1


def _either(mine: Any, function: Any) -> Any:
    """JAX's function where a number is data-dependent, else Python's."""

    def computed(*values: Any) -> Any:
        return mine(*values) if any(map(_traced, values)) else function(*values)

    return computed


lowering(torch.sym_not)(_either(jnp.logical_not, operator.not_))
lowering(torch.sym_max)(_either(jnp.maximum, max))
lowering(torch.sym_min)(_either(jnp.minimum, min))


def _of_math(name: str, mine: Any) -> None:
    """A function of the module `math`, and of torch, which names the same for symbols with a prefix."""
    function, symbolic = getattr(math, name, None), getattr(torch, f"_sym_{name}", None)
    lowering(*(one for one in (function, symbolic) if one is not None))(_either(mine, function))


_OTHERWISE = {"acos": "arccos", "asin": "arcsin", "atan": "arctan", "atan2": "arctan2", "pow": "power"}
_OTHERWISE |= {"acosh": "arccosh", "asinh": "arcsinh", "atanh": "arctanh"}
for _name in (
    *("sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "hypot"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "degrees", "radians"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("floor", "ceil", "fabs", "fmod", "copysign"),
):
    _of_math(_name, getattr(jnp, _OTHERWISE.get(_name, _name)))
for _name in ("erf", "erfc", "gamma"):
    _of_math(_name, getattr(jax.scipy.special, _name))
_of_math("lgamma", jax.scipy.special.gammaln)
