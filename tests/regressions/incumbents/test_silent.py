"""Programs on which other functionalizers give a wrong result without a word; by issue of pytorch/pytorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from functionalize import functionalize
from tests.support.equality import Check
from tests.support.graphs import operators

SQUARE = torch.arange(16.0).view(4, 4)
LINE = torch.arange(12.0)


def test_198102_a_gapped_unfold_keeps_what_lies_between_its_windows(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        x.unfold(1, 1, 5).add_(1)
        y.t().unfold(0, 2, 3).mul_(3)
        return y, x.sum()

    check(f, torch.arange(22.0).view(2, 11))


def test_198095_an_output_is_a_view_of_the_input_that_eager_says(check: Check) -> None:
    def f(whole: Tensor, tail: Tensor) -> Tensor:
        whole.add_(100)
        return tail[0]

    base = torch.arange(4.0)
    check(f, base, base[1:])
    check(f, base[1:], base)


def test_133512_a_write_keeps_the_strides_of_what_it_writes(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = torch.arange(10)[::2]
        y.add_(1)
        x[::2].mul_(2)
        gapped = x[::2].add_(1)
        return torch.as_strided_copy(y, (3,), (2,)), y.stride(), gapped.stride(), gapped.as_strided((3,), (4,))

    check(f, LINE, strides=False)


def test_174371_overlapping_as_strided_reads_current_data_and_takes_writes_that_agree(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x + 1
        windows = y.as_strided((3, 4), (2, 1))
        y[3].mul_(10)
        before = windows.sum(1)
        windows.clamp_(2, 6)
        return before, windows * 1, y

    check(f, LINE)


def test_98143_a_write_to_an_expanded_tensor_is_refused_as_in_eager(check: Check) -> None:
    def f(x: Tensor) -> Tensor:
        return x[:1].expand(4).add_(1)

    check(f, LINE)


def test_139789_a_function_called_unaliased_and_then_aliased(remove: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    pure = functionalize(f, remove=remove)
    for x, y in ((LINE.clone(), LINE.clone()), (shared := LINE.clone(), shared), (rest := LINE.clone(), rest[3:])):
        expected = f(x, y)
        x.sub_(1)
        assert torch.equal(pure(x, y), expected)


@pytest.mark.parametrize("outside", ["functionalize", "grad"])
def test_136662_gradient_of_repeated_updates_of_a_column(outside: str, check: Check) -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * x
        for _ in range(3):
            y[:, 0] += x[:, 2].abs()
        return y.sin().sum()

    def inside(x: Tensor) -> Any:
        return torch.func.grad(functionalize(loss))(x)

    check(torch.func.grad(loss) if outside == "functionalize" else inside, torch.randn(4, 4))


def test_195422_dropout_that_does_nothing_returns_its_input(check: Check) -> None:
    def f(x: Tensor) -> Tensor:
        same = F.dropout(x, 0.5, training=False)
        same.add_(1)
        return x * 2

    check(f, LINE)


def test_192629_duals_keep_their_tangents(check: Check) -> None:
    def f(x: Tensor, tangent: Tensor) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x * 1, tangent)
            y = dual * dual
            y[0].mul_(dual[1])
            y.t().add_(dual)
            primal, moved = forward_ad.unpack_dual(y)
            return primal * 1, moved

    check(f, SQUARE, torch.ones(4, 4))


def test_94773_113030_data_severs_aliases(check: Check) -> None:
    def f(x: Tensor, new: Tensor) -> Any:
        y = x * 2
        before = y.view(-1)
        y.data = new
        y.add_(1)
        before.mul_(5)
        return y * 1, before, new.sum()

    check(f, SQUARE, torch.ones(2, 3))


def test_93363_a_write_to_an_input_that_is_not_contiguous(check: Check) -> None:
    def f(x: Tensor) -> Any:
        x.mul_(2)
        x[1:].add_(x[:-1] * 1)
        return x.sum(0)

    check(f, SQUARE.t())
    check(f, SQUARE[:, ::2])
    check(f, torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1)[1:])


def test_191449_resize_of_a_view(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x + 1
        part = y.view(-1)[2:8]
        part.resize_(2, 2)
        part.add_(1)
        return y, part

    check(f, SQUARE)


def test_110337_an_input_that_was_written_is_not_what_it_was(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        x.view(-1).add_(1)
        return x * 1

    pure, ours, eager = functionalize(f, remove=remove), LINE.clone(), LINE.clone()
    for _ in range(2):
        assert torch.equal(pure(ours), f(eager)) and torch.equal(ours, eager)


def test_153861_positions_that_share_an_element_are_read_as_one(check: Check) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        y.add_(x)
        return x * 2, x.view_as(y)[1]

    check(f, torch.tensor([2.0]).expand(3), torch.ones(3))


def test_192863_several_outs_are_resized(check: Check) -> None:
    def f(x: Tensor) -> Any:
        low, high, where = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64)
        torch.aminmax(x, dim=1, out=(low, high))
        torch.sort(x, dim=0, descending=True, out=(high, where))
        frexp = torch.frexp(x, out=(torch.empty(0), torch.empty(0, dtype=torch.int32)))
        return low, high, where, *frexp

    check(f, SQUARE)


def test_183575_a_buffer_that_is_only_read_is_not_written(check: Check) -> None:
    def f(x: Tensor, buffer: Tensor) -> Any:
        y = x * 1
        y.lerp_(buffer, 0.5)
        return y, buffer * y

    graph = check(f, SQUARE, torch.ones(4, 4))
    assert graph is None or not [name for name in operators(graph) if name == "copy_.default"]


def test_104463_dead_code_can_go_from_the_graph(check: Check) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        y.view(-1)[1:3].fill_(7)
        y[:, 0].relu_()
        return y

    graph = check(f, -SQUARE)
    if graph is not None:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        torch.testing.assert_close(graph(-SQUARE), f(-SQUARE))


@pytest.mark.parametrize("mode", [None, "real", "fake"], ids=str)
def test_177318_functorch_under_inference_mode(check: Check) -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 1
        y[0].mul_(y[1])
        return y.sum()

    def f(x: Tensor) -> Any:
        with torch.inference_mode():
            return torch.func.grad(loss)(x), torch.func.jvp(loss, (x,), (x,)), torch.func.vjp(loss, x)[0]

    check(f, SQUARE)


def test_124915_126856_slices_and_masks_are_assigned(check: Check) -> None:
    def f(x: Tensor, mask: Tensor) -> Tensor:
        y = x * 2
        y[1:3, ::2] = x[:2, :2]
        y[mask] = -1.0
        y[:, 1][mask[1]] = 9
        return y

    check(f, SQUARE, SQUARE > 6)


def test_strides_decide_whether_a_copy_is_made(check: Check) -> None:
    """x.t().contiguous() is a copy: writing to it leaves x alone; so are the others, but for the last two."""

    def f(x: Tensor) -> Any:
        copies = [
            x.t().contiguous(),
            x[:, 1:].contiguous(),
            x.t().flatten(),
            x.t().reshape(-1),
            x[:1].expand(2, 4).contiguous(),
            x[:, ::2].ravel(),
            x.t().to(memory_format=torch.contiguous_format),
        ]
        for copy in copies:
            copy.add_(1)
        x.contiguous()[0].mul_(2)
        x[1:].flatten()[0].mul_(3)
        return copies

    check(f, SQUARE)


def test_python_branches_on_the_strides_of_eager(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x + 1
        y[0].add_(1)
        part = y[1:]
        seen = y.t().is_contiguous(), part.storage_offset(), y.t().stride(), part.is_contiguous()
        if not y.t().is_contiguous():
            part.mul_(2)
        return part.as_strided((2,), (1,), 0), seen, y

    check(f, SQUARE)


def test_inputs_that_alias(check: Check) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        seen = y * 2
        y.mul_(3)
        return seen, x * 1

    for pair in ((LINE, LINE), (LINE[:8], LINE[4:]), (SQUARE, SQUARE.t()), (SQUARE[0], SQUARE[:, 0])):
        check(f, *pair)


def test_batch_norm_writes_its_statistics(check: Check) -> None:
    def f(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor) -> Any:
        one = torch.native_batch_norm(x, weight, None, mean, variance, True, 0.1, 1e-5)[0]
        two = F.batch_norm(x, mean, variance, weight, training=True)
        return one, two, F.batch_norm(x, mean, variance, training=False)

    graph = check(f, torch.randn(4, 3, 2), torch.zeros(3), torch.ones(3), torch.ones(3))
    assert graph is None or operators(graph).count("copy_.default") == 2


def test_attention_with_dropout_leaves_nothing_in_place(check: Check) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True).mul_(2)

    check(f, *torch.randn(3, 1, 2, 4, 8))


def test_products_leave_no_views(check: Check) -> None:
    def f(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return x @ weight.t(), torch.einsum("bij,kj->bki", x, weight), F.linear(x, weight, bias), x.matmul(bias)

    check(f, torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(4))


COMPOSITES: dict[str, Any] = {
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "nanquantile": lambda x: x.nanquantile(torch.tensor([0.3, 0.5]), dim=0),
    "stft": lambda x: torch.stft(x.flatten(), 4, window=torch.ones(4), return_complex=True),
    "diff": lambda x: torch.diff(x, n=2, prepend=x[:, :1]),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "lstm_cell": lambda x: torch.lstm_cell(x, (x, x), *[x.repeat(4, 1)] * 2),
    "isclose": lambda x: torch.isclose(x, x + 1e-6, equal_nan=True),
    "circular pad": lambda x: F.pad(x[None], (1, 2), mode="circular"),
    "cdist": lambda x: torch.cdist(x, x),
    "kron": lambda x: torch.kron(x, x),
    "gradient": lambda x: torch.gradient(x, dim=1),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_leave_nothing_in_place(name: str, check: Check) -> None:
    func = COMPOSITES[name]

    def f(x: Tensor) -> Any:
        return func(x.sin())

    check(f, SQUARE)
