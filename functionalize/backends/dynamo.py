"""``torch.compile(model, backend="functionalize")``: Dynamo's graphs, without mutation, for any compiler.

The graph that Dynamo found is traced together with its backward (`joint`), taken apart (`partition`), and handed to the
compiler: a forward graph and, where autograd is to go through it, a backward graph. What the program did to its inputs
and how its outputs alias is done around them when they are called (`compiled`).

Invariant: a graph that a compiler gets writes nothing, not even back to its inputs. Limits: once differentiable;
no tensor subclasses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from functionalize._torch import FakeTensorMode, storage_key
from functionalize._torch.dynamo import named_compiler, run_apart, to_fakes
from functionalize.aliasing.geometry import hint
from functionalize.backends.joint_graph import Program, Traced, trace
from functionalize.backends.partitioner import Extra, Given, Parts, split
from functionalize.backends.runtime_wrapper import Plan, call
from functionalize.errors import UnsupportedMutationError, check_remove
from functionalize.verify import assert_functional

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]
_OPTIONS = ("compiler", "remove")


def dynamo_backend(
    compiler: Compiler | str = "eager", *, remove: str = "mutations_and_views"
) -> Callable[..., Callable[..., Any]]:
    """A backend for ``torch.compile`` that hands a compiler graphs without mutation.

    The graphs are of ATen operators, and flat: tensors and sizes in, a tuple out. Where gradients are wanted the
    compiler gets two, a forward graph and a backward graph, and autograd goes through them as through one operator.
    Writes to inputs, and outputs that are views of inputs or of one another, are taken care of around the graphs.

    Args:
        compiler: a function of a ``torch.fx.GraphModule`` and example inputs (fake tensors, and symbols for sizes)
            that returns a function; or the name of a backend of ``torch.compile``, such as ``"inductor"``. With
            ``"eager"`` the graphs run as they are.
        remove: ``"mutations_and_views"``, or ``"mutations"`` to let view ops stay.

    Returns:
        A function for ``torch.compile(..., backend=...)``.

    Raises:
        ValueError: ``remove`` is neither of the two.

    Example:
        >>> import torch
        >>> from functionalize import dynamo_backend
        >>> def show(graph, inputs):
        ...     print(*[node.name for node in graph.graph.nodes if node.op == "call_function"])
        ...     return graph
        >>> @torch.compile(backend=dynamo_backend(show))
        ... def bump(x):
        ...     x[0].add_(1)
        ...     return x.sum()
        >>> x = torch.zeros(3)
        >>> bump(x), x
        select_copy add select_scatter sum_1
        (tensor(1.), tensor([1., 0., 0.]))
    """
    check_remove(remove)

    def functionalized(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        return _compile(_named(compiler), remove, graph, inputs)

    return functionalized


def backend(
    graph: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """What ``backend="functionalize"`` names; ``options`` are the arguments of :func:`dynamo_backend`.

    Raises:
        ValueError: there is no such option.

    Example:
        >>> import torch
        >>> double = torch.compile(lambda x: x.mul_(2), backend="functionalize", options={"compiler": "eager"})
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    unknown = set(options or ()).difference(_OPTIONS)
    if unknown:
        raise ValueError(f"backend='functionalize' has no option {sorted(unknown)}; there are {list(_OPTIONS)}")
    return dynamo_backend(**(options or {}))(graph, inputs)


def _named(compiler: Compiler | str) -> Compiler:
    return named_compiler(compiler) if isinstance(compiler, str) else compiler


