"""The options of ``to_onnx``, read and checked before anything is exported.

Invariant: an option that is wrong by itself is an error that says what to do, and nothing has run by then; how many
names there are to give is known when the program is prepared (:func:`named`). Limits: operators are told apart by
their overloads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from functionalize._torch import OpOverload
from functionalize._torch.onnx import DEFAULT_OPSET, OLDEST_OPSET
from functionalize.backends.onnx.convention.metadata import KEY
from functionalize.ops import tables

Call = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Options:
    """What a call of ``to_onnx`` asks for; see :meth:`CapturedProgram.to_onnx`."""

    path: Path | None
    external_data: bool | None = None
    opset: int = DEFAULT_OPSET
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    translations: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    verify: bool = False
    calls: Sequence[Call] = ()  # to verify by; unless given, calls with random numbers
    report: Path | None = None
    check: bool = True

    @classmethod
    def read(cls, path: str | os.PathLike[str] | None, **given: Any) -> Options:
        """The options of a call; ``given``: as it names them.

        Raises:
            TypeError: an option is of another type.
            ValueError: it has no such value, or two of them contradict one another.
            IsADirectoryError: the path is a folder.
        """
        target = None if path is None else Path(path)
        if target is not None and target.is_dir():
            raise IsADirectoryError(f"{target} is a folder\n    try  name a file in it: {target / 'model.onnx'}")
        if target is None and given["external_data"]:
            raise ValueError(
                "external_data=True needs the path of the model: the data are written beside it\n"
                "    try  to_onnx(path, external_data=True)"
            )
        verify, check = given["verify"], bool(given["check"])
        if verify and not check:
            raise ValueError(
                "verify and check=False contradict each other: verify runs the file in ONNX Runtime, and "
                "check=False is for files that it does not load\n"
                "    try  one of the two"
            )
        names = {option: _names(option, given[option]) for option in ("input_names", "output_names")}
        both = [name for name in names["input_names"] or () if name in (names["output_names"] or ())]
        if both:
            raise ValueError(
                f"{both[0]!r} is in input_names and in output_names, but names in a graph are unique\n"
                "    try  other names for the outputs"
            )
        return cls(
            target,
            external_data=given["external_data"],
            opset=_opset(given["opset_version"]),
            input_names=names["input_names"],
            output_names=names["output_names"],
            translations=_translations(given["custom_translation_table"]),
            metadata=_metadata(given["metadata"]),
            verify=bool(verify),
            calls=() if isinstance(verify, bool) else _calls(verify),
            report=_report(given["report"], target),
            check=check,
        )


def named(names: Sequence[str] | None, own: Sequence[str], option: str) -> list[str]:
    """The names that an option gives for what has names of its own; these where it gives none.

    Raises:
        ValueError: it gives more or fewer.
    """
    if names is None:
        return list(own)
    if len(names) != len(own):
        raise ValueError(
            f"{option} has {len(names)} names, but the program has {len(own)}: {', '.join(own) or 'none'}\n"
            "    try  one name for each tensor, in this order"
        )
    return list(names)


def _names(option: str, names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"{option} is {names!r}, which is not a list of names\n    try  a list of names, one for each tensor"
        )
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ValueError(f"{option} contains {twice!r} twice\n    try  a different name for each tensor")
    return tuple(names)


def _opset(version: Any) -> int:
    newest = onnx.defs.onnx_opset_version()
    if version is None:
        return DEFAULT_OPSET
    if type(version) is not int or not OLDEST_OPSET <= version <= newest:
        raise ValueError(
            f"opset_version is {version!r}\n"
            f"    try  {DEFAULT_OPSET}, the default, or another integer from {OLDEST_OPSET} to {newest}"
        )
    return version


def _translations(table: Any) -> dict[Any, Callable[..., Any]]:
    translations = dict(table or {})
    for op, translation in translations.items():
        if not isinstance(op, OpOverload):
            advice = f"{op}.{op.overloads()[0]}" if hasattr(op, "overloads") else "torch.ops.aten.gelu.default"
            raise TypeError(
                f"custom_translation_table has the key {op!r}, which is not an overload of an operator\n"
                f"    try  {advice}"
            )
        if not callable(translation):
            raise TypeError(
                f"custom_translation_table has {translation!r} for {op}, which cannot be called\n"
                "    try  one function of ONNX values, as for torch.onnx.export"
            )
        why = _never_met(op)
        if why:
            raise ValueError(
                f"custom_translation_table has {op}, which never occurs in a captured program\n"
                f"    why  {why}\n"
                "    try  a translation of the operators that it becomes (print program.graph), or a custom "
                "operator around it (torch.library.custom_op)"
            )
    return translations


def _never_met(op: OpOverload) -> str:
    """Why the graph of a captured program never has an operator; nothing where it may."""
    if tables.decomposes(op):
        return "it is decomposed during the capture"
    return "it writes in place, and the graph has its functional variant instead" if tables.row(op).written else ""


def _metadata(given: Any) -> dict[str, str]:
    entries: dict[str, str] = dict(given or {})
    for key, value in entries.items():
        if str(key).partition(".")[0] == KEY:
            raise ValueError(
                f"metadata has the key {key!r}, but keys that begin with {KEY!r} are reserved for the calling "
                "convention\n"
                "    try  another key"
            )
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(
                f"metadata has {key!r}: {value!r}\n"
                "    try  strings for key and value: an ONNX file can hold nothing else"
            )
    return entries


def _calls(given: Any) -> tuple[Call, ...]:
    calls: tuple[Call, ...] = tuple(given)
    for call in calls:
        if not (isinstance(call, tuple) and len(call) == 2 and isinstance(call[0], (tuple, list))
                and isinstance(call[1], Mapping)):  # fmt: skip
            raise TypeError(
                "verify is neither a bool nor a list of calls\n    try  verify=True, or pairs of arguments and "
                "keyword arguments: verify=[((x,), {}), ((y,), {})]"
            )
    if not calls:
        raise ValueError("verify is an empty list\n    try  verify=True, or some calls: verify=[((x,), {})]")
    return calls


def _report(report: Any, path: Path | None) -> Path | None:
    if not report:
        return None
    if report is not True:
        return Path(report)
    if path is None:
        raise ValueError(
            "report=True needs the path of the model: the report is written beside it\n    try  report='model.md'"
        )
    return path.with_name(f"{path.name}.md")
