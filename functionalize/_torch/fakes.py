"""Fake tensors, made without a dispatch.

Invariant: a tensor made here is what FakeTensorMode would have made. Limits: strided layout, sizes known as integers.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch._guards import detect_fake_mode  # fake tensors are made by one mode, which may be the caller's
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._library import simple_registry  # where fake implementations of operators are
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_fake_tensor_cache,
)
from torch.utils import _pytree as pytree

from functionalize._torch.dispatch import HigherOrderOperator, below_dispatch, on_handles
from functionalize._torch.elementwise import elementwise_strides
from functionalize._torch.symbols.sizes import decide_broadcasts, hint_of, unbacked
from functionalize._torch.tensors import PLAIN_TYPES, is_symbolic, is_tiny_tensor, set_versions
from functionalize.errors import text_of
from functionalize.ops import traits
from functionalize.refusals.calls import USED_BY_OTHER_THREAD

_RULES_OF_MODE: Any = registered_hop_fake_fns  # rules for fake modes, by higher-order operator
_META = torch.device("meta")
_SIZE = torch.ops.aten.size.default  # by which C++ reads sizes as numbers
_ITEM = torch.ops.aten._local_scalar_dense.default  # no symbol is a complex number
_ALIGNED = torch.ops.aten._nested_tensor_from_mask_left_aligned.default  # torch runs its kernel on zeros
_REAL = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


_NO_FAKE_IMPL = re.compile(r"There was no fake impl registered for <CustomOpDef\((?P<op>[^)]*)\)>")


def operator_without_fake(error: BaseException | None) -> str | None:
    """The operator without an implementation for fake tensors that an error of torch's names; None for other errors."""
    if isinstance(error, UnsupportedOperatorException):
        return str(error.func)
    match = _NO_FAKE_IMPL.search(text_of(error)) if isinstance(error, RuntimeError) else None
    return None if match is None else match["op"]


def has_fake_impl(op: Any) -> bool:
    """Whether the user has registered an implementation of an operator for fake tensors."""
    return simple_registry.singleton.find(op.name()).fake_impl.kernel is not None


