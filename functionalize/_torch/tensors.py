"""A tensor's properties and its memory, without modes and autograd between; the containers of a module's state.

Guarantees: modes, autograd and version counters do not see what is read and done here. Limits: plain tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch._prims_common import suggest_memory_format  # as kernels in C++ choose it
from torch._subclasses.fake_tensor import FakeTensor  # no public path to it
from torch.utils._python_dispatch import _disable_current_modes, return_and_correct_aliasing
from torch.utils.hooks import RemovableHandle

from functionalize._torch.dispatch import below_dispatch

# Types whose tensors reach a mode without a __torch_dispatch__ of their own.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

# Whether sizes, strides or offset of a tensor are symbols. Private, but a single call, where these would take many.
is_symbolic: Callable[[torch.Tensor], bool] = attrgetter("_has_symbolic_sizes_strides")
is_view = torch.Tensor._is_view  # whether autograd knows a tensor as a view of another
_HOLD_HOOKS_OF_ALL = [sys.modules[owner.__module__] for owner in (torch.nn.Module, torch.optim.Optimizer)]
_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"  # no public name says whether a tensor has hooks
_hooks = attrgetter(*_HOOKS)
is_zero_tensor = torch.Tensor._is_zerotensor  # whether a tensor is zeros without memory: gradients in forward mode

# The containers in which a module holds its state, not copies: we add and remove entries without its methods.
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
modules_of: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_modules")
containers_of_module: Callable[[torch.nn.Module], tuple[dict[str, Any], ...]]  # these three at once
containers_of_module = attrgetter("_parameters", "_buffers", "_modules")

_STRIDED = torch.strided  # read for each tensor: an attribute of `torch` costs as much as the rest of the check


def hooks_behind(handle: RemovableHandle) -> list[dict[int, Any]]:
    """The dicts that a handle removes its hook from, as long as they live."""
    references = handle.hooks_dict_ref, *handle.extra_dict_ref
    return [hooks for reference in references if isinstance(hooks := reference(), dict)]


def hooks_of_all() -> dict[str, dict[int, Any]]:
    """The hooks that run for all modules and all optimizers, by the names of the dicts that hold them."""
    return {f"{place.__name__}.{name}": vars(place)[name] for place, name in _places_of_hooks_of_all()}


@functools.cache
def _places_of_hooks_of_all() -> list[tuple[types.ModuleType, str]]:
    return [
        (place, name)
        for place in _HOLD_HOOKS_OF_ALL
        for name, hooks in vars(place).items()
        if name.startswith("_global_") and name.endswith("_hooks") and isinstance(hooks, dict)
    ]


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer of a module is saved with its state."""
    return name not in module._non_persistent_buffers_set


def storage_id(storage: torch.UntypedStorage) -> int:
    """Identity of a storage, of fake ones as well: a `data_ptr` needs data."""
    return int(storage._cdata)


