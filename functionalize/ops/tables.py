"""The row of each operator, by its OpOverload: how it writes, whether it is a view, its functional variant.

Invariant: `row` returns a row for every operator of the running torch, always the same one. If the tables have an
operator, its live row agrees on kind, view, written arguments and returns, unless an exception differs; a test compares
them. The tables match the running torch: if its native_functions.yaml differs from the one that the shipped tables were
generated from, tables for it are made once and kept in the user's cache directory. Limits: a row describes an operator
by its declaration and by codegen's exceptions, not one call of it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from functionalize import codegen
from functionalize.codegen.columns import Kind, OpRow, ViewKind, Written
from functionalize.codegen.native_functions import sources
from functionalize.generated import reasons, rows

__all__ = [
    "UNPAIRED",
    "WRITE_BACKS",
    "Kind",
    "OpOverload",
    "OpRow",
    "ViewKind",
    "Written",
    "acts",
    "decomposes",
    "known_ops",
    "live_row",
    "overload",
    "row",
    "views",
]

OpOverload = type(torch.ops.aten.add.Tensor)
# What an epilogue may call on an input: data first, then the metadata that eager would have left.
WRITE_BACKS = frozenset(
    getattr(torch.ops.aten, name) for name in ("copy_", "resize_", "resize_as_sparse_", "as_strided_", "set_")
)
_LOG = logging.getLogger("functionalize")

# Most of torch's own operators without results check something, or state a fact about sizes; only some act.
_OF_TORCH = frozenset({"aten", "inductor", "prim", "prims", "profiler"})
_ACTING = frozenset({"aten::_print"})

# Operators that write, do not decompose, and have no functional variant: name -> why.
UNPAIRED: Mapping[str, str] = {
    name: reason for name, (treatment, reason, _) in reasons.REASONS.items() if treatment == "refuse"
}


@functools.cache
def row(op: Any) -> OpRow:
    """The row of `op`: from the tables, or from its live schema if they do not have it.

    Example:
        >>> import torch
        >>> row(torch.ops.aten.add_.Tensor).functional
        'aten::add.Tensor'
    """
    text = _texts.get(op.name())
    return live_row(op) if text is None else OpRow.parse(text)


def decomposes(op: Any) -> bool:
    """Whether an operator has a CompositeImplicitAutograd kernel, and no kernel of its own for CPU.

    Example:
        >>> decomposes(torch.ops.aten.matmul.default), decomposes(torch.ops.aten.silu_backward.default)
        (True, False)
    """
    name = "CompositeImplicitAutograd"
    try:
        if op.has_kernel_for_dispatch_key("CPU"):
            return False
        return any(key.name == name for key in op.py_kernels) or bool(op.has_kernel_for_dispatch_key(name))
    except RuntimeError:  # operators like prim::device are registered with TorchScript, not with the dispatcher
        return False


def views(op: Any) -> bool:
    """Whether what `op` returns may share memory with its argument."""
    return row(op).view is not ViewKind.NONE


def live_row(op: Any) -> OpRow:
    """The row that the live schema of `op` gives. It has no functional variant, since a schema does not name one.

    Example:
        >>> import torch
        >>> add = live_row(torch.ops.aten.add_.Tensor)
        >>> add.kind, [written.name for written in add.written]
        (<Kind.INPLACE: 'inplace'>, ['self'])
    """
    written = tuple(
        Written(argument.name, None if argument.kwarg_only else index, None, _is_list(argument.type))
        for index, argument in enumerate(op._schema.arguments)
        if _written_alias(argument) is not None
    )
    return OpRow(
        name=op.name(),
        kind=_kind(op, written),
        view=_view_kind(op),
        written=written,
        returns=_returns(op),
        composite=decomposes(op),
        random=torch.Tag.nondeterministic_seeded in op.tags,
    )


def _is_list(type_: Any) -> bool:
    """Whether an argument of a type is a list, or an optional list."""
    return isinstance(type_.getElementType() if isinstance(type_, torch.OptionalType) else type_, torch.ListType)


def _written_alias(value: torch.Argument) -> set[str] | None:
    """The names under which the schema declares an argument or return as written; None if it does not."""
    return value.alias_info.before_set if value.alias_info is not None and value.alias_info.is_write else None


def _kind(op: Any, written: Sequence[Written]) -> Kind:
    if not written:
        return Kind.FUNCTIONAL
    base = op._schema.name.rpartition("::")[2]
    inplace_dunder = base.startswith("__i") and base.endswith("__")
    if inplace_dunder or (base.endswith("_") and not base.endswith("__")):
        return Kind.INPLACE
    return Kind.OUT if any(argument.position is None for argument in written) else Kind.MUTABLE


def _view_kind(op: Any) -> ViewKind:
    if torch.Tag.inplace_view in op.tags:
        return ViewKind.INPLACE_VIEW
    aliased = [r for r in op._schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    if decomposes(op) and (aliased or torch.Tag.maybe_aliasing_or_mutating in op.tags):
        return ViewKind.MAYBE_ALIAS
    if not aliased:
        return ViewKind.NONE
    return ViewKind.MULTI if any(isinstance(r.type, torch.ListType) for r in aliased) else ViewKind.SINGLE


def _returns(op: Any) -> tuple[int, ...]:
    """For each return its index, or -(k+1) if it is the written argument k itself."""
    written = [alias for alias in map(_written_alias, op._schema.arguments) if alias is not None]
    returned = enumerate(map(_written_alias, op._schema.returns))
    return tuple(-(written.index(alias) + 1) if alias in written else index for index, alias in returned)


def acts(op: object) -> bool:
    """Whether `op` is called only for its effects: it has no results, and its schema does not declare a write.

    Example:
        >>> acts(torch.ops.aten._print.default), acts(torch.ops.aten._assert_async.default)
        (True, False)
    """
    if not isinstance(op, OpOverload) or op._schema.returns or op._schema.is_mutable:
        return False
    return op.namespace not in _OF_TORCH or op.name() in _ACTING


@functools.cache
def overload(name: str) -> Any:
    """The operator of a name, in the form of rows.

    Raises:
        AttributeError: this torch has no such operator.

    Example:
        >>> overload("aten::add.Tensor")
        <OpOverload(op='aten.add', overload='Tensor')>
    """
    namespace, _, qualified = name.partition("::")
    base, _, overload_name = qualified.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload_name or "default")


def known_ops() -> Iterable[str]:
    """The names of all operators in the tables."""
    return _texts.keys()


def _installed_rows() -> str:
    """The rows for the installed torch: shipped, cached, or made now."""
    try:
        source = sources.installed_source()
    except FileNotFoundError as error:
        _LOG.warning(
            ("functionalize uses its tables for torch %s, which are not checked against the installed version: %s"),
            rows.TORCH_VERSION,
            error,
        )
        return rows.ROWS
    sha256 = source.sha256
    if sha256 == rows.SOURCES_SHA256:
        return rows.ROWS
    folder = _cache_folder(source)
    cached = None if folder is None else _read_cached(folder, sha256)
    return _make(source, folder) if cached is None else cached


def _cache_folder(source: sources.Source) -> Path | None:
    """Where tables for the source are kept; None if there is no home directory.

    Its name has a hash of the source and the generator, so that a change of either gives another folder.
    """
    root = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    try:
        parent = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    digest = hashlib.sha256(source.sha256.encode())
    for file in sorted(Path(codegen.__file__).parent.rglob("*")):
        if file.suffix in (".py", ".yaml", ".j2"):
            digest.update(file.read_bytes())
    return parent / "functionalize" / f"tables-{source.torch_version}-{digest.hexdigest()[:16]}"


def _read_cached(folder: Path, sha256: str) -> str | None:
    """The cached rows; None if these sources have no cache. Literals are read; the file is not run."""
    try:
        module = ast.parse((folder / "rows.py").read_text(encoding="utf-8"))
        constants = {
            ast.unparse(node.targets[0]): ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign)
        }
        return constants["ROWS"] if constants["SOURCES_SHA256"] == sha256 else None
    except (OSError, SyntaxError, ValueError, KeyError):  # absent, or not a file that we wrote
        return None


def _make(source: sources.Source, folder: Path | None) -> str:
    """Make rows for the source, keep them for the next process where that is possible, and say so."""
    # Imported only here: yaml and jinja2 take longer than all the rest of this module.
    from functionalize.codegen import emit, exceptions, tables

    versions = (
        f"torch {source.torch_version} is installed, but functionalize's tables are for torch {rows.TORCH_VERSION}"
    )
    try:
        made = tables.build(source, exceptions.load())
    except ValueError as error:
        _LOG.warning("%s; tables for the installed version cannot be generated, so these are used: %s", versions, error)
        return rows.ROWS
    try:
        if folder is None:
            raise FileNotFoundError("no home directory")
        emit.emit(made, folder)
        outcome = f"new tables are generated in {folder}"
    except OSError as error:
        outcome = f"new tables are generated for this process only ({error}; set XDG_CACHE_HOME to keep them)"
    _LOG.warning("%s: %s", versions, outcome)
    return "".join(f"{row}\n" for row in made.rows.values())


_texts: dict[str, str] = {line.partition(" ")[0]: line for line in _installed_rows().splitlines()}
