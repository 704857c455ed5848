"""The only door to private torch symbols. Each stands here with the reason why no public one serves.

Invariant: nothing here knows of bases, views or rules. Limits: written against torch 2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch._C import _TorchDispatchModeKey as ModeKey  # names the slots of the two infra modes below
from torch._higher_order_ops.auto_functionalize import (  # the graph form of a mutable custom op
    auto_functionalized,
    auto_functionalized_v2,
    can_auto_functionalize,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # no public path to either
from torch.fx.experimental.proxy_tensor import (  # proxies are attached to tensors by no public call
    ProxyTorchDispatchMode,
    _enable_thunkify,
    _sym_register,
    fetch_sym_proxy,
    set_original_aten_op,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree  # torch.utils.pytree is another implementation, without our leaf order
from torch.utils._python_dispatch import (  # a mode must know which modes run below it
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    return_and_correct_aliasing,
)

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = [  # what is passed on; functions of our own follow
    "PLAIN_TYPES",
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "ProxyTorchDispatchMode",
    "TorchDispatchMode",
    "auto_functionalized",
    "auto_functionalized_v2",
    "can_auto_functionalize",
    "pytree",
]

DisableTorchFunction = torch._C.DisableTorchFunction  # the public one silences subclasses only, not modes
OpOverload = torch._ops.OpOverload  # the type of every op; torch.ops has no public name for it
HigherOrderOperator = torch._ops.HigherOrderOperator

# Whether a tensor's place is written in symbols. Private, but one question in C++ where sizes and strides are many.
is_symbolic: Callable[[torch.Tensor], bool] = operator.attrgetter("_has_symbolic_sizes_strides")


def uncompiled(func: Function) -> Function:
    """Have Dynamo compile neither a function nor what it calls: at no cost, where ``disable`` wraps the function."""
    code: Any = func.__code__
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return func


# Types whose tensors reach a mode without a __torch_dispatch__ of their own.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


def bytes_of_original(handle: torch.Tensor) -> int | None:
    """How large the storage is which a fake tensor's storage stands for, if it stands for one that lives.

    The storage of a fake tensor that was no view is as large as that tensor, whatever the original had around it.
    """
    if not isinstance(handle, FakeTensor):
        return None
    converter, fake = handle.fake_mode.fake_tensor_converter.meta_converter, handle.untyped_storage()._cdata
    for number, storage in converter.storage_memo.items():
        if storage._cdata == fake:
            originals = converter.describer.lookup_storage.items()
            return next((original.nbytes() for original, its in originals if its == number), None)
    return None


_STRIDED = torch.strided  # asked for each tensor: a module's attribute costs as much as the rest of the question


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; of the tensor itself where it has none (sparse, mkldnn), as a negative number."""
    if tensor.layout is not _STRIDED or tensor.is_nested:
        return -id(tensor)
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # the only identity that works without data
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


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


@cache
def counts_versions(op: OpOverload) -> bool:
    """Whether an op that writes has grown the version counters of what it writes before modes see it, or never does."""
    if op.namespace == "aten":  # of those without such a kernel only the `foreach` ones call others that have one
        return not op.name().startswith("aten::_foreach_")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView"))


def counting_versions() -> contextlib.AbstractContextManager[Any]:
    """As before a mode sees an op: the kernels that it is made of grow the version counters of what they write."""
    counter = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    excluded = torch._C._dispatch_tls_local_exclude_set() - counter
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Give tensors versions, as if they had been written so often."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def memory_write(handle: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` into ``handle``'s memory, seen by no mode and no version counter. Same shape and dtype."""
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        handle.copy_(value)


