"""What each operator is, by its OpOverload: how it writes, whether it views, what computes the same without writing.

Invariant: `row` answers for every operator of the running torch, and the same operator always gets the same row. The
tables fit the torch that runs: where its native_functions.yaml is another than the one that the shipped tables were
generated from, tables for it are made once and kept in the user's cache directory. Limits: a row says what an operator
does by its declaration and by codegen's exceptions, not what one call of it does.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from . import live_schema
from ._torch import OpOverload
from .codegen import sources
from .generated import reasons, rows
from .live_schema import Kind, OpRow, ViewKind, Written

__all__ = ["UNPAIRED", "Kind", "OpRow", "ViewKind", "Written", "known_ops", "overload", "row"]

_LOG = logging.getLogger("functionalize")
_Literal = tuple[Any, ...]

# Operators that write, do not decompose, and have no functional variant: name -> why.
UNPAIRED: Mapping[str, str] = {
    name: reason for name, (treatment, reason, _) in reasons.REASONS.items() if treatment == "refuse"
}


def row(op: OpOverload) -> OpRow:
    """What `op` is: from the tables, or from its live schema where they do not know it.

    Example:
        >>> import torch
        >>> row(torch.ops.aten.add_.Tensor).functional
        'aten::add.Tensor'
    """
    found = _rows.get(op)
    if found is None:
        literal = _literals.get(op.name())
        found = _rows[op] = live_schema.row(op) if literal is None else _parse(*literal)
    return found


@functools.cache
def overload(name: str) -> OpOverload:
    """The operator of a name as rows write it.

    Raises:
        AttributeError: this torch has no such operator.

    Example:
        >>> overload("aten::add.Tensor")
        <OpOverload(op='aten.add', overload='Tensor')>
    """
    namespace, _, qualified = name.partition("::")
    base, _, overload_name = qualified.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), base), overload_name or "default")
    return found  # type: ignore[no-any-return]  # torch.ops makes its attributes up


def known_ops() -> Iterable[str]:
    """The names of all operators in the tables."""
    return _literals.keys()


def _parse(
    name: str,
    kind: str,
    composite: bool = False,
    random: bool = False,
    returns: tuple[int, ...] = (0,),
    view: str = "none",
    copy: str | None = None,
    written: tuple[tuple[str, int | None, int | None, bool, str | None], ...] = (),
    functional: str | None = None,
    functional_args: tuple[str, ...] | None = None,
    options: tuple[str, ...] = (),
    constants: tuple[tuple[str, object], ...] = (),
    quiet: str | None = None,
) -> OpRow:
    """One generated row; the parameters are the columns of codegen's `Row`, and have its defaults."""
    return OpRow(
        name=name,
        kind=Kind(kind),
        view=ViewKind(view),
        written=tuple(Written(w[1], w[0], *w[2:]) for w in written),
        functional=functional,
        functional_args=functional_args,
        returns=returns,
        copy=copy,
        composite=composite,
        random=random,
        options=options,
        constants=constants,
        quiet=quiet,
    )


def _matching_rows() -> Iterable[_Literal]:
    """The rows for the installed torch: shipped, cached, or made now."""
    try:
        source = sources.installed_source()
    except FileNotFoundError:
        _LOG.warning(
            "functionalize: this torch comes without native_functions.yaml; the tables of torch %s are used",
            rows.TORCH_VERSION,
        )
        return rows.ROWS
    if source.sha256 == rows.SOURCES_SHA256:
        return rows.ROWS
    cached = _cache_folder(source)
    return (_read_cached(cached, source) if cached else None) or _make(source, cached)


def _cache_folder(source: sources.Source) -> Path | None:
    """Where tables for the source are kept; None where there is no home directory.

    The name covers the source and the generator, so that a change of either is another folder.
    """
    if os.name == "nt":
        root = os.environ.get("LOCALAPPDATA")
    else:
        root = os.environ.get("XDG_CACHE_HOME")
    try:
        parent = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    digest = hashlib.sha256(source.sha256.encode())
    for file in sorted(Path(sources.__file__).parent.rglob("*")):
        if file.suffix in (".py", ".yaml", ".j2"):
            digest.update(file.read_bytes())
    return parent / "functionalize" / f"tables-{source.torch_version}-{digest.hexdigest()[:16]}"


def _read_cached(folder: Path, source: sources.Source) -> Iterable[_Literal] | None:
    """The cached rows; None where there are none for this source."""
    file = folder / "rows.py"
    if not file.is_file():
        return None
    spec = importlib.util.spec_from_file_location("functionalize._cached_rows", file)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Iterable[_Literal] = module.ROWS
    return found if module.SOURCES_SHA256 == source.sha256 else None


def _make(source: sources.Source, folder: Path | None) -> Iterable[_Literal]:
    """Make rows for the source, keep them for the next process where that is possible, and say so once."""
    # Imported here alone: yaml and jinja2 take longer than all the rest of this module.
    from .codegen import emit, exceptions, tables

    versions = f"made for torch {rows.TORCH_VERSION}, and torch {source.torch_version} is installed"
    try:
        made = tables.build(source, exceptions.load())
    except ValueError as error:
        _LOG.warning(
            "functionalize: its tables are %s, whose native_functions.yaml it cannot read, so they are used as they "
            "are; use a torch that it supports. %s",
            versions,
            error,
        )
        return rows.ROWS
    try:
        if folder is None:
            raise FileNotFoundError("there is no home directory")
        emit.emit(made, folder)
        kept = f"tables for this one are in {folder} now"
    except OSError as error:
        kept = f"tables for this one cannot be kept ({error}), so each process makes them; set XDG_CACHE_HOME"
    _LOG.warning("functionalize: its tables are %s; %s", versions, kept)
    return [row.values for row in made.rows.values()]


_rows: dict[OpOverload, OpRow] = {}
_literals: dict[str, _Literal] = {literal[0]: literal for literal in _matching_rows()}
