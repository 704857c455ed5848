"""One case: trace, run, compare. Invariant: the verdict depends on the case and on nothing that ran before.

A case counts when plain `make_fx` traces its program and eager repeats itself. Limits: ops that return memory
as they found it (`empty` and kin) are compared by dtype and shape; where values differ in the last digits, both
are held against double precision; where not even plain `make_fx` draws eager's random numbers, distributions
are compared. The verdict names each of these weaker comparisons.
"""

from __future__ import annotations

import itertools
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize.errors import NotFunctionalError
from functionalize.verify import assert_functional
from functionalize.verify.observation import Observation, clone_inputs, differences, leaf_differences, observe
from tests.support.ledger import REFUSED, RIGHT, WRONG, Row
from tests.sweeps.opinfo.cases import REMOVES, Case
from tests.sweeps.opinfo.compiled import check_compiled
from tests.sweeps.opinfo.gradients import check_derivatives
from tests.sweeps.opinfo.programs import Program, build

PASSED, FAILED, NOT_COUNTED = "passed", "failed", "not counted"
SEED = 42  # the seed that random entries of the database set for themselves
DRAWS = 30  # seeds for a comparison in distribution
ROUNDING = 4.0  # how many times eager's own distance from double precision ours may have

# They hand out memory as it was, so nobody can repeat their values, eager neither.
_UNINITIALIZED = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))


@dataclass(frozen=True)
class Verdict:
    """What became of a case. `kind`: how it failed, what could not do it, or the weaker comparison it passed."""

    case: str
    status: str
    kind: str = ""
    reason: str = ""


def check(case: Case, impl: str = "ours") -> Verdict:
    """Run one case with `functionalize` ("ours") or with `torch.func.functionalize` ("incumbent")."""
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = build(case)
        except Exception as error:
            return Verdict(str(case), NOT_COUNTED, "sample", _line(error))
        if case.mode == "gradients":
            return _judged(case, *check_derivatives(program))
        if case.mode == "compiled":
            return _judged(case, *check_compiled(case, case.op in _UNINITIALIZED))
        return _check(case, program, impl)


# Of what is not counted, what is for us to do; eager, make_fx or the database cannot do the rest.
_OURS = frozenset(("aot_eager", "capture", "refused"))


def rows_of(verdict: Verdict) -> list[Row]:
    """A verdict as a row that the ledger is asked for; none where it says nothing of us."""
    name, _, case = verdict.case.partition("/")
    if verdict.status == NOT_COUNTED:
        return [Row(name, case, REFUSED, f"{verdict.kind}: {verdict.reason}")] if verdict.kind in _OURS else []
    return [Row(name, case, RIGHT if verdict.status == PASSED else WRONG, verdict.reason)]


def _judged(case: Case, kind: str, reason: str) -> Verdict:
    not_counted = kind == "eager" or kind in _OURS
    status = NOT_COUNTED if not_counted else FAILED if kind else PASSED
    return Verdict(str(case), status, kind, reason[:1500])


def transform(impl: str, func: Callable[..., Any], remove: str) -> Callable[..., Any]:
    """Our transform or torch's."""
    if impl == "incumbent":
        return torch.func.functionalize(func, remove=remove)
    from functionalize import functionalize

    return functionalize(func, remove=remove)


def print_graphs(case: Case, impl: str) -> None:
    """Print the graph of plain `make_fx` and ours, as far as they can be traced, to look into a failure."""
    if case.mode in ("gradients", "compiled"):
        return  # which have other graphs
    program = build(case)
    for name, func in (
        ("plain", program.run),
        (impl, transform(impl, program.run, REMOVES[case.remove])),
    ):
        try:
            print(f"# {name}{_trace(func, program, case.mode).code}")
        except Exception:
            print(f"# {name} does not trace:")
            traceback.print_exc(file=sys.stdout)


def _check(case: Case, program: Program, impl: str) -> Verdict:
    expected = _observe(program, program.run)
    if expected.error is not None:
        return Verdict(str(case), NOT_COUNTED, "eager", _line(expected.error))
    shapes_only = case.op in _UNINITIALIZED
    if not shapes_only and any(_compare(expected, _observe(program, program.run))):
        return Verdict(str(case), NOT_COUNTED, "eager", "eager does not repeat itself")
    try:
        plain = _trace(program.run, program, "fake" if case.mode == "capture" else case.mode)
    except Exception as error:
        return Verdict(str(case), NOT_COUNTED, "make_fx", _line(error))
    remove = REMOVES[case.remove]
    try:
        graph, run = _made(case, impl, program, remove)
    except Exception as error:
        return Verdict(str(case), FAILED, "trace", _line(error))
    try:
        assert_functional(graph, remove)
    except NotFunctionalError as error:
        return Verdict(str(case), FAILED, "purity", str(error))
    return _check_values(case, program, expected, plain, graph, run, shapes_only)


