"""Finds native_functions.yaml and tags.yaml, the sources of the tables, without running any of torch.

Invariant: a `Source` names two files that were there when it was made. Limits: standard library only, and
nothing is parsed: functionalize.ops.tables compares hashes at every import, and that has to cost next to nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

_PACKAGED = Path("packaged", "ATen", "native")


@dataclass(frozen=True)
class Source:
    """Where the entries come from. `sha256` covers both files, so any change of theirs is seen."""

    functions: Path
    tags: Path
    torch_version: str

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for file in (self.functions, self.tags):
            digest.update(file.read_bytes())
        return digest.hexdigest()


def installed_source() -> Source:
    """The installed torch's own files, found without running any of torch.

    Raises:
        FileNotFoundError: torch is not installed, or without its `torchgen` data.
    """
    found = importlib.util.find_spec("torchgen")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("torchgen, which ships in the torch wheel with native_functions.yaml, is not installed")
    return source_at(Path(found.submodule_search_locations[0]) / _PACKAGED / "native_functions.yaml")


def source_at(functions: Path, tags: Path | None = None) -> Source:
    """The source at a path; the tags stand beside it unless they are given.

    Raises:
        FileNotFoundError: one of the files is not there.
    """
    tags = tags or functions.with_name("tags.yaml")
    for file in (functions, tags):
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; give --yaml FILE and --tags FILE")
    return Source(functions, tags, _torch_version(functions))


def _torch_version(functions: Path) -> str:
    """The version of the torch wheel that holds the file, "unknown" for a file from elsewhere."""
    site_packages = functions.resolve().parents[len(_PACKAGED.parts) + 1 :]
    for folder in site_packages[:1]:
        for distribution in importlib.metadata.distributions(name="torch", path=[str(folder)]):
            return distribution.version.partition("+")[0]
    return "unknown"
