"""``functionalize``: the transform, and the order of things in one transformed call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from functionalize._torch import (
    DisableTorchFunction,
    below_autograd,
    functionalized_outside,
    mode_stack,
    pytree,
    unwrap_functorch,
)
from functionalize.epilogue import Epilogue, Input
from functionalize.higher_order import Frame
from functionalize.mode import FunctionalizeMode
from functionalize.program import Program
from functionalize.undispatched import Undispatched

_REMOVE = ("mutations", "mutations_and_views")


def functionalize(func: Callable[..., Any], *, remove: str = "mutations") -> Callable[..., Any]:
    """A function of the same semantics in which no intermediate tensor is mutated.

    Used directly, the result computes what ``func`` computes: outputs, inputs after the call, aliasing, errors. Under
    ``torch.fx.experimental.proxy_tensor.make_fx`` the traced graph has no mutating op but the write-backs: one
    ``copy_`` for each input that changed, last, in input order, and before it ``as_strided_``, ``resize_`` or ``set_``
    where the function changed the input's metadata.

    Args:
        func: any function of tensors, pytrees of tensors and other values, or a module.
        remove: ``"mutations"``, or ``"mutations_and_views"`` to compute by ``*_copy`` ops what view ops would alias.

    Returns:
        A function with the signature of ``func``. Outputs have eager's shapes, strides, dtypes and aliasing.

    Raises:
        ValueError: ``remove`` is neither of the two.
        UnsupportedMutationError: when called, where ``func`` writes what no functional program can express.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from functionalize import functionalize
        >>> def f(a):
        ...     b = a + 1
        ...     b.view(-1).add_(1)
        ...     return b
        >>> graph = make_fx(functionalize(f))(torch.zeros(2))
        >>> [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
        ['add.Tensor', 'view.default', 'add.Tensor', 'view.default']
    """
    if remove not in _REMOVE:
        raise ValueError(f"remove must be 'mutations' or 'mutations_and_views', not {remove!r}")
    remove_views = remove == "mutations_and_views"

    @functools.wraps(func, updated=())
    def functionalized(*args: Any, **kwargs: Any) -> Any:
        if functionalized_outside():
            return func(*args, **kwargs)  # nested, as below: the outer one does the work
        outer = next((mode for mode in reversed(mode_stack()) if isinstance(mode, FunctionalizeMode)), None)
        if outer is not None and not outer.aside():
            return _inside(outer, remove_views, func, args, kwargs)
        return _outermost(remove_views, func, args, kwargs)

    return functionalized


def _inside(outer: FunctionalizeMode, remove_views: bool, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call inside a functionalized one: the mode that is there does the work; views go if either asks for it."""
    domain = outer.program.domain
    before, domain.remove_views = domain.remove_views, domain.remove_views or remove_views
    try:
        return func(*args, **kwargs)
    finally:
        domain.remove_views = before


def _outermost(remove_views: bool, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    mode = FunctionalizeMode(remove_views=remove_views, purify=functools.partial(_body, remove_views))
    program = mode.program
    with DisableTorchFunction():  # what we ask tensors is not for modes to hear
        inputs = _inputs(program, (args, kwargs)) if program.domain.observed else []
    try:
        with Undispatched(program), mode:
            outputs = func(*args, **kwargs)
        if program.graph.bases and program.domain.observed:
            with DisableTorchFunction(), below_autograd():
                Epilogue(program, inputs, _handles(outputs)).run()
    finally:
        program.close()
    return outputs


def _body(remove_views: bool, func: Callable[..., Any], frame: Frame) -> Callable[..., Any]:
    """A function that a higher-order op runs, pure; its frame says what it gets and what it gives."""

    @functools.wraps(func, updated=())
    def pure(*args: Any, **kwargs: Any) -> Any:
        mode = FunctionalizeMode(remove_views=remove_views, purify=functools.partial(_body, remove_views))
        program = mode.program
        with DisableTorchFunction(), below_autograd():
            args = frame.enter(program, args)
            inputs = _inputs(program, (args, kwargs))
        try:
            with Undispatched(program), mode:
                outputs = func(*args, **kwargs)
            with DisableTorchFunction(), below_autograd():
                return frame.leave(args, outputs, Epilogue(program, inputs, _handles(outputs)))
        finally:
            program.close()

    return pure


def _inputs(program: Program, tree: Any) -> list[Input]:
    inputs = [Input.of(handle) for handle in _handles(tree)]
    program.graph.expect([entry.handle for entry in inputs])
    return inputs


def _handles(tree: Any) -> list[torch.Tensor]:
    """The distinct plain tensors of a pytree, as dispatch modes see them."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return list({id(handle): handle for handle in map(unwrap_functorch, tensors)}.values())
