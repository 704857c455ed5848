"""Captured programs as ONNX files, and such files run by ONNX Runtime: the program's state goes in and comes out.

Needs the packages of the extra `onnx`. Invariant: what a program writes is an output of the file, paired in the
metadata with the input that has it in the next call. Limits: those of `to_exported_program`, and of ONNX's operators.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from onnx import ModelProto

    from functionalize.backends.onnx.runner import OnnxProgram
    from functionalize.runtime.calls.program import CapturedProgram

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def _needs(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"ONNX needs the package {package}: pip install 'functionalize[onnx]'", name=package
            ) from error


def to_onnx(program: CapturedProgram, path: str | os.PathLike[str] | None, **options: Any) -> Any:
    """See :meth:`CapturedProgram.to_onnx`."""
    _needs(*(_PACKAGES if options["verify"] else _PACKAGES[:2]))
    from functionalize.backends.onnx.options import Options
    from functionalize.backends.onnx.writing import write

    return write(program, Options.read(path, **options))


def load(
    path: str | os.PathLike[str] | ModelProto | bytes,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> OnnxProgram:
    """Load a program that ``to_onnx`` wrote. It has the original's signature, and runs in ONNX Runtime.

    The program keeps its state between calls, in tensors that ONNX Runtime reads and writes directly. If the original
    writes to its arguments, a call writes to its arguments too.

    Args:
        path: the file; or the model that ``to_onnx`` without a path returns; or its bytes.
        state: first values for parts of the state, by their paths, instead of those in the file.
        options: arguments of ``onnxruntime.InferenceSession``: providers, sess_options.

    Raises:
        ModuleNotFoundError: a package of the extra `onnx` is not installed.
        FileNotFoundError: there is no such file.
        ValueError: the file is not an ONNX model, is not complete, or was not written by this version of ``to_onnx``;
            a tool that changed it dropped first values of the state or renamed outputs; or ``state`` does not fit.
    """
    _needs("onnx", "onnxruntime")
    from functionalize.backends.onnx.runner import OnnxProgram

    if not isinstance(path, (bytes, str, os.PathLike)):
        path = path.SerializeToString()
    return OnnxProgram(path if isinstance(path, bytes) else Path(path), state or {}, **options)
