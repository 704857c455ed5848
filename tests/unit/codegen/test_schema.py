"""Schemas parse, print back to the letter, and say what is wrong with those that do not parse."""

from __future__ import annotations

import pytest

from functionalize.codegen.native_functions.schema import OpName, Schema, SchemaError, Type
from functionalize.codegen.tables import Tables


def test_every_entry_prints_back_to_the_letter(installed: Tables) -> None:
    text = installed.source.functions.read_text(encoding="utf-8")
    written = [line.removeprefix("- func: ") for line in text.splitlines() if line.startswith("- func: ")]
    in_yaml = [entry for entry in installed.spec.entries.values() if entry.generated_from is None]
    assert [str(Schema.parse(line)) for line in written] == written
    assert [str(entry.schema) for entry in in_yaml] == written


def test_the_line_of_an_entry_is_where_it_stands(installed: Tables) -> None:
    lines = installed.source.functions.read_text(encoding="utf-8").splitlines()
    for entry in installed.spec.entries.values():
        if entry.generated_from is None:
            assert lines[entry.line - 1] == f"- func: {entry.schema}"


@pytest.mark.parametrize(
    ("name", "inplace", "root"),
    [
        ("add_.Tensor", True, "add"),
        ("add.Tensor", False, "add"),
        ("__iand__.Scalar", True, "__and__"),
        ("__and__.Scalar", False, "__and__"),
        ("_native_batch_norm_legit_functional", False, "_native_batch_norm_legit"),
        ("set_", True, "set"),
    ],
)
def test_names_know_their_variant(name: str, inplace: bool, root: str) -> None:
    parsed = OpName.parse(name)
    assert (parsed.inplace, parsed.root, str(parsed)) == (inplace, root, name)


@pytest.mark.parametrize(
    "text",
    [
        "Tensor",
        "Tensor(a)",
        "Tensor(a!)[]",
        "Tensor(a -> *)",
        "Tensor(a!)?",
        "SymInt[2]?",
        "Tensor?[]",
        "bool[3]",
    ],
)
def test_types_print_back(text: str) -> None:
    assert str(Type.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("f(Tensor self) - Tensor", "a schema is `name(parameters) -> returns`"),
        ("f g(Tensor self) -> Tensor", "a schema is `name(parameters) -> returns`"),
        ("f.a.b(Tensor self) -> Tensor", "an op is named `base` or `base.overload`"),
        ("f(Tensor) -> Tensor", "a parameter is `Type name` or `Type name=default`"),
        ("f(Tensor self, Tensor self) -> Tensor", "parameters have different names"),
        ("f(Tensor(A) self) -> Tensor", "an alias annotation is"),
        ("f(Tensor(a!!) self) -> Tensor", "an alias annotation is"),
        ("f(Tensor(a|b!) self) -> Tensor", "names one alias set"),
        ("f(int(a) self) -> Tensor", "an alias annotation stands on a Tensor"),
        ("f(Tensor{} self) -> Tensor", "a type is a name"),
        ("f(Tensor self) -> Tensor 1", "a return is `Type` or `Type name`"),
        ("f(Tensor self) -> (Tensor)", "a schema prints back to the letter"),
        ("f(Tensor self,  int dim) -> Tensor", "a type is a name"),
        ("f(Tensor self, *, int a, *, int b) -> Tensor", "a parameter is"),
    ],
)
def test_a_malformed_schema_names_the_rule(text: str, rule: str) -> None:
    with pytest.raises(SchemaError) as raised:
        Schema.parse(text)
    assert rule in raised.value.rule
