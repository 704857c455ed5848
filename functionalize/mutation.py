"""Run an op that writes without writing: its functional variant, then a commit of each written argument.

Invariant: a write is admitted exactly where eager admits it, and raises eager's own error elsewhere.
Limits: an op whose row names no functional variant is a custom op (``auto_functionalized``) or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from functionalize import tables
from functionalize._torch import auto_functionalized, can_auto_functionalize, on_handles
from functionalize.errors import UnsupportedMutationError
from functionalize.program import Program
from functionalize.tables import OpRow, Written
from functionalize.view_rules import Value

aten = torch.ops.aten
Kwargs = dict[str, Any]


def mutate(program: Program, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """What ``func(*args, **kwargs)`` returns; its writes are committed to the alias graph."""
    short = _WITHOUT_READING.get(func)
    if short is not None and short(program, func, args, kwargs):
        return args[0]
    written = [w for w in row.written if _writes(func, w, args, kwargs)]
    if not written:
        return _quietly(program, func, row, args, kwargs)
    if row.functional is None:
        return _without_variant(program, func, row, args, kwargs)
    variant = tables.overload(row.functional)
    handles = _variant_arguments(func, row, variant, args, kwargs)
    call_args, call_kwargs, _ = program.values(*handles)
    results = program.domain.call(variant, *call_args, **call_kwargs)
    if len(variant._schema.returns) == 1:
        results = (results,)
    Admission(program, func, args, kwargs).settle_all(written, results)
    returns = [results[i] if i >= 0 else argument(func, row.written[-i - 1], args, kwargs) for i in row.returns]
    return None if not returns else returns[0] if len(returns) == 1 else tuple(returns)


def argument(func: Any, written: Written, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """The argument of a call that a row says is written."""
    if written.position is not None and written.position < len(args):
        return args[written.position]
    return kwargs.get(written.name)


def _named(func: Any, name: str, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """An argument of a call by name, the schema's default where the call leaves it out."""
    for position, declared in enumerate(func._schema.arguments):
        if declared.name == name:
            if not declared.kwarg_only and position < len(args):
                return args[position]
            return kwargs.get(name, declared.default_value)
    raise KeyError(name)


def _writes(func: Any, written: Written, args: Sequence[Any], kwargs: Kwargs) -> bool:
    if argument(func, written, args, kwargs) is None:
        return False
    return written.when is None or bool(_named(func, written.when, args, kwargs))


