"""Reads exceptions.yaml, what native_functions.yaml cannot tell, and finds the entries that no longer apply.

Invariant: an exception names its op, its treatment, its reason and a link, and no field that its treatment
does not use. Limits: what an exception does to a row is said in treatments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from . import classify
from .columns import ViewKind
from .native_functions.spec import Entry, SpecError, items
from .treatments import TREATMENTS, Override

FILE = Path(__file__).with_name("exceptions.yaml")
_NEEDED = frozenset({"op", "treatment", "reason", "link"})
_COMMON = _NEEDED | {"since", "until"}


def load(file: Path = FILE) -> list[Override]:
    """Read the exceptions.

    Raises:
        SpecError: an entry is malformed.
    """
    found: dict[str, Override] = {}
    for line, item in items(file):
        override = _override(file, line, item)
        if (earlier := found.setdefault(override.op, override)) is not override:
            raise override.error(f"an op has one exception; it has one at line {earlier.line} too")
    return list(found.values())


def _override(file: Path, line: int, item: dict[str, object]) -> Override:
    def error(rule: str) -> SpecError:
        return SpecError(file, line, f"op: {item.get('op')}", rule)

    for key in sorted(_NEEDED):
        if not isinstance(item.get(key), str):
            raise error(f"an exception has {key}, a text")
    treatment = str(item["treatment"])
    if treatment not in TREATMENTS:
        raise error(f"a treatment is one of {', '.join(TREATMENTS)}; {treatment} is not")
    needs, may = TREATMENTS[treatment].needs, TREATMENTS[treatment].may
    given = item.keys() - _COMMON
    if missing := needs - given:
        raise error(f"the treatment {treatment} has {', '.join(sorted(missing))}")
    if surplus := given - needs - may:
        raise error(f"the treatment {treatment} does not use {', '.join(sorted(surplus))}")
    if item.get("view") not in (None, "single", "multi"):
        raise error("a view is single or multi")
    known = {f.name for f in fields(Override)}
    values = {key: _frozen(key, value) for key, value in item.items() if key in known}
    for key in ("op", "functional", "non_mutating_op", "copy"):
        if key in values:
            values[key] = f"aten::{values[key]}"
    return Override(**values, file=file, line=line)  # type: ignore[arg-type]  # the keys were checked above


def _frozen(key: str, value: object) -> object:
    if key == "constants" and isinstance(value, dict):
        return tuple((name, _frozen("", constant)) for name, constant in value.items())
    if key == "view":
        return ViewKind(value)
    return tuple(value) if isinstance(value, list) else value


def check_applies(override: Override, entries: Mapping[str, Entry], partners: classify.Partners) -> SpecError | None:
    """Nothing, or why the exception says nothing about these entries."""
    entry = entries.get(override.op)
    if entry is None:
        return override.error("an exception is about an op that exists")
    for other in (override.functional, override.non_mutating_op, override.copy):
        if other is not None and other not in entries:
            return override.error(f"an exception names ops that exist; {other} does not")
    names = {p.name for p in entry.schema.parameters}
    used = [*(override.args or ()), *override.results, *([override.when] if override.when else [])]
    if unknown := [name for name in used if name not in names]:
        return override.error(f"an exception names parameters of its op; {', '.join(unknown)} is none")
    treatment = TREATMENTS[override.treatment]
    if not treatment.applies(override, entry, partners.functional(entry)):
        return override.error(f"{treatment.rule}; this exception no longer applies, remove it")
    return None
