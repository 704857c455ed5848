"""Operators, torch's facts about them, and dispatch modes: which are active, and how to run below them.

Invariant: a mode that is popped is pushed again, also after an error. Limits: the modes of one thread.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import CodeType
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
from torch.overrides import (  # the modes for calls of functions
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils._python_dispatch import (  # a mode must know which modes run below it
    TorchDispatchMode,
    _disable_current_modes,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as mode_stack  # active modes, bottom first

Function = TypeVar("Function", bound=Callable[..., Any])

OpOverload = torch._ops.OpOverload  # the type of every op; torch.ops has no public name for it
HigherOrderOperator = torch._ops.HigherOrderOperator
DisableTorchFunction = torch._C.DisableTorchFunction  # the public class silences subclasses only, not modes
current_function_mode: Callable[[], Any] = _get_current_function_mode
without_function_mode: Callable[[], contextlib.AbstractContextManager[Any]] = _pop_mode_temporarily
below_dispatch = torch._C._DisableTorchDispatch  # the kernels themselves, below all modes and subclasses


@cache
def counts_versions(op: OpOverload) -> bool:
    """Whether a mutating op has bumped the version counters of its tensors before modes see it, or never does."""
    if op.namespace == "aten":  # of ops without that kernel only the `foreach` ones call ops with it
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
            python = {f"{op.name().replace('::', '/')}/{name}" for name in (backend, "CompositeExplicitAutograd")}
            falls = dispatcher._dispatch_kernel_for_dispatch_key_is_fallthrough(op.name(), key)
            return bool(falls) and not python.isdisjoint(torch.library._impls)
    return True


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Run as above all modes: autograd and version counters see the calls."""
    above = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    above = above.add(torch._C.DispatchKey.ADInplaceOrView)
    excluded = torch._C._dispatch_tls_local_exclude_set() - above
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def kernel_of(op: OpOverload, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The kernel of an op for these tensors, as autograd's kernel of the op calls it."""
    keys = functools.reduce(operator.or_, map(torch._C._dispatch_keys, tensors)) & torch._C._after_autograd_keyset
    counter = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    return partial(op.redispatch, keys if _has_kernel_above_modes(op) else keys - counter)


def identity_of(generator: torch.Generator) -> int:
    """Which generator this is: operators see another Python object for it at each call."""
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


def uncompiled(func: Function) -> Function:
    """Have Dynamo compile neither a function nor what it calls, without the cost of a wrapper as by ``disable``."""
    code: Any = func.__code__
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return func


def functionalized_outside() -> bool:
    """Whether AOTAutograd functionalizes the running program, whose tensors are handles of AOTAutograd's then."""
    return torch._C._get_dispatch_mode(ModeKey.FUNCTIONAL) is not None


# The mode that makes fake tensors now; None outside of such modes.
current_fake_mode: Callable[[], FakeTensorMode | None] = partial(torch._C._get_dispatch_mode, ModeKey.FAKE)
# The mode of the ``make_fx`` that traces us; None if we are not traced.
current_proxy_mode: Callable[[], ProxyTorchDispatchMode | None] = partial(torch._C._get_dispatch_mode, ModeKey.PROXY)


def below_all_modes(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` without modes, and without kernels in Python in place of those in C++."""
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
    """Run without FakeTensor's cache, which replays an op's results, but not that it resized an ``out=`` argument."""
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
    """Run as in ``__torch_dispatch__``: autograd, autocast, functorch and version counters do not see the calls."""
    above = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    above = above.add(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)
    with torch._C._ExcludeDispatchKeyGuard(above), torch._C._AutoDispatchBelowADInplaceOrView(), without_autocast():
        yield


@contextlib.contextmanager
def below_mode(mode: Any) -> Iterator[None]:
    """Run without an active mode, and without those that were entered after it."""
    popped = []
    while mode in mode_stack():
        popped.append(_pop_mode())
    try:
        yield
    finally:
        for popped_mode in reversed(popped):
            _push_mode(popped_mode)


def direct_call(op: Any) -> Callable[..., Any]:
    """An operator without the layer in Python around it, known to FX by its name."""
    call: Any = partial(op._op)
    call.overload = op
    call.__name__, call.__module__ = str(op).replace(".", "_").replace("::", "_"), "functionalize"
    return call  # type: ignore[no-any-return]


# Where torch keeps the Python functions of its operators, by their names.
_namespaces = ("_VariableFunctions", "_nn", "_special", "_linalg", "_fft", "TensorBase")
BINDINGS = tuple(getattr(torch._C, name) for name in _namespaces)

# Operators that were recorded below autocast must not be cast again.
without_autocast: Callable[[], Any] = torch._C._DisableAutocast
# What Dynamo's graphs call at the start of an autocast region.
ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # on some device
BelowAutograd = torch._C._AutoDispatchBelowAutograd  # autograd does not see what runs, version counters do
BelowVersions = torch._C._AutoDispatchBelowADInplaceOrView  # neither sees it


def counting_versions() -> contextlib.AbstractContextManager[Any]:
    """Run as above all modes: the kernels that a composite op calls bump version counters."""
    counter = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    excluded = torch._C._dispatch_tls_local_exclude_set() - counter
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def as_before_modes(op: OpOverload) -> contextlib.AbstractContextManager[Any]:
    """In inference mode, where modes see composite ops first: run the view kernels of the ops that these call.

    Some composite ops have a view kernel themselves, which has run by then.
    """
    met = not torch.is_inference_mode_enabled() or _has_kernel_above_modes(op)
    return contextlib.nullcontext() if met else counting_versions()


def has_symbols(modes: Sequence[TorchDispatchMode]) -> bool:
    """Whether fake tensors made by these modes have symbolic sizes."""
    return any(isinstance(mode, FakeTensorMode) and mode.shape_env is not None for mode in modes)


def symbols_in_making(modes: Sequence[TorchDispatchMode]) -> Mapping[Any, Any]:
    """The ranges of data-dependent symbols, in a mode of plain sizes: it grows while the program runs."""
    for mode in modes:
        if isinstance(mode, FakeTensorMode) and mode.static_shapes and mode.shape_env is not None:
            ranges: Mapping[Any, Any] = mode.shape_env.var_to_range
            return ranges
    return {}


def python_dispatcher_enabled() -> bool:
    """Whether ops run torch's kernels in Python, where there are such kernels."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher))


def indices_stay_tensors() -> bool:
    """Whether a body of `flex_attention` is traced: torch indexes by tensors there, without reading their data."""
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
    """Whether a value is a tensor that carries a tangent, inside of ``dual_level``."""
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


GlobalStateGuard = torch._C._dynamo.guards.GlobalStateGuard  # compares all modes that Dynamo's guards know at once
TensorGuards = torch._C._dynamo.guards.TensorGuards  # compares class, dispatch keys, dtype, device, sizes and strides


_KERNELS_IN = tuple(
    f"{Path(torch.__file__).parent}/_{part}" for part in ("refs/", "decomp/", "prims", "meta_registrations.py")
)


def is_kernel(code: CodeType) -> bool:
    """Whether code is of torch's kernels in Python."""
    return code.co_filename.startswith(_KERNELS_IN)


def function_modes() -> int:
    """How many ``TorchFunctionMode``s are active; a default device is such a mode."""
    count: int = torch._C._len_torch_function_stack()
    return count


@contextlib.contextmanager
def kernels_alone() -> Iterator[None]:
    """Run as in a new thread: kernels on real tensors, without modes, fake kernels and autocast."""
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
    keys: list[Any] = []

    def read() -> None:
        keys.extend((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return keys[0], keys[1]
