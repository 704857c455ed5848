"""The options of `export` for ONNX files: as those of `CapturedProgram.to_onnx`, under the same names.

Invariant: with another format they are an error, and not left out. Limits: calls to verify by are made of the inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from functionalize.cli.shared import Job
from functionalize.cli.targets import TargetError, find

_CALLS = 3  # that the file is held against the original by


@dataclass(frozen=True)
class OnnxOptions:
    """What was given."""

    opset_version: int | None
    input_names: str | None
    output_names: str | None
    custom_translation_table: str | None
    metadata: tuple[str, ...]
    external_data: bool | None
    verify: bool
    report: str | None
    check: bool

    def arguments(self, job: Job) -> dict[str, Any]:
        """What `to_onnx` takes.

        Raises:
            TargetError: an entry cannot be read, or there is no such table.
        """
        table = None if self.custom_translation_table is None else find(self.custom_translation_table)
        return {
            "opset_version": self.opset_version,
            "input_names": _names(self.input_names),
            "output_names": _names(self.output_names),
            "custom_translation_table": table() if callable(table) else table,
            "metadata": dict(map(_entry, self.metadata)),
            "external_data": self.external_data,
            "verify": [job.inputs(number, sizes=True) for number in range(_CALLS)] if self.verify else False,
            "report": self.report or False,
            "check": self.check,
        }

    def refused(self, form: str) -> dict[str, Any]:
        """Nothing, for another format.

        Raises:
            click.UsageError: one of the options was given.
        """
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if value != _WITHOUT.get(option.name):
                said = f"--{'no-' * (value is False)}{option.name.replace('_', '-')}"
                raise click.UsageError(
                    f"{said} is for ONNX files, but this is {form}: remove it, or write -o FILE.onnx"
                )
        return {}


_WITHOUT: dict[str, Any] = {"metadata": (), "verify": False, "check": True}  # others: None

_OPTIONS = [
    click.option("--opset-version", type=int, help="Version of ONNX's operators."),
    click.option("--input-names", metavar="NAME,...", help="Names for the arguments, one for each tensor."),
    click.option("--output-names", metavar="NAME,...", help="Names for the results, one for each tensor."),
    click.option(
        "--custom-translation-table",
        metavar="MODULE:OBJECT",
        help="Translations of operators: a dict, or a function that returns one.",
    ),
    click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Add an entry to the file's metadata."),
    click.option(
        "--external-data/--no-external-data", default=None, help="Put the weights into a separate file, FILE.data."
    ),
    click.option(
        "--verify", is_flag=True, help="Compare three calls of the file with the original before it is written."
    ),
    click.option("--report", type=click.Path(dir_okay=False), metavar="FILE.md", help="Write a page about the file."),
    click.option("--check/--no-check", default=True, help="Check that ONNX Runtime loads the file."),
]


def with_onnx_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options, as ``onnx``."""

    @functools.wraps(command)
    def wrapper(*args: Any, **given: Any) -> Any:
        options = OnnxOptions(**{option.name: given.pop(option.name) for option in dataclasses.fields(OnnxOptions)})
        return command(*args, onnx=options, **given)

    for option in reversed(_OPTIONS):
        wrapper = option(wrapper)
    return wrapper


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _entry(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise TargetError(f"cannot read the entry {text!r} of --metadata: write KEY=VALUE")
    return key, value
