"""What the commands have in common: a target with its inputs, the capture with its progress, and how they answer.

Invariant: what is for people goes through `say`, which is silent under ``--json``; JSON is one object on stdout.
Limits: one command a process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.syntax import Syntax

from functionalize.cli.specs import Spec, SpecError, make_inputs
from functionalize.cli.targets import Bounds, TargetError, bounds_of, dynamic_shapes_of, find, grown, optimizer_of

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram

REMOVE = ("mutations_and_views", "mutations")
_AFTER = 0.5  # seconds: shorter captures show no progress
_EVERY = 0.1


@dataclass(frozen=True)
class Job:
    """What a command is asked to do."""

    target: str
    specs: tuple[Spec, ...]
    factory: str | None
    call: bool
    evaluate: bool
    remove: str
    seed: int
    as_json: bool
    optimizer: str | None = None
    ranges: tuple[str, ...] = ()
    shapes: str | None = None
    exporting: bool = False
    world: int | None = None
    rank: int | None = None

    @functools.cached_property
    def model(self) -> Callable[..., Any]:
        """The module or function; classes of modules, and with ``call`` factories, are called."""
        import torch

        name, found = self.target, find(self.target)
        if self.call or (isinstance(found, type) and issubclass(found, torch.nn.Module)):
            try:
                found = found()
            except TypeError as error:
                advice = "write a function that makes the model, and use --call"
                raise TargetError(f"{name} cannot be called without arguments ({error}): {advice}") from error
        if not callable(found):
            raise TargetError(f"{name} is a {type(found).__name__}, which is neither a function nor a module")
        if self.evaluate:
            if not isinstance(found, torch.nn.Module):
                raise TargetError(f"--eval is for modules, but {name} is a {type(found).__name__}")
            found.eval()
        return found  # type: ignore[no-any-return]

    @functools.cached_property
    def stepped(self) -> Any:
        """The optimizer, if there is one."""
        return None if self.optimizer is None else optimizer_of(self.optimizer, self.model)

    @property
    def original(self) -> Callable[..., Any]:
        """What the program is to equal: of a module with an optimizer, the training step."""
        from functionalize.graph_capture.inputs.training import training_step
        from functionalize.python_state.walk import is_module

        model, optimizer = self.model, self.stepped
        return training_step(model, optimizer) if optimizer is not None and is_module(model) else model

    @functools.cached_property
    def bounds(self) -> dict[str, Bounds]:
        """Between which sizes those lie that may differ."""
        return bounds_of(self.ranges)

    @property
    def dynamic_shapes(self) -> Any:
        """Which sizes may differ: those that inputs name, or what an object says."""
        if self.shapes is None:
            return dynamic_shapes_of(self.specs, self.bounds)
        if self.ranges or any(name for spec in self.specs for name in spec.names):
            raise TargetError("dynamic sizes are given both in the inputs and by --dynamic-shapes: use one of the two")
        found = find(self.shapes)
        return found() if callable(found) else found

    def inputs(self, further: int = 0, *, sizes: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs, of one look and with other numbers for each ``further``: by specs, or from a function.

        ``sizes``: with other sizes, too, where they may differ.
        """
        if self.factory is None:
            others = grown(self.specs, self.bounds, further) if sizes else None
            return make_inputs(self.specs, self.seed + further, others)
        if self.specs:
            raise TargetError("inputs are given both as specs and by --inputs: use one of the two")
        import torch

        torch.manual_seed(self.seed + further)
        made = find(self.factory)()
        if not isinstance(made, tuple):
            return (made,), {}
        if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
            return tuple(made[0]), dict(made[1])
        return made, {}

    def ranks(self) -> contextlib.AbstractContextManager[None]:
        """The world of ranks that the target is a part of, if there is one."""
        if self.world is None:
            if self.rank is not None:
                raise TargetError("--rank names one of several ranks: say how many with --world")
            return contextlib.nullcontext()
        from functionalize._torch.distributed.worlds import fake_world

        rank = self.rank or 0
        if rank >= self.world:
            raise TargetError(f"a world of {self.world} ranks has the ranks 0 to {self.world - 1}, and no rank {rank}")
        return fake_world(self.world, rank)

    def capture(self) -> CapturedProgram:
        """The target's program, with its progress on a terminal."""
        from functionalize.errors import InputMismatchError
        from functionalize.graph_capture.capture import capture

        args, kwargs = self.inputs()
        options = {"dynamic_shapes": self.dynamic_shapes, "optimizer": self.stepped}
        with _progress(Console(stderr=True)):
            try:
                return capture(self.model, args, kwargs, remove=self.remove, is_exporting=self.exporting, **options)
            except InputMismatchError as error:
                said = _DIM.sub(r"--range \1=\2:\3", str(error))
                raise TargetError(said.replace("Dim.AUTO", "--dynamic-shapes with Dim.AUTO")) from error


_DIM = re.compile(r"(?<!\* )Dim\('(\w+)', min=(\d+)(?:, max=(\d+))?\)")  # as errors advise it


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def describe(ops: int, seconds: float, module: str) -> str:
    """One line about a capture that runs."""
    rate = f"{ops / seconds:,.0f}" if seconds > 0 else "-"
    return f"captured {ops:,} ops, {rate} ops/s{f', in {module}' if module else ''}"


