"""Operators, what torch knows of them, and the dispatch modes that they reach: which are active, how to go below.

Invariant: what is taken off the stack of modes is put back, also after an error. Limits: the modes of one thread.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch._C import _TorchDispatchModeKey as ModeKey  # names the slots of the two infra modes
from torch._higher_order_ops.auto_functionalize import (  # the graph form of a mutable custom op
    auto_functionalized,
    auto_functionalized_v2,
    can_auto_functionalize,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # no public path to either
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode  # the mode of `make_fx`, which has no public name
from torch.overrides import _get_current_function_mode_stack  # what stands below a mode for calls of functions
from torch.utils._python_dispatch import (  # a mode must know which modes run below it
    TorchDispatchMode,
    _disable_current_modes,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as mode_stack  # those active, bottom first

Function = TypeVar("Function", bound=Callable[..., Any])

OpOverload = torch._ops.OpOverload  # the type of every op; torch.ops has no public name for it
HigherOrderOperator = torch._ops.HigherOrderOperator
DisableTorchFunction = torch._C.DisableTorchFunction  # the public one silences subclasses only, not modes
below_dispatch = torch._C._DisableTorchDispatch  # the kernels themselves, whatever modes and subclasses there are


@cache
def counts_versions(op: OpOverload) -> bool:
    """Whether an op that writes has grown the version counters of what it writes before modes see it, or never does."""
    if op.namespace == "aten":  # of those without such a kernel only the `foreach` ones call others that have one
        return not op.name().startswith("aten::_foreach_")
    return _has_kernel_above_modes(op)


def _has_kernel_above_modes(op: OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView"))


def followed_inside(op: OpOverload, device: torch.device) -> bool:
    """Whether autograd has no formula for an op, so that eager differentiates what its kernel calls.

    A fallthrough for autograd above a kernel in Python is not a formula; above one in C++ it means no gradients.
    """
    backend, dispatcher = device.type.upper(), torch._C
    for key in (f"Autograd{backend}", "Autograd", "CompositeImplicitAutograd"):
        if hasattr(dispatcher.DispatchKey, key) and dispatcher._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            python = {f"{op.name().replace('::', '/')}/{one}" for one in (backend, "CompositeExplicitAutograd")}
            falls = dispatcher._dispatch_kernel_for_dispatch_key_is_fallthrough(op.name(), key)
            return bool(falls) and not python.isdisjoint(torch.library._impls)
    return True


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """As before a mode sees an op: autograd, and what counts versions, see the calls."""
    above = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    above = above.add(torch._C.DispatchKey.ADInplaceOrView)
    excluded = torch._C._dispatch_tls_local_exclude_set() - above
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def kernel_of(op: OpOverload, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The kernel of an op for such tensors, as what autograd has for the op calls it."""
    keys = functools.reduce(operator.or_, map(torch._C._dispatch_keys, tensors)) & torch._C._after_autograd_keyset
    counter = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    return partial(op.redispatch, keys if _has_kernel_above_modes(op) else keys - counter)


def identity_of(generator: torch.Generator) -> int:
    """Which generator this is: operators see another Python object for it at each call."""
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


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


# The mode that makes fake tensors here, if one does.
current_fake_mode: Callable[[], FakeTensorMode | None] = partial(torch._C._get_dispatch_mode, ModeKey.FAKE)
# The mode of the ``make_fx`` that traces us, if one does.
current_proxy_mode: Callable[[], ProxyTorchDispatchMode | None] = partial(torch._C._get_dispatch_mode, ModeKey.PROXY)


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
        with _disable_current_modes(), fake or contextlib.nullcontext():
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
    before = {h.fake_mode: h.fake_mode.cache_enabled for h in handles if isinstance(h, FakeTensor)}
    for mode in before:
        mode.cache_enabled = False
    try:
        yield
    finally:
        for mode, enabled in before.items():
            mode.cache_enabled = enabled


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """As inside ``__torch_dispatch__``: no autograd, autocast, functorch level or version counter sees the calls."""
    above = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    above = above.add(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)
    with torch._C._ExcludeDispatchKeyGuard(above), torch._C._AutoDispatchBelowADInplaceOrView(), without_autocast():
        yield


