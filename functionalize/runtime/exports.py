"""What a captured program can be turned into for other engines: the methods, and who does the work.

Invariant: a backend is imported when it is first asked for; the packages that it needs are nobody else's dependencies.
Limits: backends stand above programs, so they are known by name here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from functionalize.runtime.training_mode import warn_of_training

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_BACKENDS = {  # by method: the module, and its function of a program
    "to_exported_program": ("exported_program", "to_exported_program"),
    "to_core_aten": ("exported_program", "to_core_aten"),
    "to_onnx": ("onnx", "to_onnx"),
    "to_jax": ("jax.program", "to_jax"),
    "to_stablehlo": ("jax.stablehlo", "write_stablehlo"),
}


def _backend(method: str) -> Callable[..., Any]:
    module, name = _BACKENDS[method]
    found: Callable[..., Any] = getattr(importlib.import_module(f"functionalize.backends.{module}"), name)
    return found


class Exports:
    """Methods of a captured program.

    Each is of the program as a call would run it now: with the state that there is, and as what changed since the
    capture has it. What a call refuses (another mode of the model, a hook that was added) raises `InputMismatchError`
    here as well, or is captured again with ``on_guard_failure="recapture"``. Files of a module in training mode, whose
    dropout would be live, come with a `TrainingModeWarning`.
    """

    def warn_of_training(self: Any, stacklevel: int = 2) -> None:
        """Warn where the program is that of a module in training mode, and this makes a difference."""
        warn_of_training(self.original, self.current.recorded.graph, stacklevel + 1)

    def to_exported_program(self, *, explicit_state: bool = False) -> ExportedProgram:
        """The program as ``torch.export`` has programs: saved by ``torch.export.save``, taken by whatever takes one.

        Its ``module()`` is called as the original is, and writes back as the original does: what is written is a whole
        tensor there. It begins with the state that there is now. State that the program writes is copied, other
        state is shared. Buffers are besides: what an optimizer keeps, gradients that a step leaves (`weight_grad`), the
        tensors of an argument that is an object (a cache; it is no argument any more), tensors in attributes. Numbers
        of Python's (hyperparameters) are constants, unless the program changes them. Decisions by data are assertions:
        those of the last call.

        Args:
            explicit_state: whether state that the program writes is passed and returned:
                ``(*state, *args, **kwargs) -> (*new_state, result)``. Such a program writes nothing that an engine
                could drop; who calls it threads the state, which begins as it is in ``example_inputs``.

        Returns:
            The program, accepted by torch's verifier.

        Raises:
            UnsupportedExportError: no exported program can do what this one does; the message has all causes.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> counter = torch.nn.BatchNorm1d(3)
            >>> exported = capture(counter, (torch.randn(4, 3),)).to_exported_program()
            >>> module = exported.module()
            >>> _ = module(torch.randn(4, 3)), module(torch.randn(4, 3))
            >>> module.num_batches_tracked
            tensor(2)
            >>> exported = capture(counter, (torch.randn(4, 3),)).to_exported_program(explicit_state=True)
            >>> *state, x = exported.example_inputs[0]
            >>> for _ in range(3):
            ...     *state, normed = exported.module()(*state, x)
            >>> state[2]
            tensor(3)
        """
        found: ExportedProgram = _backend("to_exported_program")(self, explicit_state=explicit_state)
        return found

    def to_core_aten(self, *, explicit_state: bool = False) -> ExportedProgram:
        """The program by the operators of the core ATen set alone, as :meth:`to_exported_program` has it.

        Views are view operators there: the set has none that copy them. Beside the set stand assertions, and what torch
        cannot decompose: docs/how-to/export-torch.md has a list.

        Args:
            explicit_state: as of :meth:`to_exported_program`.

        Raises:
            UnsupportedExportError: no exported program can do what this one does.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> exported = capture(torch.nn.GELU(), (torch.randn(3),)).to_core_aten()
            >>> [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
            ['aten.gelu.default']
        """
        found: ExportedProgram = _backend("to_core_aten")(self, explicit_state=explicit_state)
        return found

    def to_onnx(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        external_data: bool | None = None,
        opset_version: int | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        custom_translation_table: Mapping[Any, Callable[..., Any]] | None = None,
        metadata: Mapping[str, str] | None = None,
        verify: bool | Sequence[tuple[Sequence[Any], Mapping[str, Any]]] = False,
        report: bool | str | os.PathLike[str] = False,
        check: bool = True,
    ) -> Any:
        """Write the program as an ONNX file, with its state as inputs and outputs of the graph.

        An input `state` has its new value in the output `new.state`; the file's metadata pairs them, and says how the
        program is called. :func:`functionalize.backends.onnx.load` runs it as the original is called, and keeps the
        state. It begins with the state that there is now.

        Args:
            path: the file. Without one the model itself is returned.
            external_data: whether weights go into a second file, `path.data`; unless given, where they are large.
            opset_version: of ONNX's operators; unless given, 20. Before 18 and after 25 it is ONNX's converter that
                decides whether the program can have it.
            input_names: a name for each tensor among the arguments, in their order, instead of their own. State keeps
                its names.
            output_names: a name for each tensor among the results, in their order.
            custom_translation_table: how operators are translated, as ``torch.onnx.export`` has it: by overload, a
                function of ONNX values, of onnxscript's operators.
            metadata: entries of your own for the file's ``metadata_props``.
            verify: whether to run the file beside the original, three calls with random numbers (integers are zeros),
                each with the state of the last one. Or calls of your own: a list of ``(args, kwargs)``. What the
                original changes is put back.
            report: whether to write a page about the file, `path.md`, or where to write it; also where there is none,
                with the causes.
            check: whether ONNX Runtime, where it is installed, has to load the file on this machine. Without, the file
                may be for another engine or provider: bfloat16 for a GPU, operators of your own.

        Returns:
            The path; without one the model, an ``onnx.ModelProto``.

        Raises:
            UnsupportedExportError: the program, or operators of it, cannot be exported; the message has all causes, and
                nothing was written.
            NotEquivalentError: with ``verify`` the file gives something else; the message names the output, and says
                how far off it is. Nothing was written.
            TypeError, ValueError: an option has no such value, or names are too many or too few.
            IsADirectoryError: the path is a folder.
            ModuleNotFoundError: a package of the extra `onnx` is not installed.

        Example:
            >>> import tempfile, torch
            >>> from functionalize import capture
            >>> from functionalize.backends import onnx
            >>> count = torch.zeros(())
            >>> program = capture(lambda x: x + count.add_(1), (torch.zeros(2),))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     counter = onnx.load(program.to_onnx(folder + "/counter.onnx", verify=True))
            >>> counter(torch.zeros(2)), counter(torch.zeros(2))
            (tensor([1., 1.]), tensor([2., 2.]))
            >>> model = program.to_onnx(input_names=["steps"], opset_version=18)
            >>> model.opset_import[0].version, onnx.load(model)(torch.zeros(2))
            (18, tensor([1., 1.]))
        """
        self.warn_of_training(stacklevel=3)
        return _backend("to_onnx")(
            self,
            path,
            external_data=external_data,
            opset_version=opset_version,
            input_names=input_names,
            output_names=output_names,
            custom_translation_table=custom_translation_table,
            metadata=metadata,
            verify=verify,
            report=report,
            check=check,
        )

    def to_jax(self, **options: Any) -> Any:
        """The program as a pure function of JAX arrays, ``(state, *args, **kwargs) -> (new_state, outputs)``.

        Args:
            options: ``lowerings``, a table of your own; ``seed`` of the first random key.

        Raises:
            UnsupportedProgramError: JAX cannot run it; the error has all causes, each with the line.

        Example:
            >>> import torch
            >>> import jax.numpy as jnp
            >>> from functionalize import capture
            >>> counter = torch.nn.BatchNorm1d(2)
            >>> step = capture(counter, (torch.ones(3, 2),)).to_jax()
            >>> state, outputs = step(step.initial_state, jnp.ones((3, 2)))
            >>> int(state["num_batches_tracked"])
            1
        """
        return _backend("to_jax")(self, **options)

    def to_stablehlo(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the function of :meth:`to_jax` as StableHLO, which ``jax.export`` loads without torch.

        Args:
            path: of the file; the first state is written beside it, as ``npz``.
            options: those of :meth:`to_jax`, and ``platforms`` as ``jax.export`` takes them.

        Returns:
            The path of the file.

        Raises:
            UnsupportedProgramError: JAX cannot run the program; nothing is written.

        Example:
            >>> import tempfile, torch
            >>> from functionalize import capture
            >>> from functionalize.backends.jax import load
            >>> program = capture(torch.nn.Linear(2, 1), (torch.ones(3, 2),))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     loaded = load(program.to_stablehlo(f"{folder}/linear.stablehlo"))
            >>> loaded(torch.ones(3, 2).numpy()).shape
            (3, 1)
        """
        self.warn_of_training(stacklevel=3)
        written: Path = _backend("to_stablehlo")(self, path, **options)
        return written
