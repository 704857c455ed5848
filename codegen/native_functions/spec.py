"""Reads native_functions.yaml and tags.yaml into entries, each with its file and line.

Invariant: what this returns is well-formed; anything else is one `SpecError` with file, line, text and rule.
Limits: only the fields that the tables rest on are read; the others belong to PyTorch's own C++ generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from .schema import OpName, Schema, SchemaError
from .sources import Source

# The C loader takes a tenth of the time; a PyYAML without it reads the same.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class SpecError(ValueError):
    """An entry that breaks a rule.

    Attributes:
        file: the file.
        line: its line, from 1; 0 for the file as a whole.
        text: what stands there.
        rule: what it had to be.
    """

    def __init__(self, file: Path, line: int, text: str, rule: str) -> None:
        super().__init__(f"{file}:{line}: {rule}\n  text  {text}")
        self.file = file
        self.line = line
        self.text = text
        self.rule = rule


@dataclass(frozen=True)
class Entry:
    """One op of the YAML, or one that its `autogen` line makes (then `generated_from` names the entry)."""

    schema: Schema
    tags: frozenset[str]
    composite: bool
    manual: bool
    autogen: tuple[OpName, ...]
    file: Path
    line: int
    generated_from: OpName | None = None

    @property
    def name(self) -> str:
        return f"aten::{self.schema.name}"

    def error(self, rule: str, text: str | None = None) -> SpecError:
        return SpecError(self.file, self.line, text or f"func: {self.schema}", rule)


@dataclass(frozen=True)
class Spec:
    """All entries of one torch version, by name, in the order of the file."""

    source: Source
    entries: dict[str, Entry] = field(repr=False)


def read(source: Source) -> Spec:
    """Read and check every entry.

    Raises:
        SpecError: an entry is malformed.
    """
    tags = frozenset(_tag_names(source.tags))
    entries: dict[str, Entry] = {}
    for line, item in items(source.functions):
        entry = _entry(source.functions, line, item, tags)
        if earlier := entries.get(entry.name):
            raise entry.error(f"an op stands once; {entry.name} stands at line {earlier.line} too")
        entries[entry.name] = entry
    return Spec(source, entries)


def items(file: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """The mappings of a YAML list, each with its line."""
    loader = _LOADER(file.read_text(encoding="utf-8"))
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.SequenceNode):
            raise SpecError(file, 1, "", "the file is a list of entries")
        items = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise SpecError(file, line, str(error.problem), "the file is YAML") from error
    finally:
        loader.dispose()
    for child, item in zip(node.value, items, strict=True):
        line = child.start_mark.line + 1
        if not isinstance(item, dict):
            raise SpecError(file, line, str(item), "an entry is a mapping")
        yield line, item


def _tag_names(file: Path) -> Iterator[str]:
    for line, item in items(file):
        tag = item.get("tag")
        if not isinstance(tag, str):
            raise SpecError(file, line, str(item), "an entry of the tags has a `tag`")
        yield tag


def _entry(file: Path, line: int, item: dict[str, object], known_tags: frozenset[str]) -> Entry:
    func = item.get("func")
    if not isinstance(func, str):
        raise SpecError(file, line, str(item), "an entry has a `func` with a schema")
    try:
        schema = Schema.parse(func)
        autogen = tuple(OpName.parse(name) for name in _words(item.get("autogen")))
    except SchemaError as error:
        raise SpecError(file, line, f"func: {func}", f"{error.rule}; here {error.text!r}") from error
    entry = Entry(
        schema=schema,
        tags=frozenset(_words(item.get("tags"))),
        composite=_composite(item),
        manual=item.get("manual_cpp_binding") is True,
        autogen=autogen,
        file=file,
        line=line,
    )
    for tag in sorted(entry.tags - known_tags):
        raise entry.error(f"a tag stands in {file.with_name('tags.yaml').name}; {tag!r} does not")
    _check_aliases(entry)
    return entry


def _words(value: object) -> list[str]:
    """A YAML field that is absent, one string of names with commas, or a list of names."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.split(", ")
    return [str(word) for word in value] if isinstance(value, list) else [str(value)]


def _composite(item: dict[str, object]) -> bool:
    """Whether the op has a CompositeImplicitAutograd kernel, and no kernel of its own for CPU.

    Kernels of its own give other bits than the composite one, as that of `silu_backward`, a structured one.
    """
    structured = item.get("structured") is True or item.get("structured_delegate") is not None
    dispatch = item.get("dispatch")
    if structured or not isinstance(dispatch, dict):
        return not structured
    keys = {key for names in dispatch for key in str(names).split(", ")}
    return "CompositeImplicitAutograd" in keys and "CPU" not in keys


def _check_aliases(entry: Entry) -> None:
    """Every alias annotation of a return names one of a parameter, and an in-place op writes its `self`."""
    schema = entry.schema
    declared = {a for p in schema.parameters if p.type.alias for a in p.type.alias.before.split("|")}
    for returned in schema.returns:
        alias = returned.type.alias
        if alias is not None and not declared.issuperset(alias.before.split("|")):
            raise entry.error(f"an alias annotation of a return stands on a parameter; ({alias}) does not")
    if schema.name.inplace and not any(p.name == "self" for p in schema.written):
        raise entry.error("an in-place op writes its `self`, as (a!)")