def _quietly(program: Program, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """A call that writes nothing (evaluation-mode batch norm): the op that says so in its schema, if there is one."""
    quiet = tables.overload(row.quiet) if row.quiet else func
    call_args, call_kwargs, _ = program.values(args, kwargs)
    return program.domain.call(quiet, *call_args, **call_kwargs)


def _variant_arguments(
    func: Any, row: OpRow, variant: Any, args: Sequence[Any], kwargs: Kwargs
) -> tuple[list[Any], Kwargs]:
    """The functional variant's arguments, in handles."""
    outputs = {w.name for w in row.written} if row.kind is tables.Kind.OUT else set()
    call_kwargs: Kwargs = {name: arg for name, arg in kwargs.items() if name not in outputs}
    call_args = list(args)
    if row.functional_args is not None:
        by_name = {name: _named(func, name, args, kwargs) for name in row.functional_args}
        call_args, call_kwargs = [], {}
        for declared, (name, arg) in zip(variant._schema.arguments, by_name.items(), strict=False):
            if declared.kwarg_only or declared.name != name and declared.name in by_name:
                call_kwargs[declared.name] = arg
            else:
                call_args.append(arg)
    first = argument(func, row.written[0], args, kwargs)
    for option in row.options:
        call_kwargs[option] = getattr(first, option)
    call_kwargs.update(row.constants)
    _keep_dtype(variant, first, call_args, call_kwargs)
    return call_args, call_kwargs


def _keep_dtype(variant: Any, target: Any, args: list[Any], kwargs: Kwargs) -> None:
    """Reductions compute in the dtype of what they write, where the caller names none: `sum.out`, `cumsum_`."""
    for position, declared in enumerate(variant._schema.arguments):
        if declared.name != "dtype" or str(declared.type) != "Optional[int]" or not isinstance(target, torch.Tensor):
            continue
        if declared.kwarg_only or position >= len(args):
            if kwargs.get("dtype") is None:
                kwargs["dtype"] = target.dtype
        elif args[position] is None:
            args[position] = target.dtype


class Admission:
    """Settles the results of one op on the arguments that it writes, as eager would, or raises what eager raises."""

    def __init__(self, program: Program, func: Any, args: Sequence[Any], kwargs: Kwargs) -> None:
        self.program, self.func, self.args, self.kwargs = program, func, args, kwargs
        self._twins: tuple[Any, Any] | None = None

    def settle_all(self, written: Sequence[Written], results: Sequence[Any]) -> None:
        """Commit each result to its argument; all are admitted before the first is committed."""
        pairs = [pair for w in written for pair in self._pairs(w, results[w.result or 0])]
        values = [self._admitted(w, index, handle, value) for w, index, handle, value in pairs]
        for (_, _, handle, _), value in zip(pairs, values, strict=True):
            self.program.write(handle, value)

    def _pairs(self, written: Written, result: Any) -> Iterator[tuple[Written, int, torch.Tensor, Value]]:
        target = argument(self.func, written, self.args, self.kwargs)
        targets, values = (target, result) if written.is_list else ([target], [result])
        for index, (handle, value) in enumerate(zip(targets, values, strict=True)):
            if handle is not None:
                yield written, index, handle, value

    def _admitted(self, written: Written, index: int, handle: torch.Tensor, value: Value) -> Value:
        if value.size() != handle.size() or value.dtype != handle.dtype or overlaps_itself(handle):
            twin = argument(self.func, written, *self._rehearsed())
            twin = twin[index] if written.is_list else twin
            if twin.size() != handle.size():
                resize(self.program, handle, twin)
            if value.dtype != handle.dtype:
                value = self.program.domain.call(aten._to_copy.default, value, dtype=handle.dtype)
        if value.device != handle.device:
            value = self.program.domain.call(aten._to_copy.default, value, device=handle.device)
        return value

    def _rehearsed(self) -> tuple[Any, Any]:
        if self._twins is None:
            self._twins = self.program.domain.rehearse(self.func, self.args, self.kwargs)
        return self._twins


def overlaps_itself(handle: torch.Tensor) -> bool:
    """Whether several positions of a tensor surely share one element."""
    return any(
        type(stride) is int and stride == 0 and not (type(size) is int and size <= 1)
        for size, stride in zip(handle.size(), handle.stride(), strict=True)
    )


def resize(program: Program, handle: torch.Tensor, like: torch.Tensor) -> None:
    """Give an ``out=`` handle the geometry that eager gives it; all of its elements are about to be written."""
    program.graph.ensure(handle)
    on_handles(aten.resize_.default, (handle, list(like.size())), {})
    if handle.stride() != like.stride():
        on_handles(aten.as_strided_.default, (handle, list(like.size()), list(like.stride())), {})
    program.graph.moved(handle)


def _without_variant(program: Program, func: Any, row: OpRow, args: Sequence[Any], kwargs: Kwargs) -> Any:
    if not can_auto_functionalize(func):
        raise UnsupportedMutationError(
            f"{row.name} writes {', '.join(w.name for w in row.written)}",
            why=tables.UNPAIRED.get(row.name, "it has no functional variant, and its schema allows none to be made"),
            hint="compute the result out of place and copy_ it into the argument",
        )
    call_args, call_kwargs, _ = program.values(args, kwargs)
    named = {declared.name: arg for declared, arg in zip(func._schema.arguments, call_args, strict=False)}
    results = auto_functionalized(func, **named, **call_kwargs)
    own = len(func._schema.returns) or 1  # a None stands for no return at all
    for w, result in zip(row.written, results[own:], strict=True):
        target = argument(func, w, args, kwargs)
        for handle, value in zip(*((target, result) if w.is_list else ([target], [result])), strict=True):
            if handle is not None:
                program.write(handle, value)
    return results[0] if own == 1 else tuple(results[:own])


# Writes whose value does not depend on what was there, so that nothing need be read


def _copy(program: Program, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    target, source = args[0], args[1]
    if target.layout is not torch.strided or source.layout is not torch.strided or overlaps_itself(target):
        return False
    if target.is_quantized or source.is_quantized:
        return False
    call, value = program.domain.call, program.value(source)
    if source.size() != target.size():
        program.domain.rehearse(func, args, kwargs)
    elif program.graph.find(target) is not None and program.graph.find(source) is program.graph.find(target):
        return True
    options = {o: getattr(target, o) for o in ("dtype", "device") if getattr(target, o) != getattr(source, o)}
    converted = call(aten._to_copy.default, value, **options) if options else value
    if source.size() != target.size():
        converted = call(aten.expand.default, converted, list(target.size()))
    program.write(target, converted, borrowed=not options)
    return True


def _fill(program: Program, func: Any, args: Sequence[Any], kwargs: Kwargs) -> bool:
    target, number = args[0], args[1] if len(args) > 1 else 0
    if target.layout is not torch.strided or target.is_quantized or overlaps_itself(target):
        return False
    options = {"dtype": target.dtype, "layout": target.layout, "device": target.device, "pin_memory": False}
    program.write(target, program.domain.call(aten.full.default, list(target.size()), number, **options))
    return True


_WITHOUT_READING: dict[Any, Callable[[Program, Any, Sequence[Any], Kwargs], bool]] = {
    aten.copy_.default: _copy,
    aten.fill_.Scalar: _fill,
    aten.zero_.default: _fill,
}