# The same, for a tensor's storage; raises without one.
storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
# Whether tensors of a third argument, a tuple, share a storage with one another or with those of the first two.
share_storages: Callable[..., bool] = torch._C._any_output_is_alias_to_input_or_output


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; without one (sparse, mkldnn) of the tensor itself, as a negative number."""
    if type(tensor) is not FakeTensor and (tensor.layout is not _STRIDED or tensor.is_nested):  # no fake one is nested
        return -id(tensor)
    try:
        return storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def is_tiny_tensor(value: Any) -> bool:
    """Whether a value is a tensor of at most one element on the CPU, alone in its storage, and no parameter."""
    if type(value) is not torch.Tensor or value.layout is not _STRIDED or value.device.type != "cpu":
        return False
    alone = value.numel() <= 1 and value.untyped_storage().nbytes() == value.nbytes
    return alone and not (value.requires_grad or value.is_conj() or value.is_neg() or value.is_inference())


def belongs_to_others(storage: torch.UntypedStorage) -> bool:
    """Whether code outside of torch may write to a storage: NumPy, or another process by a file."""
    return not storage.resizable()


def check_sum(storage: torch.UntypedStorage) -> int | None:
    """A checksum of a storage's bytes; None on a device, and for an empty storage."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return None
    return zlib.crc32(memory_of(storage))


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage on the CPU, to be read and written while the storage lives."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def counted_with(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter of ``other`` if the two share memory; else the tensor itself."""
    if storage_key(tensor) != storage_key(other):
        return tensor
    made = other.detach()
    made.data = tensor  # replaces all but the counter
    return made


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether Python code runs when a tensor's gradient is computed."""
    return any(_hooks(tensor))


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether Python code runs when gradients go through a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def gradient_hooks(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """The dicts of a tensor's hooks on its gradient, and of those that run once it is accumulated, unless empty."""
    return [hooks for hooks in _hooks(tensor) if hooks]


def share_gradient_hooks(of: torch.Tensor, to: torch.Tensor) -> None:
    """Run the hooks of one tensor for another: both hold the same dicts, in which handles find their hooks."""
    for name, hooks in zip(_HOOKS, _hooks(of), strict=True):
        if hooks:
            setattr(to, name, hooks)


# Properties that few programs read, and that matter only to these; whether a tensor is a leaf matters to autograd, too.
OFFSET, VIEW, HOOKS, LEAF = "storage offset", "is a view", "kinds of hooks on its gradient", "is a leaf"
VERSION, STORAGE, GRADIENT = "version", "storage size in bytes", "has a gradient"
LAYOUT, BEGIN = "strides", "place in its storage"  # read directly, or because they determine what is written
LEAF_VIEW = "is a leaf, and a view"  # of a tensor without gradients, and set to require them
SILENT_VIEW = "is a view without gradients of what requires some"
FOLLOWED_VIEW = "is a view of what requires gradients"  # and therefore requires them
KIND = "kind"  # a parameter, a buffer, or neither
_KINDS = torch.nn.Parameter, torch.nn.Buffer
ASK_VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]  # the getter that Python calls; stubs call it a number
ASK_BASE: Any = torch.Tensor._base.__get__  # type: ignore[union-attr]  # likewise
ASK_HOOKS = [getattr(torch.Tensor, name).__get__ for name in _HOOKS]
ASKED_PROPERTIES: dict[str, Callable[[torch.Tensor], Any]] = {
    OFFSET: torch.Tensor.storage_offset,
    VIEW: is_view,
    LEAF_VIEW: lambda tensor: tensor.requires_grad and tensor.is_leaf and is_view(tensor),
    SILENT_VIEW: lambda tensor: is_view(tensor) and not tensor.requires_grad and autograd_base(tensor).requires_grad,
    FOLLOWED_VIEW: lambda tensor: tensor.requires_grad and not tensor.is_leaf and is_view(tensor),
    HOOKS: lambda tensor: len(gradient_hooks(tensor)),
    STORAGE: lambda tensor: tensor.untyped_storage().nbytes(),
    VERSION: lambda tensor: None if tensor.is_inference() else tensor._version,
    KIND: lambda tensor: next(
        (k for k in (torch.nn.Parameter, torch.nn.Buffer) if isinstance(tensor, k)), torch.Tensor
    ),
}

_users: Callable[[int], int] = torch._C._storage_Use_Count


def has_others(key: int, count: int) -> bool:
    """Whether more than ``count`` tensors use the storage with this :func:`storage_key`."""
    return _users(key) >= _users_of_one() + count


@functools.cache
def _users_of_one() -> int:
    """The use count of one tensor's storage once that was read: the storage's Python object may count."""
    tensor = torch.empty(1)
    return _users(storage_key(tensor))


def bytes_of_original(handle: torch.Tensor) -> int | None:
    """The size of the real storage that a fake tensor's storage stands for; None unless that lives.

    The storage of a fake tensor that was not a view is as large as that tensor, however large the original's is.
    """
    if not isinstance(handle, FakeTensor):
        return None
    converter, fake = handle.fake_mode.fake_tensor_converter.meta_converter, storage_id(handle.untyped_storage())
    for number, storage in converter.storage_memo.items():
        if storage_id(storage) == fake:
            originals = converter.describer.lookup_storage.items()
            return next((original.nbytes() for original, its in originals if its == number), None)
    return None


