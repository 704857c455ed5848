"""Makes the data of a report from a captured program.

Invariant: the program is only looked at. Limits: a node or event whose line is not known stands without a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.fx import Graph
from torch.fx import Node as FxNode

from functionalize._torch import is_symbolic
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.history import AliasHistory, BaseRecord
from functionalize.call_stack import Location
from functionalize.report import model
from functionalize.report.code import bytes_of, code_of, count, look_of, place_of
from functionalize.report.source import Frame, Sources, short

_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}
_MUTATIONS = (OutputKind.PARAMETER_MUTATION, OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class Program(Protocol):
    """What a report needs of a captured program."""

    graph: Graph
    remove: str

    @property
    def signature(self) -> ExportGraphSignature:
        """What each input and output is."""

    @property
    def alias_history(self) -> AliasHistory:
        """Every storage that was viewed or written."""

    @property
    def mutations(self) -> Any:
        """Every write to an input or to state."""


def build(
    program: Program,
    title: str = "",
    metadata: Sequence[tuple[str, str]] = (),
    shared: Sequence[Sequence[str]] = (),
) -> model.Report:
    """The report of a program; without a title it is named after what was captured.

    ``metadata``: tensors that get another size, strides or storage, each with the op that does it. ``shared``: the
    names of graph inputs that lie in one storage, storage by storage.
    """
    return _Builder(program, shared).report(title, metadata)


class _Builder:
    def __init__(self, program: Program, shared: Sequence[Sequence[str]]) -> None:
        self._program, self._sources = program, Sources()
        self._sharing = {name: list(group) for group in shared for name in group}
        self._fx = list(program.graph.nodes)
        self._numbers = {node.name: number for number, node in enumerate(self._fx)}
        self._inputs = {getattr(spec.arg, "name", ""): spec for spec in program.signature.input_specs}
        self._outputs = list(program.signature.output_specs)
        self._names = {name: spec.target or name for name, spec in self._inputs.items()}
        self._targets: dict[str, list[str]] = {}  # of write-backs, by the node that they copy
        for spec in self._outputs:
            if spec.kind in _MUTATIONS:
                self._targets.setdefault(spec.arg.name, []).append(str(spec.target))

    def report(self, title: str, metadata: Sequence[tuple[str, str]]) -> model.Report:
        nodes = tuple(self._nodes())
        storages = tuple(self._storages())
        functions = self._sources.functions()
        lines = {line.number: line for function in functions for line in function.lines if line and line.number >= 0}
        return model.Report(
            title or self._title(),
            " · ".join([f"torch {torch.__version__}", _REMOVED[self._program.remove], *self._symbols()]),
            tuple(self._amounts()),
            nodes,
            storages,
            functions,
            lines,
            self._sources.chains,
            tuple(self._mutations(lines)),
            tuple(metadata),
        )

    def _title(self) -> str:
        first = self._sources.first()
        if first is None:
            return "Captured program"
        if first.function != "forward":
            return first.function
        stacks = (node.meta.get("nn_module_stack") for node in self._fx)
        kinds = [next(iter(stack.values()))[1] for stack in stacks if stack]
        return kinds[0].rpartition(".")[2] if kinds else first.function

    def _symbols(self) -> Iterator[str]:
        values = (_value(node) for node in self._fx if node.op == "placeholder")
        if any(is_symbolic(value) for value in values if isinstance(value, torch.Tensor)):
            yield "bytes for the sizes of the example inputs"

    # Nodes

    def _nodes(self) -> Iterator[model.Node]:
        for number, node in enumerate(self._fx):
            if node.op == "placeholder":
                yield self._input(number, node)
            elif node.op != "output":
                yield self._op(number, node)
        results = next(node for node in self._fx if node.op == "output").args[0]
        for place, (value, spec) in enumerate(zip(results, self._outputs, strict=True)):
            note = f"written back to {spec.target}" if spec.kind in _MUTATIONS else "returned"
            name = value.name if isinstance(value, FxNode) else repr(value)
            number = len(self._fx) + place
            yield model.Node(number, "output", note, name, look_of(_value(value)), "", None, (("outputs", ""),))

    def _input(self, number: int, node: FxNode) -> model.Node:
        spec = self._inputs.get(node.name)
        kind = _KINDS.get(spec.kind, "input") if spec is not None else "input"
        return model.Node(
            number,
            "input",
            node.name,
            self._names.get(node.name, node.name),
            look_of(_value(node)),
            kind,
            None,
            _INPUTS,
        )

    def _op(self, number: int, node: FxNode) -> model.Node:
        chain = self._sources.dispatched(number, node.meta.get("stack_trace") or "")
        targets = self._targets.get(node.name)
        note = f"written back to {', '.join(targets)}" if targets else ""
        function = self._sources.function(chain)
        path = self._modules(node) or ((function,) if function else _UNKNOWN)
        return model.Node(number, "op", node.name, code_of(node), look_of(_value(node)), note, chain, path)

    def _modules(self, node: FxNode) -> tuple[tuple[str, str], ...]:
        """The modules whose forward made a node, outermost first, each with its class."""
        stack = node.meta.get("nn_module_stack") or {}
        return tuple((path or kind.rpartition(".")[2], kind.rpartition(".")[2]) for path, kind in stack.values())

    # Storages

    def _storages(self) -> Iterator[model.Storage]:
        """The storages: an input's memory is one, also where the program let go of all views and came back later."""
        groups: dict[Any, list[BaseRecord]] = {}
        for base in self._program.alias_history.bases:
            key = self._sharing.get(base.name, [base.name])[0] if base.name in self._inputs else base.index
            groups.setdefault(key, []).append(base)
        for number, bases in enumerate(groups.values()):
            yield self._storage(number, bases)

    def _storage(self, number: int, bases: list[BaseRecord]) -> model.Storage:
        first = bases[0]
        spec, root = self._inputs.get(first.name), first.root.region
        views, places = self._views(bases)
        writes = tuple(
            model.Write(
                places[write.view.index],
                write.op,
                _region(write.view.region),
                write.time,
                self._sources.wrote(_frame(write.location)),
            )
            for base in bases
            for write in base.writes
        )
        return model.Storage(
            number,
            self._names.get(first.name, first.name),
            model.INTERMEDIATE if spec is None else _KINDS.get(spec.kind, "input"),
            _region(root),
            _bytes(root),
            self._path(first, spec),
            views,
            writes,
            tuple(self._backs(first.name, root)) if spec is not None else (),
        )

    def _views(self, bases: list[BaseRecord]) -> tuple[tuple[model.View, ...], dict[int, int]]:
        """The views of one storage, and their numbers by those of the records; later roots hang on the first."""
        views: list[model.View] = []
        places: dict[int, int] = {}
        for record in (record for base in bases for record in base.views):
            if views and record.parent is None and record.region == bases[0].root.region:
                places[record.index] = 0
                continue
            places[record.index] = len(views)
            parent = (0 if views else None) if record.parent is None else places[record.parent.index]
            line = None if parent is None else self._sources.viewed(_frame(record.location))
            op = record.op or ("alias" if views else "")
            views.append(model.View(len(views), parent, op, _region(record.region), record.time, line))
        return tuple(views), places

    def _path(self, base: BaseRecord, spec: Any) -> tuple[str, ...]:
        """Where a storage folds: its module, or the function that made it."""
        if spec is not None:
            return _steps(spec.target, ".") if spec.target else _steps(base.name, "_")
        number = self._numbers.get(base.name)
        modules = self._modules(self._fx[number]) if number is not None else ()
        if modules:
            return _steps(f"{modules[-1][0]}.", ".")
        location = base.root.location
        return (f"{location.function} in {short(location.file)}",) if location.line else ()

    def _backs(self, name: str, root: Layout) -> Iterator[model.Back]:
        """The write-backs to a storage: to the input that it is named after, and to others that share it."""
        targets = {self._names[one] for one in self._sharing.get(name, [name])}
        for place, output in enumerate(self._outputs):
            if output.kind in _MUTATIONS and output.target in targets:
                name = output.arg.name
                number = self._numbers.get(name)
                value = None if number is None else _value(self._fx[number])
                size = None if value is None else bytes_of(value)
                part = size is not None and size < _bytes(root)
                region = f"{look_of(value)} of {place_of(root.dtype, root.size)}" if part else look_of(value)
                yield model.Back(place, number, str(output.target), name, region, size)

    # Tables

    def _mutations(self, lines: Any) -> Iterator[model.Mutation]:
        numbers = {(line.path, line.lineno): line.number for line in lines.values()}
        for write in self._program.mutations:
            kind = str(write.kind.name).removesuffix("_MUTATION").lower().replace("_", " ")
            file, lineno = _place_in(write.location)
            line = numbers.get((file, lineno))
            shown = write.location if not file else write.location.replace(file, short(file), 1)
            yield model.Mutation(kind, write.target, write.op, _region(write.region), _bytes(write.region), line, shown)

    def _amounts(self) -> Iterator[model.Amount]:
        inputs = [node for node in self._fx if node.op == "placeholder"]
        written = [spec for spec in self._outputs if spec.kind in _MUTATIONS]
        returned = [spec for spec in self._outputs if spec.kind not in _MUTATIONS]
        whole = {spec.target for spec in written}
        targets = [node for node in inputs if self._names.get(node.name) in whole]
        for label, kinds in (("inputs", (InputKind.USER_INPUT,)), ("state", _STATE)):
            chosen = [node for node in inputs if self._kind(node.name) in kinds]
            again = sum(any(self._kind(one) in _STATE for one in self._sharing.get(node.name, ())) for node in chosen)
            detail = f"{again} in memory of the state" if again and label == "inputs" else ""
            yield _amount(label, map(_value, chosen), detail)
        of = sum(bytes_of(_value(node)) for node in targets)
        yield _amount("written back", map(self._result, written), f"of {size_text(of)} in the tensors written")
        yield _amount("returned", map(self._result, returned))

    def _kind(self, name: str) -> Any:
        return self._inputs[name].kind if name in self._inputs else None

    def _result(self, spec: Any) -> Any:
        number = self._numbers.get(getattr(spec.arg, "name", ""))
        return None if number is None else _value(self._fx[number])


