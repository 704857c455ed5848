"""What torch's ONNX exporter knows of operators. Loads onnxscript.

Invariant: an operator that is known here is one that the exporter translates. Limits: written against torch 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._decomp import decomposition_table  # also what torch.export leaves as it is
from torch.export import ExportedProgram
from torch.fx import Node
from torch.onnx._internal import _lazy_import  # onnxscript as the exporter has it: its rules compare constants
from torch.onnx._internal.exporter import _building  # which dtype a number of Python's gets
from torch.onnx._internal.exporter._decomp import (  # what the exporter takes apart before it translates
    create_onnx_friendly_decomposition_table,
    get_onnx_implemented_overloads,
)
from torch.onnx._internal.exporter._dispatching import dispatch
from torch.onnx._internal.exporter._registration import ONNXRegistry


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While the exporter says nothing of packages that are not there, and of what it does not make simpler."""
    loggers = [logging.getLogger(name) for name in (ONNXRegistry.__module__, "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


_exporters: Any = _lazy_import
_from_torchlib: Any = ONNXRegistry.from_torchlib


@functools.cache
def _registry(**version: Any) -> ONNXRegistry:
    with quiet():
        found: ONNXRegistry = _from_torchlib(**version)
        return found


@contextlib.contextmanager
def _registries_kept() -> Iterator[None]:
    """While the exporter has copies of its registry: it reads the sources of all its rules for each export."""

    def kept(cls: Any, /, **version: Any) -> ONNXRegistry:
        found = copy.copy(_registry(**version))
        found.functions = {target: list(metas) for target, metas in found.functions.items()}
        return found

    ONNXRegistry.from_torchlib = classmethod(kept)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = _from_torchlib  # type: ignore[method-assign]


@functools.cache
def _compared_constants() -> list[Any]:
    """The constants that rules of the optimizer look for: `x + 0` is `x`."""
    patterns = [rule._target_pattern for rule in _exporters.onnxscript.rewriter._DEFAULT_REWRITE_RULES]
    values = [value for pattern in patterns for node in pattern for value in node.inputs]
    return [value for value in values if hasattr(value, "_abs_tol")]


@contextlib.contextmanager
def _exact_rules() -> Iterator[None]:
    """While the optimizer takes no number for another one that is near: to it, the 1e-8 of an optimizer's step is 0.

    Nor joins it bounds: it names those of two clamps of one tensor alike.
    """
    rewriter, constants = _exporters.onnxscript.rewriter, _compared_constants()
    before = [(one._rel_tol, one._abs_tol) for one in constants]
    for one in constants:
        one._rel_tol = one._abs_tol = 0.0
    rules = rewriter._DEFAULT_REWRITE_RULES
    joining = [*rewriter._min_max_to_clip.rules, *rewriter._fuse_relus_clips.rules]
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in rules if rule not in joining)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules
        for one, limits in zip(constants, before, strict=True):
            one._rel_tol, one._abs_tol = limits


# What the optimizer computes of constants otherwise than ONNX Runtime does: by kernels of a reference, in Python.
_NOT_FOLDED = ("AveragePool", "Conv", "ConvTranspose", "GridSample", "LpPool", "MaxPool", "Resize", "RoiAlign")


@contextlib.contextmanager
def _windows_unfolded() -> Iterator[None]:
    """While windows over constants are left to the engine: the reference takes others where a step is wide."""
    names = _exporters.onnxscript.optimizer._constant_folding.DEFAULT_CONSTANT_FOLD_BLACKLIST
    before = list(names)
    names.extend(_NOT_FOLDED)
    try:
        yield
    finally:
        names[:] = before


_dtype_of_input: Any = _building._determine_input_dtype


@contextlib.contextmanager
def _wide_numbers() -> Iterator[None]:
    """While numbers of Python's that are cast to the dtype of a tensor are 64 bits wide before, and not 32.

    Others are of 32 bits beside what the exporter says has these.
    """

    def wide(param: Any, arg: Any, type_binding: Any) -> Any:
        found = _dtype_of_input(param, arg, type_binding)
        cast = (param.name, param.type_constraint.name) == ("input", "T1")  # of Cast, and of CastLike
        free = cast and param.type_constraint not in type_binding and found.name == "FLOAT"
        allowed = {getattr(one.dtype, "name", "") for one in param.type_constraint.allowed_types}
        return type(found).DOUBLE if free and isinstance(arg, float) and "DOUBLE" in allowed else found

    _building._determine_input_dtype = wide
    try:
        yield
    finally:
        _building._determine_input_dtype = _dtype_of_input


def _say_dtypes(program: ExportedProgram) -> None:
    """Name the dtype of each tensor that is made of numbers alone: the exporter takes that of the numbers."""
    for node in program.graph.nodes:
        schema, look = getattr(node.target, "_schema", None), node.meta.get("val")
        if schema is None or not isinstance(look, torch.Tensor):
            continue
        types = {argument.name: str(argument.type) for argument in schema.arguments}
        if "dtype" in types and "Tensor" not in types.values() and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": look.dtype}


def _type_numbers(program: ExportedProgram) -> None:
    """Give numbers the types that the exporter's promotion wants: of several bounds it promotes the integers alone,
    and where an operator takes tensors it looks for one that takes the number.
    """
    for node in program.graph.nodes:
        schema, look = getattr(node.target, "_schema", None), node.meta.get("val")
        if schema is None or not isinstance(look, torch.Tensor) or not look.is_floating_point():
            continue
        types = [str(argument.type) for argument in schema.arguments]
        for position, (of, value) in enumerate(zip(types, node.args, strict=False)):
            if of == "Tensor" and type(value) in (int, float):
                with program.graph.inserting_before(node):
                    made = program.graph.call_function(torch.ops.aten.full.default, ([], value), {"dtype": look.dtype})
                made.meta = {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
                made.meta["val"] = look.new_empty([])
                node.update_arg(position, made)
            elif "number" in of and type(value) is int and node.target is torch.ops.aten.clamp.default:
                node.update_arg(position, float(value))


def _is_wide(program: ExportedProgram) -> bool:
    """Whether a program computes with 64 bits."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    return any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in values)


def by_torch(ops: Iterable[Any]) -> dict[Any, Any]:
    """How torch takes some operators apart."""
    return {op: decomposition_table[op] for op in ops}


def by_torch_if_wide(ops: Iterable[Any]) -> dict[Any, Any]:
    """The same, for calls with tensors of 64 bits, or numbers that only the data tell, alone."""

    def of(function: Any) -> Any:
        def taken_apart(*args: Any, **kwargs: Any) -> Any:
            wide = any(
                isinstance(one, torch.SymFloat) or (isinstance(one, torch.Tensor) and one.dtype == torch.float64)
                for one in (*args, *kwargs.values())
            )
            return function(*args, **kwargs) if wide else NotImplemented

        return taken_apart

    return {op: of(function) for op, function in by_torch(ops).items()}


def decompositions() -> dict[Any, Any]:
    """How the exporter takes operators apart that ONNX has not."""
    return create_onnx_friendly_decomposition_table(set(get_onnx_implemented_overloads(_registry())))


def exporters(op: Any) -> Callable[..., Any]:
    """How the exporter translates an operator: a function of values of ONNX that gives such."""
    found: Callable[..., Any] = _registry().get_decomps(op)[0].onnx_function
    return found


def untranslated(program: ExportedProgram, known: Collection[Any]) -> Iterator[tuple[Node, str]]:
    """The nodes of a program that the exporter cannot translate, each with the reason; ``known``: who has others."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target in known or node.target is operator.getitem:
            continue
        found, message = dispatch(node, _registry())
        if found is None and "_assert_" not in str(node.target):  # the exporter drops these
            yield node, message


def translate(program: ExportedProgram, translations: Mapping[Any, Callable[..., Any]], **options: Any) -> Any:
    """The program as the exporter writes it; ``translations``: of operators that it does not know."""
    options["custom_translation_table"] = dict(translations)
    _say_dtypes(program)
    _type_numbers(program)
    numbers = _wide_numbers() if _is_wide(program) else contextlib.nullcontext()
    with _registries_kept(), _exact_rules(), _windows_unfolded(), numbers:
        return torch.onnx.export(program, dynamo=True, verbose=False, **options)
