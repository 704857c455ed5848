"""Decomposes functions that take only plain numbers into operators that take symbols, for data-dependent numbers.

Invariant: a number that only flows into tensors stays a symbol; if a float is rounded, only the integer is a decision.
Limits: lists of numbers, however nested; torch handles tensors among them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from functionalize._torch import (
    FUSED_STEPS,
    SYMBOLS,
    FakeTensor,
    decide_batches,
    decide_broadcasts,
    indices_stay_tensors,
    is_symbolic,
    unbacked,
)

_NUMBERS = (int, float, *SYMBOLS)


class Conversions:
    """Conversions of data-dependent numbers, for code that takes only plain numbers: to symbols, or by decisions.

    Where they are decisions, bools are as well: results of comparisons, and elements of tensors.
    """

    count = 0  # of the conversions to symbols
    decide = False
    decide_bools = False

    @staticmethod
    @contextlib.contextmanager
    def deciding(decide: bool, bools: bool = False) -> Iterator[None]:
        """Set whether all conversions are decisions; ``bools``: whether bools are, in any case."""
        before = Conversions.decide, Conversions.decide_bools
        Conversions.decide, Conversions.decide_bools = decide, decide or bools
        try:
            yield
        finally:
            Conversions.decide, Conversions.decide_bools = before

    @staticmethod
    def of_bool(answer: Any) -> Any:
        """A data-dependent bool as it is, or as a decision."""
        return bool(answer) if Conversions.decide_bools and isinstance(answer, torch.SymBool) else answer


def _integer(tensor: torch.Tensor) -> int:
    """``int(tensor)``: of a float only the integer part is a decision."""
    if not tensor.is_floating_point():
        return torch.Tensor.__int__(tensor)
    number: Any = tensor.item()
    return int(math.trunc(number) if isinstance(number, torch.SymFloat) else number)


def _item(tensor: torch.Tensor) -> Any:
    """``tensor.item()``: of a bool it may be a decision."""
    return Conversions.of_bool(torch.Tensor.item(tensor))


def _boolean(input: torch.Tensor) -> bool:
    """``bool(tensor)``: a decision by the bool, not the number. In C++ the number of elements cannot be a symbol."""
    count: Any = input.numel()
    if count == 1 and isinstance(input, FakeTensor) and input.constant is None and input.dtype != torch.bool:
        input = input != 0
    if not isinstance(count, torch.SymInt):
        part = isinstance(input, FakeTensor) and is_symbolic(input)  # may begin at a symbol, which C++ does not take
        return bool(input.item()) if part else torch.is_nonzero(input)
    if count == 1:
        return bool(input.reshape(()).item())
    values = "no values" if count == 0 else "more than one value"
    raise RuntimeError(f"Boolean value of Tensor with {values} is ambiguous")


def formatted(tensor: torch.Tensor, text: str) -> str:
    """``format(tensor, text)``: formats its number, as torch does for tensors that are not fake."""
    if tensor.dim() or not isinstance(tensor, FakeTensor) or isinstance(tensor, torch.nn.Parameter):
        return torch.Tensor.__format__(tensor, text)  # type: ignore[no-any-return, no-untyped-call]
    return format(tensor.item(), text)


def _tensor_of(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` and similar functions, for lists of numbers and of tensors with one element."""

    def of_numbers(*args: Any, **options: Any) -> torch.Tensor:
        numbers, size = _flat(args[0]) if len(args) == 1 else ([], [])
        if not _have_data_dependent(numbers, size):
            return make(*args, **options)
        dtype = options.pop("dtype", None) or functools.reduce(torch.promote_types, map(_dtype_of, numbers))
        requires_grad = bool(options.pop("requires_grad", False))
        options.pop("copy", None)
        parts = [_scalar(number, dtype, options) for number in numbers]
        return (torch.stack(parts).reshape(size) if size else parts[0]).requires_grad_(requires_grad)

    return of_numbers