def _compile(compiler: Compiler, remove: str, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """One Dynamo graph, compiled; once more for each other way in which its inputs share memory."""
    state = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
    names = [name.replace(".", "_") for name in state]
    names += [node.name for node in graph.graph.find_nodes(op="placeholder")]
    planned = functools.partial(_planned, _program(graph, list(state)), names, compiler, remove)
    plan, pattern = planned([*state.values(), *inputs])
    others: dict[Any, Plan] = {}

    def compiled(*given: Any) -> Any:
        flat = [*state.values(), *given]
        chosen = plan
        if plan.parts.steps and (now := _pattern(flat)) != pattern:
            key = (now, *(value.size() if isinstance(value, torch.Tensor) else value for value in flat))
            if key not in others:
                others[key], _ = planned(flat)
            chosen = others[key]
        return call(chosen, flat)

    return compiled


class _Runner(Interpreter):
    """Runs a graph node by node, so that what is traced has each node's line of the user's program."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _Runner(args[0]).run(*args[1:])  # it recomputes to save memory, which graphs of ours do not
        return super().call_function(target, args, kwargs)


class _Run(torch.nn.Module):
    """A graph and its runner as a module, whose parameters and buffers can be replaced."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *inputs: Any) -> Any:
        return _Runner(self.graph).run(*inputs)


def _program(graph: GraphModule, state: Sequence[str]) -> Program:
    """The graph as a function of its parameters and buffers, by name, and its inputs."""
    run = _Run(graph)

    def program(flat: list[Any]) -> Sequence[Any]:
        held = {f"graph.{name}": value for name, value in zip(state, flat, strict=False)}
        given = tuple(flat[len(state) :])
        results = torch.func.functional_call(run, held, given) if held else run(*given)
        return results if isinstance(results, (list, tuple)) else (results,)

    return program


def _planned(
    program: Program, names: Sequence[str], compiler: Compiler, remove: str, inputs: Sequence[Any]
) -> tuple[Plan, Any]:
    """Trace, take apart, and compile; with it the pattern in which the inputs share memory."""
    mode, fakes = to_fakes(inputs)
    pattern = _pattern(fakes)
    traced = trace(program, mode, fakes, remove)
    parts = split(traced, names)
    handed = functools.partial(_handed, compiler, mode, remove)
    forward = handed(parts.forward, [fakes[place] for place in traced.passed])
    passed = [fakes[one.index] if isinstance(one, Given) else None for one in parts.saved]
    backward = None if parts.backward is None else handed(parts.backward, passed)
    outcome, steps = traced.outcome, parts.steps
    storages = {storage_key(fakes[step.target]) for step in steps}
    risky = {i for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor) and storage_key(fake) in storages}
    plan = Plan(
        parts=parts,
        inputs=len(fakes),
        passed=traced.passed,
        leaves=traced.leaves,
        items=outcome.items,
        layouts=outcome.layouts,
        numbers=len(outcome.numbers),
        tangents=_tangents(traced, parts),
        seen=frozenset(outcome.written),
        risky=frozenset(risky),
        forward=forward,
        backward=backward,
    )
    return plan, pattern


def _handed(
    compiler: Compiler, mode: FakeTensorMode, remove: str, graph: GraphModule, given: Sequence[Any]
) -> Callable[..., Any]:
    """What a compiler makes of a graph, whose first inputs are known to Dynamo but for those that are None."""
    assert_functional(graph, remove)
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    for place, known in enumerate(given):
        if known is not None:
            values[place] = known.detach() if isinstance(known, torch.Tensor) and known.requires_grad else known
    with run_apart(mode):
        return compiler(graph, values)


def _tangents(traced: Traced, parts: Parts) -> list[int]:
    """Which results of the forward graph have a tangent, in the order of these."""
    outcome, found = traced.outcome, []
    extras = len(outcome.values) + len(outcome.numbers)
    for place in outcome.written:
        data = [step.args[0] for step in parts.steps if step.target == place and isinstance(step.args[0], Extra)]
        if not data:
            raise UnsupportedMutationError(
                f"input {place} of the compiled graph, which requires gradients, gets new metadata",
                why="autograd cannot be told of that from outside of the graph",
                hint="return the new tensor instead",
            )
        found.append(extras + data[-1].index)
    return found + [place for place, value in enumerate(outcome.values) if value.requires_grad]


def _pattern(values: Sequence[Any]) -> tuple[Any, ...]:
    """For each tensor that shares its storage with one before it: which, and how they lie."""
    first: dict[int, int] = {}
    pattern = []
    for place, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        other = first.setdefault(storage_key(value), place)
        if other != place:
            strides = tuple(map(hint, (*value.stride(), *values[other].stride())))
            start, begin = (hint(one.storage_offset()) * one.itemsize for one in (value, values[other]))
            pattern.append((place, other, start - begin, strides))
    return tuple(pattern)
