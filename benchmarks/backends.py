"""Which state survives which exporter: three calls of each program against eager, ours beside torch's.

Prints the table of docs/how-to/choose-a-route.md. "right": three calls equal eager; "wrong from call n": without an
error; else how it fails. Limits: programs of tests/support/export_programs.py, on CPU; torchax only where it is
installed.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from functionalize import capture
from functionalize.backends.jax import from_torch, to_torch
from tests.support.export_programs import PROGRAMS, made
from tests.support.routes import JAX, ONNX, SAVED, Route

Run = Callable[..., Any]


class _AsModule(torch.nn.Module):
    """What torch.export takes: a function that is no module becomes one."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _module(program: Any) -> torch.nn.Module:
    return program if isinstance(program, torch.nn.Module) else _AsModule(program)


def _ours(route: Route) -> Callable[[Any, tuple[Any, ...], Path], Run]:
    return lambda program, args, folder: route(capture(program, args), folder)


def _torch(program: Any, args: tuple[Any, ...], folder: Path) -> Run:
    file = folder / "torch.pt2"
    torch.export.save(torch.export.export(_module(program), args), file)
    module: Run = torch.export.load(file).module()
    return module


def _torch_onnx(program: Any, args: tuple[Any, ...], folder: Path) -> Run:
    import onnxruntime

    file = str(folder / "torch.onnx")
    torch.onnx.export(_module(program), args, file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*given: Any) -> Any:
        arrays = dict(zip(names, (value.numpy() for value in given), strict=False))
        found = [torch.from_numpy(array) for array in session.run(None, arrays)]
        return found[0] if len(found) == 1 else found

    return run


def _torchax(program: Any, args: tuple[Any, ...], folder: Path) -> Run:
    import jax
    import torchax  # type: ignore[import-not-found]

    state, function = torchax.extract_jax(_module(program))
    jitted = jax.jit(function)
    return lambda *given: [to_torch(leaf) for leaf in jax.tree.leaves(jitted(state, tuple(map(from_torch, given))))]


ROUTES: dict[str, Callable[..., Run]] = {
    "ExportedProgram": _ours(SAVED),
    "`torch.export`": _torch,
    "ONNX": _ours(ONNX),
    "`torch.onnx`": _torch_onnx,
    "JAX": _ours(JAX),
    "`torchax`": _torchax,
}


def outcome(name: str, route: Callable[..., Run]) -> str:
    """What becomes of one program on one route."""
    program, inputs = made(name)
    twin, _ = made(name)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            run = route(program, inputs(), Path(folder))
        except Exception:
            return "refused"
        for call in range(3):
            given = inputs()
            mine = copy.deepcopy(given)
            expected = twin(*given)
            try:
                found = run(*mine)
            except Exception:
                return f"fails in call {call + 1}"
            try:
                leaves = [torch.utils._pytree.tree_leaves(value) for value in (found, expected)]
                pairs = [[torch.as_tensor(leaf) for leaf in some if leaf is not None] for some in leaves]
                torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-5, check_dtype=False)
                torch.testing.assert_close(mine, given)
            except AssertionError:
                return f"**wrong from call {call + 1}**"
    return "right"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    print("| program |", " | ".join(ROUTES), "|")
    print("|---|" + "---|" * len(ROUTES))
    for name in PROGRAMS:
        print(f"| {name} |", " | ".join(outcome(name, route) for route in ROUTES.values()), "|", flush=True)


if __name__ == "__main__":
    main()
