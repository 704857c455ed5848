"""Dispatch modes: which are active, and how to run below some of them.

Invariant: what is taken off the stack of modes is put back, also after an error. Limits: the modes of one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C import _TorchDispatchModeKey as ModeKey  # names the slots of the two infra modes
from torch._dispatch.python import enable_python_dispatcher as kernels_for_symbols  # kernels in Python
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # no public path to either
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode  # the mode of `make_fx`, known by no public name
from torch.utils._python_dispatch import (  # a mode must know which modes run below it
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = ["FakeTensorMode", "ProxyTorchDispatchMode", "TorchDispatchMode", "kernels_for_symbols"]

Function = TypeVar("Function", bound=Callable[..., Any])


DisableTorchFunction = torch._C.DisableTorchFunction  # the public one silences subclasses only, not modes


def uncompiled(func: Function) -> Function:
    """Have Dynamo compile neither a function nor what it calls: at no cost, where ``disable`` wraps the function."""
    code: Any = func.__code__
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return func


def functionalized_outside() -> bool:
    """Whether AOTAutograd functionalizes what runs here: its tensors are handles of its own."""
    return torch._C._get_dispatch_mode(ModeKey.FUNCTIONAL) is not None


def mode_stack() -> list[TorchDispatchMode]:
    """The dispatch modes now active, bottom first."""
    return _get_current_dispatch_mode_stack()


# The mode of the ``make_fx`` that traces us, if one does.
current_proxy_mode: Callable[[], ProxyTorchDispatchMode | None] = partial(torch._C._get_dispatch_mode, ModeKey.PROXY)


@contextlib.contextmanager
def _fake_mode_only() -> Iterator[None]:
    fake = torch._C._get_dispatch_mode(ModeKey.FAKE)
    with _disable_current_modes():
        if fake is None:
            yield
        else:
            with fake:
                yield


def below_all_modes(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` where no mode is active, and no kernel in Python stands for one of C++."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        return func(*args, **kwargs)


def on_handles(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` below every mode but FakeTensorMode: on the program's own tensors, seen by no tracer."""
    lower = torch._C._len_torch_dispatch_stack()
    if lower == 0:
        return func(*args, **kwargs)
    proxy = torch._C._get_dispatch_mode(ModeKey.PROXY)
    fake = torch._C._get_dispatch_mode(ModeKey.FAKE)
    if lower > (proxy is not None) + (fake is not None):
        with _fake_mode_only():
            return func(*args, **kwargs)
    if proxy is None:
        return func(*args, **kwargs)
    # Much cheaper than _disable_current_modes, on the path of every view under make_fx.
    torch._C._unset_dispatch_mode(ModeKey.PROXY)
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._set_dispatch_mode(proxy)


@contextlib.contextmanager
def uncached_fakes(handles: Sequence[torch.Tensor]) -> Iterator[None]:
    """FakeTensor's cache replays what an op returned, but not that it resized an ``out=`` argument."""
    modes = {id(handle.fake_mode): handle.fake_mode for handle in handles if isinstance(handle, FakeTensor)}
    before = [(mode, mode.cache_enabled) for mode in modes.values()]
    for mode, _ in before:
        mode.cache_enabled = False
    try:
        yield
    finally:
        for mode, enabled in before:
            mode.cache_enabled = enabled


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """As inside ``__torch_dispatch__``: no autograd, no functorch level and no version counter sees the calls."""
    above = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    above = above.add(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)
    with torch._C._ExcludeDispatchKeyGuard(above), torch._C._AutoDispatchBelowADInplaceOrView():
        yield


@contextlib.contextmanager
def below_mode(mode: Any) -> Iterator[None]:
    """As if an active mode, and those that were entered after it, were not there."""
    popped = []
    while mode in _get_current_dispatch_mode_stack():
        popped.append(_pop_mode())
    try:
        yield
    finally:
        for one in reversed(popped):
            _push_mode(one)


def counting_versions() -> contextlib.AbstractContextManager[Any]:
    """As before a mode sees an op: the kernels that it is made of grow the version counters of what they write."""
    counter = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    excluded = torch._C._dispatch_tls_local_exclude_set() - counter
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def unwrap_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that dispatch modes see beneath the wrappers of ``grad``, ``vmap`` and ``jvp``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def in_functorch_transform() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None
