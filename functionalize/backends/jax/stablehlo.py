"""Programs as StableHLO, which ``jax.export`` loads without torch and without this package; and such files run.

Invariant: what is written is a function of the state and the arguments: nothing that the program writes is dropped.
Limits: a file runs on the platforms that it was written for; of state the sizes are fixed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import export

from functionalize._torch import pytree
from functionalize.backends.arrays.leaves import with_ordered
from functionalize.backends.arrays.program import Written
from functionalize.backends.arrays.sizes import fits
from functionalize.backends.jax.files import read, state_beside, write_one, write_two
from functionalize.backends.jax.program import UNNAMED, JaxProgram, to_jax
from functionalize.backends.jax.values import from_torch, is_number, torch_dtype_of
from functionalize.errors import InputMismatchError, UnsupportedProgramError

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram


def write_stablehlo(program: CapturedProgram, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write a captured program as StableHLO: ``(state, *args, **kwargs) -> (new_state, outputs)``.

    Args:
        program: the program.
        path: the path of the file; the first state is written beside it, as ``npz``.
        options: those of :meth:`CapturedProgram.to_jax`, and ``platforms`` as for ``jax.export``.

    Returns:
        The path of the file.

    Raises:
        UnsupportedProgramError: JAX cannot run the program; nothing is written.
    """
    platforms, path = options.pop("platforms", None), Path(path)
    made = to_jax(program, **options)
    write_two(path, serialized(made, platforms), made.initial_state)
    return path


def save(program: JaxProgram, path: str | os.PathLike[str], *, platforms: Any = None) -> Path:
    """Write a program and its first state as one file, which :func:`load` reads.

    Args:
        program: the result of ``to_jax``.
        path: the path of the file, an ``npz``: ``program`` holds the bytes that ``jax.export`` deserializes, and
            ``state/...`` the first state.
        platforms: as for ``jax.export`` (default: the platform that JAX runs on).

    Returns:
        The path.

    Example:
        >>> import tempfile, torch
        >>> import numpy as np
        >>> from functionalize import capture
        >>> program = capture(torch.nn.BatchNorm1d(2), (torch.ones(3, 2),)).to_jax()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = load(save(program, f"{folder}/norm.jax"))
        >>> loaded(np.ones((3, 2), np.float32)).shape
        (3, 2)
    """
    path = Path(path)
    write_one(path, serialized(program, platforms), program.initial_state)
    return path


def serialized(program: JaxProgram, platforms: Any = None) -> bytes:
    """A program as ``jax.export`` keeps it."""
    state, args, kwargs = program.example()
    if "self" in kwargs:
        raise UnsupportedProgramError(
            "the program takes a keyword argument called `self`",
            why="a StableHLO program is called by a JAX method, which has an argument of that name itself",
            hint="capture the program with that argument by position",
            at="the arguments",
        )
    if (container := _unnameable((args, kwargs))) is not None:
        raise UnsupportedProgramError(
            f"the program takes {container} as an argument",
            why="a StableHLO program is called with arrays in tuples, lists, and dicts whose keys are strings",
            hint="pass the arrays in one of these, or call `to_jax()`, which supports other containers",
            at="the arguments",
        )

    def function(state: Any, /, *args: Any, **kwargs: Any) -> Any:
        new, outputs = program(state, *args, **kwargs)
        return new, _in_file(tuple(outputs) if isinstance(outputs, Written) else outputs)

    function.__signature__ = UNNAMED  # type: ignore[attr-defined]
    with jax.enable_x64(True):
        exported = export.export(jax.jit(function), platforms=platforms)(state, *args, **kwargs)
        try:
            return bytes(exported.serialize())
        except ValueError as error:
            raise UnsupportedProgramError(
                "the arguments or the results contain an object of a class that files cannot name",
                why=str(error),
                hint="use tuples, lists and dicts, or register the class with jax.export",
                at="the arguments and the results",
            ) from error


