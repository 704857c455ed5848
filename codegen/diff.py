"""What changes for us between two versions of native_functions.yaml, in Markdown.

Invariant: every op that was added, removed, or changed in a way that the tables see stands in it. Limits: a
renamed op is known by an equal schema and a similar name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .columns import OpRow, ViewKind
from .tables import Tables

_SIMILAR = 0.6  # difflib's ratio of the names; below it, an equal schema means nothing


@dataclass(frozen=True)
class Section:
    """One heading of the report with its lines. `human` is what there is to do about them, if anything."""

    title: str
    lines: tuple[str, ...]
    human: str = ""


def diff(old: Tables, new: Tables, rules: Mapping[str, str]) -> list[Section]:
    """The sections that have something to say, those that need a human first."""
    removed = sorted(old.rows.keys() - new.rows.keys())
    added = sorted(new.rows.keys() - old.rows.keys())
    renamed = _renamed(old, new, removed, added)
    kept = sorted(old.rows.keys() & new.rows.keys())
    sections = [
        Section(
            "New views without a rule",
            tuple(f"{_code(n)}: {new.rows[n].view.value}" for n in _new_views(old, new) if n not in rules),
            "write a view rule, or give the reason in UNSUPPORTED_VIEWS",
        ),
        Section(
            "Mutating ops without a partner",
            tuple(f"{_code(e.text)}: {e.rule}" for e in new.unpaired if e.text not in {u.text for u in old.unpaired}),
            "add an entry to codegen/exceptions.yaml",
        ),
        Section(
            "Exceptions that no longer apply",
            tuple(f"{_code(e.text)}: {e.rule}" for e in new.stale if e.text not in {s.text for s in old.stale}),
            "remove the entry from codegen/exceptions.yaml",
        ),
        Section("Kinds changed", _changed(old, new, kept, _kind), "see what the op writes now"),
        Section("Pairs changed", _changed(old, new, kept, _pair), "see that the new pair computes the same"),
        Section("New views", tuple(f"{_code(n)}: {new.rows[n].view.value}" for n in _new_views(old, new))),
        Section("Ops renamed", tuple(f"{_code(a)} is now {_code(b)}" for a, b in renamed.items())),
        Section("Ops added", tuple(_listed(new, [n for n in added if n not in renamed.values()]))),
        Section("Ops removed", tuple(_listed(old, [n for n in removed if n not in renamed]))),
        Section("Schemas changed", tuple(_schemas(old, new, kept))),
    ]
    return [section for section in sections if section.lines]


def markdown(old: Tables, new: Tables, sections: list[Section]) -> str:
    """The report as Markdown."""
    lines = [
        f"# native_functions.yaml: torch {old.source.torch_version} to torch {new.source.torch_version}",
        "",
        f"{len(old.rows)} ops before, {len(new.rows)} after.",
    ]
    for section in sections:
        lines += ["", f"## {section.title} ({len(section.lines)})", ""]
        if section.human:
            lines += [f"Needs a human: {section.human}.", ""]
        lines += [f"- {line}" for line in section.lines]
    if not sections:
        lines += ["", "Nothing changes."]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`"


def _new_views(old: Tables, new: Tables) -> list[str]:
    """Primitive views that were none, or were not there, before."""
    primitive = (ViewKind.SINGLE, ViewKind.MULTI)
    return [
        name
        for name, row in new.rows.items()
        if row.view in primitive and (name not in old.rows or old.rows[name].view not in primitive)
    ]


def _renamed(old: Tables, new: Tables, removed: list[str], added: list[str]) -> dict[str, str]:
    free: dict[str, list[str]] = {}
    for name in added:
        free.setdefault(_nameless(new, name), []).append(name)
    found = {}
    for name in removed:
        same = free.get(_nameless(old, name), [])
        for match in difflib.get_close_matches(name, same, n=1, cutoff=_SIMILAR):
            found[name] = match
            same.remove(match)
    return found


def _nameless(tables: Tables, name: str) -> str:
    return str(tables.spec.entries[name].schema).partition("(")[2]


def _kind(row: OpRow) -> str:
    writes = ", ".join(name for name, *_ in row.written)
    view = "" if row.view == ViewKind.NONE else f", {row.view.value} view"
    return f"{row.kind.value}{f' (writes {writes})' if writes else ''}{view}{', composite' if row.composite else ''}"


def _pair(row: OpRow) -> str:
    arguments = "" if row.functional_args is None else f"({', '.join(row.functional_args)})"
    copy = f", copied by {row.copy}" if row.copy else ""
    return f"{row.functional or 'none'}{arguments}{copy}"


def _changed(old: Tables, new: Tables, names: list[str], facet: Callable[[OpRow], str]) -> tuple[str, ...]:
    pairs = ((name, facet(old.rows[name]), facet(new.rows[name])) for name in names)
    return tuple(f"{_code(name)}: {before} -> {after}" for name, before, after in pairs if before != after)


def _listed(tables: Tables, names: list[str]) -> Iterator[str]:
    for name in names:
        yield f"{_code(name)}: {_kind(tables.rows[name])}"


def _schemas(old: Tables, new: Tables, names: list[str]) -> Iterator[str]:
    for name in names:
        before, after = old.spec.entries[name].schema, new.spec.entries[name].schema
        if before != after:
            yield f"{_code(str(before))}\n  {_code(str(after))}"
