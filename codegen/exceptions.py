"""What the YAML cannot tell: the entries of exceptions.yaml, and whether each still applies.

Invariant: an exception names its op, its treatment, its reason and a link, and no field that its treatment
does not use. Limits: whether a reason is true is for the tests, which run the ops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from . import classify
from .schema import Schema
from .spec import Entry, SpecError, items

FILE = Path(__file__).with_name("exceptions.yaml")


@dataclass(frozen=True)
class Override:
    """One entry of exceptions.yaml. The head of that file says what the fields mean."""

    op: str
    treatment: str
    reason: str
    link: str
    functional: str | None = None
    args: tuple[str, ...] | None = None
    constants: tuple[tuple[str, object], ...] = ()
    results: Mapping[str, int | None] = field(default_factory=dict)
    returns: tuple[int, ...] | None = None
    when: str | None = None
    quiet: str | None = None
    view: str | None = None
    copy: str | None = None
    since: str | None = None
    until: str | None = None
    file: Path = FILE
    line: int = 0

    def concerns(self, torch_version: str, entries: Mapping[str, Entry]) -> bool:
        """Whether the exception is about this version; of an unknown version its ops tell."""
        version = _version(torch_version)
        if not version:
            return self.op in entries or (self.since is None and self.until is None)
        after_start = self.since is None or _version(self.since) <= version
        return after_start and (self.until is None or version < _version(self.until))

    def error(self, rule: str) -> SpecError:
        return SpecError(self.file, self.line, f"op: {self.op.removeprefix('aten::')}", rule)


def _version(text: str) -> tuple[int, ...]:
    """`2.15.0` as numbers to compare; () for a text that is no version."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


# The fields beside op, treatment, reason and link: those that a treatment needs, and those that it may have.
_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "pair": (frozenset({"functional", "results"}), frozenset({"args", "constants", "returns"})),
    "hidden_write": (frozenset({"functional", "results"}), frozenset({"args", "returns", "when", "quiet"})),
    "conditional": (frozenset({"when"}), frozenset()),
    "view": (frozenset({"view", "copy"}), frozenset()),
    "fresh": (frozenset({"functional"}), frozenset()),
    "harmless": (frozenset(), frozenset()),
    "refuse": (frozenset(), frozenset({"results"})),
}
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
    if treatment not in _FIELDS:
        raise error(f"a treatment is one of {', '.join(_FIELDS)}; {treatment} is not")
    required, optional = _FIELDS[treatment]
    given = item.keys() - _COMMON
    if missing := required - given:
        raise error(f"the treatment {treatment} has {', '.join(sorted(missing))}")
    if surplus := given - required - optional:
        raise error(f"the treatment {treatment} does not use {', '.join(sorted(surplus))}")
    known = {f.name for f in fields(Override)}
    values = {key: _frozen(key, value) for key, value in item.items() if key in known}
    for key in ("op", "functional", "quiet", "copy"):
        if key in values:
            values[key] = f"aten::{values[key]}"
    return Override(**values, file=file, line=line)  # type: ignore[arg-type]  # the keys were checked above


def _frozen(key: str, value: object) -> object:
    if key == "constants" and isinstance(value, dict):
        return tuple((name, _frozen("", constant)) for name, constant in value.items())
    return tuple(value) if isinstance(value, list) else value


# Whether an exception still says something that the text does not; the text is what it has to be for that.
_Applies = Callable[[Override, Entry, "Entry | None"], bool]
_APPLIES: dict[str, tuple[_Applies, str]] = {
    "pair": (
        lambda o, entry, partner: bool(entry.schema.written) and partner is None,
        "a pair is given to a mutating op whose signature finds no partner",
    ),
    "hidden_write": (
        lambda o, entry, partner: bool(_hidden(o, entry.schema)),
        "a hidden write is of an argument that the schema does not declare as written",
    ),
    "conditional": (
        lambda o, entry, partner: bool(entry.schema.written),
        "a conditional write is of an argument that the schema declares as written",
    ),
    "view": (
        lambda o, entry, partner: classify.view_kind(entry) == classify.NO_VIEW,
        "a view kind is given to an op whose schema declares no alias",
    ),
    "fresh": (
        lambda o, entry, partner: classify.view_kind(entry) != classify.NO_VIEW,
        "an op is called fresh whose schema declares an alias",
    ),
    "harmless": (
        lambda o, entry, partner: bool(entry.schema.written),
        "a write is called harmless which the schema declares",
    ),
    "refuse": (
        lambda o, entry, partner: (
            (not entry.composite and partner is None and bool(entry.schema.written))
            or bool(_hidden(o, entry.schema))
        ),
        "an op is refused which writes, does not decompose, and finds no partner",
    ),
}


def _hidden(override: Override, schema: Schema) -> list[str]:
    """The arguments that the exception calls written and the schema does not."""
    return [p.name for p in schema.parameters if p.name in override.results and not p.type.written]


def check_applies(
    override: Override, entries: Mapping[str, Entry], partners: classify.Partners
) -> SpecError | None:
    """Nothing, or why the exception says nothing about these entries."""
    entry = entries.get(override.op)
    if entry is None:
        return override.error("an exception is about an op that exists")
    for other in (override.functional, override.quiet, override.copy):
        if other is not None and other not in entries:
            return override.error(f"an exception names ops that exist; {other} does not")
    names = {p.name for p in entry.schema.parameters}
    used = [*(override.args or ()), *override.results, *([override.when] if override.when else [])]
    if unknown := [name for name in used if name not in names]:
        return override.error(f"an exception names parameters of its op; {', '.join(unknown)} is none")
    applies, rule = _APPLIES[override.treatment]
    if not applies(override, entry, partners.functional(entry)):
        return override.error(f"{rule}; this exception no longer applies, remove it")
    return None
