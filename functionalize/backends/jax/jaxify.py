"""Torch functions and modules as functions of JAX arrays: captured for the shapes and dtypes of a call.

Invariant: a call has no effect on torch's objects; what the function writes comes back as values. Limits: each way of
shapes, dtypes and plain arguments is captured once; Python state of the function is that of the capture.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.backends.arrays.leaves import no_array
from functionalize.backends.arrays.program import RANDOM_KEY
from functionalize.backends.arrays.registry import Lowerings
from functionalize.backends.jax.lowerings import lowering
from functionalize.backends.jax.program import JaxProgram, State, to_jax
from functionalize.backends.jax.values import is_array, torch_dtype_of
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.capture import capture


def jaxify(function: Callable[..., Any], *, lowerings: Lowerings = lowering, is_exporting: bool = False) -> JaxFunction:
    """Turn a torch function or module into a function of JAX arrays, for ``jax.jit``, ``grad`` and ``vmap`` too.

    Args:
        function: a module, or a function of tensors, pytrees of tensors, and other values.
        lowerings: your own table of lowerings.
        is_exporting: as in :func:`capture`: libraries then avoid branches on tensor values.

    Returns:
        The function, which returns the result of the original as arrays. If the original writes to its arguments, it
        returns :class:`~functionalize.backends.arrays.program.Written`: ``(returned, arguments)``, where ``arguments``
        maps the names of the written parameters to their new values. See :class:`JaxFunction` for state.

    Example:
        >>> import jax, torch
        >>> import jax.numpy as jnp
        >>> from functionalize import jaxify
        >>> def bump(x):
        ...     x[0].add_(1)
        ...     return x.sum()
        >>> returned, arguments = jax.jit(jaxify(bump))(jnp.zeros(3))
        >>> returned.item(), arguments["x"].tolist()
        (1.0, [1.0, 0.0, 0.0])
        >>> jax.grad(jaxify(lambda x: (x * x).sum()))(jnp.ones(2)).tolist()
        [2.0, 2.0]
    """
    return JaxFunction(function, lowerings, is_exporting)


class JaxFunction:
    """What :func:`jaxify` returns.

    A call reads the function's state (parameters, buffers, tensors in closures) from the torch objects, as constants.
    If the function writes to state or draws random numbers, call :meth:`apply`, which takes the state and returns the
    new state.
    """

    def __init__(self, function: Callable[..., Any], lowerings: Lowerings, is_exporting: bool) -> None:
        self._function, self._lowerings, self._is_exporting = function, lowerings, is_exporting
        self._programs: dict[Any, JaxProgram] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, function, updated=())

    def __repr__(self) -> str:
        return f"JaxFunction({getattr(self._function, '__qualname__', type(self._function).__name__)})"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """What the original returns.

        Raises:
            UnsupportedProgramError: it writes to its state or draws random numbers, or JAX cannot run it.
        """
        program = self.program(*args, **kwargs)
        if program.written:
            what = sorted(program.written)
            raise UnsupportedProgramError(
                f"the function changes state: {', '.join(what[:5])}{', ...' if len(what) > 5 else ''}",
                why="a function of JAX arrays has no side effects, so the new state would be lost"
                + (" (the random key is part of the state)" if RANDOM_KEY in what else ""),
                hint="call `state = f.state(*args)` once, and then `state, outputs = f.apply(state, *args)`",
                at="the call",
            )
        return program(program.initial_state, *args, **kwargs)[1]

    def apply(self, state: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> tuple[State, Any]:
        """Run the function from a state: ``(state, *args) -> (new_state, outputs)``."""
        return self.program(*args, **kwargs)(state, *args, **kwargs)

    def state(self, /, *args: Any, **kwargs: Any) -> State:
        """The current state of the torch objects, for calls with such arguments."""
        return self.program(*args, **kwargs).initial_state

    def program(self, /, *args: Any, **kwargs: Any) -> JaxProgram:
        """The program for calls with such arguments, which is captured at the first such call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        looks = tuple(_look(leaf) for leaf in leaves)
        key = (spec, looks, torch.is_grad_enabled(), getattr(self._function, "training", None))
        with self._lock:
            if key not in self._programs:
                given, named = pytree.tree_unflatten([_substitute(leaf) for leaf in leaves], spec)
                program = capture(self._function, given, named, on_data="raise", is_exporting=self._is_exporting)
                self._programs[key] = to_jax(program, lowerings=self._lowerings)
            return self._programs[key]


def _look(leaf: Any) -> Any:
    """What of an argument a program is captured for."""
    if isinstance(leaf, torch.Tensor):
        raise no_array("an argument", leaf)
    return ("array", tuple(leaf.shape), str(leaf.dtype)) if is_array(leaf) else (type(leaf), leaf)


def _substitute(leaf: Any) -> Any:
    """A tensor like an array; its elements are not looked at."""
    if not is_array(leaf):
        return leaf
    return torch.empty(tuple(leaf.shape), dtype=torch_dtype_of(leaf))
