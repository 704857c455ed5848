"""Fake tensors whose construction is recorded: every operator on them is intercepted, at any time.

Invariant: between two operations nothing refers weakly to a user's object: torch would refuse to swap it.
Limits: written against torch 2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from functionalize._torch.dispatch import below_dispatch, current_proxy_mode, functionalized_outside
from functionalize._torch.fakes import CaptureFakeMode, FakeFactory, FakeTensor, FakeTensorMode, new_fake_mode
from functionalize._torch.symbols.tracing import TensorTracker
from functionalize._torch.tensors import storage_id, storage_key
from functionalize.patches import Patch, Patches
from functionalize.refusals.calls import CUDA_IN_FAKE_MODE

Intercept = Callable[[Any, Any, Any], Any]  # gets an op and its arguments


class _Silence(threading.local):
    """Whether a thread's operators are not intercepted: they are recorded already, or are not to be."""

    value = False


class DeferredFakeMode(CaptureFakeMode):
    """Makes deferred tensors. All of a process belong to one mode, so that an operator can take any of them."""

    intercept: Intercept | None = None
    copied: Callable[[FakeTensor, dict[int, Any]], Any] | None = None  # by `copy.deepcopy`

    def __init__(self, **options: Any) -> None:
        self._silence = _Silence()
        super().__init__(**options)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Do not intercept this thread's operators: they are recorded already, or are not to be."""
        before, self._silence.value = self._silence.value, True
        try:
            yield
        finally:
            self._silence.value = before

    @contextlib.contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Run a capture on tensors of this mode, which is not part of the construction."""
        try:
            with self.silent(), super().of_this_thread():
                yield
        finally:
            self._ended = False

    def __deepcopy__(self, memo: Any) -> DeferredFakeMode:
        """Copies of fake tensors belong to the same mode."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a deferred tensor cannot be saved or pickled: it has no data\n    try  materialize_module(module) first"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        intercept = self.intercept
        if intercept is None or self._silence.value or current_proxy_mode() is not None or functionalized_outside():
            return super().__torch_dispatch__(func, types, args, kwargs)
        return intercept(func, args, kwargs or {})


def new_deferred_mode(metas: Mapping[Any, Callable[..., Any]]) -> DeferredFakeMode:
    """The mode of a recording."""
    table: Any = attrgetter("_deepcopy_dispatch")(copy)
    table[FakeTensor] = _copied
    return new_fake_mode(symbolic=False, metas=metas, mode_type=DeferredFakeMode)


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` makes of a fake tensor: torch would read its data."""
    mode = tensor.fake_mode
    copied = mode.copied if isinstance(mode, DeferredFakeMode) else None
    return tensor.__deepcopy__(memo) if copied is None else copied(tensor, memo)


def in_place_of(places: Sequence[tuple[Any, str]], call: Callable[..., Any]) -> Patches:
    """Have this thread call ``call`` in place of torch's functions; it gets the replaced function and the arguments."""
    return Patches([Patch(owner, name, functools.partial(functools.partial, call)) for owner, name in places])


def exchange(first: FakeTensor, second: FakeTensor) -> None:
    """Exchange two tensor objects, for everything that refers to them."""
    torch._C._swap_tensor_impl(first, second)
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__


def placed(
    factory: FakeFactory,
    storage: torch.UntypedStorage,
    layout: tuple[Sequence[int], Sequence[int], int],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """A fake tensor in a storage of fake tensors. ``layout``: size, strides and offset."""
    size, stride, offset = layout
    with below_dispatch():
        element = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)
        return factory.around(element, device)


def forget_tensors(tracer: Any, mode: FakeTensorMode) -> list[tuple[FakeTensor, Any]]:
    """Drop a tracer's and a mode's references to tensors. Returns the fake tensors in use, and what they stood for."""
    tracker, tracer.tensor_tracker = tracer.tensor_tracker, TensorTracker()
    converter = mode.fake_tensor_converter
    constants: Any = converter.constant_storage_mapping
    for references in constants.values():
        for reference in references:
            if (fake := reference()) is not None:
                fake.constant = None
    constants.clear()
    meta: Any = converter.meta_converter
    for memo in (meta.tensor_memo, meta.storage_memo, meta.describer.lookup_tensor, meta.describer.lookup_storage):
        memo.clear()
    tracked = [(tensor, tracker[tensor]) for tensor in tracker if isinstance(tensor, FakeTensor)]
    tracker.clear()
    return tracked


def real_data(fake: FakeTensor) -> torch.Tensor | None:
    """The real tensor whose memory a fake one got by ``.data =``, which no mode sees; None if it got none."""
    if fake.layout is not torch.strided or fake.untyped_storage().device.type == "meta":
        return None
    storage = fake.untyped_storage()
    where = storage, fake.storage_offset(), tuple(fake.size()), tuple(fake.stride())
    with below_dispatch():
        return torch.empty(0, dtype=fake.dtype, device=storage.device).set_(*where)


def give_data(fake: FakeTensor, source: FakeTensor) -> None:
    """Give a fake tensor the memory of another."""
    with below_dispatch():
        fake.data = source


def users_of(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects use a storage."""
    return int(torch._C._storage_Use_Count(storage_id(storage)))


def is_sole_user(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the only user of its storage; False for inference tensors."""
    return int(torch._C._storage_Use_Count(storage_key(tensor))) == 1 and not tensor.is_inference()


def become(lazy: Any, fake: FakeTensor) -> None:
    """Turn an uninitialized parameter or buffer into the fake tensor that initializes it."""
    parameter, requires_grad = isinstance(lazy, torch.nn.Parameter), lazy.requires_grad
    torch._C._swap_tensor_impl(lazy, fake)
    lazy.__class__, attributes = FakeTensor, fake.__dict__
    lazy.__dict__.update(attributes)
    if parameter:
        lazy._is_param = True
    lazy.cls_to_become = FakeTensor  # torch sets its class next
    lazy.requires_grad_(requires_grad)


_OF_PARAMETERS = ("_is_param", "_is_buffer", "persistent", "cls_to_become")


def attributes_of_users(fake: FakeTensor) -> dict[str, Any]:
    """The attributes that a program gave to a fake tensor."""
    own = FakeTensor(fake.fake_mode, torch.empty(0, device="meta"), torch.device("cpu")).__dict__
    return {name: value for name, value in fake.__dict__.items() if name not in own and name not in _OF_PARAMETERS}


def take_place(fake: Any, real: torch.Tensor) -> bool:
    """Turn a fake tensor object into the real tensor, for all that refers to it; False if autograd refers to it."""
    if fake._use_count() > 1:
        return False
    torch._C._swap_tensor_impl(fake, real)
    attributes, fake.__class__ = dict(real.__dict__), type(real)
    real.__class__ = FakeTensor
    real.__dict__, fake.__dict__ = fake.__dict__, attributes
    return True


class PlainFakeMode(FakeTensorMode):
    """Torch's mode; ``fake_cuda``: whether it makes tensors on CUDA devices that the machine lacks."""

    def __init__(self, *, fake_cuda: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)  # real tensors from outside of the program
        self._refuses_cuda = not (fake_cuda or torch.cuda.is_available())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._refuses_cuda and kwargs and _is_cuda(kwargs.get("device")):
            raise CUDA_IN_FAKE_MODE.error()
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
