"""Torch's ONNX exporter, and the operators that it translates. Loads onnxscript.

Invariant: the exporter translates each operator that is listed here. Limits: written against torch 2.13.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table  # also what torch.export leaves as it is
from torch.export import ExportedProgram
from torch.fx import Node
from torch.onnx._constants import ONNX_DEFAULT_OPSET as DEFAULT_OPSET
from torch.onnx._constants import ONNX_MIN_OPSET as OLDEST_OPSET
from torch.onnx._internal.exporter import (
    _building,  # which dtype a number of Python's gets
    _core,  # torch.onnx.export with a registry of ours: the public function reads all rules again for each export
)
from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET as OLDEST_WRITTEN_OPSET
from torch.onnx._internal.exporter._decomp import (  # what the exporter decomposes before it translates
    create_onnx_friendly_decomposition_table,
    get_onnx_implemented_overloads,
)
from torch.onnx._internal.exporter._dispatching import dispatch
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.exporter._torchlib.ops.hop import higher_order_scan as higher_order_scan

from functionalize._torch.exporting import without_spec_warnings

NEWEST_WRITTEN_OPSET = 25  # that onnxscript's converter brings the exporter's operators to


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter from warning of missing packages, and of what it does not simplify."""
    loggers = [logging.getLogger(name) for name in (ONNXRegistry.__module__, "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _registry(opset: int = DEFAULT_OPSET) -> ONNXRegistry:
    """The exporter's translations for an opset. Opsets above the default add operators that no capture has."""
    return _read_registry(min(max(opset, OLDEST_WRITTEN_OPSET), DEFAULT_OPSET))


@functools.cache
def _read_registry(opset: int) -> ONNXRegistry:
    """The same, for an opset that the exporter has rules for. Slow: it reads the sources of all rules."""
    with quiet():
        return ONNXRegistry.from_torchlib(opset_version=opset)


_dtype_of_input: Any = _building._determine_input_dtype
_wide = contextvars.ContextVar("_wide", default=False)


def _wide_dtype_of_input(param: Any, arg: Any, type_binding: Any) -> Any:
    """Replaces `_determine_input_dtype`: a number has 64 bits before it is cast to the dtype of a tensor.

    The exporter gives it 32, and so loses digits. Other threads' exports get the exporter's own function.
    """
    dtype = _dtype_of_input(param, arg, type_binding)
    if not _wide.get():
        return dtype
    cast = (param.name, param.type_constraint.name) == ("input", "T1")  # of Cast, and of CastLike
    free = cast and param.type_constraint not in type_binding and dtype.name == "FLOAT"
    allowed = {getattr(allowed.dtype, "name", "") for allowed in param.type_constraint.allowed_types}
    return type(dtype).DOUBLE if free and isinstance(arg, float) and "DOUBLE" in allowed else dtype


@contextlib.contextmanager
def _wide_numbers() -> Iterator[None]:
    """Keep 64 bits of Python's floats that this thread's exports cast. Two threads must not enter it at once."""
    token = _wide.set(True)
    _building._determine_input_dtype = _wide_dtype_of_input
    try:
        yield
    finally:
        _building._determine_input_dtype = _dtype_of_input
        _wide.reset(token)


def _say_dtypes(program: ExportedProgram) -> None:
    """Pass the dtype of each tensor that is made of numbers alone: the exporter would take that of the numbers."""
    for node in program.graph.nodes:
        schema, value = getattr(node.target, "_schema", None), node.meta.get("val")
        if schema is None or not isinstance(value, torch.Tensor):
            continue
        types = {argument.name: str(argument.type) for argument in schema.arguments}
        if "dtype" in types and "Tensor" not in types.values() and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": value.dtype}


def _type_numbers(program: ExportedProgram) -> None:
    """Give numbers the types that the exporter's promotion needs. Of several bounds it promotes only the integers; for
    an operator on tensors it searches for an overload that takes the number.
    """
    for node in program.graph.nodes:
        schema, value = getattr(node.target, "_schema", None), node.meta.get("val")
        if schema is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        types = [str(argument.type) for argument in schema.arguments]
        for position, (of, number) in enumerate(zip(types, node.args, strict=False)):
            if of == "Tensor" and type(number) in (int, float):
                with program.graph.inserting_before(node):
                    made = program.graph.call_function(
                        torch.ops.aten.full.default, ([], number), {"dtype": value.dtype}
                    )
                made.meta = {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
                made.meta["val"] = value.new_empty([])
                node.update_arg(position, made)
            elif "number" in of and type(number) is int and node.target is torch.ops.aten.clamp.default:
                node.update_arg(position, float(number))


def _is_wide(program: ExportedProgram) -> bool:
    """Whether a program computes with floats of 64 bits."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    return any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in values)


def by_torch(ops: Iterable[Any]) -> dict[Any, Any]:
    """Torch's decompositions of some operators."""
    return {op: decomposition_table[op] for op in ops}


def by_torch_if_wide(ops: Iterable[Any]) -> dict[Any, Any]:
    """The same, for calls with tensors of 64 bits, or data-dependent numbers, alone."""

    def of(function: Any) -> Any:
        def decomposed(*args: Any, **kwargs: Any) -> Any:
            wide = any(
                isinstance(arg, torch.SymFloat) or (isinstance(arg, torch.Tensor) and arg.dtype == torch.float64)
                for arg in (*args, *kwargs.values())
            )
            return function(*args, **kwargs) if wide else NotImplemented

        return decomposed

    return {op: of(function) for op, function in by_torch(ops).items()}


def decompositions() -> dict[Any, Any]:
    """The exporter's decompositions of operators that ONNX does not have."""
    return create_onnx_friendly_decomposition_table(set(get_onnx_implemented_overloads(_registry())))


def exporters(op: Any) -> Callable[..., Any]:
    """The exporter's translation of an operator: a function from values of ONNX to values of ONNX."""
    translation: Callable[..., Any] = _registry().get_decomps(op)[0].onnx_function
    return translation


def untranslated(program: ExportedProgram, translated: Collection[Any], opset: int) -> Iterator[tuple[Node, str]]:
    """The nodes that the exporter cannot translate, with reasons; ``translated``: operators that we translate."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target in translated or node.target is operator.getitem:
            continue
        translation, message = dispatch(node, _registry(opset))
        if translation is None and "_assert_" not in str(node.target):  # the exporter drops these
            yield node, message


def translate(
    program: ExportedProgram,
    translations: Mapping[Any, Callable[..., Any]],
    input_names: Sequence[str],
    output_names: Sequence[str],
    opset: int,
) -> Any:
    """The program as the exporter writes it, not simplified; ``translations``: of operators that it does not know.

    It has the nearest opset that the exporter writes. The caller lets in one thread at a time.
    """
    _say_dtypes(program)
    _type_numbers(program)
    registry = copy.copy(_registry(opset))
    registry.functions = {target: list(functions) for target, functions in registry.functions.items()}
    for op, translation in translations.items():
        registry.register_op(op, translation, is_complex=False)
    with without_spec_warnings(), _wide_numbers() if _is_wide(program) else contextlib.nullcontext():
        return _core.export(
            program,
            registry=registry,
            input_names=input_names,
            output_names=output_names,
            verbose=False,
            optimize=False,
            opset_version=min(max(opset, OLDEST_WRITTEN_OPSET), NEWEST_WRITTEN_OPSET),
        )