def _module_of(node: Any) -> str:
    """The path of the innermost module that made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values())) if path), "")


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[None]:
    """Show how captures inside get on, if the console is a terminal: in a pipe nothing is written."""
    if not console.is_terminal:
        yield
        return
    from functionalize.graph_capture.trace.provenance import observing

    status, began = console.status("capturing"), time.monotonic()
    ops, due = 0, began + _AFTER

    def note(node: Any) -> None:
        nonlocal ops, due
        ops += 1
        now = time.monotonic()
        if now >= due:
            due = now + _EVERY
            status.update(describe(ops, now - began, _module_of(node)))
            status.start()  # does nothing where it was

    with observing(note):
        try:
            yield
        finally:
            status.stop()


def say(job: Job, text: str = "") -> None:
    """A line for people."""
    if not job.as_json:
        click.echo(text)


def say_code(job: Job, code: str) -> None:
    """Python for people: in colours on a terminal."""
    console = Console()
    if console.is_terminal and not job.as_json:
        console.print(Syntax(code, "python", background_color="default"))
    else:
        say(job, code)


def answer(job: Job, data: dict[str, Any]) -> None:
    """What a machine reads."""
    if job.as_json:
        click.echo(json.dumps(data, indent=2))


class SpecType(click.ParamType[Spec]):
    """Inputs in words, as arguments."""

    name = "input"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Spec:
        try:
            return value if isinstance(value, Spec) else Spec.parse(value)
        except SpecError as error:
            self.fail(str(error), param, ctx)


def wants(context: click.Context, name: str) -> bool:
    """Whether an option that is the whole run's was given, before the command or after it."""
    return bool(context.meta.get(f"functionalize.{name}"))


def remembered(name: str, text: str) -> Callable[[Any], Any]:
    """An option that is the whole run's."""

    def remember(context: click.Context, option: click.Parameter, value: bool) -> bool:
        if value:
            context.meta[f"functionalize.{name}"] = True
        return value

    return click.option(f"--{name}", is_flag=True, expose_value=False, callback=remember, help=text)


@contextlib.contextmanager
def errors_alone() -> Iterator[None]:
    """While torch logs nothing, whose logs would show a traceback before each error; with ``--traceback`` it does.

    Warnings of this package are one line each.
    """
    from functionalize._torch.symbols.tracing import logs_of_torch_off
    from functionalize.errors import DecisionsAssertedWarning, TrainingModeWarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, TrainingModeWarning):
            click.echo(f"warning: {message} (--eval)", err=True)
        elif issubclass(category, DecisionsAssertedWarning):
            said = str(message).replace("capture(..., is_exporting=True)", "--exporting")
            click.echo("warning: " + "; ".join(" ".join(line.split()) for line in said.splitlines()), err=True)
        else:
            before(message, category, *where, **more)

    before, warnings.showwarning = warnings.showwarning, show
    try:
        with contextlib.nullcontext() if wants(click.get_current_context(), "traceback") else logs_of_torch_off():
            yield
    finally:
        warnings.showwarning = before


_OPTIONS = [
    click.argument("target"),
    click.argument("specs", nargs=-1, type=SpecType(), metavar="[INPUT]..."),
    click.option("--inputs", "factory", metavar="MODULE:FUNCTION", help="A function that returns the inputs."),
    click.option("--call", is_flag=True, help="The target is a function that makes the model: call it."),
    click.option("--eval", "evaluate", is_flag=True, help="Put the module into evaluation mode."),
    click.option("--remove", type=click.Choice(REMOVE), default=REMOVE[0], show_default=True, help="What to remove."),
    click.option("--optimizer", help="Optimizer of a training step: AdamW, 'SGD(lr=0.1)', package.module:object."),
    click.option("--range", "ranges", multiple=True, metavar="NAME=MIN:MAX", help="Bounds of a dynamic size."),
    click.option("--dynamic-shapes", "shapes", metavar="MODULE:OBJECT", help="The argument dynamic_shapes of capture."),
    click.option(
        "--exporting", is_flag=True, help="Make torch.compiler.is_exporting() true, for libraries that check it."
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed for the random inputs."),
    click.option(
        "--world", type=click.IntRange(min=1), metavar="N", help="Capture as one of N ranks, which need not exist."
    ),
    click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Which of the ranks (default 0)."),
    remembered("json", "Print one JSON object."),
    remembered("traceback", "Show the traceback of an error."),
]


def on_target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a target and its options; what it gets is a :class:`Job`."""

    @functools.wraps(command)
    def wrapper(**given: Any) -> Any:
        as_json = wants(click.get_current_context(), "json")
        job = Job(as_json=as_json, **{name: given.pop(name) for name in Job.__dataclass_fields__ if name in given})
        with errors_alone(), job.ranks():
            return command(job, **given)

    for option in reversed(_OPTIONS):
        wrapper = option(wrapper)
    return wrapper
