"""Programs as StableHLO files, which ``jax.export`` loads without torch and without this package.

A program is two files: what ``jax.export`` serialized, and beside it the first state as an ``npz`` of the same name.

Invariant: a file is there whole or not at all. Limits: a file runs with the sizes that it was written for, and on the
platforms that it was written for.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from functionalize.backends.array_program import Written
from functionalize.backends.jax.program import JaxProgram, to_jax

if TYPE_CHECKING:
    from functionalize.runtime.captured_program import CapturedProgram


def write_stablehlo(program: CapturedProgram, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write a captured program as StableHLO: ``(state, *args, **kwargs) -> (new_state, outputs)``.

    Args:
        program: the program.
        path: of the file; the first state is written beside it, as ``npz``.
        options: those of :meth:`CapturedProgram.to_jax`, and ``platforms`` as ``jax.export`` takes them.

    Returns:
        The path of the file.

    Raises:
        UnsupportedProgramError: JAX cannot run the program; nothing is written.
    """
    platforms = options.pop("platforms", None)
    return write(to_jax(program, **options), path, platforms=platforms)


def write(program: JaxProgram, path: str | os.PathLike[str], *, platforms: Any = None) -> Path:
    """Write a program that is JAX's already; see :func:`write_stablehlo`."""
    path = Path(path)
    if path.suffix == ".npz":
        raise ValueError(f"{path} is where the first state goes: give the program another ending, as .stablehlo")
    state, args, kwargs = program.example()

    def function(state: Any, *args: Any, **kwargs: Any) -> Any:
        new, outputs = program(state, *args, **kwargs)
        return new, tuple(outputs) if isinstance(outputs, Written) else outputs

    with jax.enable_x64(True):
        exported = export.export(jax.jit(function), platforms=platforms)(state, *args, **kwargs)
        content = exported.serialize()
    first = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in program.initial_state.items()}
    np.savez(first, **arrays)
    _write(path, bytes(content))
    _write(path.with_suffix(".npz"), first.getvalue())
    return path


def load(path: str | os.PathLike[str]) -> StableHloProgram:
    """A program that was written by :func:`write_stablehlo`, with its state threaded from call to call.

    Raises:
        ValueError: the file is none of these, is cut off, or its state is not there.
    """
    path = Path(path)
    try:
        exported = export.deserialize(bytearray(path.read_bytes()))
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} is no program that jax.export wrote, is cut off, or is of a version that this JAX does not read: "
            f"{type(error).__name__} {error}\n    try  write it again with to_stablehlo"
        ) from error
    try:
        with np.load(path.with_suffix(".npz")) as found:
            arrays = dict(found)
    except (OSError, ValueError) as error:
        raise ValueError(f"the first state of {path} is not in {path.with_suffix('.npz')}: {error}") from error
    state, *_ = jax.tree_util.tree_unflatten(exported.in_tree, exported.in_avals)[0]
    if arrays.keys() != state.keys():
        raise ValueError(f"{path.with_suffix('.npz')} is not the state of {path}: it has {', '.join(arrays)}")
    with jax.enable_x64(True):
        first = {name: jnp.asarray(array.view(state[name].dtype)) for name, array in arrays.items()}
    return StableHloProgram(exported, first)


class StableHloProgram:
    """A program from a file, called as the original is; ``state`` is what the calls so far left.

    Example:
        >>> import tempfile, torch
        >>> from functionalize import capture
        >>> program = capture(torch.nn.BatchNorm1d(2), (torch.ones(3, 2),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = load(write_stablehlo(program, f"{folder}/norm.stablehlo"))
        >>> loaded(np.ones((3, 2), np.float32)).shape, int(loaded.state["num_batches_tracked"])
        ((3, 2), 1)
    """

    def __init__(self, exported: Any, state: Mapping[str, Any]) -> None:
        self.exported, self.state = exported, dict(state)
        self._call: Callable[..., Any] = jax.jit(exported.call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the program gives for arrays; a pair with the written arguments where it writes to some."""
        with jax.enable_x64(True):
            self.state, outputs = self._call(self.state, *args, **kwargs)
        return outputs


def _write(path: Path, content: bytes) -> None:
    """Write a file beside its place, and put it there when it is whole."""
    with _beside(path) as (file, name):
        file.write(content)
        file.close()
        os.replace(name, path)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[tuple[Any, str]]:
    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)  # noqa: SIM115
    try:
        yield file, file.name
    finally:
        file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.name)
