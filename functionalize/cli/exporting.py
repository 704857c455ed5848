"""Files of programs for other engines: written by `export --to`, run by `run`; a row for each format.

Invariant: a format is known by its suffix when it is read. Limits: formats that load without the program's code.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from functionalize.cli.specs import Spec, make_inputs
from functionalize.cli.targets import TargetError

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Loaded:
    """A program that was read from a file."""

    function: Callable[..., Any]
    state: Callable[[], Mapping[str, Any]]  # as it is now
    inputs: Callable[[int], Call]  # random ones; of a seed


@dataclass(frozen=True)
class Format:
    """How files of one kind are written and read."""

    suffix: str
    write: Callable[[CapturedProgram, Path, Mapping[str, Any]], object]  # with options, of those formats that have some
    read: Callable[[Path], Loaded]


def _write_pt2(program: CapturedProgram, path: Path, options: Mapping[str, Any]) -> None:
    import torch

    program.warn_of_training()
    exported = program.to_exported_program()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished.pt2")
    try:
        torch.export.save(exported, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read_pt2(path: Path) -> Loaded:
    import torch

    from functionalize._torch import pytree
    from functionalize.aliasing.geometry import Layout

    if not zipfile.is_zipfile(path):
        raise TargetError(f"{path} was not written by torch.export, or is not complete")
    try:
        exported = torch.export.load(path)
    except Exception as error:  # torch logs where it fails, and raises what it met there
        said = str(error).strip().split("\n", maxsplit=1)[0]
        raise TargetError(f"{path} was not written by torch.export, or is not complete: {said}") from error
    module = exported.module()
    named = {
        *exported.graph_signature.buffers_to_mutate.values(),
        *exported.graph_signature.parameters_to_mutate.values(),
    }

    def state() -> dict[str, Any]:
        return {name: value for name, value in [*module.named_parameters(), *module.named_buffers()] if name in named}

    def inputs(seed: int) -> Call:
        """Of random numbers, which lie in memory as the example inputs do."""
        generator = torch.Generator().manual_seed(seed)
        args, kwargs = copy.deepcopy(exported.example_inputs or ((), {}))
        for leaf in pytree.tree_leaves((args, kwargs)):
            is_dense = isinstance(leaf, torch.Tensor) and not Layout.of(leaf).has_internal_overlap
            if is_dense and leaf.dtype.is_floating_point:
                leaf.detach().copy_(torch.randn(leaf.size(), generator=generator))
        return tuple(args), dict(kwargs)

    return Loaded(module, state, inputs)


def _read_onnx(path: Path) -> Loaded:
    from functionalize.backends import onnx

    program = onnx.load(path)
    return Loaded(program, lambda: program.state, program.random_arguments)


def _read_stablehlo(path: Path) -> Loaded:
    import torch

    from functionalize._torch import pytree
    from functionalize.backends import jax

    program = jax.load(path)

    def of_tensors(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, jax.from_torch, (args, kwargs))
        return program(*args, **kwargs)

    return Loaded(of_tensors, lambda: program.state, program.random_arguments)


FORMATS = {
    "pt2": Format(".pt2", _write_pt2, _read_pt2),
    "onnx": Format(".onnx", lambda program, path, options: program.to_onnx(path, **options), _read_onnx),
    "stablehlo": Format(".stablehlo", lambda program, path, options: program.to_stablehlo(path), _read_stablehlo),
}


def format_of(to: str | None, output: Path) -> str:
    """The format that is written: what ``to`` says, else the suffix.

    Raises:
        click.UsageError: the two contradict one another, or the output is not a file of a format.
    """
    form = to or next((name for name, known in FORMATS.items() if known.suffix == output.suffix), None)
    if form is None:
        suffixes = ", ".join(known.suffix for known in FORMATS.values())
        raise click.UsageError(f"{output} does not end in one of {suffixes}: name a file with one of these endings")
    wanted = output.with_suffix(FORMATS[form].suffix)
    if output != wanted:
        raise click.UsageError(f"--to {form} contradicts {output}: such a file ends in {wanted.suffix}: {wanted}")
    if output.is_dir():
        raise click.UsageError(f"{output} is a folder: name a file, {output / f'model{wanted.suffix}'}")
    return form


def loaded(path: Path) -> Loaded:
    """The program in a file.

    Raises:
        TargetError: there is no such file, or its suffix is that of no format.
    """
    found = next((known for known in FORMATS.values() if known.suffix == path.suffix), None)
    if found is None:
        known = ", ".join(one.suffix for one in FORMATS.values())
        raise TargetError(f"{path} cannot be run: files that can be run end in {known}")
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    return found.read(path)


def called(program: Loaded, specs: Sequence[Spec], seed: int) -> list[dict[str, Any]]:
    """Call a program once; what it returns, tensor by tensor, as plain data."""
    import torch

    from functionalize._torch import pytree

    args, kwargs = make_inputs(specs, seed) if specs else program.inputs(seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        result = program.function(*args, **kwargs)
    return [summary(leaf) for leaf in pytree.tree_leaves(result)]


def summary(value: Any) -> dict[str, Any]:
    """A value as plain data: of tensors the first elements."""
    import torch

    if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
        from functionalize.backends.jax import to_torch

        value = to_torch(value)
    if not isinstance(value, torch.Tensor):
        return {"value": value if isinstance(value, (int, float, bool, str, type(None))) else repr(value)}
    shown = value.detach().flatten()[:8].tolist()
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.size()), "first": shown}
