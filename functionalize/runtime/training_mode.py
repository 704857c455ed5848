"""Warns of the export of a module in training mode, with active dropout or statistics of the batch.

Invariant: there is no warning for a training step, which is a function and not a module. Limits: of torch's own modules
the classes below are known; of others, whether their program draws random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Graph

from functionalize.errors import TrainingModeWarning
from functionalize.runtime.random_state import is_random

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def warn_of_training(model: Callable[..., Any], graph: Graph, stacklevel: int) -> None:
    """Warn if a module is in training mode, and this changes its results; ``graph``: of its program."""
    if not isinstance(model, nn.Module):
        return
    trained = [(path, module) for path, module in model.named_modules() if module.training and _differs(module)]
    draws = model.training and any(is_random(node) for node in graph.nodes)
    if not (trained or draws):
        return
    what, more = "it draws random numbers", f" and {len(trained) - 1} more" if len(trained) > 1 else ""
    if trained:
        path, module = trained[0]
        what = f"{type(module).__name__} at `{path}`" if path else type(module).__name__
    warnings.warn(
        f"{type(model).__name__} is exported in training mode, where it computes other results than in evaluation "
        f"mode ({what}{more}): call model.eval() before the export, unless this is intended",
        TrainingModeWarning,
        stacklevel=stacklevel,
    )


def _differs(module: Any) -> bool:
    """Whether a module computes something else in training mode."""
    if isinstance(module, _DROPOUTS):
        return bool(module.p > 0)
    if isinstance(module, _BATCH_NORMS + _INSTANCE_NORMS):
        return bool(module.track_running_stats)
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout > 0 and module.num_layers > 1)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    return isinstance(module, nn.RReLU)