def is_view_to_autograd(tensor: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view; modes do not see the call."""
    with torch._C.DisableTorchFunction():
        return tensor._is_view()


def is_leaf_to_autograd(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds a gradient of its own. Autograd raises for a view that a write has made unusable."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def is_taken_again(view: torch.Tensor) -> bool:
    """Whether autograd takes a view again after a write to its base; it rejects other views then."""
    creation: Any = torch._C._autograd
    return bool(view._is_view() and creation._get_creation_meta(view) == creation.CreationMeta.DEFAULT)


def creation_of(view: torch.Tensor) -> Any:
    """Autograd's ``CreationMeta`` of a view; None for the default: an operator made it alone, in grad mode."""
    creation: Any = torch._C._autograd
    meta = creation._get_creation_meta(view) if is_view_to_autograd(view) else creation.CreationMeta.DEFAULT
    return None if meta == creation.CreationMeta.DEFAULT else meta


def made_silently(creation: Any) -> bool:
    """Whether a view was made with grad mode off, by its ``CreationMeta``."""
    kinds: Any = torch._C._autograd.CreationMeta
    return creation in (kinds.NO_GRAD_MODE, kinds.INFERENCE_MODE)


def set_creation(view: torch.Tensor, creation: Any) -> None:
    """Set a view's ``CreationMeta``, by which autograd refuses writes."""
    if is_view_to_autograd(view):
        torch._C._autograd._set_creation_meta(view, creation)


def created_as(creation: Any) -> contextlib.AbstractContextManager[Any]:
    """The mode in which a new view gets this ``CreationMeta``."""
    kinds: Any = torch._C._autograd.CreationMeta
    if creation == kinds.NO_GRAD_MODE and torch.is_grad_enabled():
        return torch.no_grad()
    if creation == kinds.INFERENCE_MODE and not torch.is_inference_mode_enabled():
        return torch.inference_mode()
    return contextlib.nullcontext()


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """The view of a base that autograd takes by the steps that led to ``view``, all fake; None if they fail."""
    with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError, IndexError):
        taken: torch.Tensor = view._view_func_unsafe(base)
        return taken
    return None


def autograd_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes a tensor for a view of; itself if it is not a view."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Give tensors versions, as if they had been written so often."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def count_writes(tensor: torch.Tensor, count: int) -> None:
    """Add ``count`` to a tensor's version; negative if autograd counted one write as several."""
    if tensor.is_inference():  # it has no versions
        return
    for _ in range(count):
        torch._C._increment_version((tensor,))
    if count < 0:
        set_versions([tensor], [tensor._version + count])


def memory_write(handle: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` into ``handle``'s memory, unseen by modes and version counters. Same shape and dtype."""
    with below_dispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        handle.copy_(value)


def memory_view(
    storage: torch.UntypedStorage, *, size: Sequence[Any], stride: Sequence[Any], offset: Any, dtype: torch.dtype
) -> torch.Tensor:
    """A part of a storage, as a tensor that no mode has seen."""
    with below_dispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def copy_of_memory(value: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """A real tensor with the same strides, in a copy of its storage; `clone` makes tensors contiguous unless dense."""
    storage = value.untyped_storage().clone() if storage is None else storage
    twin = torch.empty(0, dtype=value.dtype, device=value.device)
    twin.set_(storage, value.storage_offset(), value.size(), value.stride())
    if value.is_conj():
        twin = twin.conj()
    return torch._neg_view(twin) if value.is_neg() else twin


def alias_of_wrapper(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    """A wrapper subclass that a view op made, marked as sharing the storage of the wrapper that it views."""
    with _disable_current_modes():
        wrapper: torch.Tensor = return_and_correct_aliasing(func, args, kwargs, out)
    return wrapper


# The methods that read elements of a sparse tensor, and their number.
OF_ELEMENTS: Mapping[str, Any] = {
    name: getattr(torch.Tensor, name) for name in ("_nnz", "_values", "_indices", "values", "indices")
}
# Packed sequences and recurrent layers, as torch's modules call them.
LEFT_ALIGNED: Any = torch._nested_tensor_from_mask_left_aligned  # whether the padding comes last
_RECURRENT = ("_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu")
RECURRENT: Mapping[str, Any] = {name: getattr(torch._VF, name) for name in _RECURRENT}
# Interpolation, as `torch.nn.functional.interpolate` calls it.
INTERPOLATIONS: tuple[Any, ...] = tuple(getattr(torch._C._nn, name) for name in dir(torch._C._nn) if "upsample" in name)
MARGIN_LOSS: Any = torch._C._nn.multilabel_margin_loss
# The steps of optimizers in one kernel, which take a learning rate as a number or as a tensor.
FUSED_STEPS: tuple[Any, ...] = tuple(
    getattr(torch, f"_fused_{name}_")
    for name in ("adam", "adamw", "sgd", "adagrad")
    if hasattr(torch, f"_fused_{name}_")
)


def has_unknown_elements(tensor: torch.Tensor) -> bool:
    """Whether a sparse tensor has a data-dependent number of elements: a fake one reports that it is empty."""
    return isinstance(tensor, FakeTensor) and tensor.layout is torch.sparse_coo and not tensor._nnz()
