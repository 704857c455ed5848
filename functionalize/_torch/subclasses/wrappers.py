"""Wrappers: tensor subclasses that hold other tensors, by ``__tensor_flatten__`` and ``__tensor_unflatten__``.

In: a wrapper; torch's masked tensors are wrappers too. Out: a :class:`Wrapping`, which says how it is made of plain
tensors, also if it holds further wrappers, and these tensors, its parts. Guarantees: a wrapping holds no tensor, and
equal wrappings make wrappers that no program can distinguish. Limits: what the class keeps elsewhere than
``__tensor_flatten__`` says is not seen, except for plain values that somebody set as attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch.masked import MaskedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type  # no public name for the protocol

from functionalize._torch.subclasses.sharding import in_order, is_ordered
from functionalize._torch.tensors import PLAIN_TYPES, FakeTensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MASKED = ("_masked_data", "_masked_mask")  # what masked tensors hold: torch's class does not say it
JAGGED: Any = torch.nested._internal.nested_tensor  # the module that makes nested tensors
DESCRIBING_VIEWS = "_nt_view_dummy"  # its function that gives a tensor which it makes once, and keeps
_RAGGED = "*"  # in place of a ragged size, which is another symbol for each nested tensor


@cache
def is_wrapper_class(cls: type) -> bool:
    """Whether the tensors of a class hold other tensors, and can be made of others."""
    return cls is MaskedTensor or is_traceable_wrapper_subclass_type(cls)


@dataclass(frozen=True, eq=False)
class Wrapping:
    """How a wrapper is made of its parts."""

    cls: type
    inner: Mapping[str, Wrapping | None]  # by attribute, the tensors that it holds: None for a part
    others: Mapping[str, Any]  # by attribute, what else it is made of: a mesh of devices
    context: Any  # as `__tensor_flatten__` gives it
    size: Sequence[Any]
    stride: Sequence[Any]
    requires_grad: bool
    attributes: Mapping[str, Any]  # plain values that somebody set
    part_sizes: Sequence[Sequence[Any]] = ()  # with expressions of symbols: those that a frozen wrapping computes by

    @classmethod
    def of(cls, wrapper: Any) -> Wrapping:
        """The wrapping of a wrapper."""
        names, context = (_MASKED, None) if type(wrapper) is MaskedTensor else wrapper.__tensor_flatten__()
        held = {name: getattr(wrapper, name) for name in names}
        inner = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
        return cls(
            cls=type(wrapper),
            inner={name: cls.of(value) if is_wrapper_class(type(value)) else None for name, value in inner.items()},
            others={name: value for name, value in held.items() if name not in inner},
            context=context,
            size=wrapper.size(),
            stride=wrapper.stride(),
            requires_grad=wrapper.requires_grad,
            attributes={name: value for name, value in vars(wrapper).items() if _is_set(name, value)},
        )

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.cls.__name__

    @cached_property
    def paths(self) -> Sequence[tuple[str, ...]]:
        """For each part, the attributes that lead to it."""
        return [
            (name, *path)
            for name, wrapping in self.inner.items()
            for path in (((),) if wrapping is None else wrapping.paths)
        ]

    def parts_of(self, wrapper: Any) -> list[torch.Tensor]:
        """The parts of a wrapper of this wrapping, or of an equal one, in the order of ``paths``."""
        return [part_at(wrapper, path) for path in self.paths]

    def wrapped(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A wrapper of other parts; it requires no gradients."""
        numbers = dict[Any, Any]()
        for sizes, part in zip(self.part_sizes, parts, strict=bool(self.part_sizes)):
            numbers |= zip(sizes, part.size(), strict=True)
        made = self._wrapped(iter(parts), numbers)
        return made.requires_grad_(False) if made.requires_grad else made

    def _wrapped(self, parts: Iterator[torch.Tensor], numbers: Mapping[Any, Any]) -> torch.Tensor:
        """``numbers``: what expressions among the sizes of a frozen wrapping stand for."""
        inner = {
            name: next(parts) if wrapping is None else wrapping._wrapped(parts, numbers)
            for name, wrapping in self.inner.items()
        }
        size, stride = self.size, self.stride
        if numbers:
            size = torch.Size(_number(each, numbers) for each in size)
            stride = tuple(_number(each, numbers) for each in stride)
        cls: Any = self.cls
        unflatten = _masked if cls is MaskedTensor else cls.__tensor_unflatten__
        if is_ordered(cls, self.context):
            unflatten = partial(in_order, unflatten)
        made: Any = unflatten({**inner, **self.others}, self.context, size, stride)
        for name, value in self.attributes.items():
            if vars(made).get(name, self) != value:
                setattr(made, name, value)
        return made  # type: ignore[no-any-return]

    def difference(self, other: Wrapping) -> str | None:
        """What a program could see of the difference between two wrappers; None if it is nothing."""
        # A context may say whether gradients are required, which guards compare by itself.
        compared = self.requires_grad == other.requires_grad
        pairs = {
            "class": (self.cls, other.cls),
            "inner tensors": ([*self.inner], [*other.inner]),
            "metadata": (compared and self.context, compared and other.context),
            "other values": (self.others, other.others),
            "size": (_comparable(self.size, other.size), _comparable(other.size, self.size)),
            "strides": (_comparable(self.stride, other.stride), _comparable(other.stride, self.stride)),
            "attributes": (self.attributes, other.attributes),
        }
        for name, (mine, others) in pairs.items():
            if not (mine is others or bool(mine == others)):
                return name
        for name, wrapping in self.inner.items():
            within = other.inner[name]
            if (wrapping is None) is not (within is None):
                return f"class of `{name}`"
            seen = None if wrapping is None or within is None else wrapping.difference(within)
            if seen is not None:
                return f"{seen} of `{name}`"
        return None

    @property
    def is_static(self) -> bool:
        """Whether its sizes are integers, apart from ragged ones."""
        return not self._symbolic

    @cached_property
    def _symbolic(self) -> Sequence[Any]:
        """Its sizes that are symbols or expressions, also of the wrappers that it holds."""
        own = [size for size in (*self.size, *self.stride) if not _is_fixed(size)]
        return [*own, *(size for each in self.inner.values() if each is not None for size in each._symbolic)]

    def frozen(self, parts: Sequence[torch.Tensor]) -> Wrapping | None:
        """The same without symbols, whose sizes are computed from those of parts; None if these do not give them.

        ``parts``: those that it was found with.
        """
        if self.is_static:
            return self
        sizes = [list(map(_expression, part.size())) for part in parts]
        given_by_parts = {size for layout in sizes for size in layout}
        expressions = map(_expression, self._symbolic)
        if not all(size in given_by_parts or size.free_symbols <= given_by_parts for size in expressions):
            return None
        return replace(self.without_symbols(), part_sizes=sizes)

    def without_symbols(self) -> Wrapping:
        """The same with expressions for symbols: nothing can be wrapped by it."""
        inner = {name: each if each is None else each.without_symbols() for name, each in self.inner.items()}
        size, stride = (list(map(_expression, sizes)) for sizes in (self.size, self.stride))
        return replace(self, inner=inner, size=size, stride=stride)


