"""Control flow: higher-order operators, whose bodies are graphs.

Invariant: what a body draws is drawn with keys of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import GraphModule

from functionalize.backends.arrays.interpreter import Call
from functionalize.backends.jax.lowerings.registry import lowering

higher = torch.ops.higher_order
Array = Any


@lowering(higher.cond, takes_call=True)
def cond(call: Call, predicate: Any, true: GraphModule, false: GraphModule, operands: Sequence[Any] = ()) -> Any:
    if isinstance(predicate, bool):
        return tuple(call.run(true if predicate else false, operands))
    branches = [lambda args, body=body: tuple(call.run(body, args)) for body in (true, false)]
    return jax.lax.cond(jnp.reshape(predicate, ()), *branches, tuple(operands))


@lowering(higher.while_loop, takes_call=True)
def while_loop(
    call: Call, condition: GraphModule, body: GraphModule, carried: Sequence[Any], more: Sequence[Any] = ()
) -> Any:
    def goes_on(state: Any) -> Any:
        return jnp.reshape(call.run(condition, [*state, *more])[0], ())

    def step(state: Any) -> Any:
        new = call.run(body, [*state, *more])
        return tuple(jnp.asarray(one, old.dtype) for one, old in zip(new, state, strict=True))

    return jax.lax.while_loop(goes_on, step, tuple(map(jnp.asarray, carried)))


@lowering(higher.scan, takes_call=True)
def scan(call: Call, body: GraphModule, init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    def step(state: Any, row: Any) -> Any:
        found = tuple(call.run(body, [*state, *row, *more]))
        return found[: len(init)], found[len(init) :]

    state, rows = jax.lax.scan(step, tuple(init), tuple(xs))
    return (*state, *rows)


@lowering(higher.map_impl, takes_call=True)
def map_impl(call: Call, body: GraphModule, xs: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    return tuple(jax.lax.map(lambda row: tuple(call.run(body, [*row, *more])), tuple(xs)))
