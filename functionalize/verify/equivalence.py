"""Does a transformed function do for its caller what the eager one does?

Invariant: both functions run on copies of the inputs, under the same random seed. Limits: what the caller can see of
one call; see :mod:`functionalize.verify.observation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from functionalize.errors import NotEquivalentError
from functionalize.transform.api import functionalize
from functionalize.verify.functional import assert_functional
from functionalize.verify.observation import clone_inputs, differences, observe


def assert_equivalent(
    func: Callable[..., Any],
    *inputs: Any,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    remove: str = "mutations",
    tracing_mode: Literal["real", "fake", "symbolic"] | None = None,
    strides: bool = False,
    aliasing: bool | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> GraphModule | None:
    """Raise unless a transformed function does for the caller what the eager one does.

    Both run on copies of the inputs that share storage as the inputs do, under the same random seed. Compared
    are values, dtypes and shapes of outputs; values, shapes, strides and gradients of the inputs after the
    call; which outputs and inputs share storage or are one object; and the type of an exception.

    Args:
        func: the eager function; its arguments and results are any pytree.
        *inputs: its arguments.
        transform: what to hold against eager; `functionalize(func, remove=remove)` unless given.
        remove: for the default transform, and for `assert_functional` on the graph.
        tracing_mode: None to call the transformed function directly; "real", "fake" or "symbolic" to trace
            it with `make_fx` on one copy, judge the graph with `assert_functional`, and run it on another.
        strides: compare strides of outputs as well.
        aliasing: compare aliasing; by default only in direct use: a graph without views returns no aliases.
        seed: the random seed of every run.
        rtol: as in `torch.testing.assert_close`.
        atol: as in `torch.testing.assert_close`.

    Returns:
        The graph, where one was traced.

    Raises:
        NotEquivalentError: says what differs.
        NotFunctionalError: the traced graph is not pure.

    Example:
        >>> import torch
        >>> from functionalize.verify import assert_equivalent
        >>> def bump(x):
        ...     x[0].add_(1)
        ...     return x.sum()
        >>> graph = assert_equivalent(bump, torch.zeros(3), tracing_mode="fake")
    """
    transformed = (transform or _default_transform(remove))(func)
    expected = observe(func, clone_inputs(inputs), seed)
    graph: GraphModule | None = None
    if tracing_mode is not None and expected.error is None:
        torch.manual_seed(seed)
        graph = _trace(transformed, clone_inputs(inputs), tracing_mode)
        assert_functional(graph, remove)
        transformed = torch.no_grad()(graph)  # gradients are nodes of it; it writes back to leaves
    actual = observe(transformed, clone_inputs(inputs), seed)
    if aliasing is None:
        aliasing = graph is None
    found = list(differences(expected, actual, strides=strides, aliasing=aliasing, rtol=rtol, atol=atol))
    if found:
        name = getattr(func, "__name__", repr(func))
        listed = "\n".join(f"  {line}" for line in found)
        raise NotEquivalentError(f"`{name}` and its transform differ:\n{listed}") from actual.error
    return graph


def _default_transform(remove: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda func: functionalize(func, remove=remove)


def _trace(func: Callable[..., Any], inputs: Sequence[Any], tracing_mode: Any) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(func, tracing_mode=tracing_mode)(*inputs)
