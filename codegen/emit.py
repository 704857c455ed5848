"""Writes the tables as Python modules of pure literals, and tells when those on disk have drifted.

Invariant: the same sources give the same bytes; a file is replaced whole, and only when its text changes.
Limits: what the modules mean is up to functionalize.ops.tables, their only reader.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jinja2

from .tables import Tables

GENERATOR = "functionalize.codegen"
COMMAND = "python -m functionalize.codegen emit"
_HERE = Path(__file__).resolve().parent
# In a checkout as in an installed package, `generated` stands beside `codegen`.
GENERATED = _HERE.parent / "generated"
_TEMPLATES = {"rows.py": "rows.py.j2", "reasons.py": "reasons.py.j2"}


def render(tables: Tables) -> dict[str, str]:
    """The text of each generated file, by file name."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["repr"] = repr
    context = {
        "generator": GENERATOR,
        "command": COMMAND,
        "source": tables.source,
        "rows": list(tables.rows.values()),
        "overrides": sorted(tables.declared, key=lambda override: override.op),
    }
    return {name: environment.get_template(file).render(context) for name, file in _TEMPLATES.items()}


def emit(tables: Tables, folder: Path) -> list[Path]:
    """Write the files that differ; return those."""
    changed = []
    for name, text in render(tables).items():
        if _read(folder / name) != text:
            write_atomically(folder / name, text)
            changed.append(folder / name)
    return changed


def drift(tables: Tables, folder: Path) -> Iterator[str]:
    """The lines of a unified diff from the files on disk to what `emit` would write, if any."""
    for name, text in render(tables).items():
        yield from difflib.unified_diff(
            _read(folder / name).splitlines(keepends=True),
            text.splitlines(keepends=True),
            fromfile=str(folder / name),
            tofile="as generated now",
            n=0,
        )


def write_atomically(file: Path, text: str) -> None:
    """Replace a file in one step: whoever reads it meanwhile sees the old text or the new one, never a part.

    Raises:
        OSError: the folder cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.chmod(name, 0o644)  # mkstemp's files are private
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
