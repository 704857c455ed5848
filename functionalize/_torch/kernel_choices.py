"""Questions about sizes by which an operator chooses its kernel become guards only if the choice changes its result.

A convolution on the CPU takes another kernel from 16 images on, which mostly gives the same sizes and strides. So the
operator runs on fake tensors with each answer to its questions. A question that makes no difference is not a guard.

Loads sympy. Invariant: for all sizes that meet the guards, results are like the fake ones. Limits: operators that
do not write, on sizes that come from inputs; if there are too many questions, all of them are guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functionalize._torch.symbols.shape_env import DecidingShapeEnv, NotBoolError

_RUNS = 24
Answers = dict[Any, bool]  # to questions, in the order in which they are asked


def indifferent(environment: Any, run: Callable[[], Any]) -> Any:
    """The result of ``run``, with guards on only those of its questions that change it; NotImplemented if unknown."""
    if not isinstance(environment, DecidingShapeEnv):
        return NotImplemented
    try:
        path, result = _tried(environment, run, {})
        matters = None if result is None else _that_matter(environment, run, path, _metadata(result))
    except NotBoolError:
        return NotImplemented
    if matters is None:
        return NotImplemented
    for question in matters:
        environment.evaluate_expr(question)
    return result


def _that_matter(environment: DecidingShapeEnv, run: Callable[[], Any], path: Answers, expected: Any) -> Answers | None:
    """The questions whose answers change the result; None if there are too many."""
    answered, matters, runs = dict(path), Answers(), 0
    waiting: list[tuple[Answers, Answers]] = [({}, path)]
    while waiting:
        scripted, path = waiting.pop()
        if any(question in matters and answer != answered.get(question) for question, answer in scripted.items()):
            continue
        asked = list(path.items())
        for place in range(len(scripted), len(asked)):
            question, answer = asked[place]
            if question in matters:
                continue
            runs += 1
            if runs > _RUNS:
                return None
            other = dict(asked[:place]) | {question: not answer}
            answered.setdefault(question, answer)
            further, result = _tried(environment, run, other)
            if result is None or _metadata(result) != expected:
                matters[question] = answer
            else:
                waiting.append((other, further))
    return matters


def _tried(environment: DecidingShapeEnv, run: Callable[[], Any], answers: Mapping[Any, bool]) -> tuple[Answers, Any]:
    """The questions with their answers, and the result: None if the operator refuses."""
    path: Answers = {}
    with environment.trying(path, answers):
        try:
            return path, run()
        except NotBoolError:
            raise
        except Exception:  # any error of a kernel about sizes
            return path, None


def _metadata(result: Any) -> Any:
    return [
        (leaf.dtype, leaf.device, [str(number) for number in (*leaf.size(), *leaf.stride())])
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in pytree.tree_leaves(result)
    ]
