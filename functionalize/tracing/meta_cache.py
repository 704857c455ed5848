"""A cache of the metadata of ops' results, by the op and the metadata of its arguments.

FakeTensorMode computes the shapes, strides and dtypes of an op's results; the cache has them if it has seen the op on
arguments of the same metadata. All captures of a process share the cache.

In: an op with its arguments. Out: a `CacheEntry`, from which its results are made, or ``MISS``. Guarantees:
these results are what FakeTensorMode would have made. Limits: sizes known as integers, strided tensors, ops of torch's
own; results that are data-dependent, or are not tensors, are not cached. Of numbers that are symbols, which only
elementwise ops may get, the results have the metadata that any number of their class gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functionalize._torch import FakeTensor, FakeTensorMode, OpOverload, is_symbolic, pytree, storage_id
from functionalize._torch.fakes import FakeFactory, below_dispatch, data_dependent, fake_device
from functionalize._torch.symbols.traced_symbols import tracked_symbol_node
from functionalize._torch.symbols.tracing import name_for, tracked_node
from functionalize.aliasing.geometry import Layout, plain_layout
from functionalize.aliasing.tensor_queries import tensor_leaves
from functionalize.aliasing.view_rules import ViewRule
from functionalize.ops import tables, traits
from functionalize.ops.calls import has_mask
from functionalize.ops.tables import ViewKind

_STRIDED = torch.strided
_ENTRIES = 100_000  # the cache is emptied at this size: a bound on memory, far above what one model needs
_SYMBOLS = frozenset({torch.SymInt, torch.SymFloat})
_AS_THEY_ARE = (bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_INDEX = torch.ops.aten.index.Tensor
_DEPENDS_ON_DATA = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True)
class ResultMeta:
    """One result: its layout, in a storage of its own or in that of the argument at index ``aliased_arg``."""

    layout: Layout
    device: torch.device
    aliased_arg: int | None
    distance: int | None  # of its first element from that of the argument; None if it may begin before the storage

    def make(self, factory: FakeFactory, args: Sequence[Any]) -> FakeTensor:
        """The result, as a tensor of the factory's mode."""
        layout = self.layout
        if self.aliased_arg is None:
            return factory.fresh(layout.size, layout.stride, layout.dtype, self.device)
        source: FakeTensor = args[self.aliased_arg]
        if self.distance is None or torch.is_inference_mode_enabled() or source.is_inference():
            return factory.view(source, layout.size, layout.stride, layout.offset)
        room = source.untyped_storage().nbytes()
        if type(room) is not int or layout.span[1] > room:
            return factory.view(source, layout.size, layout.stride, layout.offset)
        return factory.part(source, layout.size, layout.stride, self.distance)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The results of one op, for arguments of one metadata."""

    results: tuple[ResultMeta | None, ...]  # None where the op returns None
    container: type | None  # of the results, if they are several
    layouts: tuple[Layout, ...]  # of the results
    random: bool  # whether the op may draw random numbers
    name: str  # of a node of the op
    is_view: bool  # whether results share the memory of an argument
    rules: list[ViewRule] = field(default_factory=list)  # of a view op: its rule, once a program has derived the view

    def make(self, factory: FakeFactory, args: Sequence[Any]) -> Any:
        """The results, as tensors of the factory's mode; ``MISS`` for views of a storage of data-dependent size."""
        try:
            if self.container is None:
                meta = self.results[0]
                return None if meta is None else meta.make(factory, args)
            return self.container([None if meta is None else meta.make(factory, args) for meta in self.results])
        except data_dependent():
            return MISS


@dataclass(slots=True, eq=False)
class CachedCall:
    """A call whose results are cached, or can be."""

    key: Any
    entry: CacheEntry  # ``MISS`` if the call was not seen before
    args: list[Any]  # nodes in place of tensors, if the caller asked for nodes
    kwargs: dict[str, Any]

    @property
    def layout(self) -> Layout:
        """The layout of the first argument, if that is a tensor."""
        return self.key[2]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Op:
    """An op, as part of keys, and whether its results can be cached, also of numbers that are symbols."""

    func: Any
    usable: bool
    takes_symbols: bool