_PLACE = re.compile(r"(.+?):(\d+) in ")
_REMOVED = {"mutations": "mutations removed, views kept", "mutations_and_views": "mutations and views removed"}
_INPUTS = (("inputs", ""),)
_UNKNOWN = (("elsewhere", ""),)


def _steps(name: str, separator: str) -> tuple[str, ...]:
    """What stands before a name's last part: ``("layer.", "0.")`` of ``layer.0.weight``."""
    return tuple(f"{step}{separator}" for step in name.split(separator)[:-1])


def _amount(label: str, values: Any, detail: str = "") -> model.Amount:
    tensors: Sequence[Any] = [value for value in values if isinstance(value, torch.Tensor)]
    return model.Amount(label, len(tensors), sum(map(bytes_of, tensors)), detail if tensors else "")


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, FxNode) else node


def _region(region: Layout) -> str:
    return place_of(region.dtype, region.size, region.stride, region.offset)


def _bytes(region: Layout) -> int:
    return count(region.size) * int(region.dtype.itemsize)


def _frame(location: Location) -> Frame:
    return Frame(location.file, location.line, location.function)


def _place_in(location: str) -> tuple[str, int]:
    """File and line of a location that was written out as ``file:line in function: text``."""
    found = _PLACE.match(location)
    return (found[1], int(found[2])) if found else ("", 0)


def size_text(count: int | None) -> str:
    """``1.5 KiB`` for 1536."""
    if count is None:
        return ""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{amount:.3g} {units[0]}"
