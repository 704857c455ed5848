"""The commands.

Invariant: exit status 0 for done and equal, 1 for an error or a difference, 2 for a command that cannot be read; errors
are one line, with ``--traceback`` all. Limits: targets run as trusted code.
"""

from __future__ import annotations

import difflib
import enum
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from functionalize.cli.description import described
from functionalize.cli.exporting import FORMATS, called, format_of, loaded, summary
from functionalize.cli.onnx_options import OnnxOptions, with_onnx_options
from functionalize.cli.ranks import (
    captured_by_each,
    disagreement,
    values_on_all_ranks,
    volume_lines,
)
from functionalize.cli.shared import (
    Job,
    SpecType,
    answer,
    counted,
    errors_alone,
    on_target,
    remembered,
    say,
    say_code,
    wants,
)
from functionalize.cli.specs import Spec, SpecError
from functionalize.cli.targets import TargetError
from functionalize.codegen.columns import Kind, OpRow, ViewKind, as_literal

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram

_HELP = """Turn PyTorch programs into programs without mutation, and inspect them.

\b
A TARGET is package.module:object, a function or a module (or a class of modules, which is called without arguments);
the current directory is searched first. Each INPUT describes a tensor of random numbers:
  'f32[2,16]'            dtypes: f16 bf16 f32 f64 i8 i16 i32 i64 u8 bool c64
  'i64[2,5]<1000'        integers from 0 up to a limit (by default 10); < and [ are the shell's without quotes
  'f32[batch=2,16]'      a dynamic size with a name; --range batch=2:64 bounds it
  'f32[2,16]@mask'       a keyword argument
  =3  =None@mask         a Python value
or give --inputs package.module:function, which returns a tuple of arguments, or (args, kwargs).

\b
Examples:
  functionalize trace torch.nn:GELU f32[2,16]
  functionalize trace my_models:decode f32[4,3] f32[3] --remove mutations
  functionalize verify my_models:make_model 'i64[1,8]<1000@input_ids' --call --runs 3
  functionalize report my_models:Net f32[1,3,32,32] -o report.html
  functionalize export my_models:Net f32[n=4,3,32,32] --to onnx -o net.onnx
  functionalize export my_models:WithLoss f32[8,3] --optimizer 'AdamW(lr=0.01)' --to stablehlo -o step.stablehlo
  functionalize run net.onnx --calls 3
  functionalize ops add_.Tensor
"""

_FILE = click.Path(path_type=Path, dir_okay=False)