def _new_tensor(self: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
    """``tensor.new_tensor``."""
    if not _have_data_dependent(*_flat(data)):
        return self.new_tensor(data, **options)
    return _tensor_of(torch.tensor)(data, **{"dtype": self.dtype, "device": self.device, **options})


def _have_data_dependent(numbers: Sequence[Any], size: Sequence[int]) -> bool:
    """Whether all are numbers, or tensors with one element in a list, and some are data-dependent."""
    single = [isinstance(number, torch.Tensor) and number.numel() == 1 if size else False for number in numbers]
    depend = any(isinstance(number, (*SYMBOLS, FakeTensor)) for number in numbers)
    return depend and all(alone or isinstance(number, _NUMBERS) for alone, number in zip(single, numbers, strict=True))


def _dtype_of(number: Any) -> torch.dtype:
    if isinstance(number, torch.Tensor):
        return number.dtype
    if isinstance(number, (bool, torch.SymBool)):
        return torch.bool
    return torch.get_default_dtype() if isinstance(number, (float, torch.SymFloat)) else torch.int64


def _scalar(number: Any, dtype: torch.dtype, options: Any) -> torch.Tensor:
    """A number as a tensor without dimensions."""
    if not isinstance(number, torch.Tensor):
        number = torch.sym_ite(number, 1, 0) if isinstance(number, torch.SymBool) else number
        return torch.scalar_tensor(number, dtype=dtype, **options)
    if number.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        raise TypeError("only integer tensors of a single element can be converted to an index")
    device = options.get("device") or torch.get_default_device()
    return number.detach().reshape(()).to(device=device, dtype=dtype)


def _flat(data: Any) -> tuple[list[Any], list[int]]:
    """The numbers of nested lists, and the lists' sizes; both empty if lists are ragged or empty."""
    if not isinstance(data, (list, tuple)):
        return [data], []
    parts: Sequence[tuple[list[Any], list[int]]] = [_flat(item) for item in data]
    if not parts or any(size != parts[0][1] for _, size in parts):
        return [], []
    return [number for numbers, _ in parts for number in numbers], [len(parts), *parts[0][1]]


def _of_tensor(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's fused step, which takes a learning rate as a tensor, too, unlike other numbers."""

    def stepped(*lists: Any, lr: Any, **options: Any) -> Any:
        symbolic = isinstance(lr, torch.SymFloat)
        return step(*lists, lr=torch.scalar_tensor(lr, dtype=torch.float64) if symbolic else lr, **options)

    return stepped


def _batch_norm(
    input: Any, running_mean: Any, running_var: Any, *options: Any, momentum: Any = 0.1, **named: Any
) -> Any:
    """Batch norm with a data-dependent momentum, as an average over all batches has."""
    plain: Any = torch.nn.functional.batch_norm
    weight: Any = momentum  # stubs allow no arithmetic of symbols with tensors
    if not (isinstance(momentum, torch.SymFloat) and named.get("training") and running_mean is not None):
        return plain(
            input, running_mean, running_var, *options, **({} if len(options) > 3 else {"momentum": momentum}), **named
        )
    seen = [torch.zeros_like(running) for running in (running_mean, running_var)]
    result = plain(input, *seen, *options, momentum=1.0, **named)
    with torch.no_grad():
        for running, now in zip((running_mean, running_var), seen, strict=True):
            running.data.copy_(weight * now + (1 - weight) * running)  # without a new version, as in eager
    return result


def _indexed(call: Callable[..., Any]) -> Callable[..., Any]:
    """``tensor[index]``: a data-dependent integer among the indices is a symbol."""

    def indexed(tensor: torch.Tensor, index: Any, *value: Any) -> Any:
        parts = tuple(map(_without_bools, index if type(index) is tuple else (index,)))
        if type(index) is tuple:
            index = parts = tuple([_joined(part, tensor.device) for part in parts])
        else:
            index = parts[0]
        if not any(map(_is_data_dependent, parts)) or indices_stay_tensors():
            return call(tensor, index, *value)
        counts = [_dims_of(part) for part in parts]
        others = tensor.dim() - sum(count for count in counts if count is not None)
        dims = [others if count is None else count for count in counts]
        numbers = [_number(part) for part in parts]
        symbols = [at for at, part in enumerate(numbers) if isinstance(part, torch.SymInt)]
        for at in reversed(symbols):  # reading takes only integers
            tensor = torch.select(tensor, sum(dims[:at]), numbers[at])
        rest = tuple(part for part in numbers if not isinstance(part, torch.SymInt))
        return call(tensor, rest or ..., *value) if rest or value else tensor

    return indexed


def _joined(part: Any, device: torch.device) -> Any:
    """A list with data-dependent positions as a tensor; any other part itself."""
    listed = isinstance(part, (list, tuple)) and _have_data_dependent(*_flat(part))
    return _tensor_of(torch.tensor)(part, device=device) if listed else part


def _without_bools(index: Any) -> Any:
    """A part of an index with the values of data-dependent bools: they are masks, not positions."""
    if isinstance(index, slice):
        ends = (index.start, index.stop, index.step)
        plain = [int(bool(end)) if isinstance(end, torch.SymBool) else _end(end) for end in ends]
        return index if all(map(operator.is_, ends, plain)) else slice(*plain)
    return bool(index) if isinstance(index, torch.SymBool) else index


def _end(end: Any) -> Any:
    """The start, end or step of a slice as a number: torch would read a tensor's value."""
    whole = isinstance(end, FakeTensor) and not (end.is_floating_point() or end.is_complex() or end.dtype == torch.bool)
    if not whole or Conversions.decide or end.constant is not None or unbacked(end.size()) or end.numel() != 1:
        return end
    if indices_stay_tensors():
        return end
    Conversions.count += 1
    return _read(end)


def _is_data_dependent(index: Any) -> bool:
    """Whether an index is a data-dependent integer: a symbol, or a tensor without dimensions."""
    if isinstance(index, torch.SymInt):
        return True
    if not isinstance(index, FakeTensor) or index.dim() or index.dtype in (torch.bool, torch.uint8):
        return False
    return index.constant is None and not (index.is_floating_point() or index.is_complex())


def _dims_of(index: Any) -> int | None:
    """How many dimensions an index takes; None: all that the other parts leave."""
    if index is Ellipsis:
        return None
    if index is None or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) else 1


def _number(index: Any) -> Any:
    """An index as a number, if it is a tensor that holds one."""
    return _read(index) if _is_data_dependent(index) and not isinstance(index, torch.SymInt) else index


def _read(index: torch.Tensor) -> Any:
    """The number of a tensor: one symbol until the tensor is written."""
    entry = _READ.get(index)
    if entry is None or entry[0] != index._version:
        entry = _READ[index] = index._version, index.item()
    return entry[1]


# `tensor[index] += 1` reads and writes at one position: both need the same symbol.
_READ: Any = WeakIdKeyDictionary()


def _select(call: Callable[..., Any]) -> Callable[..., Any]:
    """``select`` with a data-dependent index."""

    def selected(input: torch.Tensor, dim: Any, index: Any) -> Any:
        return call(input, dim, _number(index))

    return selected


def _broadcast(*tensors: Any) -> Any:
    """``torch.broadcast_tensors``, which in C++ assumes that data-dependent sizes are not 1."""
    operands = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    decide_broadcasts([operand.size() for operand in operands])
    return torch.broadcast_tensors(*operands)


def _tensor_split(*args: Any, **named: Any) -> Any:
    """``tensor_split``, which in C++ reads the positions from a tensor's memory."""
    split: Any = torch.tensor_split
    where = named.get("tensor_indices_or_sections", args[1] if len(args) > 1 else None)
    if not isinstance(where, FakeTensor) or where.dtype != torch.int64 or where.dim() > 1:
        return split(*args, **named)
    named.pop("tensor_indices_or_sections", None)
    return split(*args[:1], where.tolist(), *args[2:], **named)


def _ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *options: Any, **named: Any
) -> Any:
    """``F.ctc_loss``, for whose mean C++ makes a tensor of the lengths, and fills it."""
    loss: Any = torch.nn.functional.ctc_loss
    bound = inspect.signature(loss).bind(log_probs, targets, input_lengths, target_lengths, *options, **named)
    bound.apply_defaults()
    is_listed = isinstance(target_lengths, (list, tuple))
    if not (is_listed and isinstance(log_probs, FakeTensor) and bound.arguments["reduction"] == "mean"):
        return loss(*bound.args, **bound.kwargs)
    bound.arguments["reduction"] = "none"
    losses = loss(*bound.args, **bound.kwargs)
    counts = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
    return (losses / counts.clamp_min(1)).mean()


