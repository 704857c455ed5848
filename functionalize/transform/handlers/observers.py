"""Observers in one operator with fake quantization, whose first call resizes their statistics.

Torch's schema says that the operator writes the statistics; its meta kernel does not resize them.

Invariant: after this the operator does not change sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

OBSERVING = torch.ops.aten._fused_moving_avg_obs_fq_helper.default
_PER_ROW = 11  # the position of the argument; the dispatcher leaves out trailing defaults


def size_statistics(args: Sequence[Any]) -> None:
    """Resize empty statistics to the number of channels, with the values that the kernel starts from."""
    x, observer_on, _, least, most, scale, zero_point, *_ = args
    if len(args) <= _PER_ROW or not args[_PER_ROW] or least.numel() or not observer_on.item():
        return
    for statistic in (least, most, scale, zero_point):
        statistic.resize_([x.size(0)])
    for statistic, value in ((least, math.inf), (most, -math.inf), (scale, 1), (zero_point, 0)):
        statistic.fill_(value)
