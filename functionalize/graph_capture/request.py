"""The request for one capture: the program, its example inputs, and the options.

In: what ``capture`` was called with, or what a call needs that no captured graph serves. Out: one frozen value that the
whole capture reads. Invariant: a capture of an equal request runs the same program on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.graph_capture.inputs.dynamic_shapes import DynamicShapes
from functionalize.graph_capture.inputs.hyperparameters import ChangingNumbers
from functionalize.graph_capture.inputs.training import training_step
from functionalize.python_state.walk import is_module
from functionalize.runtime.decisions import Answers


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """The program to capture, its example inputs, and the options."""

    function: Callable[..., Any]  # a module or a function
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    remove: str  # "mutations" or "mutations_and_views"
    sizes: DynamicShapes  # which sizes may differ from call to call
    optimizer: torch.optim.Optimizer | None = None  # whose step is part of the program
    order: int = 1  # how often the program is differentiated
    as_views: bool = False  # whether overlapping inputs become views of their base in autograd
    answers: Answers | None = None  # of another capture, whose branches the program is to take
    numbers: ChangingNumbers | None = None  # None: branches on tensor values are refused, numbers are constants
    # What runs for the program, on arguments that hold the same tensors otherwise; None: the program itself.
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    @property
    def roots(self) -> dict[str, Any]:
        """The objects whose state is the program's, by name, besides those that its code reaches."""
        module = {"": self.function} if is_module(self.function) else {}
        return module if self.optimizer is None else {**module, "optimizer": self.optimizer}

    @property
    def program(self) -> Callable[..., Any]:
        """What runs: the function, or a training step of a module and an optimizer."""
        program = self.function
        if self.optimizer is not None and is_module(self.function):
            program = training_step(self.function, self.optimizer)
        return program if self.adapt is None else self.adapt(program)