def _matmul(call: Callable[..., Any]) -> Callable[..., Any]:
    """``matmul``, whose decomposition assumes that data-dependent sizes are not 1."""

    def multiplied(*args: Any, **kwargs: Any) -> Any:
        batches = [arg.size()[:-2] for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)][:2]
        if any(map(unbacked, batches)):
            decide_batches(batches)
        return call(*args, **kwargs)

    return multiplied


_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.linalg.matmul)
DECOMPOSED: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__int__: _integer,
    torch.Tensor.item: _item,
    **dict.fromkeys((torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero), _boolean),
    torch.broadcast_tensors: _broadcast,
    torch.Tensor.__format__: formatted,
    **dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), _tensor_split),
    torch.tensor: _tensor_of(torch.tensor),
    torch.as_tensor: _tensor_of(torch.as_tensor),
    torch.asarray: _tensor_of(torch.asarray),
    torch.Tensor.new_tensor: _new_tensor,
    torch.nn.functional.batch_norm: _batch_norm,
    torch.nn.functional.ctc_loss: _ctc_loss,
    **{call: _indexed(call) for call in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)},
    **{call: _select(call) for call in (torch.select, torch.Tensor.select)},
    **{call: _matmul(call) for call in _MATMULS},
    **{step: _of_tensor(step) for step in FUSED_STEPS},
}
