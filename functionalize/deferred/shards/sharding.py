"""Computes a part of a node along one dimension, from the parts of its inputs that the rule of its operator names.

A node without a rule is computed whole, and the part copied. Random numbers are drawn from the state where the part
begins.

Invariant: the elements of a part equal those of the whole, bit for bit. Limits: parts are ranges of one dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch.deferred import is_sole_user
from functionalize._torch.dispatch import kernels_alone
from functionalize.deferred.evaluation import Evaluation
from functionalize.deferred.random.draws import Draws
from functionalize.deferred.random.fills import fill_of
from functionalize.deferred.random.ranges import fill_part
from functionalize.deferred.shards.rules import Part, Plan, Window, rule_of
from functionalize.deferred.specs import spec_of


def in_own_memory(part: torch.Tensor) -> torch.Tensor:
    """A part as a contiguous tensor that fills its storage: the part itself if it is so."""
    fits = part.is_contiguous() and part.untyped_storage().nbytes() == part.numel() * part.itemsize
    return part if fits and is_sole_user(part) else part.clone(memory_format=torch.contiguous_format)


class ShardEvaluation:
    """One run that computes a part of a node."""

    def __init__(self, evaluate: Callable[[], Evaluation], draws: Draws, compute: Callable[[Node], None]) -> None:
        """``evaluate`` makes runs over whole nodes; ``compute`` computes one for its effect on a generator."""
        self._evaluate, self._draws, self._compute = evaluate, draws, compute

    def run(self, node: Node, window: Window) -> torch.Tensor:
        """A part of a node's value, in memory of its own."""
        plans: dict[Part, Plan] = {}
        waiting: list[Part] = [(node, window)]
        while waiting:
            part = waiting.pop()
            if part not in plans:
                plans[part] = self._plan(*part)
                waiting += plans[part][0]
        uses = Counter(need for needs, _ in plans.values() for need in needs)
        values: dict[Part, Any] = {}
        with kernels_alone(), torch.inference_mode(False), self._draws.running():
            for part in sorted(plans, key=lambda part: part[0]):
                needs, compute = plans[part]
                inputs = []
                for need in needs:
                    uses[need] -= 1
                    inputs.append(values[need] if uses[need] else values.pop(need))
                values[part] = compute(inputs)
                del inputs
            value: torch.Tensor = values.pop((node, window))
            return in_own_memory(value)

    def _plan(self, node: Node, window: Window | None) -> Plan:
        spec = spec_of(node)
        if window is not None and spec is not None:
            fill = fill_of(node)
            if fill is not None and fill.per_element is not None:
                return [], partial(fill_part, fill, node, window, self._draws, self._compute, self._evaluate().place)
            rule = rule_of(node.target)
            plan = None if rule is None else rule(node, spec, window)
            if plan is not None:
                return plan
        return [], lambda inputs: self._whole(node, window)

    def _whole(self, node: Node, window: Window | None) -> Any:
        (value,) = self._evaluate().values([node])
        if window is None:
            return value
        part = window.of(value)
        return part if node.op == "get_attr" else part.clone()
