"""Makes the data of a report from a captured program.

Invariant: the program is not changed. Limits: a node or event whose line is not known stands without a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.fx import Graph
from torch.fx import Node as FxNode

from functionalize._torch import is_symbolic
from functionalize._torch.distributed.communication import collectives
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.history import AliasHistory, BaseRecord
from functionalize.report import model
from functionalize.report.code import bytes_of, code_of, elements, look_of, place_of, size_text
from functionalize.report.source import Sources, short
from functionalize.report.variants import branches

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

    remove: str

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def signature(self) -> ExportGraphSignature:
        """What each input and output is."""

    @property
    def alias_history(self) -> AliasHistory:
        """Every storage that was viewed or written."""

    @property
    def mutations(self) -> Any:
        """Every write to an input or to state."""

    @property
    def sizes(self) -> Any:
        """The sizes that may differ from call to call."""

    @property
    def variants(self) -> Any:
        """Its variants: one for each outcome of its branches on tensor values."""


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
    report = _Builder(program, shared).report(title, metadata)
    return replace(report, branches=branches([variant.decisions for variant in program.variants]))


class _Builder:
    def __init__(self, program: Program, shared: Sequence[Sequence[str]]) -> None:
        self._program, self._sources = program, Sources()
        self._symbols = {symbol: size.name for size in program.sizes for symbol in size.symbols}
        self._sharing = {name: list(group) for group in shared for name in group}
        self._fx = list(program.graph.nodes)
        self._placeholders = [node for node in self._fx if node.op == "placeholder"]
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
        values = [value for value in map(_value, self._placeholders) if isinstance(value, torch.Tensor)]
        symbols = ["bytes for the sizes of the example inputs"] if any(map(is_symbolic, values)) else []
        return model.Report(
            title or self._title(),
            " · ".join([f"torch {torch.__version__}", _REMOVED[self._program.remove], *symbols]),
            tuple(self._amounts()),
            nodes,
            storages,
            self._sources.functions(),
            {line.number: line for line in self._sources.lines.values()},
            self._sources.chains,
            tuple(self._mutations()),
            tuple(metadata),
            tuple(map(str, self._program.sizes)),
            collectives=tuple(self._collectives()),
        )

    def _title(self) -> str:
        first = self._sources.first()
        if first != "forward":
            return first or "Captured program"
        paths = map(_modules, self._fx)
        return next((path[0][1] for path in paths if path), first)

    # Nodes

    def _nodes(self) -> Iterator[model.Node]:
        for number, node in enumerate(self._fx):
            look = self._look(node)
            if node.op == "placeholder":
                name, kind = self._names.get(node.name, node.name), self._kind_text(node.name)
                yield model.Node(number, "input", node.name, name, look, kind, None, (("inputs", ""),))
            elif node.op != "output":
                chain = self._sources.dispatched(number, node.meta.get("stack_trace") or "")
                note = f"written back to {', '.join(self._targets[node.name])}" if node.name in self._targets else ""
                path = _modules(node) or (self._sources.function(chain) or ("elsewhere", ""),)
                yield model.Node(number, "op", node.name, code_of(node), look, note, chain, path)
        results = next(node for node in self._fx if node.op == "output").args[0]
        for number, (value, spec) in enumerate(zip(results, self._outputs, strict=True), len(self._fx)):
            note = f"written back to {spec.target}" if spec.kind in _MUTATIONS else "returned"
            name = value.name if isinstance(value, FxNode) else repr(value)
            yield model.Node(number, "output", note, name, self._look(value), "", None, (("outputs", ""),))

    def _look(self, node: Any) -> str:
        return self._named(look_of(_value(node)))

    def _region(self, region: Layout) -> str:
        return self._named(place_of(region.dtype, region.size, region.stride, region.offset))

    def _named(self, text: str) -> str:
        """A text with the caller's names for sizes."""
        return _WORD.sub(lambda word: self._symbols.get(word[0], word[0]), text) if self._symbols else text

    # Storages

    def _storages(self) -> Iterator[model.Storage]:
        """The storages: an input's memory is one, also where the program let go of all views and came back later."""
        groups: dict[Any, list[BaseRecord]] = {}
        for base in self._program.alias_history.bases:
            key = self._sharing.get(base.name, [base.name])[0] if base.name in self._inputs else base.index
            groups.setdefault(key, []).append(base)
        number = 0
        for bases in groups.values():
            storage = self._storage(number, bases)
            if storage.events > 1 or storage.backs:  # else an alias of all of it, which is never written
                number += 1
                yield storage

    def _storage(self, number: int, bases: list[BaseRecord]) -> model.Storage:
        name, root = bases[0].name, bases[0].root.region
        views, places = self._views(bases)
        writes = []
        for write in (write for base in bases for write in base.writes):
            line = self._sources.handled(write.origin.inside, wrote=True)
            region = self._region(write.view.region)
            writes.append(model.Write(places[write.view.index], write.op, region, write.time, line))
        return model.Storage(
            number,
            self._names.get(name, name),
            self._kind_text(name) if name in self._inputs else model.INTERMEDIATE,
            self._region(root),
            _bytes(root),
            self._path(bases[0]),
            views,
            tuple(writes),
            tuple(self._backs(name, root)) if name in self._inputs else (),
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
            line = None if parent is None else self._sources.handled(record.origin.inside, wrote=False)
            op = record.op or ("alias" if views else "")
            views.append(model.View(len(views), parent, op, self._region(record.region), record.time, line))
        return tuple(views), places

    def _path(self, base: BaseRecord) -> tuple[str, ...]:
        """Where a storage folds: its module, or the function that made it."""
        if spec := self._inputs.get(base.name):
            return _steps(spec.target, ".") if spec.target else _steps(base.name, "_")
        if base.name in self._numbers and (modules := _modules(self._fx[self._numbers[base.name]])):
            return _steps(f"{modules[-1][0]}.", ".")
        location = base.root.origin.inside
        return (f"{location.function} in {short(location.file)}",) if location.line else ()

    def _backs(self, name: str, root: Layout) -> Iterator[model.Back]:
        """The write-backs to a storage: to the input that it is named after, and to others that share it."""
        targets = {self._names[one] for one in self._sharing.get(name, [name])}
        for number, output in enumerate(self._outputs):
            if output.kind in _MUTATIONS and output.target in targets:
                value = self._result(output)
                size = None if value is None else bytes_of(value)
                part = size is not None and size < _bytes(root)
                region = f"{look_of(value)} of {place_of(root.dtype, root.size)}" if part else look_of(value)
                name = output.arg.name
                at = self._numbers.get(name)
                yield model.Back(number, at, str(output.target), name, self._named(region), size)

    # Tables

    def _collectives(self) -> Iterator[model.Collective]:
        for entry in collectives(self._program.graph):
            number = self._numbers[entry.node.name]
            yield model.Collective(number, entry.kind, entry.axis, len(entry.ranks), entry.bytes)

    def _mutations(self) -> Iterator[model.Mutation]:
        for write in self._program.mutations:
            kind = str(write.kind.name).removesuffix("_MUTATION").removeprefix("USER_").lower()
            found = _LOCATION.match(write.location)
            line = self._sources.lines.get((found[1], int(found[2]))) if found else None
            shown = write.location.replace(found[1], short(found[1]), 1) if found else write.location
            number = None if line is None else line.number
            region = write.region
            yield model.Mutation(kind, write.target, write.op, self._region(region), _bytes(region), number, shown)

    def _amounts(self) -> Iterator[model.Amount]:
        inputs = [node for node in self._placeholders if self._kind(node.name) == InputKind.USER_INPUT]
        again = sum(any(self._kind(one) in _STATE for one in self._sharing.get(node.name, ())) for node in inputs)
        yield _amount("inputs", map(_value, inputs), f"{again} in memory of the state" if again else "")
        yield _amount("state", (_value(node) for node in self._placeholders if self._kind(node.name) in _STATE))
        written = [spec for spec in self._outputs if spec.kind in _MUTATIONS]
        returned = [spec for spec in self._outputs if spec.kind not in _MUTATIONS]
        targets = {spec.target for spec in written}
        whole = sum(bytes_of(_value(node)) for node in self._placeholders if self._names.get(node.name) in targets)
        yield _amount("written back", map(self._result, written), f"of {size_text(whole)} in the tensors written")
        yield _amount("returned", map(self._result, returned))

    def _kind(self, name: str) -> Any:
        return self._inputs[name].kind if name in self._inputs else None

    def _kind_text(self, name: str) -> str:
        return _KINDS.get(self._kind(name), "input")

    def _result(self, spec: Any) -> Any:
        number = self._numbers.get(getattr(spec.arg, "name", ""))
        return None if number is None else _value(self._fx[number])


_WORD = re.compile(r"\w+")
_LOCATION = re.compile(r"(.+?):(\d+) in ")
_REMOVED = {"mutations": "mutations removed, views kept", "mutations_and_views": "mutations and views removed"}


def _modules(node: FxNode) -> tuple[tuple[str, str], ...]:
    """The modules whose forward made a node, outermost first, each with its class."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((path or kind.rpartition(".")[2], kind.rpartition(".")[2]) for path, kind in stack.values())


def _steps(name: str, separator: str) -> tuple[str, ...]:
    """What stands before a name's last part: ``("layer.", "0.")`` of ``layer.0.weight``."""
    return tuple(f"{step}{separator}" for step in name.split(separator)[:-1])


def _amount(label: str, values: Any, detail: str = "") -> model.Amount:
    tensors: Sequence[Any] = [value for value in values if isinstance(value, torch.Tensor)]
    return model.Amount(label, len(tensors), sum(map(bytes_of, tensors)), detail if tensors else "")


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, FxNode) else node


def _bytes(region: Layout) -> int:
    return elements(region.size) * int(region.dtype.itemsize)
