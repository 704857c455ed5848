"""Random numbers in eager's order.

Kernels draw in the order of the storage. A value may have other strides than its handle (Note [Values may have other
strides than their handles]), and a functional variant may lay out its result anew. So where the handle is dense but its
dimensions are permuted, the op runs on the value's elements in the handle's storage order.

Invariant: each op draws once. Limits: a handle that is not dense draws in logical order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.domains.tensors import tensor_leaves
from functionalize.program import Program
from functionalize.regions import Geometry

aten = torch.ops.aten

# Random ops of one tensor whose results have its shape, element by element.
_ELEMENTWISE = frozenset(
    {
        aten.bernoulli.default,
        aten.bernoulli.p,
        aten.cauchy.default,
        aten.exponential.default,
        aten.geometric.default,
        aten.log_normal.default,
        aten.native_dropout.default,
        aten.normal_functional.default,
        aten.rand_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.randn_like.default,
        aten.random.default,
        aten.random.to,
        getattr(aten.random, "from"),
        aten.uniform.default,
    }
)


def compute(program: Program, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Results, as values, of a random op on handles; None where the plain way draws in eager's order."""
    handles = list(tensor_leaves(args, kwargs))
    if op not in _ELEMENTWISE or len(handles) != 1:
        return None
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    order = Geometry.of(handles[0]).order
    if order is None or list(order) == sorted(order):
        return None
    call, back = program.domain.call, sorted(range(len(order)), key=order.__getitem__)
    ordered = call(aten.permute.default, program.value(handles[0]), list(order))
    if not ordered.is_contiguous():
        ordered = call(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    call_args, call_kwargs = pytree.tree_map_only(torch.Tensor, lambda _: ordered, (tuple(args), kwargs))
    out = call(op, *call_args, **call_kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda leaf: call(aten.permute.default, leaf, back), out)
