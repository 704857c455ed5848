"""What became of a program in a mode, and the words for it.

Invariant: a clear refusal is a verdict of its own, never a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.verify.observation import Observation

PASSED, FAILED, REFUSED, NOT_COUNTED = "passed", "failed", "refused", "not counted"


@dataclass(frozen=True)
class Verdict:
    """What became of a program in a mode. ``kind`` groups failures, ``reason`` describes one."""

    status: str
    kind: str = ""
    reason: str = ""
    equal: int = 0  # calls of a captured program that equal eager
    refused: int = 0  # its calls that a guard refuses, with nothing changed

    @property
    def signature(self) -> str:
        """Equal for failures that look alike."""
        return f"{self.kind}: {re.sub(r'[0-9.]+|0x[0-9a-f]+', 'N', self.reason)[:90]}"


def refusal(error: Exception) -> Verdict:
    """The verdict on a refused program: in the words that say why, or else what."""
    lines = [line.strip() for line in str(error).splitlines()]
    why = next((line.split(maxsplit=1)[1] for line in lines if line.startswith("why")), lines[0])
    return Verdict(REFUSED, "refused", why)


def reads_past_a_storage(eager: Observation) -> Verdict | None:
    """The verdict where a tensor that eager leaves ends behind its storage, as `set_` to a smaller one lets it."""
    tensors = [one for one in (*eager.outputs, *eager.inputs) if isinstance(one, torch.Tensor)]
    if any(
        one.layout is torch.strided and one.numel() and _end(one) > one.untyped_storage().nbytes() for one in tensors
    ):
        return Verdict(NOT_COUNTED, "eager reads past the end of a storage")
    return None


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize


def visible_differences(
    eager: Observation, actual: Observation, names: Sequence[str], of: Sequence[str] = ("outputs", "inputs")
) -> Iterator[str]:
    """Differences in what the tensors themselves say, in the order of outputs and inputs."""
    for label in of:
        for index, (want, got) in enumerate(zip(getattr(eager, label), getattr(actual, label), strict=True)):
            for name in names if isinstance(want, torch.Tensor) else ():
                if name in ("requires_grad", "is_leaf") and not (want.is_floating_point() or want.is_complex()):
                    continue  # a comparison in place: eager follows it, and integers have no gradients
                wanted, have = _answer(want, name), _answer(got, name)
                if wanted != have and not isinstance(wanted, type):
                    yield f"{label} {index}: {name} {have}, eager gives {wanted}"


def _answer(tensor: torch.Tensor, name: str) -> Any:
    """What a tensor says of itself; of one that autograd calls unusable, the error's type."""
    try:
        said = getattr(tensor, name)
        return said() if callable(said) else said
    except RuntimeError as error:
        return type(error)


def line_of(error: Exception | None) -> str:
    """An error in one line."""
    if error is None:
        return "no error"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
