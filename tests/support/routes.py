"""The ways by which tests run captured programs elsewhere, each defined once.

A route takes a captured program and a folder for files, and gives what is called with tensors: it writes to its
arguments and keeps state as the program does. Limits: results on JAX are the nests that JAX knows.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functionalize import UnsupportedExportError

Run = Callable[..., Any]
RESULTS, GRADIENTS, BACKWARDS = "", "-gradients", "-backwards"


@dataclass(frozen=True)
class Route:
    """One way. ``needs``: modules that may be missing; ``ledgers``: what the sweep of operators compares by it."""

    name: str
    export: Callable[[Any, Path], Run]
    needs: tuple[str, ...] = ()
    ledgers: tuple[str, ...] = ()

    @property
    def __name__(self) -> str:
        """What pytest calls a row of a table."""
        return self.name

    def __call__(self, captured: Any, folder: Path = Path()) -> Run:
        import pytest  # here: benchmarks use routes without it

        for module in self.needs:
            pytest.importorskip(module)
        return self.export(captured, folder)


def _saved(captured: Any, folder: Path) -> Run:
    file = io.BytesIO()
    torch.export.save(captured.to_exported_program(), file)
    file.seek(0)
    module: Run = torch.export.load(file).module()
    return module


def _onnx(captured: Any, folder: Path) -> Run:
    """A file on ONNX Runtime. What the engine has no kernel for is refused."""
    from functionalize.backends import onnx

    path = captured.to_onnx(folder / "program.onnx")
    try:
        return onnx.load(path)
    except ValueError as error:
        what = str(error).splitlines()[0].partition("cannot be loaded: ")[2] or str(error)
        raise UnsupportedExportError("ONNX Runtime", [what]) from error


def _jax_unjitted(captured: Any, folder: Path) -> Run:
    program = captured.to_jax()
    return _on_arrays(captured, _with_state(program.initial_state, program))


def _jax(captured: Any, folder: Path) -> Run:
    program = captured.to_jax()
    return _on_arrays(captured, _with_state(program.initial_state, program.jit()))


def _with_state(state: Any, step: Run) -> Run:
    def call(*arrays: Any) -> Any:
        nonlocal state
        state, outputs = step(state, *arrays)
        return outputs

    return call


def _stablehlo(captured: Any, folder: Path) -> Run:
    from functionalize.backends.jax import Written, load

    loaded = load(captured.to_stablehlo(folder / "program.stablehlo"))
    names = set(_names(captured))

    def call(*arrays: Any) -> Any:
        match loaded(*arrays):
            case (returned, dict(arguments)) if captured.mutations and arguments.keys() <= names:
                return Written(returned, arguments)
            case result:
                return result

    return _on_arrays(captured, call)


def _on_arrays(captured: Any, run: Run) -> Run:
    """A program on JAX's arrays, called with tensors."""
    import jax

    from functionalize.backends.jax import Written, from_torch, to_torch

    def call(*args: Any) -> Any:
        result = run(*pytree.tree_map_only(torch.Tensor, from_torch, args))
        result = pytree.tree_map_only(jax.Array, to_torch, result)
        if not isinstance(result, Written):
            return result
        given = dict(zip(_names(captured), args, strict=True))
        for name, value in result.arguments.items():
            given[name].copy_(value)
        return result.returned

    return call


def _names(captured: Any) -> list[str]:
    """The parameters of a program."""
    return list(captured.specialization.capture.convention.names)


MODULE = Route("module", lambda captured, _: captured.to_exported_program().module(), ledgers=(RESULTS,))
SAVED = Route("saved", _saved)
CORE_ATEN = Route("core_aten", lambda captured, _: captured.to_core_aten().module(), ledgers=(RESULTS,))
RUN_DECOMPOSITIONS = Route(
    "run_decompositions",
    lambda captured, _: captured.to_exported_program().run_decompositions().module(),
    ledgers=(RESULTS,),
)
ONNX = Route("onnx", _onnx, ("onnxscript", "onnxruntime"), (RESULTS, BACKWARDS))
JAX = Route("jax", _jax, ("jax",), (RESULTS, GRADIENTS, BACKWARDS))
JAX_UNJITTED = Route("jax_unjitted", _jax_unjitted, ("jax",))
STABLEHLO = Route("stablehlo", _stablehlo, ("jax",))
ROUTES = {
    route.name: route for route in (MODULE, SAVED, CORE_ATEN, RUN_DECOMPOSITIONS, ONNX, JAX, JAX_UNJITTED, STABLEHLO)
}
SWEPT = [route.name for route in ROUTES.values() if route.ledgers]
