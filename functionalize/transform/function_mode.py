"""The mode above the dispatcher, for calls that dispatch modes do not see.

Invariant: a program does here what it would do without modes. Limits: calls by the public name, on plain tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from functionalize._torch import (
    ASK_BASE,
    ASK_HOOKS,
    ASK_VERSION,
    BEGIN,
    GRADIENT,
    HOOKS,
    LAYOUT,
    LEAF,
    OFFSET,
    PLAIN_TYPES,
    STORAGE,
    VERSION,
    VIEW,
    HigherOrderOperator,
    decided,
    enable_python_dispatcher,
    has_symbol,
    is_symbolic,
    is_view,
    mode_stack,
    no_python_dispatcher,
    pytree,
    storage_key,
    symbols_in_making,
    unbacked,
    unwrap_functorch,
)
from functionalize._torch.autograd import ENGINE, SET_GRAD_MODE
from functionalize._torch.dispatch import is_kernel, python_dispatcher_enabled
from functionalize._torch.tensors import autograd_base
from functionalize.aliasing.tensor_queries import tensor_leaves
from functionalize.ops import functions
from functionalize.patches import Patch, Patches
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.functions.eager_kernels import IN_EAGER, OPENED
from functionalize.transform.functions.numbers import DECOMPOSED as OF_NUMBERS
from functionalize.transform.functions.padded_encoders import OF_ENCODERS
from functionalize.transform.functions.recurrent_layers import LAYERS
from functionalize.transform.functions.sparse import ELEMENTS
from functionalize.transform.handlers.copies import deep_copy, reduced

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # stubs call it a tensor
_GRAD: Any = torch.Tensor.grad  # stubs call it a tensor
_OF_STORAGES = ("storage_offset", "as_strided", "as_strided_", "as_strided_scatter", "set_")
_ASKS: dict[Any, tuple[str, ...]] = {  # what a program reads by them
    **dict.fromkeys((getattr(torch.Tensor, name) for name in _OF_STORAGES), (OFFSET,)),
    **dict.fromkeys((torch.as_strided, torch.as_strided_copy, torch.as_strided_scatter, _SET_DATA), (OFFSET,)),
    **dict.fromkeys((getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "grad_fn")), (LEAF,)),
    **dict.fromkeys((is_view, ASK_BASE), (VIEW,)),
    **dict.fromkeys(ASK_HOOKS, (HOOKS,)),
    **dict.fromkeys((torch.Tensor.detach_, torch.detach_), (VIEW, LEAF)),
    torch.Tensor.untyped_storage: (OFFSET, STORAGE),
    **dict.fromkeys((_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__), (GRADIENT,)),
    ASK_VERSION: (VERSION,),
    torch.Tensor.storage_offset: (OFFSET, BEGIN),
    **dict.fromkeys((torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.dim_order), (LAYOUT,)),
}
_HOOK: Any = torch.Tensor.register_hook
_GRAD_FN: Any = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_REQUIRE: Any = torch.Tensor.requires_grad_
_NOTED = functions.DETACHING | {_HOOK, _REQUIRE, ASK_VERSION, SET_GRAD_MODE, _GRAD_FN}
_COPIES: dict[Any, Any] = {torch.Tensor.__deepcopy__: deep_copy, torch.Tensor.__reduce_ex__: reduced}
DECOMPOSED = {**OF_NUMBERS, **LAYERS, **IN_EAGER, **OF_ENCODERS}
_WITHOUT_SYMBOLS = frozenset({int, float, bool, str, type(None), slice, type(...), torch.dtype, torch.device})
_TABLES = ELEMENTS.keys() | _ASKS.keys() | DECOMPOSED.keys()
_TABLED = {*_COPIES, _SET_DATA, *functions.GRADIENTS_OF, *OPENED} | _TABLES | _NOTED | functions.UNDISPATCHED


class FunctionalizeFunctionMode(TorchFunctionMode):
    """Intercepts what happens above the dispatcher, unseen by dispatch modes. Entered around the context's mode.

    ``tensor.data = other`` gives a tensor object other storage. Some functions, seeing that a mode is active, compute a
    new tensor in place of writing the one that was passed as ``out=``. `dropout` with a probability of zero returns its
    input, but a copy where sizes are symbolic (pytorch/pytorch#195422). And autograd's engine checks whether a mode is
    active: without a mode it accumulates gradients in place, and some formulas choose other ops, so that gradients have
    other strides. Hooks on gradients are noted: autograd treats a view with a hook differently. Besides, calls on
    data-dependent sizes go to torch's kernels in Python: some of those in C++ only take integers. Limits: calls by the
    public name, on plain tensors.
    """

    def __init__(self, context: FunctionalizationContext) -> None:
        super().__init__()
        self._context = context
        self._symbols = symbols_in_making(mode_stack())
        self._symbolic = python_dispatcher_enabled()
        self._unused = context.notes.unused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():  # a body of a higher-order op, which comes again when the op runs
            return func(*args, **(kwargs or {}))
        if types and not PLAIN_TYPES.issuperset(types):
            self._context.refuse_subclasses(types)
        if self._unused:  # a tensor in a list has a node that uses it
            self._unused.difference_update(map(id, (*args, *(kwargs or {}).values())))
        if kwargs and "generator" in kwargs:
            self._context.notes.note_generator(kwargs["generator"])
        try:
            if func in _TABLED or self._symbols or _has_number(args, kwargs):
                out = self._called(func, args, kwargs or {})
            else:  # almost all calls
                out = func(*args, **kwargs) if kwargs else func(*args)
        except TypeError:
            self._context.refuse_subclasses(map(type, tensor_leaves(args, kwargs or {})))
            if not any(isinstance(value, torch.SymBool) for value in (*args, *(kwargs or {}).values())):
                raise
            out = self._called(func, _with_plain_bools(args), _with_plain_bools(kwargs or {}))
        if out is NotImplemented:  # of a binary operator, in place of a TypeError
            self._context.refuse_subclasses(map(type, tensor_leaves(args, kwargs or {})))
        return out

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in OPENED and PLAIN_TYPES.issuperset(map(type, tensor_leaves(args, kwargs))):
            with self:
                return OPENED[func](*args, **kwargs)
        values = (*args, *kwargs.values())
        symbolic = self._symbols and (func in functions.GRADIENTS_OF or _has_symbols(values))
        if symbolic or (_has_number(args, kwargs) and not isinstance(func, HigherOrderOperator)):
            with enable_python_dispatcher():
                return self._decompose(func, args, kwargs)
        return self._decompose(func, args, kwargs) if func in _TABLED else func(*args, **kwargs)

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in ELEMENTS and self._context.has_unknown_elements(args[0]):
            return ELEMENTS[func](args[0])
        if func in _ASKS:
            self._note_questions(func, args, kwargs)
        if func in _METHODS:
            return _METHODS[func](self, func, args, kwargs)
        if func in _NOTED and not (func is _REQUIRE and args[0].requires_grad is _wanted(*args, **kwargs)):
            self._note(func, list(tensor_leaves(args, kwargs)))
        if func in DECOMPOSED and PLAIN_TYPES.issuperset(map(type, tensor_leaves(args, kwargs))):
            return DECOMPOSED[func](*args, **kwargs)
        if func in functions.DROPOUTS and _drops_nothing(*args, **kwargs):
            return args[0] if args else kwargs["input"]
        if func == _SET_DATA and all(map(_is_plain, args)):
            return self._context.set_data(*args)
        if func in _COPIES and type(args[0]) in PLAIN_TYPES:
            return _COPIES[func](*args)
        if func in functions.LOSES_OUT and kwargs.get("out") is not None:
            others = {name: value for name, value in kwargs.items() if name != "out"}
            result = func(*args, **others)
            return kwargs["out"].resize_(result.size()).copy_(result)
        return func(*args, **kwargs)

    def _note_questions(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note which properties of which tensors the program reads."""
        asked = self._context.notes.asked
        for tensor in tensor_leaves(args, kwargs):
            for question in _ASKS[func]:
                asked.add(question, tensor)
            if func == ASK_BASE:  # a view shows its base
                asked.add(VIEW, autograd_base(tensor))
            if func == _GRAD_FN:  # which leads to the leaves that the tensor was computed from
                asked.add_behind(LEAF, [tensor])

    def _reshape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy, or ask about the sizes: torch assumes that data-dependent sizes are not 1."""
        source = args[0] if args else kwargs.get("input", kwargs.get("self"))
        out = func(*args, **kwargs)
        if _is_plain(source) and isinstance(out, torch.Tensor):
            self._context.notes.note_stride_dependent(source, out)
        if not (_is_plain(source) and is_symbolic(source)) or out is True:
            return out
        if out is not False and storage_key(out) == storage_key(source):
            return out
        sizes = [size for size in source.size() if unbacked([size])]
        answers = [decided(size == 1) for size in sizes]
        if None in answers and out is not False:
            self._context.note_copy(source, out, sizes)
        return func(*args, **kwargs) if any(answers) else out

    def _differentiate(self, func: Any, args: Any, kwargs: Any) -> Any:
        notes = self._context.notes
        self._note_hooks_of(func, args, kwargs)
        observed = self._context.executor.observed
        if func is torch.autograd.grad and observed:
            notes.refuse_gradients_with_strides_of_inputs(args[1] if len(args) > 1 else kwargs.get("inputs"))
        with engine_running(self._context, symbolic=self._symbolic) if observed else contextlib.nullcontext():
            gradients = self._context.differentiate(func, args, kwargs)
        notes.note_gradients(gradients)
        return gradients

    def _note_hooks_of(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note the tensors whose hooks a backward runs: those that it gets as ``inputs``, or all that it reaches."""
        asked, position = self._context.notes.asked, functions.GRADIENTS_OF[func]
        inputs = pytree.tree_leaves(args[position] if len(args) > position else kwargs.get("inputs"))
        if not (inputs and all(isinstance(value, torch.Tensor) for value in inputs)):
            inputs = pytree.tree_leaves(args[0] if args else next(iter(kwargs.values())))
            asked.add_behind(HOOKS, inputs)
        asked.add_all(HOOKS, map(id, inputs))

    def _note(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Note what becomes of the gradients of tensors; refuse versions that only eager counts."""
        if func is SET_GRAD_MODE:
            self._context.endings.note_grad_mode()
            return
        for tensor in tensors if func in functions.DETACHING else tensors[:1]:
            self._note_one(func, tensor)

    def _note_one(self, func: Any, tensor: torch.Tensor) -> None:
        notes = self._context.notes
        if func == ASK_VERSION:
            notes.refuse_version_of_gradient(tensor)
        elif func in functions.DETACHING:
            self._context.endings.note(tensor, "detached")
        elif func == _GRAD_FN:
            self._context.endings.note(tensor, "its grad_fn is read, and may get hooks")
        elif func is _REQUIRE:
            notes.note_required(tensor, self._context.views_beside(tensor))
        else:
            executor = self._context.executor
            self._context.endings.note(tensor, "with a hook on its gradient")
            notes.note_hook(tensor, executor.predates_call(tensor) and not executor.is_constant(tensor))


_METHODS: dict[Any, Any] = {
    **dict.fromkeys(functions.GRADIENTS_OF, FunctionalizeFunctionMode._differentiate),
    **dict.fromkeys(functions.RESHAPING, FunctionalizeFunctionMode._reshape),
}


class EngineMode(FunctionalizeFunctionMode):
    """The mode for what autograd's engine runs of a program: hooks, backward methods, regions that run again."""

    def __init__(self, context: FunctionalizationContext, symbolic: bool) -> None:
        """``symbolic``: whether torch's kernels in Python, some of which run other ops, are for all of the program."""
        super().__init__(context)
        self._kernels = contextlib.nullcontext if symbolic else no_python_dispatcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling() or is_kernel(sys._getframe(1).f_code):  # of the engine's own ops
            return func(*args, **(kwargs or {}))
        with self._kernels():  # for symbols, they are enabled for the engine
            return super().__torch_function__(func, types, args, kwargs)


def engine_running(context: FunctionalizationContext, *, symbolic: bool) -> Patches:
    """A context in which autograd's engine runs code of a program as if the program ran it.

    A mode is left while its method runs, and so is the program's while it differentiates.
    """
    mode = EngineMode(context, symbolic)

    def in_mode(run: Callable[..., Any]) -> Callable[..., Any]:
        def running(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return run(*args, **kwargs)

        return running

    return Patches([Patch(torch.autograd, ENGINE, in_mode)])


def _has_symbols(values: Iterable[Any]) -> bool:
    """Whether some values, or values in containers among them, are symbols or tensors of symbolic sizes."""
    for value in values:
        type_ = type(value)
        if type_ in PLAIN_TYPES:
            if is_symbolic(value):
                return True
        elif type_ is list or type_ is tuple:
            if _has_symbols(value):
                return True
        elif type_ not in _WITHOUT_SYMBOLS and any(map(has_symbol, pytree.tree_leaves(value))):
            return True
    return False


def _has_number(args: Any, kwargs: Any) -> bool:
    """Whether a list among arguments has a tensor that may be a size: functions of sizes make a symbol of it."""
    for argument in (*args, *kwargs.values()) if kwargs else args:
        type_ = type(argument)
        if type_ is list or type_ is tuple:
            for item in argument:
                if isinstance(item, torch.Tensor) and not item.is_floating_point() and item.dim() == 0:
                    return True
    return False


def _with_plain_bools(arguments: Any) -> Any:
    """Arguments with the values of data-dependent bools, which most functions do not take."""
    if isinstance(arguments, dict):
        return {name: bool(value) if isinstance(value, torch.SymBool) else value for name, value in arguments.items()}
    return tuple(bool(value) if isinstance(value, torch.SymBool) else value for value in arguments)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a dispatch mode sees this tensor object: no subclass, no wrapper of a functorch transform."""
    return type(tensor) in PLAIN_TYPES and unwrap_functorch(tensor) is tensor


def _wanted(tensor: torch.Tensor, requires_grad: bool = True) -> bool:
    """What `requires_grad_` sets."""
    return requires_grad


def _drops_nothing(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> bool:
    """Whether a call of `dropout` is legal, and returns its input."""
    return 0 <= p <= 1 and (p == 0 or not (training and train))