def _unnameable(tree: Any) -> str | None:
    """The first container of a nest that no file has, in words."""
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            return f"a dict whose keys are not strings ({', '.join(map(repr, tree))})"
        if type(tree) not in (dict, OrderedDict):
            return f"a {type(tree).__name__}"
        items: Iterable[Any] = tree.values()
    elif isinstance(tree, (tuple, list)) and type(tree).__module__ != "torch.return_types":
        items = tree
    else:
        return None if pytree.tree_is_leaf(tree) else f"a {type(tree).__name__}"
    return next((name for item in items if (name := _unnameable(item)) is not None), None)


def _in_file(outputs: Any) -> Any:
    """Outputs as a file can give them, their entries in their order.

    Raises:
        UnsupportedProgramError: there is something else among them than arrays and numbers, under names.
    """
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        named = all(isinstance(step.key, str) for step in path if isinstance(step, pytree.MappingKey))
        if named and (leaf is None or is_number(leaf) or isinstance(leaf, (jax.Array, np.ndarray, np.generic))):
            continue
        what = f"returns {leaf!r}" if named else "returns a dict whose keys are not strings"
        raise UnsupportedProgramError(
            f"the program {what}, at {pytree.keystr(path) or 'the top'}",
            why="a StableHLO program returns arrays in tuples, lists, and dicts whose keys are strings",
            hint="return it in one of these, or do not return it if it is the same in each call; or call `to_jax()` "
            "or `to_onnx()`, which support it",
            at="what it returns",
        )
    return with_ordered(outputs, lambda keys: keys != sorted(keys))


def _as_returned(outputs: Any) -> Any:
    """Outputs of a file, with dicts for those whose order it keeps."""
    if isinstance(outputs, dict):
        return {key: _as_returned(item) for key, item in outputs.items()}
    return type(outputs)(map(_as_returned, outputs)) if type(outputs) in (list, tuple) else outputs


def load(path: str | os.PathLike[str]) -> StableHloProgram:
    """Load a program that ``to_stablehlo`` or :func:`save` wrote; it keeps its state from call to call.

    Raises:
        OSError: there is no such file.
        ValueError: the file is not such a program, is not complete, or its state is missing.
    """
    path = Path(path)
    content, included = read(path)
    try:
        exported = export.deserialize(bytearray(content))
        state, *_ = jax.tree_util.tree_unflatten(exported.in_tree, exported.in_avals)[0]
        known = {name: (value.shape, value.dtype) for name, value in state.items()}
    except Exception as error:  # whatever reading other bytes comes to
        raise ValueError(
            f"{path} was not written by to_stablehlo, is not complete, or has a version that this JAX does not read: "
            f"{type(error).__name__} {error}\n"
            "    try  write it again with to_stablehlo"
        ) from error
    arrays = state_beside(path) if included is None else included
    wanted = {name: (shape, dtype.itemsize) for name, (shape, dtype) in known.items()}
    if {name: (array.shape, array.dtype.itemsize) for name, array in arrays.items()} != wanted:
        raise ValueError(
            f"the file of state beside {path} belongs to another program: it contains {', '.join(arrays) or 'nothing'}"
        )
    with jax.enable_x64(True):
        first = {name: jnp.asarray(array.view(known[name][1])) for name, array in arrays.items()}
    return StableHloProgram(exported, first)


