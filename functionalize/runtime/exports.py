"""The methods that export a captured program for other engines, and the backend that does the work of each.

Invariant: a backend is imported when its method is first called; nothing else depends on the packages that it needs.
Limits: backends are a layer above programs, so this module knows them by name.
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

_BACKENDS = {  # by method: the module, and its function that takes a program
    "to_exported_program": ("export.exported_program", "to_exported_program"),
    "to_core_aten": ("export.exported_program", "to_core_aten"),
    "to_onnx": ("onnx", "to_onnx"),
    "to_jax": ("jax.program", "to_jax"),
    "to_stablehlo": ("jax.stablehlo", "write_stablehlo"),
}


def _backend(method: str) -> Callable[..., Any]:
    module, name = _BACKENDS[method]
    convert: Callable[..., Any] = getattr(importlib.import_module(f"functionalize.backends.{module}"), name)
    return convert


class Exports:
    """Methods of a captured program.

    Each exports the program that a call would run now, with its current state. If a call would be refused (another mode
    of the model, a new hook), the export raises `InputMismatchError` as well, or captures again with
    ``on_guard_failure="recapture"``. The export of a module in training mode warns with `TrainingModeWarning`.
    """

    def warn_of_training(self: Any, stacklevel: int = 2) -> None:
        """Warn if the program is a module in training mode, and this changes its results."""
        warn_of_training(self.original, self.current.recorded.graph, stacklevel + 1)

    def to_exported_program(self, *, explicit_state: bool = False) -> ExportedProgram:
        """Convert the program to a ``torch.export.ExportedProgram``, for ``torch.export.save`` and other backends.

        Its ``module()`` has the signature of the original, and writes the same state and arguments, each as a whole
        tensor. It begins with the current state. State that the program writes is copied; other state is shared.
        Buffers of the exported program are also: the state of an optimizer, gradients that a step leaves
        (`weight_grad`), tensors in attributes, and the tensors of an argument that is a Python object, such as a cache
        (it is no argument of the exported program). Python numbers, such as hyperparameters, are constants unless the
        program changes them. Branches on tensor values become assertions of the branches of the last call.

        Args:
            explicit_state: whether the caller passes and gets the state that the program writes:
                ``(*state, *args, **kwargs) -> (*new_state, result)``. Such a program writes nothing that an engine
                could drop. Its first state is in ``example_inputs``.

        Returns:
            The exported program, which torch's verifier accepts.

        Raises:
            UnsupportedExportError: an exported program cannot represent this one; the message lists all causes.

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
        exported: ExportedProgram = _backend("to_exported_program")(self, explicit_state=explicit_state)
        return exported

    def to_core_aten(self, *, explicit_state: bool = False) -> ExportedProgram:
        """Convert the program like :meth:`to_exported_program`, but only with operators of the core ATen set.

        Views are view operators there, because the set has no operators that copy views. Assertions, and operators
        that torch cannot decompose, are outside the set: docs/reference/export-details.md lists them.

        Args:
            explicit_state: as in :meth:`to_exported_program`.

        Raises:
            UnsupportedExportError: an exported program cannot represent this one.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> exported = capture(torch.nn.GELU(), (torch.randn(3),)).to_core_aten()
            >>> [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
            ['aten.gelu.default']
        """
        exported: ExportedProgram = _backend("to_core_aten")(self, explicit_state=explicit_state)
        return exported

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

        The new value of an input `state` is the output `new.state`. The file's metadata pair them and describe the
        program's arguments. :func:`functionalize.backends.onnx.load` loads the file as a function with the signature of
        the original, which keeps the state. It begins with the current state.

        Args:
            path: the path of the file. Without a path, the model is returned.
            external_data: whether to write the weights to a second file, `path.data` (default: if they are large).
            opset_version: the version of ONNX's operators (default: 20). Before 18 and after 25, ONNX's converter
                determines whether the program can have this version.
            input_names: a new name for each tensor among the arguments, in order. State keeps its names.
            output_names: a name for each tensor among the results, in order.
            custom_translation_table: translations of operators, as for ``torch.onnx.export``: from an overload to a
                function of ONNX values that calls onnxscript's operators.
            metadata: entries to add to the file's ``metadata_props``.
            verify: whether to compare the file with the original in three calls with random numbers (integers are
                zeros), where each call continues with the state of the last one. Or your own calls: a list of
                ``(args, kwargs)``. Changes that the original makes are undone.
            report: whether to write a page about the file, `path.md`, or the path of the page. It is written for a
                failed export too, with the causes.
            check: whether ONNX Runtime, if it is installed, must load the file on this machine. With False, the file
                may be for another engine or provider: bfloat16 for a GPU, your own operators.

        Returns:
            The path; without a path, the model, an ``onnx.ModelProto``.

        Raises:
            UnsupportedExportError: the program, or some of its operators, cannot be exported; the message lists all
                causes. No file was written.
            NotEquivalentError: with ``verify``, the file's results differ; the message names the output and the
                difference. No file was written.
            TypeError, ValueError: an option has a wrong value, or the number of names is wrong.
            IsADirectoryError: ``path`` is a folder.
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
        """Convert the program to a pure function of JAX arrays, ``(state, *args, **kwargs) -> (new_state, outputs)``.

        Args:
            options: ``lowerings``, your own table of lowerings; ``seed``, the seed of the first random key.

        Raises:
            UnsupportedProgramError: JAX cannot run the program; the message lists all causes with their lines.

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
            path: the path of the file; the first state is written beside it, as ``npz``.
            options: those of :meth:`to_jax`, and ``platforms`` as for ``jax.export``.

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
