"""The containers in which a module holds its state: entries are put into them, and taken out, behind its back.

Invariant: what is returned is the container itself, no copy.
"""

from __future__ import annotations

from typing import Any

import torch


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """A module's own parameters, by name."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers, by name."""
    return module._buffers


def modules_of(module: torch.nn.Module) -> dict[str, Any]:
    """The modules directly in a module, by name; None for one that was taken away."""
    return module._modules


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer of a module is saved with its state."""
    return name not in module._non_persistent_buffers_set