class _Commands(click.Group):
    """Errors become one line, and with ``--json`` an object too."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if wants(ctx, "traceback"):
                traceback.print_exc()
            if wants(ctx, "json"):
                click.echo(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}, indent=2))
            if not wants(ctx, "traceback"):
                click.echo(f"error: {_text(error)}", err=True)
            ctx.exit(1)


_DETAILS = ("Developer debug context", "from user code:", "Set TORCHDYNAMO_VERBOSE")  # behind what torch says itself


def _text(error: Exception) -> str:
    text = str(error).strip() or "no message"
    for detail in _DETAILS:  # of torch's errors about what it traced: `--traceback` shows these
        text = text.partition(detail)[0].rstrip()
    return text if isinstance(error, (SpecError, TargetError)) else f"{type(error).__name__}: {text}"


def _choice(kinds: type[enum.Enum]) -> click.Choice[str]:
    return click.Choice([kind.value for kind in kinds])


@click.group(cls=_Commands, help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="functionalize")
@remembered("traceback", "Show the traceback of an error.")
def commands() -> None:
    """All commands."""


@commands.command()
@on_target
def trace(job: Job) -> None:
    """Capture TARGET and print its graph and what it writes.

    \b
    Examples:
      functionalize trace my_models:decode f32[4,3] f32[3]
      functionalize trace my_models:make_norm f32[8,3] --call --eval
    """
    program = job.capture()
    code, data = program.graph_module.print_readable(print_output=False).rstrip(), described(program)
    say_code(job, code)
    say(job)
    for write in data["mutations"]:
        say(job, f"writes {write['target']}: {write['op']} at {write['location']}")
    say(job, f"{counted(data['ops'], 'operator')}, {counted(len(data['mutations']), 'write')}")
    if job.world is not None:
        from functionalize.verify import collectives, volumes

        rows = volumes(collectives(program.graph_module))
        for line in volume_lines(rows):
            say(job, line)
        data |= {"collectives": [asdict(row) for row in rows]}
    answer(job, {"target": job.target, **data, "code": code})


@commands.command()
@on_target
@click.option("-o", "--output", type=_FILE, default="report.html", show_default=True, help="The page.")
def report(job: Job, output: Path) -> None:
    """Capture TARGET and write a page about it: storages, views, writes, code.

    \b
    Example:
      functionalize report my_models:Net f32[1,3,32,32] -o report.html
    """
    program = job.capture()
    program.report(output, title=job.target)
    say(job, f"wrote {output}")
    answer(job, {"target": job.target, "file": str(output), "mutations": len(program.mutations)})


@commands.command()
@on_target
@click.option(
    "--runs", type=click.IntRange(min=1), default=1, show_default=True, help="Number of runs, each on new inputs."
)
@click.option("--rtol", type=float, help="Relative tolerance, as in torch.testing.assert_close.")
@click.option("--atol", type=float, help="Absolute tolerance.")
def verify(job: Job, runs: int, rtol: float | None, atol: float | None) -> None:
    """Capture TARGET, check that its graph writes nothing, and run it beside eager on random inputs.

    It compares outputs, inputs and state after the call, and which of them share memory. It varies dynamic sizes, and
    tries both ends of their ranges. With --world it captures TARGET on each rank, and checks that all ranks issue their
    collectives in one order, and that results equal eager's on all ranks.

    \b
    Example:
      functionalize verify my_models:make_model 'i64[1,8]<1000@input_ids' --call --runs 3
    """
    from functionalize.cli.checking import at_ends, differences_from_eager
    from functionalize.verify import assert_functional

    program = job.capture()
    assert_functional(program.graph_module, job.remove)
    if job.world is not None:
        _verify_ranks(job, program)
        return
    tries = [(f"run {run}", job.inputs(run, sizes=True)) for run in range(runs)]
    ends = [(f"with {said}", inputs) for said, inputs in at_ends(program, job.inputs())]
    found = []
    for number, (said, inputs) in enumerate((*tries, *ends)):
        lines = differences_from_eager(job.original, program, inputs, seed=job.seed + number, rtol=rtol, atol=atol)
        found += [f"{said}: {line}" for line in lines]
    equal = f"free of {job.remove.replace('_', ' ')}; equals eager in {counted(runs, 'run')}"
    equal += ", and with the smallest and largest dynamic sizes" * bool(ends)
    for line in (*found, "differs from eager" if found else equal):
        say(job, line)
    data = {"target": job.target, "functional": True, "equal": not found, "runs": runs, "differences": found}
    answer(job, data)
    if found:
        click.get_current_context().exit(1)


def _verify_ranks(job: Job, program: CapturedProgram) -> None:
    """Whether the ranks of a world issue their collectives in one order, and compute what eager does."""
    programs = captured_by_each(job)
    waiting = disagreement([each.issued for each in programs])
    said = ["ranks wait for one another for ever:", *waiting] if waiting else []
    unknown = None
    if not waiting:
        try:
            difference = values_on_all_ranks(job, program, programs)
            said += [difference] if difference else []
        except NotImplementedError as error:
            unknown = str(error)
    for line in said:
        say(job, line)
    if not said:
        say(job, f"all {job.world} ranks issue {counted(len(programs[0].issued), 'collective')}, in one order")
        say(job, f"values were not compared: {unknown}" if unknown else "results equal eager's on all ranks")
    answer(job, {"target": job.target, "functional": True, "equal": not said, "differences": said, "unknown": unknown})
    if said:
        click.get_current_context().exit(1)


@commands.command()
@on_target
@click.option("--to", type=click.Choice(list(FORMATS)), help="The format to write (default: by the ending of -o).")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The file to write.")
@with_onnx_options
def export(job: Job, to: str | None, output: Path, onnx: OnnxOptions) -> None:
    """Capture TARGET and write it for other engines.

    \b
    Files of programs contain the program's state; `functionalize run` runs them:
      .pt2        for torch.export.load
      .onnx       for ONNX Runtime
      .stablehlo  for jax.export; the first state is in an npz beside it

    \b
    Examples:
      functionalize export my_models:Net f32[batch=4,3,32,32] --eval -o net.onnx
      functionalize export my_models:Net f32[1,3,32,32] --eval -o net.onnx --opset-version 18 --verify
      functionalize export my_models:Net f32[1,3,32,32] -o net.pt2
    """
    form = format_of(to, output)
    options = onnx.arguments(job) if form == "onnx" else onnx.refused(form)
    program = job.capture()
    FORMATS[form].write(program, output, options)
    say(job, f"wrote {form}: {output}")
    answer(job, {"target": job.target, "files": {form: str(output)}})


@commands.command(name="run")
@click.argument("file", type=_FILE)
@click.argument("specs", nargs=-1, type=SpecType(), metavar="[INPUT]...")
@click.option(
    "--calls", type=click.IntRange(min=1), default=1, show_default=True, help="Number of calls, each on new inputs."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for the random inputs.")
@remembered("json", "Print one JSON object.")
def run_file(file: Path, specs: tuple[Spec, ...], calls: int, seed: int) -> None:
    """Run a program that `export --to` wrote. Each call continues with the state that the last one left.

    Without INPUTs it is called with random numbers of the sizes that it was captured with. JAX's files do not record
    dynamic sizes: pass INPUTs for these.

    \b
    Examples:
      functionalize run net.onnx --calls 3
      functionalize run net.stablehlo f32[8,16]
    """
    with errors_alone():
        program = loaded(file)
        results = [called(program, specs, seed + number) for number in range(calls)]
    state = {name: summary(value) for name, value in program.state().items()}
    if wants(click.get_current_context(), "json"):
        click.echo(json.dumps({"file": str(file), "calls": results, "state": state}, indent=2))
        return
    for number, result in enumerate(results):
        click.echo(f"call {number}")
        for one in result:
            click.echo(f"  {_line(one)}")
    for name, one in state.items():
        click.echo(f"state {name}: {_line(one)}")


def _line(one: dict[str, Any]) -> str:
    """A value in one line."""
    if "dtype" not in one:
        return str(one["value"])
    shown = ", ".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in one["first"])
    return f"{one['dtype']}{one['shape']} {shown}"


@commands.command(name="ops")
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option("--kind", type=_choice(Kind), help="List operators that write in this way.")
@click.option("--view", type=_choice(ViewKind), help="List operators that view in this way.")
@click.option("--random", is_flag=True, help="List operators that draw random numbers.")
@click.option("--match", metavar="TEXT", help="List operators with this in their names.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def operators(
    names: Sequence[str], kind: str | None, view: str | None, random: bool, match: str | None, as_json: bool
) -> None:
    """Show what the tables say about operators, or list operators of one kind.

    \b
    Examples:
      functionalize ops add_.Tensor split
      functionalize ops --kind mutable
      functionalize ops --view multi --match split --json
    """
    from functionalize.codegen import exceptions, tables
    from functionalize.codegen.native_functions import sources

    if not (names or kind or view or random or match):
        raise click.UsageError("name an operator, such as add_.Tensor, or list some with --kind, --view or --match")
    known = tables.build(sources.installed_source(), exceptions.load())
    if names:
        rows = [row for name in names for row in _named(known.rows, name)]
    else:
        rows = [row for row in known.rows.values() if kind in (None, row.kind.value) and view in (None, row.view.value)]
        rows = [row for row in rows if (row.random or not random) and (match or "") in row.name]
    if as_json:
        columns = [{name: as_literal(value) for name, value in asdict(row).items()} for row in rows]
        click.echo(json.dumps({"ops": columns}, indent=2))
        return
    for line in _explained(known, rows) if names else (row.name for row in rows):
        click.echo(line)


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit status."""
    try:
        commands.main(list(arguments), prog_name="functionalize")
    except SystemExit as end:  # how click ends every command
        return end.code if isinstance(end.code, int) else 1


def _named(rows: dict[str, OpRow], name: str) -> list[OpRow]:
    """The operators of a name: one, or without an overload all that there are."""
    full = f"aten::{name.removeprefix('aten.').removeprefix('aten::').removesuffix('.default')}"
    every = not name.endswith(".default")
    found = [row for known, row in rows.items() if known == full or (every and known.startswith(f"{full}."))]
    if not found:
        near = difflib.get_close_matches(full, rows, n=5)
        raise click.ClickException(f"there is no operator {full}; similar names: {', '.join(near) or 'none'}")
    return found


def _explained(tables: Any, rows: Sequence[OpRow]) -> Iterator[str]:
    from functionalize.codegen import explain, rules

    for index, row in enumerate(rows):
        if index:
            yield ""
        for label, text in explain.lines(tables, row.name, rules.read_rules()):
            yield f"{label:11} {text}"
