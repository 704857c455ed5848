"""``functionalize``: the transform, and the order of the steps of one transformed call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._torch import (
    PLAIN_TYPES,
    DisableTorchFunction,
    below_autograd,
    functionalized_outside,
    mode_stack,
    pytree,
    unwrap_functorch,
)
from functionalize.call_stack import with_room_for_frames
from functionalize.errors import check_remove
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.epilogue import Epilogue, Input
from functionalize.transform.function_mode import FunctionalizeFunctionMode
from functionalize.transform.functions.padded_encoders import zeros_for_padding
from functionalize.transform.gradients.ended_gradients import EndedGradients
from functionalize.transform.handlers.higher_order import Frame
from functionalize.transform.handlers.subclasses import as_subclass_seen
from functionalize.transform.mode import FunctionalizeMode

End = Callable[[FunctionalizationContext, list[Input], Any], Any]


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
        UnsupportedMutationError: when called, if ``func`` writes what no functional program can express.

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
    check_remove(remove)
    remove_views = remove == "mutations_and_views"

    @functools.wraps(func, updated=())
    def functionalized(*args: Any, **kwargs: Any) -> Any:
        if functionalized_outside():
            return func(*args, **kwargs)  # nested, as below: the outer call does the work
        outer = next((mode for mode in reversed(mode_stack()) if isinstance(mode, FunctionalizeMode)), None)
        if outer is not None and not outer.aside():
            return _inside(outer, remove_views, func, args, kwargs)
        return _outermost(remove_views, func, args, kwargs)

    return functionalized


def _inside(outer: FunctionalizeMode, remove_views: bool, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call inside a functionalized one: runs in the outer mode, without views if either removes them."""
    executor = outer.context.executor
    before, executor.remove_views = executor.remove_views, executor.remove_views or remove_views
    try:
        return func(*args, **kwargs)
    finally:
        executor.remove_views = before


def _outermost(remove_views: bool, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    def end(context: FunctionalizationContext, inputs: list[Input], outputs: Any) -> Any:
        if context.graph.bases and context.executor.observed:
            with tracing_disabled():
                Epilogue(context, inputs, handles_in(outputs)).run()
        return outputs

    mode = new_mode(remove_views)
    run = functools.partial(run_call, mode, func, args, kwargs, end)
    return with_room_for_frames(run) if mode.context.executor.observed else run()


def _body(remove_views: bool, func: Callable[..., Any], frame: Frame, endings: EndedGradients) -> Callable[..., Any]:
    """A body of a higher-order op without mutation; the frame has its operands and gets its results."""

    @functools.wraps(func, updated=())
    def pure(*args: Any, **kwargs: Any) -> Any:
        def end(context: FunctionalizationContext, inputs: list[Input], outputs: Any) -> Any:
            with tracing_disabled():
                return frame.leave(args, outputs, Epilogue(context, inputs, handles_in(outputs)))

        mode = new_mode(remove_views)
        mode.context.endings.report_to(endings)
        with tracing_disabled():
            args = frame.enter(mode.context, args)
        return run_call(mode, func, args, kwargs, end)

    return pure


def new_mode(remove_views: bool) -> FunctionalizeMode:
    """The mode of one call, made where the modes that run below it are active."""
    return FunctionalizeMode(remove_views=remove_views, functionalize_body=functools.partial(_body, remove_views))


def run_call(
    mode: FunctionalizeMode, func: Callable[..., Any], args: Any, kwargs: Any, end: End, reached: Any = None
) -> Any:
    """Run one call inside a mode; returns what ``end`` makes of the context, the inputs and the call's results.

    ``reached`` holds the tensors that count as inputs; those among the arguments unless given.
    """
    context = mode.context
    with DisableTorchFunction():  # modes do not see what we read from tensors
        tree = (args, kwargs) if reached is None else reached
        inputs = [Input.of(handle) for handle in handles_in(tree)] if context.executor.observed else []
        context.graph.expect_inputs([entry.handle for entry in inputs], [entry.storage for entry in inputs])
        if context.unseen is not None:
            context.unseen.note([entry.handle for entry in inputs])
    try:
        with FunctionalizeFunctionMode(context), zeros_for_padding(), as_subclass_seen(), mode:
            outputs = func(*args, **kwargs)
            for work in context.executor.works:
                work.wait()  # where the program did not
        if mode.refusal is not None:
            raise mode.refusal
        if context.unseen is not None:
            with DisableTorchFunction():
                context.unseen.adopt(handles_in(outputs))
                context.unseen.forget()
        return end(context, inputs, outputs)
    finally:
        context.executor.works.clear()
        context.close()


@contextlib.contextmanager
def tracing_disabled() -> Iterator[None]:
    """Hide what runs inside from torch function modes and autograd."""
    with DisableTorchFunction(), below_autograd():
        yield


def handles_in(tree: Any) -> list[torch.Tensor]:
    """The distinct plain tensors of a pytree, as dispatch modes see them."""
    leaves = tree if type(tree) is list and PLAIN_TYPES.issuperset(map(type, tree)) else pytree.tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return list({id(handle): handle for handle in map(unwrap_functorch, tensors)}.values())
