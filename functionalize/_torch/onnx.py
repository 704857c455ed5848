"""What torch's ONNX exporter knows of operators. Loads onnxscript.

Invariant: an operator that is known here is one that the exporter translates. Limits: written against torch 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._decomp import decomposition_table  # also what torch.export leaves as it is
from torch.export import ExportedProgram
from torch.fx import Node
from torch.onnx._internal.exporter._decomp import (  # what the exporter takes apart before it translates
    create_onnx_friendly_decomposition_table,
    get_onnx_implemented_overloads,
)
from torch.onnx._internal.exporter._dispatching import dispatch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from functionalize._torch.dispatch import HigherOrderOperator, OpOverload


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


def by_torch(ops: Iterable[Any]) -> dict[Any, Any]:
    """How torch takes some operators apart."""
    return {op: decomposition_table[op] for op in ops}


def decompositions() -> dict[Any, Any]:
    """How the exporter takes operators apart that ONNX has not."""
    return create_onnx_friendly_decomposition_table(set(get_onnx_implemented_overloads(_registry())))


def untranslated(program: ExportedProgram, known: Collection[Any]) -> Iterator[tuple[Node, str]]:
    """The nodes of a program that the exporter cannot translate, each with the reason; ``known``: who has others."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target in known:
            continue
        if not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            continue
        found, message = dispatch(node, _registry())
        if found is None and "_assert_" not in str(node.target):  # the exporter drops these
            yield node, message


def translate(program: ExportedProgram, translations: Mapping[Any, Callable[..., Any]], **options: Any) -> Any:
    """The program as the exporter writes it; ``translations``: of operators that it does not know."""
    options["custom_translation_table"] = dict(translations)
    with _registries_kept():
        return torch.onnx.export(program, dynamo=True, verbose=False, **options)
