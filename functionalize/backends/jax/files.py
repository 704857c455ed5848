"""Files of JAX programs: what ``jax.export`` serialized, and the first state; in two files, or both in one.

Of two, the state lies beside the program as an ``npz`` of the same name. One file is an ``npz`` too: the program under
``program``, the state under ``state/`` and its keys.

Invariant: files are there whole or not at all. Limits: state of dtypes that NumPy lacks is kept by its bytes.
"""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_PROGRAM, _STATE = "program", "state/"

Arrays = Mapping[str, Any]


def write_two(path: Path, program: bytes, state: Arrays) -> None:
    """Write the program to ``path``, and the state beside it."""
    if path.suffix == ".npz":
        raise ValueError(
            f"{path} has the ending of the file for the first state: use another ending for the program, such as "
            ".stablehlo"
        )
    _write({path.with_suffix(".npz"): _archive(state), path: program})


def write_one(path: Path, program: bytes, state: Arrays) -> None:
    """Write both to ``path``."""
    bits = np.frombuffer(program, np.uint8)
    _write({path: _archive({_PROGRAM: bits, **{_STATE + name: value for name, value in state.items()}})})


def read(path: Path) -> tuple[bytes, dict[str, Any] | None]:
    """The program, and the state where it is in the same file.

    Raises:
        OSError: there is no such file.
        ValueError: it is cut off.
    """
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        arrays = _arrays(path, path)
        if _PROGRAM not in arrays:
            raise ValueError(f"{path} contains no program: it is a file of state, or a file of another kind")
        program = arrays.pop(_PROGRAM).tobytes()
        return program, {name.removeprefix(_STATE): value for name, value in arrays.items()}
    if content[:2] == b"PK":
        raise ValueError(f"{path} is not complete\n    try  write it again")
    return content, None


def state_beside(path: Path) -> dict[str, Any]:
    """The state of a program that is alone in its file.

    Raises:
        ValueError: it is not there.
    """
    return _arrays(path.with_suffix(".npz"), path)


def _arrays(path: Path, of: Path) -> dict[str, Any]:
    try:
        with np.load(path) as found:
            return dict(found)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise ValueError(f"the first state of {of} is not in {path}: {error}") from error


def _archive(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{name: np.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]
    return file.getvalue()


def _write(files: Mapping[Path, bytes]) -> None:
    """Write all files beside their places, and put them there when all are whole."""
    written: dict[Path, str] = {}
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
                written[path] = file.name
                file.write(content)
        for path, name in written.items():
            os.replace(name, path)
    finally:
        for name in written.values():
            Path(name).unlink(missing_ok=True)