class StableHloProgram:
    """A program from a file, with the signature of the original; ``state`` is its state after the calls so far.

    Example:
        >>> import tempfile, torch
        >>> import numpy as np
        >>> from functionalize import capture
        >>> program = capture(torch.nn.BatchNorm1d(2), (torch.ones(3, 2),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = load(write_stablehlo(program, f"{folder}/norm.stablehlo"))
        >>> loaded(np.ones((3, 2), np.float32)).shape, int(loaded.state["num_batches_tracked"])
        ((3, 2), 1)
    """

    def __init__(self, exported: Any, state: Mapping[str, Any]) -> None:
        self.exported, self.state = exported, dict(state)

        def call(leaves: list[Any]) -> Any:  # not by name: JAX takes a name for that of a parameter of its own
            args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, leaves)
            return exported.call(*args, **kwargs)

        self._call: Callable[..., Any] = jax.jit(call)

    @property
    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the arguments of a call look like."""
        (_, *args), kwargs = jax.tree_util.tree_unflatten(self.exported.in_tree, self.exported.in_avals)
        return tuple(args), kwargs

    def __repr__(self) -> str:
        arguments = ", ".join(map(_look, jax.tree.leaves(self._arguments)))
        return f"StableHloProgram(arguments: {arguments or 'none'}; state: {', '.join(self.state) or 'none'})"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """What the program gives for arrays; a pair with the written arguments where it writes to some.

        Raises:
            InputMismatchError: the arguments are nested differently from those of the capture, or of other shapes or
                dtypes.
        """
        self._check(args, kwargs)
        with jax.enable_x64(True):
            try:
                self.state, outputs = self._call(jax.tree.leaves(((self.state, *args), kwargs)))
            except ValueError as error:  # of sizes that differ: what it says of the call, without the rest
                said = str(error).partition("\n")[0]
                passed = ", ".join(map(_look, jax.tree.leaves((args, kwargs))))
                raise InputMismatchError(
                    f"the program does not take the sizes of {passed}: {said}",
                    hint="pass sizes within the bounds of the capture (`dynamic_shapes`), equal where one size is used "
                    "for several dimensions",
                ) from error
        return _as_returned(outputs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted = jax.tree_util.tree_leaves_with_path(self._arguments)
        found = jax.tree_util.tree_leaves_with_path((args, kwargs))
        nestings: list[Any] = [jax.tree.structure(one) for one in ((args, kwargs), self._arguments)]
        if nestings[0] != nestings[1]:
            raise InputMismatchError(
                f"the program is called with {_places(found)}, but was captured with {_places(wanted)}",
                hint="pass arguments like those of the capture",
            )
        for (path, aval), (_, value) in zip(wanted, found, strict=True):
            if not _fits(aval, value):
                raise InputMismatchError(
                    f"the argument {_place(path)} is {_look(value)}, but was {_look(aval)} when the program was "
                    "captured",
                    hint="pass an array of that shape and dtype, or export the program again for this one",
                )

    def random_arguments(self, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arrays of random numbers with the shapes of a call's arguments; integers are zeros."""
        generator = torch.Generator().manual_seed(seed)

        def made(aval: Any) -> Any:
            if not all(type(size) is int for size in aval.shape):
                raise InputMismatchError(
                    f"the program takes arguments of dynamic sizes: {_look(aval)}",
                    hint="say which inputs to pass: functionalize run FILE f32[2,16]",
                )
            value = torch.zeros(aval.shape, dtype=torch_dtype_of(aval))
            if value.is_floating_point():
                value.copy_(torch.randn(value.size(), generator=generator))
            return from_torch(value)

        found: tuple[tuple[Any, ...], dict[str, Any]] = jax.tree.map(made, self._arguments)
        return found


def _fits(aval: Any, value: Any) -> bool:
    """Whether an argument has the dtype and the sizes of the capture; JAX tells what symbols may stand for."""
    if not (hasattr(aval, "dtype") and hasattr(value, "dtype")):
        return type(aval) is type(value)
    return bool(aval.dtype == value.dtype and fits(aval.shape, value.shape))


def _place(path: Any) -> str:
    """Where a leaf of the arguments is, in words: ``0``, ``mask``, ``0['x']``."""
    (kind, first, *rest) = path
    return f"{getattr(first, 'key', getattr(first, 'idx', first))}{jax.tree_util.keystr(tuple(rest))}" if kind else ""


def _places(leaves: Any) -> str:
    return ", ".join(_place(path) for path, _ in leaves) or "nothing"


def _look(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else f"a {type(value).__name__}"