def alias_of_wrapper(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    """A wrapper subclass that a view op made, told that it shares the storage of the wrapper that it views."""
    with _disable_current_modes():
        told: torch.Tensor = return_and_correct_aliasing(func, args, kwargs, out)
    return told


def memory_view(
    handle: torch.Tensor, storage: torch.UntypedStorage, place: tuple[Any, Any, Any], dtype: torch.dtype
) -> torch.Tensor:
    """A place (size, strides, offset) of a storage that a tensor has, or had, as a tensor that no mode has seen."""
    size, stride, offset = place
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        twin = torch.empty(0, dtype=dtype, device=storage.device)
        return twin.set_(storage, offset, size, stride)


def copy_of_memory(value: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """A real tensor of the same strides in a copy of its storage; `clone` makes what is not dense contiguous."""
    twin = torch.empty(0, dtype=value.dtype, device=value.device)
    twin.set_(
        value.untyped_storage().clone() if storage is None else storage,
        value.storage_offset(),
        value.size(),
        value.stride(),
    )
    if value.is_conj():
        twin = twin.conj()
    return torch._neg_view(twin) if value.is_neg() else twin


def point_proxy(mode: ProxyTorchDispatchMode, handle: torch.Tensor, value: torch.Tensor) -> None:
    """Let ``handle`` stand for the graph node that ``value`` stands for."""
    tracker = mode.tracer.tensor_tracker
    proxy = tracker.get(value)
    if proxy is not None:
        tracker[handle] = proxy


def holders(mode: ProxyTorchDispatchMode, key: int) -> Iterator[torch.Tensor]:
    """The tensors of a storage that the tracer knows as nodes."""
    return (tensor for tensor in mode.tracer.tensor_tracker if storage_key(tensor) == key)


def hint_of(number: Any, supposed: int | None = None) -> Any:
    """The size that a symbol has in this trace, without a guard; of one that comes from data what is to be supposed."""
    node = number.node
    if node.hint is not None:
        return node.hint
    if node.shape_env.has_guarding_hint(node.expr):  # was equated with sizes of inputs after it was made
        return node.shape_env.guarding_hint_or_throw(node.expr)
    return None if supposed is None else node.shape_env.optimization_hint(node.expr, fallback=supposed)


def unbacked(numbers: Sequence[Any]) -> bool:
    """Whether some size is known when the program runs only: it comes from data, not from the inputs' sizes."""
    return any(type(number) is not int and hint_of(number) is None for number in numbers)


def sized_by_data(tensor: FakeTensor, numbers: Sequence[Any] = ()) -> bool:
    """Whether sizes, of a tensor or among numbers, are known when the program runs only, or were so until a guard."""
    if not (is_symbolic(tensor) or any(_is_symbol(number) for number in numbers)):
        return False
    return tensor.fake_mode.static_shapes or unbacked((*tensor.size(), *filter(_is_symbol, numbers)))


def forget_offset(handle: FakeTensor) -> None:
    """Let nobody wait for the symbol of a view's storage offset: its copy starts at zero."""
    environment, offset = handle.fake_mode.shape_env, handle.storage_offset()
    if environment is not None and isinstance(offset, torch.SymInt):
        pending = environment.pending_fresh_unbacked_symbols
        pending[:] = [symbol for symbol in pending if symbol not in offset.node.expr.free_symbols]


def node_of(mode: ProxyTorchDispatchMode, tensor: torch.Tensor) -> Any:
    """The node that a tensor stands for; None for a constant of the trace."""
    entry = mode.tracer.tensor_tracker.get(tensor)
    if entry is None:
        return None
    return getattr(entry, "node", None) or entry.proxy.node


def last_node(mode: ProxyTorchDispatchMode) -> Any:
    """The newest node of the graph that is traced; None while there is none."""
    return next(iter(reversed(mode.tracer.graph.nodes)), None)


def same_node(mode: ProxyTorchDispatchMode, one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors stand for the same node."""
    node = node_of(mode, one)
    return node is not None and node is node_of(mode, two)


def record_view(
    mode: ProxyTorchDispatchMode, op: Any, value: torch.Tensor, args: tuple[Any, ...], result: torch.Tensor
) -> bool:
    """Add the node ``op(value, *args)``, whose result is known already, to the graph. False: the tracer cannot."""
    source = mode.tracer.tensor_tracker.get(value)
    if source is None or source.constant is not None or op in _LOOKS_AT_STRIDES:
        return False
    with set_original_aten_op(op):
        name = mode.tracer.graph._target_to_str(op.overloadpacket.__name__)
        if any(map(_is_symbol, args)) or any(type(arg) is list and any(map(_is_symbol, arg)) for arg in args):
            args = pytree.tree_map_only(torch.SymInt, fetch_sym_proxy(mode.tracer), args)
        proxy = mode.tracer.create_proxy("call_function", op, (source.proxy, *args), {}, name=name)
        track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
    return True


def record_effect(mode: ProxyTorchDispatchMode, op: Any, handle: torch.Tensor, args: tuple[Any, ...]) -> None:
    """Add the node ``op(handle, *args)`` for its effect, which the handle shows already, without running the op."""
    tracked, symbols = mode.tracer.tensor_tracker, fetch_sym_proxy(mode.tracer)
    args = pytree.tree_map_only(torch.Tensor, lambda tensor: tracked[tensor].proxy, (handle, *args))
    args = pytree.tree_map_only(torch.SymInt, symbols, args)
    name = mode.tracer.graph._target_to_str(op.overloadpacket.__name__)
    mode.tracer.create_proxy("call_function", op, args, {}, name=name)


# What these mean depends on where in its storage the value lies.
_LOOKS_AT_STRIDES = frozenset({torch.ops.aten.as_strided.default})


def has_symbols(modes: Sequence[TorchDispatchMode]) -> bool:
    """Whether fake tensors made by these modes have symbolic sizes."""
    return any(isinstance(mode, FakeTensorMode) and mode.shape_env is not None for mode in modes)


def record_symbols(mode: ProxyTorchDispatchMode, arguments: Any) -> None:
    """Have the nodes for the symbols among some arguments now: the tracer adds them when they are first used."""
    for number in pytree.tree_leaves(arguments):
        if isinstance(number, torch.SymInt) and number in mode.tracer.symnode_tracker:
            fetch_sym_proxy(mode.tracer)(number)


_the_number: Any = torch.sym_int  # a function like any other to a graph


def _is_symbol(number: Any) -> bool:
    return isinstance(number, torch.SymInt)


def track_symbols(mode: ProxyTorchDispatchMode, handle: torch.Tensor) -> None:
    """Let the tracer know the sizes of a tensor made while it did not look: as arithmetic on symbols that it knows.

    Nodes for the arithmetic appear when a symbol is used. The tracer does the same for sums and products by itself,
    and gives up on powers, minima and the like, and on numbers: symbols that a guard has pinned.
    """
    if not is_symbolic(handle):
        return
    symbols = list(filter(_is_symbol, [*handle.size(), *handle.stride(), handle.storage_offset()]))
    free = [symbol for number in symbols for symbol in number.node.expr.free_symbols]
    if len(free) > 1:  # the tracer does not find powers and products of three by itself
        numel = on_handles(torch.Tensor.numel, (handle,), {})
        symbols += filter(_is_symbol, [numel, handle.untyped_storage().nbytes()])
    # Imported here: sympy takes longer to load than all the rest, and where there are symbols torch has loaded it.
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    tracer: Any = mode.tracer
    for symbol in symbols:
        expression = symbol.node.expr
        if symbol in tracer.symnode_tracker:
            continue
        if expression.is_number:
            with _enable_thunkify(tracer):
                _sym_register(tracer, _the_number, (int(expression),), symbol)
            continue
        known = {free: tracer.sympy_expr_tracker.get(free) for free in expression.free_symbols}
        if any(entry is None for entry in known.values()):
            continue
        with _enable_thunkify(tracer):
            values = {free: entry.value for free, entry in known.items()}
            same = sympy_interp(PythonReferenceAnalysis, values, expression)
        if isinstance(same, torch.SymInt) and same in tracer.symnode_tracker:
            tracer.symnode_tracker[symbol] = tracer.symnode_tracker[same]


def unwrap_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that dispatch modes see beneath the wrappers of ``grad``, ``vmap`` and ``jvp``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
