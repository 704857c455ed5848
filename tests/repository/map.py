"""The map of modules, read off their docstrings: `scripts/map [FOLDER]...` prints each module with its job.

Invariant: lower layers stand first, as in `tests.repository.test_layers.LAYERS`. Limits: sources are parsed, not
imported.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import groupby

from tests.repository.test_layers import CODEGEN, LAYERS, TRANSFORM, Source, layer_key


def job_of(source: Source) -> str:
    """The first sentence of a module's docstring, on one line."""
    paragraph = (ast.get_docstring(source.tree) or "").partition("\n\n")[0]
    return re.split(r"(?<=[.?])\s", " ".join(paragraph.split()), maxsplit=1)[0]


def main(folders: list[str]) -> int:
    """Print the map, or that of some folders; 1 where one of these does not exist."""
    modules = [source for source in CODEGEN + TRANSFORM if source.path.name != "__init__.py"]
    modules.sort(key=lambda source: (LAYERS.get(layer_key(source.name), -1), source.path.parent, source.path))
    if unknown := set(folders) - {part for source in modules for part in source.path.parts}:
        print(f"no such folder: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    for folder, group in groupby(modules, key=lambda source: source.path.parent):
        shown = [source for source in group if not folders or set(folders) & set(source.path.parts)]
        if shown:
            print(f"\n{folder}/")
        for source in shown:
            print(f"    {source.path.stem:<24} {job_of(source)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
