"""``nn.TransformerEncoder`` in inference: eager computes on nested tensors, and returns zeros for the padding.

If a mode is active, torch stays with padded tensors, and with the results of its layers for the padding. It calls
``torch.overrides.has_torch_function`` once all else allows nested tensors. There we make the last layer return
zeros: the results for the rest are the same both ways.

Invariant: the modules have no hook of ours when a call ends. Limits: what Dynamo compiles stays with padded tensors, in
any backend; so does a layer by itself, whose kernel returns NaN if a whole sequence is padded.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from functionalize._torch import FakeTensor
from functionalize._torch.tensors import LEFT_ALIGNED
from functionalize.patches import Patch, Patches

_FORWARD = nn.TransformerEncoder.forward.__code__
_DEVICES = frozenset({"cpu", "cuda", "xpu"})  # whose kernels torch trusts with nested tensors


@contextlib.contextmanager
def zeros_for_padding() -> Iterator[None]:
    """For a call: make encoders return what they return without modes."""
    hooks = list[Any]()
    try:
        with Patches([Patch(torch.overrides, "has_torch_function", partial(_asking, hooks))]):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _left_aligned(tensor: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether the padding comes last everywhere, which the encoder checks: by operators that backends have."""
    if not (isinstance(mask, FakeTensor) and mask.dim() == 2 and mask.dtype == torch.bool):
        return LEFT_ALIGNED(tensor, mask)  # type: ignore[no-any-return]
    places = torch.arange(mask.size(1), device=mask.device)
    return bool((mask == (places < mask.sum(1, keepdim=True))).all())


OF_ENCODERS = {LEFT_ALIGNED: _left_aligned}


def _asking(hooks: list[Any], ask: Callable[..., bool]) -> Callable[..., bool]:
    """``has_torch_function``, unchanged for all other callers. ``hooks`` gets the hooks that it sets."""

    def asked(tensors: Sequence[Any]) -> bool:
        caller = sys._getframe(2)  # the first frame is that of the replaced name
        if caller.f_code is _FORWARD and _is_nested_in_eager(tensors):
            names = caller.f_locals
            hooks.append(_give_zeros([*names["self"].layers], names["src_key_padding_mask"]))
        return ask(tensors)

    return asked


def _is_nested_in_eager(tensors: Sequence[Any]) -> bool:
    """The encoder's checks after this one, in its order: the device, and whether gradients are needed."""
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return tensors[0].device.type in _DEVICES and not differentiated


def _give_zeros(layers: list[nn.Module], mask: torch.Tensor) -> Any:
    """A hook of the last of some layers, by which its last output is zero where the mask is not."""
    left, thread = layers.count(layers[-1]), threading.get_ident()

    def fill(layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal left
        if threading.get_ident() != thread:
            return None
        left -= 1
        return None if left else output.masked_fill(mask.ne(0).unsqueeze(-1), 0.0)

    return layers[-1].register_forward_hook(fill)
