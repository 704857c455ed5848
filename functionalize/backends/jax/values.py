"""Tensors as JAX arrays, dtypes as JAX's, and torch's rules of promotion.

Invariant: nothing is rounded or cut off on the way: where JAX has no 64 bits, what needs them is refused. Limits:
dtypes that both have; strided tensors.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import export
from jax.extend.core import primitives

from functionalize._torch import pytree
from functionalize.errors import UnsupportedProgramError

DTYPES: dict[torch.dtype, Any] = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32,
    torch.uint64: jnp.uint64,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}
_WIDE = frozenset({torch.int64, torch.uint64, torch.float64, torch.complex128})  # what JAX has if it is told to
_OF_JAX = {np.dtype(mine): dtype for dtype, mine in DTYPES.items()}
_BITS = {torch.bfloat16: torch.int16}  # dtypes that NumPy has not, through others of their width


def dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """JAX's dtype.

    Raises:
        UnsupportedProgramError: it has none.
    """
    if dtype not in DTYPES:
        raise UnsupportedProgramError(
            f"JAX has no dtype like {dtype}",
            why="the program has tensors of this dtype",
            hint="convert them",
            at="the program",
        )
    found: np.dtype[Any] = np.dtype(DTYPES[dtype])
    return found


def torch_dtype_of(array: Any) -> torch.dtype:
    """The dtype that torch has for an array's.

    Raises:
        UnsupportedProgramError: programs have none like it: keys of random numbers, floats of 8 bits.
    """
    found = None if jnp.issubdtype(array.dtype, jax.dtypes.extended) else _OF_JAX.get(np.dtype(array.dtype))
    if found is None:
        raise UnsupportedProgramError(
            f"an array has the dtype {array.dtype}",
            why="torch has no tensors of this dtype",
            hint="convert the array; a random key belongs to the state of the function: `f.state(*args)`, `f.apply`",
            at="the call",
        )
    return found


def from_torch(tensor: torch.Tensor) -> jax.Array:
    """A tensor's elements as a JAX array of the same dtype and shape; memory is not shared.

    Raises:
        UnsupportedProgramError: JAX has no such dtype.

    Example:
        >>> import torch
        >>> from_torch(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).dtype
        dtype(bfloat16)
    """
    wanted = dtype_of(tensor.dtype)
    value = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    bits = _BITS.get(tensor.dtype)
    found = value.numpy() if bits is None else value.view(bits).numpy().view(wanted)
    with jax.enable_x64(True):
        # A copy by NumPy, as JAX may read later; and one by JAX, whose own memory alone can be donated.
        return jnp.array(found.copy(), dtype=wanted, copy=True)


def to_torch(array: Any) -> torch.Tensor:
    """An array's elements as a tensor of the same dtype and shape; memory is not shared.

    Example:
        >>> to_torch(jnp.ones(2, dtype=jnp.bfloat16))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    dtype = torch_dtype_of(array)
    bits = _BITS.get(dtype)
    found = np.array(array)
    if bits is None:
        return torch.from_numpy(found)
    return torch.from_numpy(found.view(str(bits).removeprefix("torch."))).view(dtype)


def is_array(value: Any) -> bool:
    """Whether an argument is an array: JAX's or NumPy's."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


# Promotion


def opmath(dtype: Any) -> Any:
    """The dtype that eager's kernels compute in: they round to 16 bits once, at the end."""
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype


def category(dtype: Any) -> int:
    """Boolean, integral, floating or complex: of operands without dimensions only a higher one counts."""
    if dtype == np.bool_:
        return 0
    if jnp.issubdtype(dtype, np.integer):
        return 1
    return 2 if jnp.issubdtype(dtype, np.floating) else 3


def is_number(value: Any) -> bool:
    """Whether an operand is a number of Python's, perhaps one that a trace does not know."""
    return isinstance(value, (bool, int, float, complex)) or getattr(value, "weak_type", False)


def weak(x: Any, kind: type) -> Any:
    """An array without dimensions as a number of Python's: only the primitive makes an array's type a weak one."""
    dtype = jax.dtypes.canonicalize_dtype(kind)
    return primitives.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=kind is not bool, sharding=None)


def known(value: Any) -> Any:
    """An operand; a size that a file leaves open as a number."""
    return weak(jnp.asarray(value), int) if export.is_symbolic_dim(value) else value


def result_type(*values: Any) -> Any:
    """The dtype that torch computes in: tensors count before tensors without dimensions, and these before numbers."""
    ranks: list[Any] = [None, None, None]
    for value in values:
        if is_number(value):
            kind = type(value) if isinstance(value, (bool, int, float, complex)) else None
            dtype, rank = _DEFAULTS[kind] if kind is not None else _weak(value), 2
        else:
            dtype, rank = value.dtype, 0 if value.ndim else 1
        ranks[rank] = dtype if ranks[rank] is None else jnp.promote_types(ranks[rank], dtype)
    found = None
    for dtype in ranks:
        if dtype is not None and (found is None or category(dtype) > category(found)):
            found = dtype if found is None else _raised(found, dtype)
    return np.dtype(found)


