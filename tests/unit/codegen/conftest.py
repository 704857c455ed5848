"""The tables of the installed torch, built once, and small YAML files for what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from functionalize.codegen import exceptions
from functionalize.codegen.native_functions import sources
from functionalize.codegen.tables import Tables, build

TAGS = "- tag: core\n- tag: inplace_view\n- tag: view_copy\n- tag: nondeterministic_seeded\n"


@pytest.fixture(scope="session")
def installed() -> Tables:
    return build(sources.installed_source(), exceptions.load())


@pytest.fixture
def source_of(tmp_path: Path) -> Callable[[str], sources.Source]:
    """Write a native_functions.yaml with these entries, and return it as a source."""

    def write(text: str) -> sources.Source:
        file = tmp_path / "native_functions.yaml"
        file.write_text(text)
        (tmp_path / "tags.yaml").write_text(TAGS)
        return sources.source_at(file)

    return write
