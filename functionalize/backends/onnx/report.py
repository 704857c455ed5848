"""A page about an ONNX file, in Markdown: what it takes and gives, and what it is made of; or why there is none.

Invariant: the page is written whether or not the file is. Limits: what is known by the time that an export fails.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir

from functionalize.backends.onnx.convention.metadata import Convention
from functionalize.backends.onnx.options import Options

_PACKAGES = ("functionalize", "torch", "onnx", "onnxscript", "onnxruntime")


@dataclass
class Report:
    """What an export has come to so far."""

    options: Options
    done: list[str] = field(default_factory=list)
    convention: Convention | None = None
    model: Any = None  # onnx_ir.Model

    def text(self, error: Exception | None) -> str:
        """The page; ``error``: what the export ended by."""
        options = self.options
        lines = [f"# {'An ONNX model in memory' if options.path is None else options.path}", ""]
        lines += [f"- {step}" for step in self.done]
        lines += [] if error is None else ["- **not written**", "", "## Why", "", "```", str(error), "```"]
        if self.convention is not None and self.model is not None:
            lines += [*self._inputs(self.convention), *self._outputs(self.convention)]
            lines += [*_conditions(self.convention), *self._operators()]
        lines += ["", "## Versions", "", *(f"- {package} {_version(package)}" for package in _PACKAGES)]
        return "\n".join([*lines, ""])

    def _inputs(self, convention: Convention) -> list[str]:
        state = {one.input: f"state `{one.target}`" for one in convention.state}
        rows = [(*_look(value), state.get(value.name, "argument")) for value in self.model.graph.inputs]
        return _table("Inputs", ("name", "type", "size", "what it is"), rows)

    def _outputs(self, convention: Convention) -> list[str]:
        kinds = {one.output: f"the new value of `{one.input}`" for one in convention.state}
        kinds |= {output: f"`{argument}` after the call" for argument, output in convention.writes.items()}
        kinds |= {one.output: "a condition that must be true" for one in convention.checks}
        rows = [(*_look(value), kinds.get(value.name, "result")) for value in self.model.graph.outputs]
        return _table("Outputs", ("name", "type", "size", "what it is"), rows)

    def _operators(self) -> list[str]:
        nodes = onnx_ir.traversal.RecursiveGraphIterator(self.model.graph)
        counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes)
        return _table("Operators", ("operator", "how many"), counts.most_common())


def _conditions(convention: Convention) -> list[str]:
    bounds, conditions = convention.sizes.bounds, convention.sizes.conditions
    lines = [f"- `{name}` is {low} to {'any' if high is None else high}" for name, (low, high) in bounds.items()]
    lines += [f"- `{condition}`" for condition in conditions]
    lines += [f"- `{one.output}`: {' '.join(one.message.split())}" for one in convention.checks]
    return ["", "## Conditions for a call", "", *lines] if lines else []


@contextlib.contextmanager
def reporting(options: Options) -> Iterator[Report]:
    """While something is exported: what it comes to, which becomes a page if one is asked for."""
    report, failure = Report(options), None
    try:
        yield report
    except Exception as error:
        failure = error
        raise
    finally:
        if options.report is not None:
            options.report.parent.mkdir(parents=True, exist_ok=True)
            options.report.write_text(report.text(failure), encoding="utf-8")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [" | ".join(map(str, row)).join(("| ", " |")) for row in (columns, ["---"] * len(columns), *rows)]
    return ["", f"## {title}", "", *(lines if rows else ["none"])]


def _look(value: Any) -> tuple[str, str, str]:
    sizes = "unknown" if value.shape is None else ", ".join(map(str, value.shape)).join("[]")
    return f"`{value.name}`", "unknown" if value.dtype is None else value.dtype.name, sizes


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
