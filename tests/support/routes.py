"""The ways by which tests run exported programs, by name; each takes a captured program and a folder for files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.support.export_programs import on_onnx


def on_module(program: Any, folder: Path) -> Any:
    """An ExportedProgram, saved and loaded again, as a module."""
    file = io.BytesIO()
    torch.export.save(program.to_exported_program(), file)
    file.seek(0)
    return torch.export.load(file).module()


def on_stablehlo(program: Any, folder: Path) -> Any:
    """A StableHLO file on JAX; it writes to its arguments as the program does."""
    pytest.importorskip("jax")
    from functionalize.backends.jax import from_torch, load, to_torch

    loaded = load(program.to_stablehlo(folder / "program.stablehlo"))
    writes = program.specialization.capture.convention.names if program.mutations else ()

    def run(*args: Any) -> Any:
        arrays = [arg if arg is None else from_torch(arg) for arg in args]
        result = tree_map_only(type(arrays[0]), to_torch, loaded(*arrays))
        if (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], dict)
            and set(result[1]) <= set(writes)
        ):
            result, written = result
            for name, value in written.items():
                args[list(writes).index(name)].copy_(value)
        return result

    return run


ROUTES = {"module": on_module, "onnx": on_onnx, "stablehlo": on_stablehlo}