@contextlib.contextmanager
def below_mode(mode: Any) -> Iterator[None]:
    """As if an active mode, and those that were entered after it, were not there."""
    popped = []
    while mode in mode_stack():
        popped.append(_pop_mode())
    try:
        yield
    finally:
        for one in reversed(popped):
            _push_mode(one)


def direct_call(op: Any) -> Callable[..., Any]:
    """An operator without the layer in Python around it, known to FX by its name."""
    call: Any = partial(op._op)
    call.overload = op
    call.__name__, call.__module__ = str(op).replace(".", "_").replace("::", "_"), "functionalize"
    return call  # type: ignore[no-any-return]


# Where torch keeps the Python functions of its operators, by their names.
_namespaces = ("_VariableFunctions", "_nn", "_special", "_linalg", "_fft", "TensorBase")
BINDINGS = tuple(getattr(torch._C, name) for name in _namespaces)

# Graphs of operators below autocast must not be cast again.
without_autocast: Callable[[], Any] = torch._C._DisableAutocast
# What Dynamo's graphs call where a region of autocast begins.
ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # on some device
BelowAutograd = torch._C._AutoDispatchBelowAutograd  # autograd does not see what runs, version counters do
BelowVersions = torch._C._AutoDispatchBelowADInplaceOrView  # neither of the two does


def counting_versions() -> contextlib.AbstractContextManager[Any]:
    """As before a mode sees an op: the kernels that it is made of grow the version counters of what they write."""
    counter = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    excluded = torch._C._dispatch_tls_local_exclude_set() - counter
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def as_before_modes(op: OpOverload) -> contextlib.AbstractContextManager[Any]:
    """In inference mode, where composite ops come to a mode first: so that what they call meets the kernels for views.

    Some have such a kernel themselves, which has been met by then.
    """
    met = not torch.is_inference_mode_enabled() or _has_kernel_above_modes(op)
    return contextlib.nullcontext() if met else counting_versions()


def has_symbols(modes: Sequence[TorchDispatchMode]) -> bool:
    """Whether fake tensors made by these modes have symbolic sizes."""
    return any(isinstance(mode, FakeTensorMode) and mode.shape_env is not None for mode in modes)


def symbols_in_making(modes: Sequence[TorchDispatchMode]) -> Mapping[Any, Any]:
    """The symbols that fake tensors of plain sizes get while a program runs, from data: by now, and later."""
    for mode in modes:
        if isinstance(mode, FakeTensorMode) and mode.static_shapes and mode.shape_env is not None:
            ranges: Mapping[Any, Any] = mode.shape_env.var_to_range
            return ranges
    return {}


def indices_stay_tensors() -> bool:
    """Whether a body of `flex_attention` is traced: torch has its indices by tensors computed, not read from data."""
    return any(type(mode).__name__ == "TransformGetItemToIndex" for mode in _get_current_function_mode_stack())


def unwrap_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that dispatch modes see beneath the wrappers of ``grad``, ``vmap`` and ``jvp``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


in_functorch_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack  # None: outside of them


def in_forward_ad() -> bool:
    """Whether tensors may carry tangents, inside of ``torch.autograd.forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def has_tangent(value: Any) -> bool:
    """Whether it is a tensor that carries a tangent, inside of ``dual_level``."""
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


GlobalStateGuard = torch._C._dynamo.guards.GlobalStateGuard  # compares all modes that Dynamo's guards know at once
TensorGuards = torch._C._dynamo.guards.TensorGuards  # compares class, dispatch keys, dtype, device, sizes and strides


def function_modes() -> int:
    """How many ``TorchFunctionMode``s are active; a default device is one."""
    count: int = torch._C._len_torch_function_stack()
    return count


@contextlib.contextmanager
def kernels_alone() -> Iterator[None]:
    """As in a thread of its own: kernels run on real tensors, whatever modes, fake kernels and autocast are active."""
    with (
        _disable_current_modes(),
        DisableTorchFunction(),
        torch._C._DisablePythonDispatcher(),
        torch._C._ForceDispatchKeyGuard(*_keys_of_a_thread()),
        BelowVersions(),
    ):
        yield


@cache
def _keys_of_a_thread() -> tuple[Any, Any]:
    """The dispatch keys that a new thread includes and excludes."""
    found: list[Any] = []

    def look() -> None:
        found.extend((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0], found[1]