def _masked(inner: Mapping[str, Any], context: None, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A masked tensor over these very tensors: its constructor would copy them."""
    data = inner["_masked_data"]
    made: Any = torch.Tensor._make_wrapper_subclass(
        MaskedTensor,
        size,
        dtype=data.dtype,
        device=data.device,
        layout=data.layout,
        dispatch_sizes_strides_policy="strides",
        dispatch_layout=True,
    )
    vars(made).update(inner)
    return made  # type: ignore[no-any-return]


def part_at(wrapper: Any, path: Sequence[str]) -> Any:
    """What a wrapper holds at the end of some attributes; None if it is not there."""
    for name in path:
        wrapper = getattr(wrapper, name, None)
    return wrapper


def plain_part(wrapper: Any, path: Sequence[str]) -> Any:
    """The same, detached: autograd follows the wrapper, also where it holds a tensor that requires gradients."""
    part = part_at(wrapper, path)
    return part.detach() if isinstance(part, torch.Tensor) and part.requires_grad else part


def is_ragged(size: Any) -> bool:
    """Whether a size is the ragged one of a nested tensor."""
    return isinstance(size, torch.SymInt) and bool(size.node.is_nested_int())


def _expression(size: Any) -> Any:
    """A size as an integer, or as an expression of symbols; a ragged size as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) and not is_ragged(size) else size


def _number(size: Any, numbers: Mapping[Any, Any]) -> Any:
    if size in numbers:
        return numbers[size]
    return int(size.xreplace(numbers)) if hasattr(size, "xreplace") else size


def _comparable(sizes: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Sizes to compare with others: an integer may be any expression's value."""
    if len(sizes) != len(others):
        return [len(sizes)]
    return [
        (_RAGGED if is_ragged(size) else _expression(size)) if _is_fixed(size) is _is_fixed(other) else None
        for size, other in zip(sizes, others, strict=True)
    ]


def _is_fixed(size: Any) -> bool:
    return type(size) is int or is_ragged(size)


def _is_set(name: str, value: Any) -> bool:
    """Whether somebody has set an attribute: torch itself keeps caches and marks under other names."""
    return not name.startswith("_") and name != "fake_device" and isinstance(value, _PLAIN)


def tensors_given_to(tensor: Any) -> list[str]:
    """The attributes of a tensor that are tensors and that somebody has set: not those of a wrapper's class."""
    names = [name for name, value in vars(tensor).items() if isinstance(value, torch.Tensor)]
    if names and is_traceable_wrapper_subclass_type(type(tensor)):
        held = tensor.__tensor_flatten__()[0]
        return [name for name in names if not (name in held or name.startswith("_"))]
    return names if type(tensor) in PLAIN_TYPES and type(tensor) is not FakeTensor else []


def with_tangent_metadata(wrapper: Any) -> Any:
    """The wrapper with the metadata that its class wants gradients of it to have: of a partial sum, the whole."""
    coerce = getattr(wrapper, "__coerce_tangent_metadata__", None)
    return wrapper if coerce is None else coerce()


def as_tangent(tangent: Any, expected: Wrapping) -> Any:
    """A tangent with the class and the metadata that a backward was traced for; None if its class cannot give them."""
    same_class = type(tangent) is expected.cls
    if same_class and Wrapping.of(tangent).difference(expected) in (None, "strides"):
        return tangent
    coerce = getattr(tangent, "__coerce_same_metadata_as_tangent__", None)
    if coerce is None:
        return None
    coerced = coerce(expected.context, None if same_class else expected.cls)
    return coerced if type(coerced) is expected.cls else None
