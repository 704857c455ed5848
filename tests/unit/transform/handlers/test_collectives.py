"""Collectives in one process: those that write become functional ones, which go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import (
    NotCapturedWarning,
    NotFunctionalError,
    UnsupportedMutationError,
    UnsupportedProgramError,
    capture,
    functionalize,
)
from functionalize.runtime.communication import CallLog, logging_to, once, run_as_written
from functionalize.verify import assert_functional, collectives

dist: Any = torch.distributed
functional: Any = torch.distributed._functional_collectives  # its stubs want names of groups
linalg: Any = torch.linalg  # does not export its error

pytestmark = pytest.mark.usefixtures("group_of_one")


def reduced(x: Tensor) -> Any:
    y = x * 2
    dist.all_reduce(y)
    return y


def test_a_collective_that_writes_becomes_one_that_returns() -> None:
    x = torch.ones(3)
    program = capture(reduced, (x,))
    assert [node.name for node in program.graph.nodes] == ["x", "mul", "all_reduce", "wait_tensor", "output"]
    assert_functional(program.graph_module, "mutations_and_views")
    reads_as = program.graph_module.code.split("def forward")[1]
    assert "all_reduce.default(mul, 'sum', '0')" in reads_as


def exchanged(x: Tensor, counts: Tensor) -> Tensor:
    splits = counts.tolist()
    out = x.new_empty(sum(splits), 2)
    dist.all_to_all_single(out, x[: sum(splits)], splits, splits)
    return out


def test_splits_that_data_decides_are_symbols_of_the_graph() -> None:
    x = torch.arange(8.0).view(4, 2)
    program = capture(exchanged, (x, torch.tensor([3])))
    for count in (4, 1, 0, 2):
        assert torch.equal(program(x, torch.tensor([count])), x[:count])
    assert len(program.variants) == 1
    lines = program.graph_module.code.split("counts):\n")[1].splitlines()
    assert [line.partition(";")[0].strip().replace("torch.ops.", "") for line in lines] == [
        "select_copy = aten.select_copy.int(counts, 0, 0)",
        "_local_scalar_dense = aten._local_scalar_dense.default(select_copy)",
        "add_1 = 0 + _local_scalar_dense",
        "slice_copy = aten.slice_copy.Tensor(x, 0, 0, add_1, 1)",
        "all_to_all_single = _c10d_functional.all_to_all_single.default("
        "slice_copy, [_local_scalar_dense], [_local_scalar_dense], '0')",
        "wait_tensor = _c10d_functional.wait_tensor.default(all_to_all_single)",
        "return (wait_tensor,)",
        "",
    ]


def test_a_call_beyond_the_limit_of_variants_runs_the_original_as_other_ranks_wait() -> None:
    def func(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        y = y + 1 if y.sum() > 0 else y - 1
        dist.all_reduce(y)
        return y

    x = torch.ones(3)
    program = capture(func, (x,), cache_size=1)
    before = dist.group.WORLD._get_sequence_number_for_group()
    with pytest.warns(NotCapturedWarning, match="more than 1 different ways"):
        assert torch.equal(program(-x), torch.full((3,), -3.0))
    assert torch.equal(program(x), torch.full((3,), 3.0))
    assert dist.group.WORLD._get_sequence_number_for_group() - before == 4


def test_a_graph_with_collectives_that_write_is_not_functional() -> None:
    graph = make_fx(reduced, tracing_mode="fake")(torch.ones(3))
    with pytest.raises(NotFunctionalError, match=r"c10d::allreduce_: it writes"):
        assert_functional(graph)


def test_what_a_graph_communicates_is_listed_in_order() -> None:
    def func(x: Tensor) -> Any:
        later = dist.all_reduce(x, async_op=True)
        dist.barrier()
        whole = torch.zeros(3)
        dist.all_gather_single(whole, x[:1].repeat(3))
        later.wait()
        return whole

    listed = collectives(capture(func, (torch.ones(5),)).graph)
    assert [(one.kind, one.group, one.bytes) for one in listed] == [
        ("all_reduce", "0", 20),
        ("barrier", "0", 0),
        ("all_gather", "0", 12),
    ]


def test_collectives_that_nothing_reads_stay_in_order() -> None:
    def func(x: Tensor) -> None:
        dist.barrier()
        dist.all_reduce(x * 2)
        dist.broadcast(x + 1, 0)

    program = capture(func, (torch.ones(2),))
    before = sequence_number()
    program(torch.ones(2))
    assert sequence_number() == before + 3
    assert [one.kind for one in collectives(program.graph)] == ["barrier", "all_reduce", "broadcast"]
    program.graph.eliminate_dead_code()
    assert [one.kind for one in collectives(program.graph)] == ["barrier", "all_reduce", "broadcast"]


def constant_reduced(x: Tensor) -> Any:
    y = torch.tensor(3.0)
    dist.all_reduce(y)
    return x * y


def constant_reduced_and_read(x: Tensor) -> Any:
    y = torch.tensor(3.0)
    dist.reduce(y, 0)
    return x * y.item()


def constant_reduced_functionally(x: Tensor) -> Any:
    return x * functional.all_reduce(torch.tensor(3.0), "sum", dist.group.WORLD)


@pytest.mark.parametrize("func", [constant_reduced, constant_reduced_and_read, constant_reduced_functionally])
def test_what_arrives_for_a_constant_is_no_constant(func: Callable[[Tensor], Tensor]) -> None:
    before = sequence_number()
    programs = capture(func, (torch.ones(2),)), make_fx(functionalize(func), tracing_mode="fake")(torch.ones(2))
    assert sequence_number() == before
    for program in programs:
        (communication,) = collectives(program.graph)
        assert communication.node.users
        torch.testing.assert_close(program(torch.ones(2)), torch.full((2,), 3.0))
    assert sequence_number() == before + 2


def test_in_direct_use_a_collective_writes_to_the_program_s_own_tensors() -> None:
    x = torch.ones(2, 3)
    torch.testing.assert_close(functionalize(reduced)(x), reduced(x.clone()))


def test_a_tensor_of_another_size_is_refused() -> None:
    def func(x: Tensor) -> Any:
        whole = torch.zeros(5)
        dist.all_gather_single(whole, x)
        return whole

    with pytest.raises(UnsupportedMutationError, match="3 elements arrive in a tensor of 5"):
        capture(func, (torch.ones(3),))


def test_functional_collectives() -> None:
    def func(x: Tensor) -> Any:
        total: Tensor = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return total.add_(1)

    program = capture(func, (torch.ones(3),))
    assert_functional(program.graph_module, "mutations_and_views")
    torch.testing.assert_close(program(torch.ones(3)), torch.full((3,), 3.0))


def waited_in_place(x: Tensor) -> Any:
    y = COLLECTIVES.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)
    z = COLLECTIVES.wait_tensor(y)
    z.add_(1)
    return y * 2


def waited_with_views(x: Tensor) -> Any:
    y = COLLECTIVES.all_reduce(x, "sum", dist.group.WORLD.group_name)
    row = y[0]
    z = COLLECTIVES.wait_tensor(y)
    row.mul_(3)
    z.t_()
    return y, z, row


def waited_unread(x: Tensor) -> Any:
    y = COLLECTIVES.all_reduce(x, "sum", dist.group.WORLD.group_name)
    COLLECTIVES.wait_tensor(y)
    return y + 1


def waited_input(x: Tensor) -> Any:
    z = COLLECTIVES.wait_tensor(x)
    z.add_(1)
    return x * 2


def waited_several(x: Tensor) -> Any:
    several = COLLECTIVES.all_reduce_coalesced([x, x * 2], "sum", dist.group.WORLD.group_name)
    waited = [COLLECTIVES.wait_tensor(one) for one in several]
    waited[0].add_(1)
    return several[0] * 2, several[1]


COLLECTIVES: Any = torch.ops._c10d_functional


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("func", [waited_in_place, waited_with_views, waited_unread, waited_input, waited_several])
def test_a_waited_tensor_is_the_tensor_itself(func: Callable[[Tensor], Any], remove: str) -> None:
    def given() -> Any:
        return torch.arange(4.0).view(2, 2)

    x = given()
    expected = func(x), x
    program = capture(func, (given(),), remove=remove)
    assert_functional(program.graph_module, remove)
    traced = make_fx(functionalize(func, remove=remove), tracing_mode="fake")(given())
    for call in (functionalize(func, remove=remove), program, traced):
        x = given()
        torch.testing.assert_close((call(x), x), expected, rtol=0, atol=0)
    for graph in (program.graph, traced.graph):
        reduced = [node for node in graph.nodes if "all_reduce" in str(node.target)]
        waited = [node for node in graph.nodes if "wait_tensor" in str(node.target)]
        assert waited and all("reduce" not in str(user.target) for node in waited for user in node.users)
        assert all(
            "wait" in str(user.target) or "getitem" in str(user.target) for node in reduced for user in node.users
        )


def test_a_waited_tensor_is_returned_as_itself() -> None:
    def func(x: Tensor) -> Any:
        y = COLLECTIVES.all_reduce(x, "sum", dist.group.WORLD.group_name)
        return y, COLLECTIVES.wait_tensor(y)

    for call in (func, functionalize(func), capture(func, (torch.ones(2),))):
        first, second = call(torch.ones(2))
        assert first is second


def after_a_collective(x: Tensor) -> Any:
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    return y + 1 if x.sum() > 0 else y - 1


def by_a_collective(x: Tensor) -> Any:
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    return y + 1 if y.sum() > 0 else y - 1


def before_a_collective(x: Tensor) -> Any:
    y = x + 1 if x.sum() > 0 else x - 1
    return functional.all_reduce(y, "sum", dist.group.WORLD)


def in_one_branch(x: Tensor) -> Any:
    if x.sum() > 0:
        return x + 1
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def sequence_number() -> int:
    """How often the group has communicated."""
    return int(dist.group.WORLD._get_sequence_number_for_group())


@pytest.mark.parametrize("func", [after_a_collective, by_a_collective, before_a_collective, in_one_branch])
def test_a_program_that_branches_on_values_communicates_as_often_as_in_eager(func: Callable[[Tensor], Any]) -> None:
    program = capture(func, (torch.ones(3),))
    for x in (torch.ones(3), -torch.ones(3), torch.ones(3), -2 * torch.ones(3)):
        before = sequence_number()
        expected = func(x)
        between = sequence_number()
        torch.testing.assert_close(program(x), expected)
        assert sequence_number() - between == between - before
    assert len(program.variants) == 2


def test_a_capture_for_a_call_communicates_for_this_call() -> None:
    program = capture(by_a_collective, (torch.ones(3),), on_guard_failure="recapture")
    for x in (torch.ones(5), -torch.ones(2)):
        before = sequence_number()
        torch.testing.assert_close(program(x), x + 1 if x[0] > 0 else x - 1)
        assert sequence_number() == before + 1


@pytest.mark.parametrize("func", [after_a_collective, before_a_collective, in_one_branch])
def test_branches_beside_collectives_with_gradients_are_decided_ahead(func: Callable[[Tensor], Any]) -> None:
    program = capture(func, (torch.ones(3, requires_grad=True),))
    for sign in (1, -1, 1, -2):
        results, numbers = [], [sequence_number()]
        for call in (func, program):
            x = torch.full((3,), float(sign), requires_grad=True)
            y = call(x)
            results.append([y.detach(), *torch.autograd.grad(y.sum(), x)])
            numbers.append(sequence_number())
        torch.testing.assert_close(*results)
        assert numbers[2] - numbers[1] == numbers[1] - numbers[0]
    assert len(program.variants) == 2


def caught_beside_a_branch(x: Tensor, place: Tensor) -> Any:
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    try:
        return y * 2 if torch.arange(3.0)[place].sum() > 0 else y
    except IndexError:
        return y.cos()


def on_one_branch(x: Tensor, place: Tensor) -> Any:
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    if x.sum() > 0 and torch.arange(3.0)[place].sum() > 0:
        return y * 2
    return y.sin()


@pytest.mark.parametrize("func", [caught_beside_a_branch, on_one_branch])
def test_an_operator_that_decides_ahead_may_raise(func: Callable[[Tensor, Tensor], Tensor]) -> None:
    program = capture(func, (torch.ones(3, requires_grad=True), torch.tensor([1])))
    for sign, place in ((1, 1), (-1, 7), (-1, 1)):
        results, numbers = [], [sequence_number()]
        for call in (func, program):
            x = torch.full((3,), float(sign), requires_grad=True)
            y = call(x, torch.tensor([place]))
            results.append([y.detach(), *torch.autograd.grad(y.sum(), x)])
            numbers.append(sequence_number())
        torch.testing.assert_close(*results)
        assert numbers[2] - numbers[1] == numbers[1] - numbers[0]


def test_branches_on_what_was_communicated_with_gradients_are_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedProgramError, match="all_reduce, a collective operation, in a program that branches"):
        capture(by_a_collective, (x,))


def test_a_second_derivative_of_a_program_that_communicates_is_refused() -> None:
    program = capture(lambda x: (functional.all_reduce(x, "sum", dist.group.WORLD) ** 3).sum(), (torch.ones(2),))
    x = torch.ones(2, requires_grad=True)
    before = sequence_number()
    (gradient,) = torch.autograd.grad(program(x), x, create_graph=True)
    torch.testing.assert_close(gradient, torch.full((2,), 3.0))
    assert sequence_number() == before + 2
    with pytest.raises(RuntimeError, match="communicated already"):
        torch.autograd.grad(gradient.sum(), x)
    assert sequence_number() == before + 2


def collectives_that_write(x: Tensor) -> Any:
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts[:1], x[:2] * 3)
    dist.reduce_scatter(parts[1], [x[2:]])
    return parts


def caught_after_collectives(x: Tensor) -> Any:
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    parts, later = collectives_that_write(x), x.clone()
    work = dist.all_reduce(later, async_op=True)
    x.add_(1)
    try:
        root = torch.linalg.cholesky(torch.eye(2) * total[0])
    except linalg.LinAlgError:
        root = torch.zeros(2, 2)
    work.wait()
    dist.barrier()
    return total, parts, later, root, torch.rand(2)


def raises_after_collectives(x: Tensor) -> Any:
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    collectives_that_write(x)
    if total[0] < 0:
        raise ValueError("the sum is negative")
    return total + 1


def test_where_an_operator_raises_the_program_runs_with_what_the_call_has_received() -> None:
    program = capture(caught_after_collectives, (torch.ones(4),))
    for x in (torch.ones(4), -torch.ones(4), torch.ones(4), -2 * torch.ones(4)):
        before, calls = sequence_number(), []
        for call in (caught_after_collectives, program):
            torch.manual_seed(0)
            written = x.clone()
            calls.append((call(written), written))
            calls[-1] = (*calls[-1], sequence_number() - before)  # type: ignore[assignment]
            before = sequence_number()
        torch.testing.assert_close(calls[1], calls[0], rtol=0, atol=0)


def test_a_branch_that_raises_communicates_as_often_as_in_eager() -> None:
    program = capture(raises_after_collectives, (torch.ones(4),))
    for call in (raises_after_collectives, program, program):
        before = sequence_number()
        with pytest.raises(ValueError, match="the sum is negative"):
            call(-torch.ones(4))
        assert sequence_number() == before + 3


@pytest.mark.parametrize("otherwise", [lambda x: dist.broadcast(x, 0), lambda x: dist.all_reduce(x[:2])])
def test_a_program_that_communicates_otherwise_when_it_runs_again_is_refused(
    otherwise: Callable[[Tensor], Any],
) -> None:
    with logging_to(CallLog()):
        once(COLLECTIVES.all_reduce.default, 0, torch.ones(3), "sum", dist.group.WORLD.group_name)
        before = sequence_number()
        with pytest.raises(UnsupportedProgramError, match="where the same call has communicated by"):
            run_as_written(otherwise, [torch.ones(3)], {})
        assert sequence_number() == before


def test_where_takes_the_place_of_a_branch_beside_collectives() -> None:
    def func(x: Tensor) -> Any:
        y = functional.all_reduce(x, "sum", dist.group.WORLD)
        return torch.where(y.sum() > 0, y + 1, y - 1)

    program = capture(func, (torch.ones(3),))
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(program(x), func(x))