_DEFAULTS: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float32, complex: np.complex64}


def _weak(value: Any) -> Any:
    return (np.bool_, np.int64, np.float32, np.complex64)[category(value.dtype)]


def _raised(found: Any, dtype: Any) -> Any:
    """The dtype of a higher category; a complex number keeps the width of the floats that it meets."""
    if category(dtype) == 3 and category(found) == 2:
        return np.complex128 if np.dtype(found) == np.float64 else np.complex64
    return dtype


def promoted(*values: Any) -> tuple[Any, ...]:
    """Operands as arrays of one dtype."""
    values = tuple(map(known, values))
    dtype = result_type(*values)
    return tuple(cast(value, dtype) for value in values)


def cast(value: Any, dtype: Any) -> Any:
    """An array of a dtype, of an array or a number.

    A complex one loses its imaginary part, a boolean one says whether there is anything, and floats become integers
    as in torch: cut off.
    """
    value = known(value)
    if isinstance(value, (bool, int, float, complex)):
        if category(dtype) == 1 and isinstance(value, int):
            return jnp.asarray(np.array(value).astype(dtype))
        return jnp.asarray(value, dtype=dtype)
    if value.dtype == dtype and not getattr(value, "weak_type", False):
        return value
    if category(dtype) == 0:
        return value != 0
    value = jnp.real(value) if category(dtype) < 3 else value
    if category(value.dtype) == 2 and category(dtype) == 1:
        return _cut_off(value, np.dtype(dtype))
    return jax.lax.convert_element_type(value, dtype)


def _cut_off(x: Any, dtype: np.dtype[Any]) -> Any:
    """Floats as integers, as eager's kernels on a CPU have them.

    They are cut off to 32 or 64 bits, of which narrower integers keep the last ones. What does not fit there, and what
    is NaN, is the least of these integers. (Of `uint32` eager has several, by how it comes to the number.)
    """
    x = x.astype(np.float32) if x.dtype.itemsize == 2 else x
    wide = dtype.itemsize == 8 or (dtype == np.uint8 and x.dtype == np.float64)
    through: Any = np.dtype(np.int64 if wide else np.int32)
    beyond = 2.0 ** (8 * through.itemsize - 1)
    fits = (x >= -beyond) & (x < beyond)
    found = jnp.where(fits, jax.lax.convert_element_type(x, through), np.array(np.iinfo(through).min, through))
    found = jax.lax.convert_element_type(found, dtype)
    if dtype not in (np.uint32, np.uint64):
        return found
    large = jnp.where(x < 2 * beyond, jax.lax.convert_element_type(x, dtype), np.array(0, dtype))
    return jnp.where(x >= beyond, large, found)


def as_float(value: Any) -> Any:
    """An operand in floats, as functions want it that give floats: integers become float32."""
    return value if category(value.dtype) >= 2 else cast(value, np.float32)


def is_wide(graph: torch.fx.Graph) -> bool:
    """Whether a graph has numbers of 64 bits."""
    values = pytree.tree_leaves([node.meta.get("val") for node in graph.nodes])
    return any(value.dtype in _WIDE for value in values if isinstance(value, torch.Tensor))


def wide_enough(wide: bool, values: Any) -> AbstractContextManager[Any]:
    """64 bits for a call on ``values`` of a program that has some, if it has.

    Raises:
        UnsupportedProgramError: JAX traces without them, and would cut the program's numbers off later.
    """
    if not wide or jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    if any(isinstance(leaf, jax.core.Tracer) for leaf in pytree.tree_leaves(values)):
        raise UnsupportedProgramError(
            "the program computes with 64-bit numbers, but JAX traces it with 32 bits",
            why="JAX would silently truncate them (int64 to int32, float64 to float32)",
            hint='call jax.config.update("jax_enable_x64", True), put `with jax.enable_x64(True):` around the '
            "call of jax.jit, grad or vmap, or use `.jit()`, which does so itself",
            at="the call",
        )
    enabled: AbstractContextManager[Any] = jax.enable_x64(True)
    return enabled


_PRECISIONS = {"highest": "highest", "high": "high", "medium": "default"}  # torch's, as JAX calls them


def as_precise_as_torch() -> AbstractContextManager[Any]:
    """Products of float32 as torch computes them, unless JAX is told otherwise: on GPUs and TPUs JAX rounds more."""
    if jax.config.jax_default_matmul_precision is not None:  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    found: AbstractContextManager[Any] = jax.default_matmul_precision(_PRECISIONS[torch.get_float32_matmul_precision()])
    return found
