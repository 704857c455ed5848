"""The commands: `python -m functionalize.codegen emit | check | diff OLD NEW | explain OP | source`.

Invariant: exit status 0 for done, 1 for drift or an unknown op, 2 for sources that cannot be read. Limits:
torch is never imported, so what these commands say is about text.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from . import diff, emit, exceptions, explain, rules
from .native_functions.sources import Source, installed_source, source_at
from .native_functions.spec import SpecError
from .tables import Tables, build

_DESCRIPTION = "Generates the tables of functionalize from PyTorch's native_functions.yaml."


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (SpecError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m functionalize.codegen", description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument("--yaml", type=Path, help="native_functions.yaml; by default that of the installed torch")
    source.add_argument("--tags", type=Path, help="tags.yaml; by default the one beside native_functions.yaml")
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--out", type=Path, default=emit.GENERATED, help="folder of the tables; default: %(default)s")

    command = commands.add_parser("emit", parents=[source, folder], help="write the tables")
    command.set_defaults(run=_emit)
    command = commands.add_parser("check", parents=[source, folder], help="fail where the tables have drifted")
    command.set_defaults(run=_check)
    command = commands.add_parser("diff", help="what another version changes for us, in Markdown")
    command.add_argument("old", help="a native_functions.yaml, or `installed`")
    command.add_argument("new", help="a native_functions.yaml, or `installed`")
    command.add_argument("--tags", type=Path, help="tags.yaml for files that have none beside them")
    command.set_defaults(run=_diff)
    command = commands.add_parser("explain", parents=[source], help="the row of an op, and where it comes from")
    command.add_argument("op", help="for example add_.Tensor")
    command.set_defaults(run=_explain)
    command = commands.add_parser("source", help="where the installed torch keeps its native_functions.yaml")
    command.set_defaults(run=_source)
    return parser


def _build(options: argparse.Namespace) -> Tables:
    source = source_at(options.yaml, options.tags) if options.yaml else installed_source()
    return build(source, exceptions.load())


def _emit(options: argparse.Namespace) -> int:
    tables = _build(options)
    tables.require_complete()
    changed = emit.emit(tables, options.out)
    for file in changed:
        print(f"wrote {file}")
    print(f"{len(tables.rows)} rows of torch {tables.source.torch_version}{'' if changed else ', unchanged'}")
    return 0


def _check(options: argparse.Namespace) -> int:
    tables = _build(options)
    tables.require_complete()
    lines = list(emit.drift(tables, options.out))
    sys.stdout.writelines(lines)
    if lines:
        print(
            f"the tables in {options.out} have drifted from their sources; run `{emit.COMMAND}`",
            file=sys.stderr,
        )
    return 1 if lines else 0


def _diff(options: argparse.Namespace) -> int:
    known = exceptions.load()
    old, new = (build(_named_source(name, options.tags), known) for name in (options.old, options.new))
    print(diff.markdown(old, new, diff.diff(old, new, rules.read_rules())), end="")
    return 0


def _named_source(name: str, tags: Path | None) -> Source:
    if name == "installed":
        return installed_source()
    beside = Path(name).with_name("tags.yaml")
    return source_at(Path(name), beside if beside.is_file() else tags)


def _explain(options: argparse.Namespace) -> int:
    tables = _build(options)
    name = options.op.replace("aten.", "aten::", 1) if options.op.startswith("aten.") else options.op
    name = name if name.startswith("aten::") else f"aten::{name}"
    if name not in tables.rows:
        near = difflib.get_close_matches(name, tables.rows, n=5)
        print(f"there is no operator {name}; similar names: {', '.join(near) or 'none'}", file=sys.stderr)
        return 1
    for label, text in explain.lines(tables, name, rules.read_rules()):
        print(f"{label:11} {text}")
    return 0


def _source(options: argparse.Namespace) -> int:
    print(installed_source().functions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