Read = Callable[[FakeTensor, Layout], Any]  # the current value of a handle with a layout
MISS: Any = object()  # the entry of a call that was not seen before
_cache: dict[Any, CacheEntry | None] = {}
_ops: dict[int, _Op] = {}  # by identity: the hash of an op is a method in Python


def clear() -> None:
    """Empty the cache."""
    _cache.clear()


def find(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    factory: FakeFactory,
    tracer: Any = None,
    read: Read | None = None,
) -> CachedCall | None:
    """A call in the cache; None if its results are never cached.

    ``tracer``: has the nodes of its tensors; a call on a tensor without a node is not cached. ``read``: gives the
    values of handles, on which the op runs instead; a call on values with other strides than their handles' is not
    cached.
    """
    op = _ops.get(id(func))
    if op is None:
        usable = _is_usable(func)
        op = _ops[id(func)] = _Op(func, usable, usable and _is_elementwise(func))
    if not op.usable or (func is _INDEX and has_mask(args[1])):
        return None  # with a mask, of a data-dependent size: running the op for its metadata would add a symbol
    parts: list[Any] = [op, torch.get_default_dtype()]
    described = _describe(args, parts, factory.mode, tracer, read)
    if described is None:
        if not _some_are_constants(args):
            return None
        del parts[2:]
        described = _describe(args, parts, factory.mode, tracer, read, constants=True)
        if described is None:
            return None
    if kwargs:
        parts += kwargs
        values = _describe(kwargs.values(), parts, factory.mode, tracer, read)
        if values is None:
            return None
        kwargs = dict(zip(kwargs, values, strict=True))
    key = tuple(parts)
    entry = _cache.get(key, MISS)
    return None if entry is None else CachedCall(key, entry, described, kwargs)


def insert(key: Any, func: Any, args: Sequence[Any], out: Any) -> CacheEntry | None:
    """Add a call with its results. Returns its entry; None if the results cannot be made from metadata."""
    if len(_cache) >= _ENTRIES:
        clear()
    entry = _cache[key] = _entry(func, args, out)
    return entry