def _made(case: Case, impl: str, program: Program, remove: str) -> tuple[GraphModule, Callable[..., Any]]:
    """The functional graph of a case, and what does the program's work by it."""
    if case.mode != "capture":
        graph = _trace(transform(impl, program.run, remove), program, case.mode)
        return graph, graph
    from functionalize import capture

    captured = capture(program.run, clone_inputs(program.inputs), remove=remove)
    return captured.graph_module, captured


def _check_values(
    case: Case,
    program: Program,
    expected: Observation,
    plain: GraphModule,
    graph: GraphModule,
    run: Callable[..., Any],
    shapes_only: bool,
) -> Verdict:
    actual = _observe(program, run)
    if actual.error is not None:
        return Verdict(str(case), FAILED, "run", _line(actual.error))
    found = list(_compare(expected, actual))
    weaker = ""
    if shapes_only:
        weaker, found = "shapes", [line for line in found if "values" not in line]
    elif found and _is_random(graph) and any(_compare(expected, _observe(program, plain))):
        # Plain make_fx draws otherwise than eager as well, so no seed can make them meet.
        weaker, found = "distribution", list(_compare_distributions(program, run))
    elif found and _only_rounding(program, expected, actual):
        weaker, found = "rounding", []
    if found:
        return Verdict(str(case), FAILED, "values", "; ".join(found))
    return Verdict(str(case), PASSED, weaker)


def _only_rounding(program: Program, expected: Observation, actual: Observation) -> bool:
    """Whether ours is as near to the result in double precision as eager itself is, leaf by leaf.

    Values may have other strides than eager's tensors, and kernels add up in the order of memory.
    """
    exact = _observe(Program(program.run, tuple(map(_double, program.inputs))), program.run)
    triples = [_numbers(seen) for seen in (expected, actual, exact)]
    if exact.error is not None or len({len(leaves) for leaves in triples}) > 1:
        return False
    return all(itertools.starmap(_as_near, zip(*triples, strict=True)))


def _double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _as_near(eager: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor) -> bool:
    if (eager.dtype, eager.shape) != (ours.dtype, ours.shape) or exact.shape != eager.shape:
        return False
    if not eager.is_floating_point() or eager.dtype is torch.float64 or not eager.numel():
        return not any(leaf_differences(eager, ours, strides=False))
    far = (eager.double() - exact).abs().max() * ROUNDING
    return bool((ours.double() - exact).abs().max() <= far) or not any(leaf_differences(eager, ours, strides=False))


def _trace(func: Callable[..., Any], program: Program, mode: Any) -> GraphModule:
    torch.manual_seed(SEED)
    return make_fx(func, tracing_mode=mode)(*clone_inputs(program.inputs))


def _observe(program: Program, func: Callable[..., Any], seed: int = SEED) -> Observation:
    return observe(func, clone_inputs(program.inputs), seed)


def _compare(expected: Observation, actual: Observation) -> Iterator[str]:
    if expected.error is None and actual.error is None:
        # A graph returns plain tuples where eager has named ones.
        expected, actual = _flat(expected), _flat(actual)
    yield from differences(expected, actual, strides=False, aliasing=False, rtol=None, atol=None)


def _flat(seen: Observation) -> Observation:
    _, spec = pytree.tree_flatten(seen.outputs)
    return Observation(seen.inputs, seen.outputs, spec, seen.error)


def _is_random(graph: GraphModule) -> bool:
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes)


def _compare_distributions(program: Program, graph: Callable[..., Any]) -> Iterator[str]:
    """Whether dtypes and shapes agree, and the means of all leaves over many seeds lie within six sigma."""
    draws = {
        name: [_observe(program, func, seed) for seed in range(DRAWS)]
        for name, func in (("eager", program.run), ("graph", graph))
    }
    first = {name: _numbers(seen[0]) for name, seen in draws.items()}
    if [(x.dtype, x.shape) for x in first["eager"]] != [(x.dtype, x.shape) for x in first["graph"]]:
        yield "random: dtypes or shapes differ from eager's"
        return
    for index in range(len(first["eager"])):
        eager = torch.stack([_numbers(seen)[index].double().mean() for seen in draws["eager"]])
        ours = torch.stack([_numbers(seen)[index].double().mean() for seen in draws["graph"]])
        spread = ((eager.var() + ours.var()) / DRAWS).sqrt() + 1e-9
        if (eager.mean() - ours.mean()).abs() > 6 * spread:
            yield f"random: leaf {index} has mean {ours.mean():.4g}, eager {eager.mean():.4g} +- {spread:.2g}"


def _numbers(seen: Observation) -> list[torch.Tensor]:
    leaves = [leaf for leaf in (*seen.outputs, *seen.inputs) if isinstance(leaf, torch.Tensor)]
    return [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:1500]
