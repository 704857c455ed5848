"""Programs that other functionalizers refuse, or crash on, and that run here; by issue of pytorch/pytorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedMutationError, functionalize
from functionalize.verify import assert_equivalent
from tests.support.equality import Check
from tests.support.graphs import operators

aten = torch.ops.aten
SQUARE = torch.arange(16.0).view(4, 4)
LINE = torch.arange(12.0)
STATIC = pytest.mark.parametrize("mode", [None, "real", "fake"], ids=str)


@STATIC
def test_81385_resize_grows_a_base_with_a_live_view(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x.clone()
        z = y.view(3, 4)
        y.resize_(20)
        y[10:].fill_(7)
        z.mul_(2)
        return y, z

    check(f, LINE)


def test_104505_as_strided_on_a_chain_of_views_is_written(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x + 1
        y.view(-1)[2:].as_strided((2, 2), (3, 1)).add_(1)
        y[:, 1:].t().as_strided((2,), (5,), 4).mul_(10)
        y[1].as_strided((3,), (2,), 0).neg_()
        return y

    check(f, SQUARE)


def test_104505_as_strided_reaches_beyond_a_slice_of_an_input(check: Check) -> None:
    def f(x: Tensor) -> Any:
        part = x[1:2]
        part.as_strided((4,), (4,), 0).mul_(3)
        return part.sum(), x.t()[0] * 1

    check(f, SQUARE)


def test_165409_183888_a_write_to_overlapping_windows_that_eager_allows(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x - 6
        y.unfold(0, 3, 2).abs_()
        x.unfold(0, 4, 1).clamp_(2, 9)
        return y

    check(f, LINE)


def test_194747_inputs_of_several_dtypes_in_one_buffer(check: Check) -> None:
    def decode(keys: Tensor, states: Tensor, whole: Tensor) -> Any:
        keys[1].fill_(3)
        states.mul_(2)
        return keys.sum(), states * 1, whole[:4] + 1

    buffer = torch.zeros(64, dtype=torch.uint8)
    keys, states = buffer[:32].view(torch.float16).view(2, 8), buffer[32:].view(torch.float32)
    check(decode, keys, states, buffer)


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "sgd"])
def test_fused_optimizers_with_empty_lists(name: str, check: Check, mode: Any) -> None:
    rates: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "maximize": False}
    beta: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}

    def f(parameters: list[Tensor], gradients: list[Tensor], moments: list[list[Tensor]], steps: list[Tensor]) -> None:
        if name in ("adam", "adamw"):
            step = getattr(torch, f"_fused_{name}_")
            step(parameters, gradients, *moments, [], steps, amsgrad=False, **rates, **beta)
        elif name == "adagrad":
            torch._fused_adagrad_(parameters, gradients, moments[1], steps, lr_decay=0.0, eps=1e-8, **rates)
        else:
            rest: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
            torch._fused_sgd_(parameters, gradients, [], **rates, **rest)

    pairs = [[torch.ones(3), torch.ones(2, 2)] for _ in range(4)]
    if name in ("sgd", "adagrad") and mode == "symbolic":
        pytest.skip(f"FakeTensor has no kernel of _fused_{name}_ for symbolic sizes")
    check(f, pairs[0], pairs[1], pairs[2:], [torch.tensor(1.0), torch.tensor(1.0)])


def test_fused_optimizer_whose_state_is_its_parameter_is_refused_in_graphs(remove: str) -> None:
    def f(p: Tensor, gradient: Tensor) -> None:
        rest: dict[str, Any] = {
            "beta1": 0.9,
            "beta2": 0.99,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "amsgrad": False,
            "maximize": False,
        }
        torch._fused_adam_([p], [gradient], [p], [p[:2]], [], [torch.tensor(1.0)], lr=0.1, **rest)

    assert_equivalent(f, torch.ones(3), torch.ones(3), remove=remove)
    with pytest.raises(UnsupportedMutationError, match="depends on the order"):
        make_fx(functionalize(f, remove=remove), tracing_mode="fake")(torch.ones(3), torch.ones(3))


def test_ops_that_codegen_cannot_pair(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y, low, where = x + 1, torch.empty(4, 4), torch.empty(4, 4, dtype=torch.int64)
        y.polygamma_(1)
        torch.cummax(x, 0, out=(low, where))
        y.fill_diagonal_(2)
        return y, low, where, torch.rrelu_(x - 8, 0.1, 0.3, training=True)

    check(f, SQUARE)


def test_composite_functions_with_out(check: Check) -> None:
    def f(x: Tensor) -> Any:
        outs = [torch.empty(0) for _ in range(7)]
        torch.diff(x, out=outs[0])
        torch.quantile(x, 0.5, dim=1, out=outs[1])
        torch.matmul(x, x.t(), out=outs[2])
        torch.linalg.norm(x, dim=1, out=outs[3])
        torch.cross(x[:, :3], x[:, 1:], dim=1, out=outs[4])
        torch.row_stack((x, x), out=outs[5])
        torch.linalg.multi_dot([x, x, x], out=outs[6])
        return outs

    check(f, SQUARE)


def test_a_leaf_is_written_under_no_grad(check: Check) -> None:
    def f(weight: Tensor, gradient: Tensor) -> Any:
        with torch.no_grad():
            weight.sub_(gradient, alpha=0.1)
            weight[0].clamp_(max=3)
        return (weight * 2).detach()

    check(f, SQUARE.clone().requires_grad_(), torch.ones(4, 4))


def test_73537_a_functionalized_function_inside_another(check: Check) -> None:
    def inner(x: Tensor) -> Tensor:
        x.view(-1).add_(1)
        return x[1:]

    def f(x: Tensor) -> Any:
        y = x * 2
        part = functionalize(inner, remove="mutations_and_views")(y)
        part.mul_(3)
        return y, functionalize(functionalize(inner))(x)

    check(f, LINE)


def test_81618_constructors_with_out(check: Check) -> None:
    def f(x: Tensor) -> Any:
        outs = [torch.empty(0) for _ in range(5)]
        torch.zeros(3, out=outs[0])
        torch.arange(2, 8, out=outs[1])
        torch.full((2, 2), 7.0, out=outs[2])
        torch.linspace(0, 1, 4, out=outs[3])
        torch.eye(3, out=outs[4])
        outs[4][0].add_(x[:3])
        return outs

    check(f, LINE)


@STATIC  # FakeTensor refuses to resize a tensor of symbolic size, in plain make_fx too
def test_178482_out_of_empty_takes_the_size_that_it_is_asked_for(check: Check) -> None:
    def f(x: Tensor) -> Any:
        out = x * 2
        torch.empty(2, 3, out=out)
        return out.fill_(1), torch.ones(5, out=torch.empty(5))

    check(f, LINE[:6].clone())


def test_98835_113554_out_of_random_numbers(check: Check) -> None:
    def f(x: Tensor) -> Any:
        out = torch.empty(0)
        torch.normal(x, 1.0, out=out)
        return out, torch.randn(4, out=torch.empty(4)), torch.normal(0.0, x, out=torch.empty(12))

    check(f, LINE)


def test_111580_diff_into_an_out_of_another_size(check: Check) -> None:
    def f(x: Tensor) -> Any:
        out = torch.zeros(2)
        view = out.resize_(0)
        torch.diff(x, dim=0, out=view)
        return out

    check(f, SQUARE)


@pytest.mark.parametrize("order", ["transform of graph", "graph of transform"])
def test_82813_83070_635_84570_graphs_and_transforms_in_either_order(order: str, check: Check) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        y.view(-1)[1:].add_(x.view(-1)[:-1])
        return y.t()

    graph = make_fx(f if order == "transform of graph" else functionalize(f))(SQUARE.clone())
    check(graph, SQUARE)


def test_84495_jit_trace_takes_the_graph_of_a_functionalized_function() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y[0].add_(1)
        return y

    graph = make_fx(functionalize(f))(SQUARE.clone())
    with pytest.warns((DeprecationWarning, FutureWarning), match="deprecated"):
        traced = torch.jit.trace(graph, (SQUARE.clone(),))
    assert torch.equal(traced(SQUARE.clone()), f(SQUARE.clone()))


def test_97852_a_graph_of_a_whole_training_step(check: Check) -> None:
    def step(weight: Tensor, momentum: Tensor, x: Tensor) -> Any:
        leaf = weight.detach().requires_grad_()
        loss = ((x @ leaf).relu_() ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, leaf)
        momentum.mul_(0.9).add_(gradient)
        weight.sub_(momentum, alpha=0.1)
        return loss.detach()

    inputs = torch.ones(4, 2), torch.zeros(4, 2), SQUARE
    check(make_fx(step)(*[value.clone() for value in inputs]), *inputs)


@pytest.mark.parametrize("change", ["unsqueeze_", "squeeze_", "t_", "as_strided_"])
def test_90507_an_intermediate_whose_metadata_changes_keeps_its_gradient(change: str, remove: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"unsqueeze_": (0,), "as_strided_": ((4, 4), (1, 4), 0)}

    def f(x: Tensor) -> Tensor:
        out = x * 2
        getattr(out, change)(*arguments.get(change, ()))
        return out

    def gradient(func: Callable[[Tensor], Tensor]) -> Any:
        leaf = SQUARE.clone().requires_grad_()
        func(leaf).mul_(SQUARE).sum().backward()
        return leaf.grad

    assert torch.equal(gradient(functionalize(f, remove=remove)), gradient(f))


def test_136064_a_view_of_the_same_dtype(check: Check) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        x.view(x.dtype).copy_(y)
        return x.view(torch.int32).view(torch.float32).mul_(2) + 1

    check(f, SQUARE, -SQUARE)


def test_113793_views_changed_in_place(check: Check) -> None:
    def f(x: Tensor) -> Any:
        flat = x.view(-1)
        pairs = flat.unflatten(0, (-1, 2))
        pairs[:, 0].mul_(2)
        flat[3:5] += pairs[0]
        return pairs.transpose_(0, 1)

    check(f, SQUARE)


@pytest.fixture(scope="module")
def library() -> Any:
    with torch.library._scoped_library("functionalize_incumbents", "FRAGMENT") as library:
        library.define("swap_halves(Tensor(a!) first, Tensor(b!) second) -> ()")
        library.define("add_into(Tensor(a!) to, Tensor source) -> ()")
        library.define("scale(Tensor x, Tensor(a!)[] parts, Tensor(b!)? bias=None) -> Tensor")

        def swap_halves(first: Tensor, second: Tensor) -> None:
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)

        def add_into(to: Tensor, source: Tensor) -> None:
            to.add_(source)

        def scale(x: Tensor, parts: list[Tensor], bias: Tensor | None = None) -> Tensor:
            for part in parts:
                part.mul_(2)
            if bias is not None:
                bias.zero_()
            return x * 2

        for operator in (swap_halves, add_into, scale):
            library.impl(operator.__name__, operator, "CompositeExplicitAutograd")
        yield torch.ops.functionalize_incumbents


def test_139628_two_views_of_one_tensor_as_arguments_of_a_custom_op(library: Any, check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x + 1
        library.swap_halves(y[0], y[1])
        library.swap_halves(x[:, 0], x[:, 1])
        parts = y.unbind(1)
        out = library.scale(x, [parts[0], parts[2]], y[3, 3:])
        return y, out

    check(f, SQUARE)


def test_198031_a_custom_op_writes_the_clone_of_what_it_reads(library: Any, check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x.clone()
        library.add_into(y, x)
        library.add_into(x, y)
        return y

    check(f, LINE)


def test_143379_the_noise_of_rrelu_is_written(check: Check) -> None:
    def f(x: Tensor) -> Any:
        noise = torch.zeros_like(x)
        y = aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
        return y, noise, aten.rrelu_with_noise_(x - 9, noise, 0.1, 0.3, True)

    graph = check(f, SQUARE)
    assert graph is None or len(graph.graph.find_nodes(op="output")[0].args[0]) == 3


def test_126236_a_view_from_before_set_is_written(check: Check) -> None:
    def f(x: Tensor, new: Tensor) -> Any:
        y = x * 2
        stale = y.view(-1)
        torch.ops.aten.set_.source_Tensor(y, new)
        stale.add_(1)
        y.mul_(3)
        return stale, y

    check(f, SQUARE, torch.ones(2, 3))


def test_111506_a_lifted_constant_shares_no_storage_with_its_tensor() -> None:
    def f(x: Tensor) -> Any:
        constant = torch.tensor([1.0, 2.0])
        constant.add_(x)
        return constant

    graph = make_fx(functionalize(f))(torch.ones(2))
    assert [graph(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 3.0]] * 2


@pytest.mark.parametrize("mode", [None, "real"], ids=str)
def test_197096_a_constant_is_written(check: Check) -> None:
    def f(x: Tensor) -> Any:
        table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        table[0].mul_(x[0, 0])
        table.t_()
        return table @ x[:2]

    check(f, SQUARE)


def test_130394_183771_strides_of_what_is_assigned_by_slices(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = torch.empty_strided((4, 4), (1, 4))
        y[:2] = x[:2]
        y[2:] = x[2:] * 2
        return y, y.stride(), (y + 1).stride(), y.view(torch.int32)

    check(f, SQUARE)


def test_133174_164697_sparse_tensors_pass_through(check: Check, mode: Any) -> None:
    def f(x: Tensor) -> Any:
        y = x + 1
        y[0].zero_()
        dense = y.to_sparse().coalesce().to_dense()
        dense[1].add_(y[2])
        return dense

    if mode in (None, "real"):
        check(f, SQUARE)
    else:
        assert_equivalent(f, SQUARE)


def test_180727_views_of_another_dtype_under_vmap(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y.view(-1)[0].add_(1)
        return y.t().contiguous()

    batch = torch.stack([SQUARE, -SQUARE])
    torch.testing.assert_close(torch.vmap(functionalize(f, remove=remove))(batch), torch.vmap(f)(batch))


def test_no_message_is_an_internal_assert(remove: str) -> None:
    """A user's error is the user's: of all programs here that raise, none asks for a report."""

    def bad_shapes(x: Tensor) -> Any:
        return x[0].add_(torch.ones(3))

    def bad_dtype(x: Tensor) -> Any:
        return x.long().div_(2)

    def too_far(x: Tensor) -> Any:
        return x.as_strided_((40, 40), (40, 1))

    for func in (bad_shapes, bad_dtype, too_far):
        with pytest.raises(RuntimeError) as eager:
            func(SQUARE.clone())
        with pytest.raises(RuntimeError) as ours:
            functionalize(func, remove=remove)(SQUARE.clone())
        assert "INTERNAL ASSERT" not in str(ours.value) and type(ours.value) is type(eager.value)


def test_a_module_is_functionalized_with_its_state(check: Check) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            return self.norm(x).relu_()

    net = Net()

    def f(state: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(net, state, (x,))

    state = {name: value.detach() for name, value in [*net.named_parameters(), *net.named_buffers()]}
    graph = check(f, state, SQUARE)
    assert graph is None or operators(graph).count("copy_.default") == 3
