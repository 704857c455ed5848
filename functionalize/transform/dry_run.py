"""Runs ops on twins or copies of a program's tensors, to learn what eager refuses and which metadata it gives.

Invariant: the program's own tensors and random numbers stay as they are. Limits: copies only strided tensors; copies
of fake tensors hold zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from functionalize._torch import below_all_modes, copy_of_memory, on_handles, pytree, storage_key, uncached_fakes
from functionalize.aliasing.geometry import Layout, hint
from functionalize.aliasing.strided_layout import with_lazy_bits
from functionalize.aliasing.tensor_queries import is_fake, is_plain_strided, same_strides, tensor_leaves
from functionalize.ops.calls import draws, is_data_dependent
from functionalize.transform.values import ValueExecutor

Kwargs = dict[str, Any]
_MAX_BYTES = 2**26  # of copies: beyond this a trace should not compute for the sake of an error message


def on_twins(
    executor: ValueExecutor, func: Any, args: Sequence[Any], kwargs: Kwargs, written: Sequence[Any]
) -> dict[int, torch.Tensor]:
    """Run a mutating op on twins of the handles that it writes; returns them, by identity, as the op left them.

    ``written`` holds tensors and lists of tensors. Raises what eager raises.
    """
    originals = list(tensor_leaves(written, {}))

    def run(size: Callable[[Any], Any]) -> dict[int, torch.Tensor]:
        twins = {id(handle): on_handles(_uninitialized_like, (handle, size), {}) for handle in originals}
        call_args, call_kwargs = pytree.tree_map_only(
            torch.Tensor, lambda handle: twins.get(id(handle), handle), (tuple(args), kwargs)
        )
        with _same_random_numbers(func, args, kwargs), uncached_fakes(originals):
            executor.on_handles(func, call_args, call_kwargs)
        for twin in twins.values() if executor.symbolic else ():
            executor.track_sizes(twin)
        return twins

    try:
        return run(lambda number: number)
    except RuntimeError as error:
        if not (executor.symbolic and "tried to directly modify sizes" in str(error)):
            raise
        return run(
            int
        )  # fake tensors of symbolic sizes cannot be resized: from here on the sizes are fixed to those of this trace


def _uninitialized_like(tensor: torch.Tensor, size: Callable[[Any], Any]) -> torch.Tensor:
    if not is_plain_strided(tensor):
        return tensor.clone()
    return tensor.new_empty_strided(list(map(size, tensor.size())), list(map(size, tensor.stride())))


def on_copies(executor: ValueExecutor, func: Any, args: Sequence[Any], kwargs: Kwargs) -> None:
    """Run an op on copies of its arguments, which share memory as the originals do. Raises what eager raises.

    Fake kernels ignore shared memory, so fake arguments get real substitutes, of zeros.
    """
    handles = list(tensor_leaves(args, kwargs))
    if not _can_be_copied(handles):
        return
    fake = any(map(is_fake, handles))
    copy = partial(_zeros, symbolic=executor.symbolic) if fake else copy_of_memory
    try:
        _run_on(lambda: _copies(handles, copy), func, args, kwargs)
    except Exception as error:  # any other error is due to the zeros
        if not fake or str(error).startswith("unsupported operation:"):
            raise


def refuse_dtype(
    executor: ValueExecutor, func: Any, args: Sequence[Any], kwargs: Kwargs, target: torch.Tensor, dtype: torch.dtype
) -> None:
    """Raise what eager raises if an op takes zeros, but not a ``target`` of another dtype than its result's, ``dtype``.

    Fake kernels of some ops write a result of any dtype to their `out=`.
    """
    handles = list(tensor_leaves(args, kwargs))
    if not _can_be_copied(handles):
        return

    def copies(made: Callable[..., torch.Tensor] = torch.Tensor.to) -> dict[int, torch.Tensor]:
        copied = _copies(handles, partial(_zeros, symbolic=executor.symbolic))
        return copied | {id(target): made(copied[id(target)], dtype)}

    try:
        _run_on(copies, func, args, kwargs)
    except Exception:  # due to the zeros
        return
    _run_on(lambda: copies(lambda copy, dtype: copy), func, args, kwargs)


def _can_be_copied(tensors: Sequence[torch.Tensor]) -> bool:
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return False
    sizes = (hint(tensor.untyped_storage().nbytes()) for tensor in tensors)
    return not any(map(is_fake, tensors)) or sum(sizes) <= _MAX_BYTES


def _run_on(copies: Callable[[], dict[int, torch.Tensor]], func: Any, args: Sequence[Any], kwargs: Kwargs) -> None:
    """Run an op below all modes, on copies of its arguments."""

    def run() -> None:
        made = copies()
        new = pytree.tree_map_only(torch.Tensor, lambda handle: made[id(handle)], (tuple(args), kwargs))
        func(*new[0], **new[1])

    with _same_random_numbers(func, args, kwargs):
        below_all_modes(run, (), {})


def _copies(handles: Sequence[torch.Tensor], copy: Callable[..., torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies by the identity of the originals; they share storages as the originals do."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = {}
    for handle in handles:
        key = storage_key(handle)
        copies[id(handle)] = copy(handle, storages.get(key))
        storages[key] = copies[id(handle)].untyped_storage()
    return copies


def _zeros(tensor: torch.Tensor, storage: torch.UntypedStorage | None, symbolic: bool) -> torch.Tensor:
    """A real tensor with the layout of a fake one, in a storage of zeros unless one is given."""
    if storage is None:
        storage = torch.zeros(hint(tensor.untyped_storage().nbytes()), dtype=torch.uint8).untyped_storage()
    size, stride = [hint(n) for n in tensor.size()], [hint(n) for n in tensor.stride()]
    if symbolic:  # the stride of a dimension of size 1 may differ from eager's, and does not matter
        stride = [1 if n == 1 else s for n, s in zip(size, stride, strict=True)]
    made = torch.empty(0, dtype=tensor.dtype).set_(storage, hint(tensor.storage_offset()), size, stride)
    return with_lazy_bits(made, Layout.of(tensor))


def with_eager_strides(executor: ValueExecutor, func: Any, args: Sequence[Any], kwargs: Kwargs, out: Any) -> Any:
    """``out``, the results of an op on values, with a fresh handle for each result to which eager gives other strides.

    ``args`` and ``kwargs`` are the handles; a fresh handle has eager's strides, and no data yet.
    """
    if is_data_dependent(func, args):
        return out  # data-dependent shapes, and tensors whose strides are their own
    with _same_random_numbers(func, args, kwargs):
        wanted = executor.on_handles(func, args, kwargs)
    if isinstance(out, torch.Tensor):
        return wanted if _strides_differ(out, wanted) else out
    flat, spec = pytree.tree_flatten(out)
    pairs = zip(flat, pytree.tree_leaves(wanted), strict=True)
    return pytree.tree_unflatten([want if _strides_differ(leaf, want) else leaf for leaf, want in pairs], spec)


def _strides_differ(result: Any, wanted: Any) -> bool:
    strided = isinstance(result, torch.Tensor) and result.layout is torch.strided
    return strided and not same_strides(result, wanted)


def result_dtype(func: Any, args: Sequence[Any], kwargs: Kwargs) -> torch.dtype | None:
    """The dtype of the first tensor that an op returns."""
    with _same_random_numbers(func, args, kwargs):
        results = tensor_leaves([on_handles(func, args, kwargs)], {})
    return next((result.dtype for result in results), None)


def _same_random_numbers(func: Any, args: Sequence[Any], kwargs: Kwargs) -> contextlib.AbstractContextManager[Any]:
    """A context for another run of an op, which must not draw from the program's random numbers."""
    return torch.random.fork_rng() if draws(func, args, kwargs) else contextlib.nullcontext()
