"""Operators of optimizers, decomposed: those on lists of tensors (``_foreach_add``), and the fused steps.

Invariant: what a step does not update comes back as it was. Limits: sizes of lists are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from functionalize._torch import OpOverload

aten = torch.ops.aten
Tensors = Sequence[Any]


def decomposition(op: Any) -> Callable[..., Any] | None:
    """A function of the operator's arguments that computes the same by operators; None for others than these."""
    if op in _STEPS:
        return _STEPS[op]
    if isinstance(op, OpOverload) and op.name().startswith("aten::_foreach_"):
        return partial(_each, op)
    return None


_OF_ONE: dict[str, Callable[..., Any]] = {  # where the operator on one tensor has another name, or other arguments
    "norm": lambda x, order=2, dtype=None: aten.linalg_vector_norm.default(x, order, dtype=dtype),
    "zero": aten.zeros_like.default,
    "addcmul": lambda x, y, z, value=1: aten.addcmul.default(x, y, z, value=value),
    "addcdiv": lambda x, y, z, value=1: aten.addcdiv.default(x, y, z, value=value),
    "maximum": lambda x, y: aten.maximum.default(x, y) if isinstance(y, torch.Tensor) else aten.clamp_min.default(x, y),
    "minimum": lambda x, y: aten.minimum.default(x, y) if isinstance(y, torch.Tensor) else aten.clamp_max.default(x, y),
}


def _each(op: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """An operator on lists: of each list its element, in turn."""
    name = op._schema.name.removeprefix("aten::_foreach_")
    one = _OF_ONE.get(name) or getattr(aten, name)
    lists = [value for value in args if isinstance(value, (list, tuple))]
    if name in ("addcmul", "addcdiv") and op._schema.overload_name == "Tensor":
        args = (*args[:3], list(aten.unbind.int(args[3])))
    return [
        one(*(value[n] if isinstance(value, (list, tuple)) else value for value in args), **kwargs)
        for n in range(len(lists[0]))
    ]


def _gradient(p: Any, grad: Any, weight_decay: Any, maximize: bool, scale: Any) -> tuple[Any, Any]:
    """The gradient as it was found once it is scaled back, and as the step takes it."""
    found = grad if scale is None else grad / scale
    grad = -found if maximize else found
    return found, grad + weight_decay * p if weight_decay is not None else grad


def _unless(found_inf: Any, new: Any, old: Any) -> Any:
    """What is new, unless a gradient was infinite: then the step is left out."""
    return new if found_inf is None else torch.where(found_inf.reshape(()) == 1, old, new)


def sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    *,
    weight_decay: Any,
    momentum: Any,
    lr: Any,
    dampening: Any,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> tuple[Tensors, Tensors, Tensors]:
    new: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for number, (p, raw) in enumerate(zip(params, grads, strict=True)):
        found, grad = _gradient(p, raw, weight_decay, maximize, grad_scale)
        if buffers:
            old = buffers[number]
            buffer = aten.clone.default(grad) if is_first_step else old * momentum + grad * (1 - dampening)
            grad = grad + momentum * buffer if nesterov else buffer
            new[2].append(_unless(found_inf, buffer, old))
        new[0].append(_unless(found_inf, p - lr * grad, p))
        new[1].append(found)
    return new


def adam(
    decoupled: bool,
    params: Tensors,
    grads: Tensors,
    averages: Tensors,
    squares: Tensors,
    largest: Tensors,
    steps: Tensors,
    *,
    lr: Any,
    beta1: Any,
    beta2: Any,
    weight_decay: Any,
    eps: Any,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> tuple[Tensors, ...]:
    new: tuple[list[Any], ...] = ([], [], [], [], [])
    for number, (p, raw) in enumerate(zip(params, grads, strict=True)):
        begun = p * (1 - lr * weight_decay) if decoupled else p
        found, grad = _gradient(p, raw, None if decoupled else weight_decay, maximize, grad_scale)
        average = averages[number] * beta1 + grad * (1 - beta1)
        square = squares[number] * beta2 + grad * grad * (1 - beta2)
        top = aten.maximum.default(largest[number], square) if amsgrad else square
        first, second = (1 - beta ** steps[number] for beta in (beta1, beta2))
        update = (lr / first) * average / (aten.sqrt.default(top) / aten.sqrt.default(second) + eps)
        values = [(begun - update, p), (found, found), (average, averages[number]), (square, squares[number])]
        values += [(top, largest[number])] if amsgrad else []
        for place, (value, old) in zip(new, values, strict=False):
            place.append(_unless(found_inf, value.to(old.dtype), old))
    return new


def adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Tensors,
    *,
    lr: Any,
    lr_decay: Any,
    weight_decay: Any,
    eps: Any,
    maximize: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> tuple[Tensors, ...]:
    new: tuple[list[Any], ...] = ([], [], [], [])
    for p, raw, total, step in zip(params, grads, sums, steps, strict=True):
        found, grad = _gradient(p, raw, weight_decay, maximize, grad_scale)
        rate, summed = lr / (1 + (step - 1) * lr_decay), total + grad * grad
        values = [
            (p - rate * grad / (aten.sqrt.default(summed) + eps), p),
            (found, found),
            (summed, total),
            (step, step),
        ]
        for place, (value, old) in zip(new, values, strict=True):
            place.append(_unless(found_inf, value.to(old.dtype), old))
    return new


_STEPS: dict[Any, Callable[..., Any]] = {}
for _packet, _step in (
    (aten._fused_sgd, sgd),
    (aten._fused_adam, partial(adam, False)),
    (aten._fused_adamw, partial(adam, True)),
    (aten._fused_adagrad, adagrad),
):
    _STEPS |= {_packet.default: _step, _packet.tensor_lr: _step}
