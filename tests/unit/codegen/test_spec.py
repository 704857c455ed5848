"""A malformed entry gives one error with file, line, text and the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from functionalize.codegen import exceptions
from functionalize.codegen.native_functions.sources import Source, source_at
from functionalize.codegen.native_functions.spec import SpecError
from functionalize.codegen.tables import build

GOOD = "- func: neg(Tensor self) -> Tensor\n  dispatch:\n    CPU: neg\n"


@pytest.mark.parametrize(
    ("bad", "text", "rule"),
    [
        ("- func: neg_(Tensor(a!) self -> Tensor(a!)", "func: neg_(", "a schema is"),
        ("- func: neg(Tensor self) -> Tensor", "func: neg(", "stands at line 1 too"),
        ("- func: f(Tensor(A) self) -> Tensor", "func: f(", "an alias annotation is"),
        ("- func: f(Tensor(a) self) -> Tensor(b)", "func: f(", "stands on a parameter; (b) does not"),
        ("- func: f_(Tensor self) -> Tensor", "func: f_(", "an in-place op writes its `self`"),
        ("- func: f(Tensor self) -> Tensor\n  tags: novel", "func: f(", "'novel' does not"),
        ("- dispatch: {}", "{'dispatch': {}}", "an entry has a `func`"),
        ("- neg", "neg", "an entry is a mapping"),
        ("- func: f(Tensor self) -> Tensor\n  autogen: a b", "func: f(", "an op is named"),
        (
            "- func: f(Tensor self) -> ()\n  dispatch:\n    CPU: f\n  autogen: f.out",
            "f.out",
            "a tensor to write",
        ),
        (
            "- func: neg.int(Tensor self) -> Tensor",
            "func: neg.int(",
            "a signature belongs to one functional op",
        ),
    ],
)
def test_one_error_says_it_all(source_of: Callable[[str], Source], bad: str, text: str, rule: str) -> None:
    source = source_of(GOOD + bad + "\n")
    with pytest.raises(SpecError) as raised:
        build(source, [])
    error = raised.value
    assert (error.file, error.line) == (source.functions, 4)
    assert text in error.text
    assert rule in error.rule
    assert str(error) == f"{error.file}:4: {error.rule}\n  text  {error.text}"


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (
            "- func: f_(Tensor(a!) self) -> Tensor(a!)\n  dispatch:\n    CPU: f_\n",
            "a mutating op has a functional",
        ),
        (
            "- func: f(Tensor(a) self) -> Tensor(a)\n  dispatch:\n    CPU: f\n",
            "a primitive view has a copy op",
        ),
    ],
)
def test_a_missing_partner_is_an_error(source_of: Callable[[str], Source], bad: str, rule: str) -> None:
    tables = build(source_of(GOOD + bad), [])
    with pytest.raises(SpecError, match=rule) as raised:
        tables.require_complete()
    assert raised.value.line == 4


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [("- a: [", 2, "the file is YAML"), ("a: b\n", 1, "the file is a list of entries")],
)
def test_a_file_that_is_no_list_of_entries(source_of: Callable[[str], Source], text: str, line: int, rule: str) -> None:
    with pytest.raises(SpecError) as raised:
        build(source_of(text), [])
    assert (raised.value.line, raised.value.rule) == (line, rule)


def test_a_missing_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give --yaml FILE and --tags FILE"):
        source_at(tmp_path / "native_functions.yaml")


ENTRY = "- op: neg\n  treatment: {}\n  reason: r\n  link: l\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("- op: neg\n  treatment: view\n  reason: r\n", "an exception has link, a text"),
        (ENTRY.format("magic"), "a treatment is one of"),
        (ENTRY.format("view"), "the treatment view has copy, view"),
        (ENTRY.format("refuse") + "  when: x\n", "the treatment refuse does not use when"),
        (ENTRY.format("refuse") * 2, "an op has one exception"),
    ],
)
def test_a_malformed_exception_is_an_error(tmp_path: Path, text: str, rule: str) -> None:
    file = tmp_path / "exceptions.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=rule):
        exceptions.load(file)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (ENTRY.format("refuse").replace("neg", "gone"), "about an op that exists"),
        (ENTRY.format("refuse"), "no longer applies, remove it"),
        (ENTRY.format("harmless"), "no longer applies, remove it"),
        (ENTRY.format("fresh") + "  functional: neg\n", "no longer applies, remove it"),
        (ENTRY.format("conditional") + "  when: flag\n", "names parameters of its op; flag is none"),
        (ENTRY.format("pair") + "  functional: gone\n  results: {self: 0}\n", "aten::gone does not"),
        (ENTRY.format("pair") + "  functional: neg\n  results: {self: 0}\n", "no longer applies, remove it"),
    ],
)
def test_an_exception_that_does_not_apply_is_an_error(
    source_of: Callable[[str], Source], tmp_path: Path, text: str, rule: str
) -> None:
    file = tmp_path / "exceptions.yaml"
    file.write_text(text)
    tables = build(source_of(GOOD), exceptions.load(file))
    with pytest.raises(SpecError, match=rule):
        tables.require_complete()


@pytest.mark.parametrize(
    ("version", "concerned"), [("2.13.0", False), ("2.15.0", True), ("2.17.1", False), ("unknown", False)]
)
def test_an_exception_may_be_about_some_versions(tmp_path: Path, version: str, concerned: bool) -> None:
    file = tmp_path / "exceptions.yaml"
    file.write_text(ENTRY.format("refuse") + '  since: "2.15"\n  until: "2.17"\n')
    assert exceptions.load(file)[0].concerns(version, {}) is concerned