def data_dependent() -> tuple[type[Exception], ...]:
    """The errors that fake tensors raise because the program branches on tensor values."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # here: loads sympy

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode


def fake_mode_of(leaves: Sequence[Any]) -> FakeTensorMode | None:
    """The mode that made the fake tensors among some values; None without fake tensors."""
    real = _REAL.issuperset(map(type, leaves))  # otherwise torch searches each leaf
    mode: FakeTensorMode | None = detect_fake_mode(None if real else list(leaves))
    return mode


class _InKernel(threading.local):
    """Whether a thread runs a meta kernel."""

    value = False


_LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def _is_copied(func: Any, args: Sequence[Any]) -> bool:
    """Whether torch's decomposition of an op would copy an expanded argument, to compute in float32.

    It takes the strides of the result from that copy, kernels take them from the other arguments. (Kernels on the CPU
    copy arguments of another dtype than the result's, too.)
    """
    tensors = [arg for arg in args if isinstance(arg, FakeTensor)]
    low = bool(tensors) and tensors[0].dtype in _LOW_PRECISION and len({tensor.dtype for tensor in tensors}) == 1
    if not low or torch.Tag.pointwise not in func.tags or func._schema.is_mutable:
        return False
    strides = [stride for tensor in tensors if tensor.layout is torch.strided for stride in tensor.stride()]
    return any(type(stride) is int and stride == 0 for stride in strides)


def _in_float32(arg: Any) -> Any:
    """A tensor of float32 with the strides of one of low precision; any other argument itself."""
    if not isinstance(arg, FakeTensor) or arg.dtype not in _LOW_PRECISION:
        return arg
    return torch.empty_strided(arg.size(), arg.stride(), dtype=torch.float32, device=arg.device)


_NUMBERS = frozenset({torch.SymFloat, torch.SymBool})  # torch's own mode handles SymInt


def _has_symbols(args: Iterable[Any]) -> bool:
    return any(type(arg) in _NUMBERS or (type(arg) is list and _has_symbols(arg)) for arg in args)


@contextlib.contextmanager
def without_constants(holders: Iterable[Any]) -> Iterator[None]:
    """Keep torch from running an op now because it knows the data of its tensors.

    ``holders``: fake tensors, and the tracer's entries of tensors; both keep the data in an attribute of one name.
    """
    constants = [(holder, holder.constant) for holder in holders if holder.constant is not None]
    for holder, _ in constants:
        holder.constant = None
    try:
        yield
    finally:
        for holder, constant in constants:
            holder.constant = constant


def has_foreign_fakes() -> bool:
    """Whether a mode of torch's own, as Dynamo's, makes the fake tensors now: it has only torch's meta kernels."""
    mode = detect_fake_mode()
    return mode is not None and not (isinstance(mode, MetasFakeMode) and mode.metas)


class MetasFakeMode(FakeTensorMode):
    """Makes fake tensors, by torch's meta kernels and those in ``metas``."""

    supports_higher_order_operators = True
    metas: Mapping[Any, Callable[..., Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A higher-order operator has a rule for exactly FakeTensorMode, or one that calls the mode again.
        if isinstance(func, HigherOrderOperator) and func not in _RULES_OF_MODE:
            return func.python_key_table[FakeTensorMode](self, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.by_own_meta(func, args, kwargs)
        return self.by_torchs_meta(func, types, args, kwargs or {}) if out is NotImplemented else out

    def by_torchs_meta(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """An op's results by torch's meta kernel, without guards for a choice between kernels with equal results."""
        chooses = func in traits.CHOOSES_KERNEL
        if chooses and any(isinstance(arg, FakeTensor) and is_symbolic(arg) for arg in args):
            from functionalize._torch.kernel_choices import indifferent  # here: loads sympy

            out = indifferent(self.shape_env, lambda: self._on_snapshots(func, types, args, kwargs))
            if out is not NotImplemented:
                return pytree.tree_map_only(FakeTensor, self._fresh_like, out)
        return FakeTensorMode.dispatch(self, func, types, args, kwargs)

    def _on_snapshots(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The same, on new tensors: torch caches in a tensor what it learns about the sizes."""
        with disable_fake_tensor_cache(self):
            args, kwargs = pytree.tree_map_only(FakeTensor, self._fresh_like, (args, kwargs))
            return FakeTensorMode.dispatch(self, func, types, args, kwargs)

    def _fresh_like(self, tensor: FakeTensor) -> torch.Tensor:
        with self:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_() if tensor.requires_grad else made

    def by_own_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op's results by ``metas``; NotImplemented if torch's own meta kernel is to run."""
        meta = self.metas.get(func)
        if meta is None or not PLAIN_TYPES.issuperset(map(type, filter(torch.is_tensor, args))):
            return NotImplemented
        with self:
            return meta(*args, **(kwargs or {}))


class CaptureFakeMode(MetasFakeMode):
    """Makes the fake tensors of one capture.

    Another thread that uses them during the capture gets an error. They are in a program's objects then: that thread
    would get fake results, and confuse the state of the mode.
    """

    thread: int | None = None  # the thread that captures
    _ended = False
    _asked_sizes: list[Any] | None = None

    def __init__(self, **options: Any) -> None:
        self._in_kernel = _InKernel()
        super().__init__(**options)

    @property
    def in_kernel_invocation(self) -> bool:
        """Torch reads this first from a fake tensor's mode, also where it must not raise; each thread has its own."""
        return self._in_kernel.value

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._in_kernel.value = value

    @contextlib.contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """While its tensors are in a program's objects."""
        self.thread, self._ended = threading.get_ident(), False
        try:
            yield
        finally:
            self.thread, self._ended = None, True

    def __enter__(self) -> Any:
        self._refuse_other_threads()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._refuse_other_threads()
        if isinstance(func, HigherOrderOperator) and func not in _RULES_OF_MODE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._ended and any(type(leaf) in _REAL for leaf in pytree.tree_leaves((args, kwargs))):
            raise USED_BY_OTHER_THREAD.error()  # a fake tensor that was read just before the capture ended
        if _has_symbols(args) or (kwargs and _has_symbols(kwargs.values())):
            with self._not_constant(func, args, kwargs):
                return super().__torch_dispatch__(func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def _not_constant(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Keep an op from computing with the data of constants: torch takes NaN for an unknown number."""
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        constants = [leaf.constant for leaf in leaves if leaf.constant is not None]
        try:
            with without_constants(leaves):
                yield
        finally:
            for constant in constants if func._schema.is_mutable else ():
                self.fake_tensor_converter.invalidate_constant_aliases(constant)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        decider = getattr(self.shape_env, "decider", None)
        if decider is not None and func in traits.ANSWERS_BY_DATA and (func is not _ITEM or args[0].dtype.is_complex):
            answer = decider.result(func, args, kwargs or {})
            if answer is not None:
                return answer
        if func is _ALIGNED:
            raise DataDependentOutputException(func)
        if decider is not None and (func in traits.BROADCASTS or torch.Tag.pointwise in getattr(func, "tags", ())):
            shapes = [arg.size() for arg in args if isinstance(arg, FakeTensor)]
            decide_broadcasts([*shapes, args[1]] if func is torch.ops.aten.expand.default else shapes)
        if func is _SIZE and self._asked_sizes is not None and not unbacked(args[0].size()):
            self._asked_sizes += args[0].size()
            return [size if type(size) is int else hint_of(size) for size in args[0].size()]
        out: Any = self.by_own_meta(func, args, kwargs)
        if out is not NotImplemented:
            return out
        try:
            out = self.by_torchs_meta(func, types, args, kwargs or {})
            if _is_copied(func, args):
                with self:
                    like: Any = FakeTensorMode.dispatch(self, func, types, [*map(_in_float32, args)], kwargs or {})
                    return torch.empty_strided(out.size(), like.stride(), dtype=out.dtype, device=out.device)
            strides = elementwise_strides(func, args, kwargs or {}, out)
            if strides is not None and strides != out.stride():
                with self:
                    return torch.empty_strided(out.size(), strides, dtype=out.dtype, device=out.device)
        except AssertionError as error:  # of a kernel in Python: checks in C++ raise a RuntimeError
            raise RuntimeError(str(error)) from error
        return out

    @contextlib.contextmanager
    def sizes_count_at_the_end(self) -> Iterator[None]:
        """While autograd runs: sizes that C++ reads as numbers become guards at the end, unless there is an error."""
        before, asked = self._asked_sizes, list[Any]()
        environment: Any = self.shape_env
        self._asked_sizes = asked
        try:
            with environment.later(asked) if hasattr(environment, "later") else contextlib.nullcontext():
                yield
        finally:
            self._asked_sizes = before
        for size in asked:
            int(size)

    def _refuse_other_threads(self) -> None:
        other = self.thread not in (None, threading.get_ident())
        if other and torch._C._current_graph_task_id() == -1:  # autograd may work in threads of its own
            raise USED_BY_OTHER_THREAD.error()


Mode = TypeVar("Mode", bound=CaptureFakeMode)


def new_fake_mode(
    *,
    symbolic: bool,
    metas: Mapping[Any, Callable[..., Any]] | None = None,
    mode_type: type[Mode] = CaptureFakeMode,  # type: ignore[assignment]
) -> Mode:
    """A mode as ``make_fx`` sets it up. ``metas``: meta kernels by op, in place of torch's."""
    from functionalize._torch.symbols.shape_env import DecidingShapeEnv  # here: loads sympy

    mode = mode_type(
        allow_fallback_kernels=not symbolic,
        allow_non_fake_inputs=True,
        shape_env=DecidingShapeEnv(duck_shape=not symbolic),
        static_shapes=not symbolic,
    )
    mode.metas = metas or {}
    mode._allow_unsafe_data_ptr_access = False  # asking fake tensors for their memory raises
    return mode


def substitutes(tensors: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from tensors to fake tensors, of the mode of ``tensors``: aliased as the tensors, and without data."""
    mode = fake_mode_of(tensors) or new_fake_mode(symbolic=False)

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the converter asks non-leaves for gradients
            fake = mode.from_tensor(tensor, static_shapes=True)
        if tensor.layout is torch.strided and not tensor.is_nested:
            storage, size = fake.untyped_storage(), tensor.untyped_storage().nbytes()
            if storage.nbytes() < size:  # as for a tensor that was not a view: made for the tensor alone
                storage.resize_(size)
        if not tensor.is_inference():
            set_versions([fake], [tensor._version])
        return fake

    return made


def mark_as(fake: Any, tensor: torch.Tensor) -> None:
    """Give a fake tensor the properties, besides its layout, of the tensor that it stands for."""
    if type(tensor) is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    elif getattr(tensor, "_is_buffer", False):  # buffers have no class of their own
        fake._is_buffer, fake.persistent = True, tensor.persistent  # type: ignore[attr-defined]
    if tensor.requires_grad:
        fake.requires_grad_(True)


# A fake tensor's device, without the property in Python around it, which every op would call several times.
fake_device: Callable[[FakeTensor], torch.device] = attrgetter("_fake_device")
_make_subclass: Any = torch.Tensor._make_subclass
_reinterpret: Any = attrgetter("_reinterpret_tensor")(torch._C._dynamo.guards)  # a view, unknown to autograd
_forbid_data: Any = torch._C._set_throw_on_mutable_data_ptr  # of a storage, for all tensors that share it


class FakeFactory:
    """Makes the fake tensors of one mode. To be used inside of ``below_dispatch``, which costs as much as the rest."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._forbids = not mode._allow_unsafe_data_ptr_access
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def fresh(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> FakeTensor:
        """A fake tensor with a storage of its own."""
        element = torch.empty_strided(size, stride, dtype=dtype, device=_META)
        if self._forbids:
            _forbid_data(element)
        return self.around(element, device)

    def view(self, source: FakeTensor, size: Sequence[int], stride: Sequence[int], offset: int) -> FakeTensor:
        """A fake tensor with another layout in a fake tensor's storage."""
        return self.around(source.as_strided(size, stride, offset), fake_device(source))

    def part(self, source: FakeTensor, size: Sequence[int], stride: Sequence[int], distance: int) -> FakeTensor:
        """The same, at a fifth of the cost, for a layout known to fit in the storage; not for inference tensors.

        ``distance``: from the first element of the source, in elements.
        """
        return self.around(_reinterpret(source, size, stride, distance), fake_device(source))

    def at(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor with a tensor's layout, in a storage of device ``meta``."""
        where = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        element = torch.empty(0, dtype=tensor.dtype, device=_META).set_(storage, *where)
        if self._forbids:
            _forbid_data(element)
        return self.around(element, tensor.device)

    def snapshot(self, tensor: FakeTensor) -> FakeTensor:
        """A fake tensor that later changes of the metadata of ``tensor`` do not reach."""
        return self.around(tensor, fake_device(tensor))

    def like_real(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor of the size and the strides of a tensor, with a storage of its own."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return self.fresh(tensor.size(), tensor.stride(), tensor.dtype, device)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like any other tensor."""
        if is_tiny_tensor(tensor):
            with below_dispatch():
                return self.like_real(tensor)
        if not isinstance(tensor, FakeTensor):
            fake: torch.Tensor = on_handles(self.mode.from_tensor, (tensor,), {})  # the fake tensor of a view is a view
            return fake
        with below_dispatch():
            return self.snapshot(tensor)

    def around(self, element: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor over the memory of a tensor of device ``meta`` whose data are forbidden, or of a fake one."""
        made: Any = _make_subclass(FakeTensor, element, False, dispatch_device=True, device_for_backend_keys=device)
        if device not in self._attributes:
            first: Any = FakeTensor(self.mode, torch.empty(0, device=_META), device)
            self._attributes[device] = first.__dict__
        made.__dict__ = self._attributes[device].copy()
        return made  # type: ignore[no-any-return]
