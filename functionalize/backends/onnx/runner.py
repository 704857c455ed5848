"""Runs a program that was written as an ONNX file: called as the original is, with its state kept between calls.

ONNX Runtime reads and writes the memory of torch's tensors. A new state is written where the old one is if nothing but
one scatter reads that; else to a second tensor, and the two take turns.

Invariant: a call that is refused has changed neither state nor arguments. Limits: CPU memory; one call at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import onnxruntime
import torch
from google.protobuf.message import DecodeError  # what reading a file of another kind raises
from torch.utils.dlpack import from_dlpack

from functionalize._torch import FakeTensor, pytree
from functionalize.aliasing.geometry import Layout
from functionalize.backends.arrays.sizes import fits
from functionalize.backends.export.signature.layouts import laid_out, lies_so
from functionalize.backends.export.signature.state import free_name
from functionalize.backends.onnx.convention.first_state import first_values
from functionalize.backends.onnx.convention.metadata import ELEMENTS, KEY, Convention, Result, spec_of
from functionalize.backends.onnx.convention.sharing import lie_alike
from functionalize.errors import DataDependentError, InputMismatchError

_NAMES = {
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
} | {f"tensor({str(dtype).removeprefix('torch.')})": dtype for dtype in ELEMENTS}


class _Kept:
    """One tensor of state: as it is, and where its next value goes."""

    def __init__(self, value: torch.Tensor, *, in_place: bool) -> None:
        self.now = value
        self.next = value if in_place else torch.empty_like(value)

    def turn(self) -> None:
        self.now, self.next = self.next, self.now


class OnnxProgram:
    """What :func:`functionalize.backends.onnx.load` returns."""

    def __init__(self, path: Path | bytes, state: Mapping[str, torch.Tensor], **options: Any) -> None:
        """``path``: of the file; or the model itself. ``state``: what some of the state begins with."""
        label = "the model" if isinstance(path, bytes) else str(path)
        model = _read(path, label)
        self.convention = _convention(model, label)
        self._label = label
        self._specs = spec_of(self.convention.in_spec), spec_of(self.convention.out_spec)
        first = first_values(model, self.convention, path if isinstance(path, Path) else None, state)
        try:
            options = {"providers": ["CPUExecutionProvider"], "sess_options": _quiet(), **options}
            source = path if isinstance(path, bytes) else str(path)
            self.session = onnxruntime.InferenceSession(source, **options)
        except Exception as error:  # ONNX Runtime has several kinds, of no common class
            raise ValueError(
                f"{label} cannot be loaded: {error}\n"
                "    try  keep its `.data` file beside it; pass other providers if this one does not support a "
                "type; or write the file again"
            ) from error
        in_place = not self.convention.checks  # else a call that is refused would have written
        self._state = {
            one.target: _Kept(first[one.target], in_place=in_place and one.in_place) for one in self.convention.state
        }
        self._inputs = {one.name: one for one in self.session.get_inputs()}
        outputs = {one.name: one for one in self.session.get_outputs()}
        self._check_names(label, outputs)
        self._outputs = [outputs[name] for name in self.convention.read]
        self._lock = threading.Lock()

    def _check_names(self, label: str, outputs: Collection[str]) -> None:
        """Hold the file to its metadata: another tool may have given its inputs and outputs other names."""
        inputs = self.convention.passed
        missing = [f"no output `{name}`" for name in self.convention.read if name not in outputs]
        missing += [f"an input `{name}` that the metadata do not list" for name in self._inputs if name not in inputs]
        if missing:
            raise ValueError(
                f"the metadata of {label} do not fit its graph, which has {', '.join(missing)}\n"
                f"    why  the metadata list the inputs {_listed(inputs)} and the outputs "
                f"{_listed(self.convention.read)}; the graph has {_listed(self._inputs)} and {_listed(outputs)}: the "
                "file was changed after it was written\n"
                f"    try  restore the names in the graph, or change them in the entry `{KEY}` of the metadata as "
                "well"
            )
        for state in self.convention.state:
            given = self._inputs.get(state.input)
            if given is not None and _NAMES.get(given.type) is not getattr(torch, state.dtype):
                raise ValueError(
                    f"the state `{state.target}` is {state.dtype} in the metadata of {label}, but {given.type} in "
                    "its graph: the file was changed after it was written\n"
                    "    try  keep the types of inputs and outputs when you convert the file (`keep_io_types`)"
                )

    def __repr__(self) -> str:
        rows = {"arguments": [one.name for one in self.convention.arguments], "state": list(self._state)}
        said = [f"{what}: {', '.join(names)}" for what, names in rows.items() if names]
        return f"OnnxProgram({'; '.join([self._label, *said])})"

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The state, by its paths: the tensors that the next call reads; copy into them to set it.

        Ask again after a call, which may leave its state in other tensors.
        """
        return MappingProxyType({target: kept.now for target, kept in self._state.items()})

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute, keep the new state, write what the original writes to its arguments, return what it returns.

        Raises:
            InputMismatchError: the arguments are nested differently, or have other dtypes or sizes.
            DataDependentError: the data take another branch than when the program was captured.
        """
        leaves = self._leaves(args, kwargs)
        with self._lock:
            given = self._run(leaves)
            self._check(given)
            for kept in self._state.values():
                kept.turn()
            for name, output in self.convention.writes.items():
                leaves[name].copy_(given[output])
        made, tensors = list[Any](), dict(leaves)
        for result in self.convention.results:
            made.append(_result(result, given, tensors))
        return pytree.tree_unflatten(made, self._specs[1])

    def random_arguments(self, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of random numbers, of the sizes that the program was captured with."""
        generator, leaves = torch.Generator().manual_seed(seed), []
        for argument in self.convention.arguments:
            known, value = self._inputs.get(argument.name), argument.value
            if known is not None:
                dtype = _NAMES[known.type]
                value = torch.zeros(self.convention.sizes.example(argument.name) or known.shape, dtype=dtype)
                if dtype.is_floating_point:
                    value.copy_(torch.randn(value.size(), generator=generator))
                for layout in self.convention.layouts:
                    value = laid_out(value, layout.look) if layout.argument == argument.name else value
            leaves.append(value)
        args, kwargs = pytree.tree_unflatten(leaves, self._specs[0])
        return args, kwargs

    def _leaves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = self._in_order(args, kwargs)
        given = tuple(args), kwargs
        try:
            values = self._specs[0].flatten_up_to(given)  # keys of dicts in any order
        except ValueError as error:
            raise InputMismatchError(
                f"the arguments have the structure {pytree.tree_structure(given)}, but were captured with "
                f"{self._specs[0]}",
                hint="pass arguments like those of the capture",
            ) from error
        found = {}
        for argument, value in zip(self.convention.arguments, values, strict=True):
            found[argument.name] = value
            if argument.constant and (type(value) is not type(argument.value) or value != argument.value):
                raise InputMismatchError(
                    f"the argument `{argument.name}` is {value!r}, but was captured as {argument.value!r}",
                    hint="pass the same value, or export the program again with another one",
                )
            if not argument.constant:
                self._check_tensor(argument.name, value)
        self.convention.sizes.check(found)
        self._check_layouts(found)
        self._check_memory(found)
        return found

    def _in_order(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments by position and by name as they were when the program was captured."""
        spec = self._specs[0]
        keywords = list(spec.child(1).context or [])
        positional = self.convention.names[: spec.child(0).num_children]
        given = dict(zip(self.convention.names, args, strict=False)) | {free_name(key): kwargs[key] for key in kwargs}
        if set(given) != {*positional, *keywords} or len(given) != len(args) + len(kwargs):
            raise InputMismatchError(
                f"the program is called with {', '.join(given) or 'nothing'} ({len(args)} by position)",
                hint=f"pass {', '.join([*positional, *keywords])}",
            )
        return [given[name] for name in positional], {name: given[name] for name in keywords}

    def _check_tensor(self, name: str, value: Any) -> None:
        expected = self._inputs.get(name)
        if not isinstance(value, torch.Tensor):
            raise InputMismatchError(
                f"the argument `{name}` is not a tensor, but was captured as one", hint="pass a tensor"
            )
        if expected is None:  # the graph does not use it
            return
        if not _has_elements(value):
            raise InputMismatchError(
                f"the argument `{name}` is a {type(value).__name__} on {value.device}, of layout {value.layout}, but "
                "ONNX Runtime reads elements from CPU memory",
                hint="pass a dense tensor with data, x.cpu()",
            )
        if not fits(expected.shape, value.size()) or _NAMES.get(expected.type) is not value.dtype:
            raise InputMismatchError(
                f"the argument `{name}` has size {list(value.size())} and {value.dtype}, but was captured with "
                f"{expected.shape} and {expected.type}",
                hint="pass a tensor of that size and type, or capture the program with dynamic_shapes",
            )

    def _check_layouts(self, leaves: dict[str, Any]) -> None:
        """How arguments lie in memory counts where the program asks for it."""
        for layout in self.convention.layouts:
            if not lies_so(leaves[layout.argument], layout.look):
                raise InputMismatchError(
                    f"the argument `{layout.argument}` has another memory layout than at the capture "
                    f"({layout.look}), and the program's results depend on it",
                    hint="pass a tensor with that layout (.contiguous()), or capture again",
                )

    def _check_memory(self, leaves: dict[str, Any]) -> None:
        """Which arguments share memory counts where the program writes some."""
        if not (self.convention.writes or self.convention.shared):
            return
        for name in self.convention.writes:
            _check_writable(name, leaves[name])
        tensors = {name: value for name, value in leaves.items() if isinstance(value, torch.Tensor) and value.numel()}
        if not lie_alike(tensors, self.convention.shared, self.convention.writes):
            raise InputMismatchError(
                "the arguments share memory in another way than when the program was captured",
                hint="pass tensors that share memory in the same way, or capture again",
            )

    def _run(self, leaves: dict[str, Any]) -> dict[str, torch.Tensor]:
        """All outputs, by name: those of state in the tensors that they go to."""
        if not self._outputs:  # all that it returns is among its arguments
            return {}
        binding, held = self.session.io_binding(), []
        news = {one.output: self._state[one.target].next for one in self.convention.state}
        values = {one.input: self._state[one.target].now for one in self.convention.state}
        values |= {name: value.detach() for name, value in leaves.items() if isinstance(value, torch.Tensor)}
        for name in self._inputs:
            value = values[name].resolve_conj().resolve_neg().contiguous()
            held.append(value)
            binding.bind_input(name, "cpu", 0, ELEMENTS[value.dtype], list(value.size()), _pointer(value))
        given: dict[str, torch.Tensor] = {}
        for output in self._outputs:
            made = news.get(output.name)
            if made is None and all(isinstance(size, int) for size in output.shape):
                made = torch.empty(output.shape, dtype=_NAMES[output.type])
            if made is None:
                binding.bind_output(output.name, "cpu")
                continue
            given[output.name] = made
            sizes = list(made.size())
            binding.bind_output(output.name, "cpu", 0, ELEMENTS[made.dtype], sizes, _pointer(made))
        self.session.run_with_iobinding(binding)
        for output, value in zip(self._outputs, binding.get_outputs(), strict=True):
            if output.name not in given:
                given[output.name] = from_dlpack(value).view(_NAMES[output.type])  # NumPy has no bfloat16
        return given

    def _check(self, given: dict[str, torch.Tensor]) -> None:
        for check in self.convention.checks:
            if not bool(given[check.output]):
                raise DataDependentError(
                    "the program takes another branch for this data than when it was captured\n"
                    f"    at   {check.message}",
                    why="the file holds only the branches that were captured; no state and no argument has changed",
                    hint="call the program with such data, and export another file",
                )


def _result(result: Result, given: Mapping[str, torch.Tensor], tensors: dict[str, Any]) -> Any:
    """A leaf of the results. ``tensors``: arguments and earlier results by name; gets this one."""
    if result.name is None:
        return result.value
    if result.same_as is not None:
        return tensors[result.same_as]
    value = given[result.name]
    tensors[result.name] = value
    return value.item() if result.kind == "number" else value


def _has_elements(value: torch.Tensor) -> bool:
    """Whether the elements of a tensor are what lies at its address: of fake ones and wrappers nothing does."""
    if isinstance(value, FakeTensor) or value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    return not value.is_nested and (not value.numel() or value.data_ptr() != 0)


def _check_writable(name: str, value: torch.Tensor) -> None:
    """Before anything runs: what the write-back would be refused for."""
    if value.requires_grad and value.is_leaf and torch.is_grad_enabled():
        raise InputMismatchError(
            f"the program writes to the argument `{name}`, a leaf that requires grad, with grad mode on",
            hint="call it under torch.no_grad(), or pass a tensor that requires none",
        )
    if value.layout is torch.strided and Layout.of(value).has_internal_overlap:
        raise InputMismatchError(
            f"the program writes to the argument `{name}`, some elements of which share memory",
            hint="pass a clone",
        )


_EMPTY = torch.zeros(1)


def _pointer(value: torch.Tensor) -> int:
    return value.data_ptr() or _EMPTY.data_ptr()


def _quiet() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # the first values of the state are used by nobody else
    return options


def _read(path: Path | bytes, label: str) -> Any:
    if isinstance(path, Path) and not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if isinstance(path, bytes):
            return onnx.load_from_string(path)
        return onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise ValueError(
            f"{label} is not an ONNX file, or is not complete\n    try  write it again with to_onnx"
        ) from error


def _convention(model: Any, label: str) -> Convention:
    text = next((entry.value for entry in model.metadata_props if entry.key == KEY), None)
    if text is None:
        raise ValueError(
            f"{label} was not written by to_onnx, or is not complete: its metadata do not describe its inputs and "
            "outputs\n"
            "    try  write it with program.to_onnx; if a tool made it from such a file, copy the entries of "
            f"`metadata_props` that begin with `{KEY}`; or run it with onnxruntime directly"
        )
    return Convention.parse(text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
