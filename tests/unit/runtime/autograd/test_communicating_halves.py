"""Programs that communicate, cut into a forward and a backward: both communicate as often as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
import torch.distributed.nn.functional as nn_functional
from torch import Tensor
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from functionalize import UnsupportedProgramError, capture

dist: Any = torch.distributed
functional: Any = torch.distributed._functional_collectives  # its stubs want names of groups

pytestmark = [
    pytest.mark.usefixtures("group_of_one"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.*is deprecated"),
]


def unread(x: Tensor) -> Any:
    dist.barrier()
    y = x.sin()
    z = y.detach() * 2
    dist.all_reduce(z)
    dist.broadcast(z, 0)
    return y.exp().sum()


def read_in_another_order(x: Tensor) -> Any:
    whole = functional.all_gather_single_autograd(x.sin(), 0, dist.group.WORLD)
    part = functional.reduce_scatter_single_autograd(x.cos(), "sum", 0, dist.group.WORLD)
    return part.exp().sum() + whole.sum().exp()


def cheap_to_compute_again(x: Tensor) -> Any:
    y = x.detach().clone()
    dist.reduce(y, 0)
    return (x * y.sin()).sin().sum()


def the_same_twice(x: Tensor) -> Any:
    first = functional.all_reduce(x, "sum", dist.group.WORLD)
    return first.exp().sum() + functional.all_reduce(x, "sum", dist.group.WORLD).sin().sum()


def of_torch_distributed_nn(x: Tensor) -> Any:
    return (nn_functional.all_reduce(x.sin()).exp() * torch.cat(nn_functional.all_gather(x * 2))).sum()


def checkpointed(x: Tensor) -> Any:
    def region(x: Tensor) -> Any:
        return functional.all_gather_single_autograd(x.sin(), 0, dist.group.WORLD).exp()

    return checkpoint(region, x, use_reentrant=False).sum()


def communicated(func: Callable[[Tensor], Tensor]) -> tuple[int, int, Tensor, Tensor | None]:
    """How often a forward and its backward communicate, with the result and the gradient."""
    x, number = torch.arange(4.0).requires_grad_(), dist.group.WORLD._get_sequence_number_for_group
    before = number()
    result = func(x)
    between = number()
    result.backward()
    return between - before, number() - between, result.detach(), x.grad


PROGRAMS = [unread, read_in_another_order, cheap_to_compute_again, the_same_twice, of_torch_distributed_nn]
CUTS = [None, min_cut_rematerialization_partition, default_partition]


@pytest.mark.parametrize("partition_fn", CUTS)
@pytest.mark.parametrize("func", PROGRAMS)
def test_each_half_communicates_as_often_as_in_eager(func: Callable[[Tensor], Tensor], partition_fn: Any) -> None:
    program = capture(func, (torch.arange(4.0).requires_grad_(),), partition_fn=partition_fn)
    assert communicated(program)[:2] == communicated(func)[:2]
    torch.testing.assert_close(communicated(program)[2:], communicated(func)[2:], rtol=0, atol=0)


def test_a_checkpointed_region_communicates_again_in_the_backward_as_in_eager() -> None:
    program = capture(checkpointed, (torch.arange(4.0).requires_grad_(),))
    assert communicated(program)[:2] == communicated(checkpointed)[:2] == (1, 2)
    torch.testing.assert_close(communicated(program)[2:], communicated(checkpointed)[2:], rtol=0, atol=0)


def test_a_partition_function_that_communicates_again_is_refused() -> None:
    def again(module: Any, inputs: Any, *, num_fwd_outputs: int) -> Any:
        forward, backward = default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs)
        collectives = [node for node in forward.graph.nodes if "reduce" in node.name]
        graph = backward.graph
        with graph.inserting_before(graph.output_node()):
            copy = graph.create_node("call_function", collectives[0].target, (next(iter(graph.nodes)), "sum", 0, "0"))
        copy._rename(collectives[0].name)
        returned: Any = graph.output_node().args[0]
        graph.output_node().args = ((copy, *returned[1:]),)
        return forward, backward

    program = capture(cheap_to_compute_again, (torch.arange(4.0).requires_grad_(),), partition_fn=again)
    with pytest.raises(UnsupportedProgramError, match=r"has the backward compute functionalize\.reduce\.default again"):
        program(torch.arange(4.0).requires_grad_())