def _is_usable(func: Any) -> bool:
    """Whether an op's results depend on the metadata of its arguments alone."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    row = tables.row(func)
    plain = not func._schema.is_mutable and not row.composite and row.view is not ViewKind.INPLACE_VIEW
    data = _DEPENDS_ON_DATA.intersection(func.tags) and func is not _INDEX
    return plain and not data and func not in traits.MADE_FOR_INFERENCE and "lift" not in func.name()


def _is_elementwise(func: Any) -> bool:
    """Whether numbers among the arguments of an op are numbers for each element."""
    return torch.Tag.pointwise in func.tags or func.name().startswith("aten::_foreach_")


def _some_are_constants(args: Sequence[Any]) -> bool:
    """Whether torch knows the data of some tensors among arguments, but not of all: then not of the results."""
    answers = {leaf.constant is not None for leaf in tensor_leaves(args, {}) if type(leaf) is FakeTensor}
    return len(answers) == 2


def with_example_numbers(arguments: Any) -> Any:
    """Arguments with plain numbers for those that are symbols."""
    examples = {torch.SymInt: 1, torch.SymFloat: 0.5}
    return pytree.tree_map_only(tuple(examples), lambda number: examples[type(number)], arguments)


def _describe(
    args: Collection[Any],
    parts: list[Any],
    mode: FakeTensorMode,
    tracer: Any,
    read: Read | None,
    constants: bool = False,
) -> list[Any] | None:
    """The arguments, with nodes for tensors and symbols if asked for. None: not cached.

    ``parts`` gets their part of the key, which begins with the op. ``constants``: take tensors of known data, too.
    """
    described = []
    for arg in args:
        type_ = type(arg)
        if type_ is FakeTensor:
            if (arg := _describe_tensor(arg, parts, mode, tracer, read, constants)) is None:
                return None
        elif type_ is int or type_ is float or type_ is complex:
            parts += (type_, arg)  # 1, 1.0 and True are equal, and make results of different dtypes
        elif type_ is list or type_ is tuple:
            parts += (type_, len(arg))
            if (arg := _describe(arg, parts, mode, tracer, read, constants)) is None:
                return None
        elif type_ in _AS_THEY_ARE:
            parts += (type_, arg)
        elif type_ in _SYMBOLS and parts[0].takes_symbols:
            parts.append(type_)
            if tracer is not None and (arg := tracked_symbol_node(tracer, arg)) is None:
                return None
        else:
            return None
        described.append(arg)
    return described


def _describe_tensor(
    tensor: FakeTensor, parts: list[Any], mode: FakeTensorMode, tracer: Any, read: Read | None, constants: bool
) -> Any:
    layout = _plain_layout(tensor, mode, constants)
    if layout is None:
        return None
    if read is not None and (value := read(tensor, layout)) is not tensor:
        expected, tensor = layout.stride, value
        layout = _plain_layout(tensor, mode, constants) if type(tensor) is FakeTensor else None
        if layout is None or layout.stride != expected:
            return None
    parts += (layout, fake_device(tensor))
    if constants and tracer is not None:
        return tracked_node(tracer, tensor)
    return tensor if tracer is None else tracer.tensor_tracker.node(tensor)


def _plain_layout(tensor: FakeTensor, mode: FakeTensorMode, constants: bool) -> Layout | None:
    """The layout of a strided tensor of a mode with plain sizes, and without lazy bits; else None.

    ``constants``: also of one whose data torch knows.
    """
    if is_symbolic(tensor) or tensor.layout is not _STRIDED or tensor.fake_mode is not mode:
        return None
    dtype = tensor.dtype
    if (tensor.constant is not None and not constants) or tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
        return None
    return plain_layout(tensor.shape, tensor.stride(), tensor.storage_offset(), dtype, False, False)


def _entry(func: Any, args: Sequence[Any], out: Any) -> CacheEntry | None:
    container = type(out) if type(out) in (list, tuple) else None
    results = (out,) if container is None else tuple(out)
    if not all(leaf is None or type(leaf) is FakeTensor for leaf in results):
        return None
    storages = {storage_id(arg.untyped_storage()): index for index, arg in enumerate(args) if type(arg) is FakeTensor}
    metas = [None if leaf is None else _meta_of(leaf, storages, args) for leaf in results]
    if any(meta is None and leaf is not None for meta, leaf in zip(metas, results, strict=True)):
        return None
    own = [storage_id(leaf.untyped_storage()) for leaf in results if leaf is not None]
    row = tables.row(func)
    views = row.view is not ViewKind.NONE
    if any(key in storages for key in own) != views or (not views and len(set(own)) < len(own)):
        return None  # a result that is an argument, or shares its memory with another
    layouts = tuple(meta.layout for meta in metas if meta is not None)
    return CacheEntry(tuple(metas), container, layouts, row.random, name_for(func), views)


def _meta_of(leaf: FakeTensor, storages: dict[int, int], args: Sequence[Any]) -> ResultMeta | None:
    if is_symbolic(leaf) or leaf.layout is not torch.strided or leaf.is_quantized or leaf.constant is not None:
        return None
    if leaf.is_conj() or leaf.is_neg() or leaf.is_nested:
        return None
    source = storages.get(storage_id(leaf.untyped_storage()))
    layout = Layout.of(leaf)
    if source is None:
        with below_dispatch():
            like = torch.empty_strided(layout.size, layout.stride, dtype=leaf.dtype, device="meta")
        if layout.offset or like.untyped_storage().nbytes() != leaf.untyped_storage().nbytes():
            return None
    elif leaf.dtype != args[source].dtype or args[source].is_conj() or args[source].is_neg():
        return None
    distance = None if source is None or layout.span[0] < 0 else layout.offset - args[source].storage_offset()
    return ResultMeta(layout, leaf.fake_device, source, distance)
