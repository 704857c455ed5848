"""Two witnesses for every row: torchgen's model of the YAML, and the schema that the dispatcher holds.

Neither is used at run time. Where a row differs from what a witness says, it is because of an exception.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torchgen.gen import parse_native_yaml  # type: ignore[import-untyped]
from torchgen.model import NativeFunction, SchemaKind  # type: ignore[import-untyped]

from functionalize.codegen import classify, rules
from functionalize.codegen.tables import Tables
from functionalize.ops import tables
from functionalize.ops.tables import Kind, OpRow, ViewKind


@pytest.fixture(scope="module")
def model(installed: Tables) -> dict[str, NativeFunction]:
    parsed = parse_native_yaml(str(installed.source.functions), str(installed.source.tags))
    return {f"aten::{function.func.name}": function for function in parsed.native_functions}


def live_rows() -> Iterator[tuple[torch._ops.OpOverload, OpRow]]:
    """The operators that the dispatcher has, each with its row."""
    for name in tables.known_ops():
        try:
            op = tables.overload(name)
        except AttributeError:  # bound by hand: a method of Tensor, not an operator
            continue
        yield op, tables.row(op)


@pytest.mark.slow
def test_torchgen_knows_the_same_ops(installed: Tables, model: dict[str, NativeFunction]) -> None:
    assert model.keys() == installed.rows.keys()


def test_torchgen_reads_the_same_schemas(installed: Tables, model: dict[str, NativeFunction]) -> None:
    ours = {name: str(entry.schema) for name, entry in installed.spec.entries.items()}
    assert ours == {name: str(function.func) for name, function in model.items()}


# Writes of `self` by ops whose name has no underscore; torchgen's model has no kind for them.
# With a composite kernel beside their own, which gives eager's bits.
WITH_KERNELS = {"aten::mish_backward", "aten::native_channel_shuffle", "aten::silu_backward"}
UNNAMED_WRITES = {"aten::set_data", "aten::retain_grad", "aten::record_stream"}


def test_torchgen_sees_the_same_kinds(installed: Tables, model: dict[str, NativeFunction]) -> None:
    kinds = {
        SchemaKind.functional: Kind.FUNCTIONAL,
        SchemaKind.inplace: Kind.INPLACE,
        SchemaKind.out: Kind.OUT,
        SchemaKind.mutable: Kind.MUTABLE,
    }
    differing = {
        name
        for name, function in model.items()
        if classify.kind(installed.spec.entries[name].schema) != kinds[function.func.kind()]
    }
    assert differing == UNNAMED_WRITES


def test_torchgen_sees_the_same_composites(installed: Tables, model: dict[str, NativeFunction]) -> None:
    composite = {name for name, row in installed.rows.items() if row.composite}
    assert composite == {n for n, f in model.items() if f.has_composite_implicit_autograd_kernel} - WITH_KERNELS


def test_torchgen_sees_the_same_random_ops(installed: Tables, model: dict[str, NativeFunction]) -> None:
    random = {name for name, row in installed.rows.items() if row.random}
    assert random == {name for name, f in model.items() if "nondeterministic_seeded" in f.tags}


def test_torchgen_pairs_the_same_signatures(installed: Tables, model: dict[str, NativeFunction]) -> None:
    for name, row in installed.rows.items():
        if row.functional is None or name in installed.overrides or row.functional_args is not None:
            continue
        assert model[name].func.signature() == model[row.functional].func.signature(), name


def test_the_dispatcher_has_nearly_every_op(installed: Tables) -> None:
    manual = {name for name, entry in installed.spec.entries.items() if entry.manual}
    missing = installed.rows.keys() - {op.name() for op, _ in live_rows()}
    assert missing <= manual


def test_the_dispatcher_holds_the_same_rows(installed: Tables) -> None:
    for op, row in live_rows():
        live = tables.live_row(op)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(row.name, "CompositeImplicitAutograd")
        if torch._C._dispatch_has_kernel_for_dispatch_key(row.name, "CPU"):
            assert not composite or row.name in WITH_KERNELS
            composite = False
        assert (row.name, row.composite) == (live.name, composite), row.name
        assert live.composite >= composite, row.name  # Python decompositions count as well
        if row.name in installed.overrides:
            continue
        assert (row.kind, row.view, row.random) == (live.kind, live.view, live.random), row.name
        assert [(w.position, w.name, w.is_list) for w in row.written] == [
            (w.position, w.name, w.is_list) for w in live.written
        ]
        if row.kind is Kind.FUNCTIONAL or row.functional is None:
            assert row.returns == live.returns


def parameters(op: torch._ops.OpOverload) -> dict[str, torch.Argument]:
    return {argument.name: argument for argument in op._schema.arguments}


def kind_of_type(argument: torch.Argument) -> str:
    """The type without optionality: a variant may insist on what its op lets one leave out."""
    return str(argument.type).removeprefix("Optional[").removesuffix("]")


def test_functional_variants_take_the_arguments() -> None:
    for op, row in live_rows():
        if row.functional is None:
            continue
        variant = tables.overload(row.functional)
        given = parameters(op)
        outs = {w.name for w in row.written if row.kind is Kind.OUT and w.position is None}
        names = row.functional_args or tuple(name for name in given if name not in outs)
        supplied = {*row.options, *(name for name, _ in row.constants)}
        taking = [p for p in variant._schema.arguments if p.name not in supplied]
        # What an op lacks besides, such as pin_memory for `out=`, has a default.
        taking = [p for p in taking if p.name in given or not p.has_default_value()]
        for name, parameter in zip(names, taking, strict=True):
            assert kind_of_type(given[name]) == kind_of_type(parameter), (row.name, name)
            if row.functional_args is None or parameter.kwarg_only:
                assert (name, given[name].kwarg_only) == (parameter.name, parameter.kwarg_only), row.name


def test_functional_variants_return_what_is_written() -> None:
    for op, row in live_rows():
        if row.functional is None or row.kind is Kind.FUNCTIONAL:
            continue
        results = tables.overload(row.functional)._schema.returns
        used = [w.result for w in row.written] + [index for index in row.returns if index >= 0]
        assert all(index is not None and index < len(results) for index in used), row.name
        assert len(set(used)) == len(used), row.name
        for written in row.written:
            assert isinstance(written.value_among(results).type, torch.ListType) is written.is_list, row.name
        assert len(op._schema.returns) == len(row.returns), row.name


def test_functional_variants_write_nothing() -> None:
    for _, row in live_rows():
        for name in (row.functional, row.copy, row.non_mutating_op):
            if name is not None and name != row.non_mutating_op:
                assert tables.live_row(tables.overload(name)).kind is Kind.FUNCTIONAL, row.name


def test_a_mutating_op_pairs_or_decomposes_or_has_a_reason() -> None:
    for _, row in live_rows():
        if row.kind is not Kind.FUNCTIONAL and row.functional is None and not row.composite:
            assert row.name in tables.UNPAIRED


def test_every_primitive_view_has_a_copy_and_a_rule() -> None:
    ruled = rules.read_rules()
    for _, row in live_rows():
        if row.view in (ViewKind.SINGLE, ViewKind.MULTI):
            assert row.copy is not None, row.name
            assert row.name in ruled, row.name


def test_rules_as_read_are_rules_as_registered() -> None:
    from functionalize.aliasing import view_rules

    registered = {op.name() for op in (*view_rules.VIEW_RULES, *view_rules.UNSUPPORTED_VIEWS)}
    read = rules.read_rules()
    assert registered <= read.keys()
    assert read.keys() <= set(tables.known_ops())
