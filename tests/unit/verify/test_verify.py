"""What `verify` finds: offending nodes with their lines, and differences from eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize.errors import (
    DataDependentError,
    DeferredError,
    InputMismatchError,
    NotEquivalentError,
    NotFunctionalError,
    UnsupportedExportError,
    UnsupportedMutationError,
    UnsupportedProgramError,
)
from functionalize.verify import assert_equivalent, assert_functional
from functionalize.verify.observation import clone_inputs

aten = torch.ops.aten


def traced(func: Callable[..., Any], *inputs: Any, lines: bool = False) -> GraphModule:
    return make_fx(func, record_stack_traces=lines)(*inputs)


def graph_of(build: Callable[..., Any], inputs: int) -> GraphModule:
    """A graph by hand: `build(graph, *placeholders)` returns what the graph is to return."""
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"x{index}") for index in range(inputs)]
    graph.output(build(graph, *placeholders))
    return GraphModule(torch.nn.Module(), graph)


def offence(gm: GraphModule, remove: str = "mutations") -> str:
    with pytest.raises(NotFunctionalError) as caught:
        assert_functional(gm, remove)
    return str(caught.value)


# assert_functional


def test_pure_graph_passes() -> None:
    assert_functional(traced(lambda x: x.add(1).mul(2), torch.zeros(2)), "mutations_and_views")


def test_mutation_is_named_with_the_users_line() -> None:
    class Write(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y.add_(1)
            return y.mul(2)

    message = offence(traced(Write(), torch.zeros(2), lines=True))
    assert "aten::add_.Tensor writes into `self`" in message
    assert "test_verify.py" in message
    assert "in forward: y.add_(1)" in message
    assert message.startswith("1 node(s)")


def test_out_argument_is_a_mutation() -> None:
    gm = traced(lambda x, y: torch.add(x, x, out=y).mul(2), torch.zeros(2), torch.zeros(2))
    assert "add.out writes into `out`" in offence(gm)


def test_views_offend_only_where_they_are_to_be_removed() -> None:
    gm = traced(lambda x: x[0].add(1), torch.zeros(2, 2))
    assert_functional(gm)
    assert "aten::select.int is a view" in offence(gm, "mutations_and_views")


def test_multi_output_view() -> None:
    gm = traced(lambda x: x.split(1)[0].add(1), torch.zeros(2))
    assert "aten::split.Tensor is a view" in offence(gm, "mutations_and_views")


def test_write_backs_are_allowed_last() -> None:
    def build(graph: torch.fx.Graph, x: Any, y: Any) -> Any:
        a = graph.call_function(aten.add.Tensor, (x, 1))
        b = graph.call_function(aten.mul.Tensor, (y, 2))
        graph.call_function(aten.copy_.default, (x, a))
        graph.call_function(aten.copy_.default, (y, b))
        return (a, b)

    assert_functional(graph_of(build, 2), "mutations_and_views")


def test_write_back_of_metadata_is_allowed_last() -> None:
    def build(graph: torch.fx.Graph, x: Any) -> Any:
        a = graph.call_function(aten.full.default, ([4], 1.0))
        grown = graph.call_function(aten.resize_.default, (x, [4]))
        graph.call_function(aten.copy_.default, (grown, a))
        return a

    assert_functional(graph_of(build, 1))


def test_write_back_before_a_computation_offends() -> None:
    def build(graph: torch.fx.Graph, x: Any) -> Any:
        a = graph.call_function(aten.add.Tensor, (x, 1))
        graph.call_function(aten.copy_.default, (x, a))
        return graph.call_function(aten.mul.Tensor, (x, 2))

    assert "aten::copy_ writes into `self`" in offence(graph_of(build, 1))


def test_write_back_onto_an_intermediate_offends() -> None:
    def build(graph: torch.fx.Graph, x: Any) -> Any:
        a = graph.call_function(aten.add.Tensor, (x, 1))
        graph.call_function(aten.copy_.default, (a, x))
        return a

    assert "aten::copy_ writes into `self`" in offence(graph_of(build, 1))


def test_write_back_that_reads_an_overwritten_input_offends() -> None:
    def swap(graph: torch.fx.Graph, x: Any, y: Any) -> Any:
        graph.call_function(aten.copy_.default, (x, y))
        graph.call_function(aten.copy_.default, (y, x))
        return ()

    assert "reads `x0` after its write-back" in offence(graph_of(swap, 2))


@pytest.mark.parametrize("training", [True, False])
def test_hidden_write_of_batch_norm(training: bool) -> None:
    def normalize(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, var, training=training)

    gm = traced(normalize, torch.randn(4, 3), torch.zeros(3), torch.ones(3))
    if training:
        assert "writes into `running_mean`, `running_var`" in offence(gm)
    else:
        assert_functional(gm)


def test_batch_norm_without_statistics_is_pure() -> None:
    gm = traced(lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), torch.randn(4, 3))
    assert_functional(gm)


def test_graphs_of_higher_order_operators_are_judged() -> None:
    def branch(x: Tensor) -> Tensor:
        return x.sin()

    gm = traced(lambda x: torch.cond(x.sum() > 0, branch, torch.cos, (x,)), torch.ones(3))
    assert_functional(gm)
    inner = gm.true_graph_0
    assert isinstance(inner, GraphModule)
    output = next(iter(reversed(inner.graph.nodes)))
    with inner.graph.inserting_before(output):
        inner.graph.call_function(aten.add_.Tensor, (next(iter(inner.graph.nodes)), 1))
    assert "[in true_graph_0]" in offence(gm)


def test_python_functions_cannot_be_judged() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.relu_(x))
    assert "is not an ATen operator" in offence(gm)
    gm = torch.fx.symbolic_trace(lambda x: x.relu_())
    assert "call_method nodes cannot be checked" in offence(gm)


def test_remove_is_checked() -> None:
    with pytest.raises(ValueError, match=r"mutations.*mutations_and_views.*'views'"):
        assert_functional(traced(torch.sin, torch.zeros(2)), "views")


# clone_inputs


def test_copies_share_storage_as_their_originals_do() -> None:
    base = torch.arange(6.0)
    inputs = (base, [base[2:], base.view(2, 3).t()], base, {"other": torch.zeros(2)})
    first, (tail, transposed), same, others = clone_inputs(inputs)
    assert first is same
    first[2] = 9
    assert tail[0] == 9 and transposed[2, 0] == 9 and base[2] == 2
    assert transposed.stride() == (1, 3) and tail.storage_offset() == 2
    assert others["other"].untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_copies_keep_what_makes_a_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    conjugate = torch.tensor([1 + 2j]).conj()
    generator = torch.Generator().manual_seed(3)
    p, c, g, text, sparse = clone_inputs((parameter, conjugate, generator, "text", torch.eye(2).to_sparse()))
    assert isinstance(p, torch.nn.Parameter) and p.requires_grad
    assert p.grad is not None and p.grad is not parameter.grad and p.grad.tolist() == [3, 3]
    assert c.is_conj() and torch.equal(c, conjugate)
    assert torch.equal(torch.rand(2, generator=g), torch.rand(2, generator=generator))
    assert text == "text" and sparse.is_sparse


# assert_equivalent


def bump(x: Tensor) -> Tensor:
    x[0].add_(1)
    return x.sum()


def swapped_for(other: Callable[..., Any]) -> Callable[[Any], Any]:
    """A transform that is wrong in the way that `other` differs from the function."""
    return lambda func: other


def difference(func: Callable[..., Any], other: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    with pytest.raises(NotEquivalentError) as caught:
        assert_equivalent(func, *inputs, transform=swapped_for(other), **options)
    return str(caught.value)


def test_equal_functions_pass_and_leave_inputs_alone() -> None:
    x = torch.zeros(3)
    assert assert_equivalent(bump, x, transform=swapped_for(bump)) is None
    assert torch.equal(x, torch.zeros(3))


def test_graph_is_returned_when_traced() -> None:
    gm = assert_equivalent(torch.sin, torch.ones(2), transform=swapped_for(torch.sin), tracing_mode="fake")
    assert isinstance(gm, GraphModule)


def test_impure_graph_is_refused() -> None:
    with pytest.raises(NotFunctionalError):
        assert_equivalent(bump, torch.zeros(3), transform=swapped_for(bump), tracing_mode="fake")


def test_lost_write_is_found() -> None:
    message = difference(bump, lambda x: x.sum() + 1, torch.zeros(3))
    assert "`bump` and its transform differ" in message
    assert "input after the call 0: values" in message
    assert "output" not in message


OWN_ERRORS = [
    UnsupportedProgramError("no", why="so", hint="else"),
    UnsupportedMutationError("no", why="so", hint="else"),
    DataDependentError("no", why="so", hint="else"),
    UnsupportedExportError("ONNX", ["no"]),
    InputMismatchError("no", hint="else"),
    DeferredError("no", why="so", hint="else"),
    NotFunctionalError("no"),
]


@pytest.mark.parametrize("own", OWN_ERRORS, ids=lambda own: type(own).__name__)
@pytest.mark.parametrize("of_eager", [RuntimeError, ValueError, AssertionError, Exception])
def test_a_refusal_of_ours_is_no_error_of_eager(of_eager: type[Exception], own: Exception) -> None:
    in_the_words_of_eager = type(own).__new__(type(own))
    in_the_words_of_eager.args = ("sizes differ",)

    def eager(x: Tensor) -> Any:
        raise of_eager("sizes differ")

    def refused(x: Tensor) -> Any:
        raise own

    def with_the_words_of_eager(x: Tensor) -> Any:
        raise in_the_words_of_eager

    assert type(own).__name__ in difference(eager, refused, torch.ones(2))
    assert_equivalent(eager, torch.ones(2), transform=swapped_for(with_the_words_of_eager))
    assert_equivalent(refused, torch.ones(2), transform=swapped_for(refused))


def test_errors_of_torch_are_compared_by_class() -> None:
    def eager(x: Tensor) -> Any:
        return x.add(torch.ones(5))

    def other_words(x: Tensor) -> Any:
        return x @ x

    def other_class(x: Tensor) -> Any:
        raise TypeError("no number")

    assert_equivalent(eager, torch.ones(2, 3), transform=swapped_for(other_words))
    assert "TypeError" in difference(eager, other_class, torch.ones(2, 3))
    assert "exception: none" in difference(eager, torch.sin, torch.ones(2, 3))
    assert "eager gives none" in difference(torch.sin, eager, torch.ones(2, 3))


def test_wrong_output_is_found() -> None:
    assert "output 0: values" in difference(torch.sin, torch.cos, torch.ones(2))
    assert "output 0: dtype torch.float64" in difference(torch.sin, lambda x: x.sin().double(), torch.ones(2))
    assert "output 0: shape" in difference(torch.sin, lambda x: x.sin()[:1], torch.ones(2))
    assert "structure" in difference(torch.sin, lambda x: [x.sin()], torch.ones(2))
    assert "output 0: 2, eager gives 1" in difference(lambda x: 1, lambda x: 2, torch.ones(2))


def test_nan_equals_nan() -> None:
    assert_equivalent(torch.log, -torch.ones(2), transform=swapped_for(lambda x: x.log()))


def test_strides_are_compared_where_asked() -> None:
    x = torch.ones(2, 3)

    def contiguous(x: Tensor) -> Tensor:
        return x.sin().t().contiguous()

    def transposed(x: Tensor) -> Tensor:
        return x.sin().t()

    assert_equivalent(transposed, x, transform=swapped_for(contiguous))
    assert "strides (2, 1), eager gives (1, 3)" in difference(transposed, contiguous, x, strides=True)


def test_changed_strides_of_an_input_are_found() -> None:
    def turn(x: Tensor) -> None:
        x.t_()

    def turn_and_pack(x: Tensor) -> None:
        x.set_(x.t().contiguous())  # type: ignore[call-overload]

    assert "input after the call 0: strides" in difference(turn, turn_and_pack, torch.ones(2, 3))


def test_lost_alias_is_found() -> None:
    message = difference(lambda x: x[0], lambda x: x[0].clone(), torch.ones(2))
    assert "in eager input 0, output 0 share storage" in message
    message = difference(lambda x: x[0].clone(), lambda x: x[0], torch.ones(2))
    assert "share storage, but not in eager" in message
    message = difference(lambda x: x, lambda x: x.view(-1), torch.ones(2))
    assert "in eager input 0, output 0 are one object" in message


def test_errors_must_be_of_one_type() -> None:
    def fail(x: Tensor) -> None:
        raise IndexError("no such row")

    def fail_otherwise(x: Tensor) -> None:
        raise KeyError("no such row")

    x = torch.ones(2)
    assert_equivalent(fail, x, transform=swapped_for(fail))
    assert "KeyError" in difference(fail, fail_otherwise, x)
    assert "exception: none, eager gives IndexError" in difference(fail, torch.sin, x)


def test_random_functions_run_under_one_seed() -> None:
    assert_equivalent(torch.bernoulli, torch.full((9,), 0.5), transform=swapped_for(lambda x: x.bernoulli()))


def test_gradients_of_inputs_are_compared() -> None:
    def backward(x: Tensor) -> None:
        x.square().sum().backward()

    x = torch.ones(2, requires_grad=True)
    assert_equivalent(backward, x, transform=swapped_for(backward))
    assert "grad None, eager gives tensor" in difference(backward, lambda x: None, x)


def test_default_transform_is_ours() -> None:
    for mode in (None, "real", "fake", "symbolic"):
        for remove in ("mutations", "mutations_and_views"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert_equivalent(bump, torch.zeros(3, 2), remove=remove, tracing_mode=mode)
