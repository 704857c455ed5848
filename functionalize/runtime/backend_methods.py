"""What a captured program can become: methods whose work the backends do.

Invariant: a backend, and what it needs, is imported by those who ask for it. Limits: backends know programs, and no
program knows a backend but by the name of its module.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any


def _backend(name: str) -> Any:
    """A module of the backends, imported by those who ask for it: they make programs of this one, and know it."""
    return importlib.import_module(f"functionalize.backends.{name}")


class BackendMethods:
    """The methods, of :class:`~functionalize.runtime.captured_program.CapturedProgram`."""

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
        return _backend("jax.program").to_jax(self, **options)

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
        written: Path = _backend("jax.stablehlo").write_stablehlo(self, path, **options)
        return written
