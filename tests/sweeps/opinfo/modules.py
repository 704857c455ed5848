"""Training every module of torch's module database by captured calls and by compiled ones, against eager.

Samples are those of the database, and beside each the same with as many rows as its result has features: where sizes
are equal, what is transposed looks like what is not. Invariant: results, the gradients of inputs and parameters, and
buffers are eager's, in each of three steps, where the module trains and where it does not. Limits: samples count where
eager can be differentiated, and repeats itself.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from functionalize import capture
from functionalize.verify.observation import clone_inputs
from tests.sweeps.opinfo.check import FAILED, NOT_COUNTED, PASSED, Verdict
from tests.sweeps.opinfo.gradients import difference, differentiable

SEED = 42
STEPS = 3
LARGEST = 40  # rows of a sample that is resized
# Makes what is called of a module and of example inputs.
Make = Callable[[nn.Module, Sequence[Any], dict[str, Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Sample:
    """A module, and what it is called with."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@cache
def _table() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database calls deprecated functions while it builds itself
        from torch.testing._internal.common_modules import module_db

    return {info.formatted_name: info for info in module_db}


def module_names() -> list[str]:
    """Every module's name, in the database's order."""
    return list(_table())


def samples(name: str, limit: int | None, train: bool = True) -> Iterator[Sample]:
    """The samples of a module, spread over all of them where there are more than a limit; each with its square ones."""
    info = _table()[name]
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=train)
    step = 1 if limit is None else max(1, len(given) // limit)
    for number, one in islice(enumerate(given), 0, None if limit is None else step * limit, step):
        if one.forward_input is None:
            continue
        torch.manual_seed(SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs).double().train(train)
        first = Sample(f"{name}/{number}", built, tuple(one.forward_input.args), dict(one.forward_input.kwargs))
        if _result(first) is not None:  # a lazy module has its parameters now
            yield first
            yield from _square(first)


def _square(sample: Sample) -> Iterator[Sample]:
    """The sample with as many rows, and then columns, as its result has features, where the module takes such."""
    result = _result(sample)
    sizes = [tensor.size() for tensor in pytree.tree_leaves(result) if isinstance(tensor, torch.Tensor)]
    features = dict.fromkeys(size[dim] for size in sizes[:1] if len(size) > 1 for dim in (-1, 1))
    for dim in (0, 1):
        for count in features:
            args, kwargs = _resized((sample.args, sample.kwargs), dim, count)
            made = Sample(f"{sample.name}/{count} at {dim}", sample.module, args, kwargs)
            if count <= LARGEST and _sizes(made) != _sizes(sample) and _result(made) is not None:
                yield made


def _sizes(sample: Sample) -> list[torch.Size]:
    return [t.size() for t in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]


def _resized(tree: Any, dim: int, count: int) -> Any:
    """Inputs whose rows, of those that have as many as the first, are cut off or come again and again."""
    rows = [t.size(dim) for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.dim() > dim]

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() <= dim or tensor.size(dim) != rows[0] or not rows[0]:
            return tensor
        made = tensor.detach().index_select(dim, torch.arange(count, device=tensor.device) % rows[0])
        return made.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, resized, tree)


def _result(sample: Sample) -> Any:
    """What the module gives in eager; None where it does not take the sample."""
    args, kwargs = _fresh(sample)
    module = copy.deepcopy(sample.module) if _is_ready(sample.module) else sample.module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return module(*args, **kwargs)
        except Exception:
            return None


def _is_ready(module: nn.Module) -> bool:
    return not any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def training(sample: Sample, make: Make) -> list[Any]:
    """What three steps of training show: results, gradients of inputs, then of parameters, and buffers."""
    module = copy.deepcopy(sample.module)
    called = make(module, *_fresh(sample))
    found: list[Any] = []
    for step in range(STEPS):
        args, kwargs = _fresh(sample)
        torch.manual_seed(SEED + step)
        results = differentiable(called(*args, **kwargs))
        torch.manual_seed(SEED + step)
        torch.autograd.backward(results, [torch.randn_like(result) for result in results])
        leaves = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.requires_grad]
        found += [result.detach() for result in results] + [leaf.grad for leaf in leaves]
    gradients = [parameter.grad for parameter in module.parameters()]
    return found + gradients + [buffer.detach().clone() for buffer in module.buffers()]


def _fresh(sample: Sample) -> tuple[Any, dict[str, Any]]:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = clone_inputs(tensor.detach())
        return made.requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, copied, (sample.args, sample.kwargs))
    return args, kwargs


def eager(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    return module


def captured(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    return capture(module, tuple(args), kwargs)


def compiled(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module, backend="functionalize", dynamic=False)


def check(sample: Sample, make: Make) -> Verdict:
    """Hold training against eager's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, again = training(sample, eager), training(sample, eager)
        except Exception as error:
            return Verdict(sample.name, NOT_COUNTED, "eager", str(error))
        if difference(expected, again):
            return Verdict(sample.name, NOT_COUNTED, "eager", "eager does not repeat itself")
        try:
            differs = difference(expected, training(sample, make))
        except Exception as error:
            return Verdict(sample.name, FAILED, "run", f"{type(error).__name__}: {' '.join(str(error).split())}")
        return Verdict(sample.name, FAILED if differs else PASSED, "values" if differs else "", differs)
