"""Writes a captured program as an ONNX file.

Invariant: all causes for which a program cannot be exported are found before anything is written; the files of a
program appear complete or not at all. Limits: one file, and one more for large weights.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from google.protobuf.message import DecodeError  # what reading a file of another kind raises
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from functionalize._torch import pytree
from functionalize._torch.exporting import named_sizes
from functionalize._torch.onnx import by_torch, by_torch_if_wide, decompositions, quiet, translate, untranslated
from functionalize.backends.decompositions.opmath import SPELT_OUT
from functionalize.backends.decompositions.own import DECOMPOSITIONS
from functionalize.backends.decompositions.primitives import VIEWS
from functionalize.backends.export.exported_program import to_exported_program
from functionalize.backends.export.passes.core_aten import without_differing
from functionalize.backends.export.passes.taking_apart import sizes_stay_free, taken_apart, user_line
from functionalize.backends.export.passes.views import with_views
from functionalize.backends.onnx.convention.first_state import write_first_values
from functionalize.backends.onnx.convention.metadata import ELEMENTS, KEY
from functionalize.backends.onnx.convention.naming import provisional, rename, rename_sizes
from functionalize.backends.onnx.convention.sharing import shared_memory
from functionalize.backends.onnx.engine import refuse_what_it_does_not_load
from functionalize.backends.onnx.opsets import convert
from functionalize.backends.onnx.optimize import optimize
from functionalize.backends.onnx.options import Options
from functionalize.backends.onnx.prepare import Prepared
from functionalize.backends.onnx.report import Report, reporting
from functionalize.backends.onnx.rewrites import (
    BY_TORCH,
    BY_TORCH_IF_WIDE,
    FIRST_ALONE,
    REWRITES,
    TRANSLATIONS,
    either,
)
from functionalize.backends.onnx.verification import check_values, refuse_random
from functionalize.backends.preparation.devices import program_on_cpu
from functionalize.errors import UnsupportedExportError
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.runtime.capturing import CAPTURING

_TO = "ONNX"
_LARGE = 2**30  # bytes of weights that go into a file of their own
_LARGEST = 2**31 - 2**20  # of a model in one piece


def write(program: CapturedProgram, options: Options) -> Any:
    """Write a program; the path, or the model where there is none.

    One thread at a time: torch's exporter has settings of the process.
    """
    with CAPTURING, reporting(options) as report:
        if options.verify:
            refuse_random(program)
        return _write(program, options, report)


def _write(program: CapturedProgram, options: Options, report: Report) -> Any:
    exported = to_exported_program(program, to=_TO, by_value=True, scales=False, floats=True)
    dims = named_sizes(exported.graph.find_nodes(op="placeholder"))
    prepared = Prepared(without_differing(with_views(program_on_cpu(exported))), options)
    prepared.convention.shared = _shared(exported, prepared.input_names)
    rows = either(SPELT_OUT, DECOMPOSITIONS, by_torch_if_wide(BY_TORCH_IF_WIDE), by_torch(BY_TORCH) | REWRITES)
    # With the exporter's own, which give operators that have rows, and primitives.
    rows = either(rows, decompositions(), VIEWS)
    with sizes_stay_free(prepared.program, _TO):
        rows = {op: row for op, row in rows.items() if op not in options.translations}
        simple = taken_apart(prepared.program, rows, _TO)
        translations = {**TRANSLATIONS, **options.translations}
        _refuse_untranslated(simple, [*_unknown_types(prepared.program)], translations, options.opset)
        _refuse_other_sizes(prepared.program, simple)
        made = _translated(simple, prepared, translations, options.opset)
    report.done.append(f"translated, for opset {options.opset}")
    prepared.describe_sizes()
    _as_declared(made.model, simple)
    rename(made.model, prepared.passed, prepared.output_names, prepared.names)
    prepared.convention.sizes = prepared.convention.sizes.renamed(rename_sizes(made.model, dims))
    _finish(made.model, prepared)
    made.model.metadata_props.update(options.metadata)
    report.convention, report.model = prepared.convention, made.model
    with _saved(made, options.path, _external(options, made.model)) as file:
        if options.check:
            refuse_what_it_does_not_load(file, made.model)
            report.done.append("loaded by ONNX Runtime")
        if options.verify:
            check_values(program, file, options.calls)
            report.done.append("equal to the original in all compared calls")
        return onnx.load(str(file)) if options.path is None else options.path


def _external(options: Options, model: Any) -> bool:
    """Whether weights go into a file of their own."""
    weights = sum(weight.const_value.nbytes for weight in model.graph.initializers.values())
    if options.path is None and weights > _LARGEST:
        raise ValueError(
            f"the model has {weights:,} bytes of weights, but an ONNX model in memory is limited to 2 GiB\n"
            "    try  pass a path to to_onnx"
        )
    if options.external_data is None:
        return options.path is not None and weights > _LARGE
    return options.external_data


def _shared(exported: ExportedProgram, names: Mapping[str, str]) -> list[Any]:
    """The arguments that share memory, as those of the example do."""
    leaves = pytree.tree_leaves(exported.example_inputs)
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    pairs = zip(specs, leaves, strict=True)
    tensors = {names[s.arg.name]: leaf for s, leaf in pairs if isinstance(leaf, torch.Tensor) and leaf.numel()}
    return shared_memory(tensors)


def _refuse_other_sizes(program: ExportedProgram, rewritten: ExportedProgram) -> None:
    """Hold what was decomposed to what it was made of: a row that is wrong must not go unnoticed."""
    for one, other in zip(*(_results(some) for some in (program, rewritten)), strict=True):
        looks = [node.meta["val"] for node in (one, other)]
        if not isinstance(looks[0], torch.Tensor):
            continue
        sizes = zip(*(look.size() for look in looks), strict=False)
        if looks[0].dim() != looks[1].dim() or any(a != b for a, b in sizes if type(a) is int and type(b) is int):
            cause = UnsupportedExportError.cause(
                f"`{one.name}` has the size {tuple(looks[0].size())}, but {tuple(looks[1].size())} after decomposition",
                why="a rewrite of the ONNX route is wrong",
                hint="please report this with the program, and use other operators meanwhile",
                at=user_line(one),
            )
            raise UnsupportedExportError(_TO, [cause])


def _results(program: ExportedProgram) -> Any:
    return program.graph.output_node().args[0]


def _unknown_types(program: ExportedProgram) -> Iterator[str]:
    """Causes: inputs and outputs of types that no runner takes."""
    values = [("takes", node) for node in program.graph.find_nodes(op="placeholder")]
    for verb, node in [*values, *(("returns", result) for result in _results(program))]:
        look = node.meta.get("val") if isinstance(node, Node) else None
        if isinstance(look, torch.Tensor) and look.dtype not in ELEMENTS:
            yield UnsupportedExportError.cause(
                f"the program {verb} `{node.name}`, of {look.dtype}",
                why="ONNX Runtime has no tensors of that type",
                hint="pass, keep and return complex numbers with torch.view_as_real, and convert other types",
                at=user_line(node),
            )


def _refuse_untranslated(program: ExportedProgram, causes: list[str], known: Collection[Any], opset: int) -> None:
    unknown = [*untranslated(program, known, opset), *_made_up(program, known)]
    for node, message in unknown:
        line = user_line(node)
        cause = UnsupportedExportError.cause(
            f"{node.target} has no translation",
            why=message.split("\n", maxsplit=1)[0] or "the exporter's table has no such operator",
            hint="pass your own translation (custom_translation_table), use other operators, or compute it outside "
            "the exported program",
            at=line,
        )
        if cause not in causes:
            causes.append(cause)
    if causes:
        raise UnsupportedExportError(_TO, causes)


def _made_up(program: ExportedProgram, known: Collection[Any]) -> Iterator[tuple[Node, str]]:
    """Results that the exporter does not compute, and that somebody reads; ``known``: who has translations of ours."""
    for node in program.graph.nodes:
        first_alone = node.op == "call_function" and node.target in FIRST_ALONE and node.target not in known
        users = node.users if first_alone else ()
        if any(user.target is operator.getitem and user.args[1] != 0 and user.users for user in users):
            yield node, "the exporter computes only its first result, but the program reads others (a backward)"


def _translated(program: ExportedProgram, prepared: Prepared, translations: Mapping[Any, Any], opset: int) -> Any:
    inputs = provisional(len(prepared.passed))
    outputs = [f"{name}.out" for name in provisional(len(prepared.output_names))]
    with quiet():
        try:
            made = translate(program, translations, inputs, outputs, opset)
            optimize(made.model)
            convert(made.model, opset)
            return made
        except torch.onnx.errors.OnnxExporterError as error:
            raise UnsupportedExportError(_TO, [_failure(error, program)]) from error


_AT_NODE = re.compile(r"Error when translating node %(\w+)")


def _failure(error: BaseException, program: ExportedProgram) -> str:
    """The cause that an error of the exporter is: at which operator, and what it was in the end."""
    chain = [error]
    while (deeper := chain[-1].__cause__) is not None:
        chain.append(deeper)
    names = [found[1] for one in chain if (found := _AT_NODE.search(str(one)))]
    node = next((node for node in program.graph.nodes if node.name in names), None)
    why = (str(chain[-1]).strip() or type(chain[-1]).__name__).splitlines()[0]
    what = "torch's exporter fails" + ("" if node is None else f" to translate {node.target}")
    return UnsupportedExportError.cause(what, why=why, hint="use other operators", at=node and user_line(node))


def _as_declared(model: Any, program: ExportedProgram) -> None:
    """Give outputs the dtypes of the program's: torch's exporter leaves some of 16 bits with 32."""
    import onnx_ir

    for index, (value, node) in enumerate(zip(list(model.graph.outputs), _results(program), strict=True)):
        look = node.meta["val"]
        wanted = onnx_ir.DataType(ELEMENTS[look.dtype]) if isinstance(look, torch.Tensor) else value.dtype
        if value.dtype == wanted:
            continue
        name, value.name = value.name, f"{value.name}.wide"
        cast = onnx_ir.node("Cast", [value], attributes={"to": wanted})
        made = cast.outputs[0]
        made.name, made.shape, made.type = name, value.shape, onnx_ir.TensorType(wanted)
        model.graph.append(cast)
        model.graph.outputs[index] = made


def _finish(model: Any, prepared: Prepared) -> None:
    """Add what the runner needs: the first values of the state, and the calling convention."""
    convention = prepared.convention
    write_first_values(model, convention, prepared.initial(), prepared.names)
    for state in convention.state:
        state.in_place = _may_share(model, state.input, state.output)
    model.metadata_props[KEY] = convention.text()


_IN_PLACE = ("ScatterND", "ScatterElements")  # which write parts of what they copy, and do not copy what is there


def _may_share(model: Any, name: str, output: str) -> bool:
    """Whether a new state may be written where the old one is: nothing but one scatter reads that."""
    given = next(value for value in model.graph.inputs if value.name == name)
    users = {node for node, _ in given.uses()}
    if len(users) != 1:
        return False
    (node,) = users
    first = node.op_type in _IN_PLACE and node.inputs[0] is given and given not in node.inputs[1:]
    return bool(first and node.outputs[0].name == output)


@contextlib.contextmanager
def _saved(made: Any, path: Path | None, external_data: bool) -> Iterator[Path]:
    """While a model is in a file, which goes to its path in the end, unless that raises."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    name = "model.onnx" if path is None else path.name
    folder = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=None if path is None else path.parent))
    try:
        made.save(folder / name, external_data=external_data)
        yield folder / name
        if path is not None:
            files = sorted(folder.iterdir(), key=lambda file: file.name == name)
            stale = _weights_beside(path) - {file.name for file in files}
            for file in files:  # the model last: what it refers to is there
                os.replace(file, path.parent / file.name)
            for file_name in stale:
                (path.parent / file_name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _weights_beside(path: Path) -> set[str]:
    """The file of weights that was written beside the model at a path: one that it refers to, or an empty one."""
    name = f"{path.name}.data"
    if not (path.is_file() and (path.parent / name).is_file()):
        return set()
    if not (path.parent / name).stat().st_size:
        return {name}
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError):  # another kind of file
        return set()
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
    return {name} if any((entry.key, entry.value) == ("location", name) for entry in entries) else set()
