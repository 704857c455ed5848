"""Programs that the fuzzer found captured otherwise than eager runs them, shrunk; named after what they show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import capture, functionalize
from functionalize.errors import InputMismatchError, UnsupportedMutationError, UnsupportedProgramError
from functionalize.tracing import meta_cache
from functionalize.verify import assert_functional
from functionalize.verify.observation import clone_inputs, differences, observe

MEMORY = torch.arange(24.0)
Program = Callable[..., Any]


def writes_beyond_an_input(x: Tensor) -> Tensor:
    return x.as_strided((7,), (1,), 16).neg_()


def grows_an_input_through_a_view(x: Tensor) -> None:
    view = x.view(3, 1, 2, 1)
    view.resize_(1, 13, 1)
    view.view(-1)[6:].fill_(0)


def writes_to_memory_that_an_input_leaves(x: Tensor) -> Tensor:
    first = x.unbind(0)[0]
    x.div_(2)
    x.as_strided_((1, 2), (2, 1), 5)
    return first


def sets_an_input_to_a_copy_of_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    x.swapaxes_(-1, -2)
    before = x.reshape(4, 1)
    x.set_(x.clone())  # type: ignore[call-overload]
    return x, before


def leaves_a_storage_for_none(x: Tensor) -> None:
    x.mul_(torch.arange(4.0).view(4, 1))
    x.set_()  # type: ignore[call-overload]


def moves_an_input_into_the_memory_of_another(x: Tensor, y: Tensor, z: Tensor) -> None:
    y.index_fill_(0, torch.tensor([1, 2]), -2)
    x.set_(z)  # type: ignore[call-overload]
    y.unsqueeze_(0)


def returns_negated_views_of_a_result(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.mul(x, x, out=torch.empty(0))
    return y, torch._neg_view(y)


def returns_empty_parts_of_one_storage(x: Tensor) -> list[Tensor]:
    return list((x + x).tensor_split([6, 7], 0))[1:]


def returns_views_of_a_size_that_the_data_decide(x: Tensor) -> tuple[Tensor, ...]:
    rows = x.nonzero()
    return (*rows.tensor_split([1], 0), rows.unfold(-2, 1, 1), rows.t())


def views_a_part_of_known_size_of_a_storage_of_unknown(x: Tensor) -> Tensor:
    (x + 1)[:1].unflatten(0, (1,))  # what this looks like is known from here on
    first: Tensor = x[x > 0].split([1, 0], 0)[0].unflatten(0, (1,))
    return first


def returns_a_diagonal_of_a_size_that_the_data_decide(x: Tensor) -> tuple[Tensor, Tensor]:
    places = x.nonzero()
    return places, places.diagonal(1, 1, 0)


def returns_rows_whose_strides_the_data_decide(x: Tensor) -> tuple[Tensor, ...]:
    return x.nonzero()[-1], x.nonzero()[-1:], (x > 0).nonzero()[:, 1:][0]


def reads_a_conjugate_view(x: Tensor) -> Tensor:
    return torch.complex(x, x).conj().real


def returns_what_requires_grad_only_then(x: Tensor) -> Tensor:
    return x.requires_grad_()


PROGRAMS: list[tuple[Program, tuple[Tensor, ...]]] = [
    (writes_beyond_an_input, (MEMORY.as_strided((), ()),)),
    (grows_an_input_through_a_view, (torch.arange(6.0).view(3, 2),)),
    (writes_to_memory_that_an_input_leaves, (MEMORY.as_strided((2,), (2,), 1),)),
    (sets_an_input_to_a_copy_of_itself, (torch.arange(4.0).view(4, 1),)),
    (leaves_a_storage_for_none, (torch.arange(4.0).view(4, 1),)),
    (moves_an_input_into_the_memory_of_another, (torch.zeros(()), MEMORY[:5], MEMORY[0])),
    (returns_negated_views_of_a_result, (torch.arange(3.0),)),
    (returns_empty_parts_of_one_storage, (torch.ones(6),)),
    (returns_views_of_a_size_that_the_data_decide, (torch.tensor([[1.0, 0], [2, 3]]),)),
    (views_a_part_of_known_size_of_a_storage_of_unknown, (torch.tensor([1.0, -1.0]),)),
    (returns_a_diagonal_of_a_size_that_the_data_decide, (torch.ones(2),)),
    (returns_rows_whose_strides_the_data_decide, (torch.tensor([[1.0, 0], [2, 3]]),)),
    (reads_a_conjugate_view, (torch.arange(3.0),)),
    (returns_what_requires_grad_only_then, (torch.ones(2),)),
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize(("program", "inputs"), PROGRAMS, ids=[program.__name__ for program, _ in PROGRAMS])
def test_captured_as_eager_runs_it(program: Program, inputs: tuple[Tensor, ...], remove: str) -> None:
    captured = capture(program, clone_inputs(inputs), remove=remove)
    assert_functional(captured.graph_module, remove)
    want, got = observe(program, clone_inputs(inputs)), observe(captured, clone_inputs(inputs))
    assert want.error is None
    assert not list(differences(want, got, strides=True, aliasing=True, rtol=None, atol=None))


# Sizes of both factors, whether the second lies column by column, offsets of the groups.
GROUPED = [
    ((8, 16), (2, 16, 32), False, [3, 8]),
    ((8, 16), (2, 6, 16), True, [4, 8]),  # rows of the result are padded to 16 bytes
    ((2, 8, 16), (2, 16, 8), False, None),
    ((2, 8, 16), (16, 8), False, [4, 8]),
    ((8, 16), (16, 8), False, [4, 16]),
    ((8, 16), (2, 16, 3), False, [4, 8]),  # what follows is refused
    ((8, 16), (2, 12, 8), False, [4, 8]),
    ((8, 16), (3, 16, 8), False, [4, 8]),
    ((8, 16), (2, 16, 8), False, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("left", "right", "turned", "offsets"), GROUPED)
def test_grouped_matrix_products(left: Any, right: Any, turned: bool, offsets: Any, dtype: torch.dtype) -> None:
    a, b = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
    b = b.mT if turned else b
    groups = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(a, b, offs=groups)

    try:
        want = run(a, b)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            capture(run, (a, b))
        return
    got = capture(run, (a, b))(a, b)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


def transposes_in_place(x: Tensor) -> Tensor:
    return x.t_()


def adds_a_dim_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    row = x[0]
    return row, x.unsqueeze_(0)


def shrinks(x: Tensor) -> tuple[Tensor, Tensor]:
    column = x[:, 0]
    x.resize_(2, 1)
    return column, x.mul_(2)


def narrows_and_writes(x: Tensor) -> None:
    x.as_strided_((2, 2), (3, 1)).fill_(7)


def takes_the_data_of_a_part(x: Tensor) -> Tensor:
    x.data = x[1:]
    return x * 2


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize(
    "program", [transposes_in_place, adds_a_dim_in_place, shrinks, narrows_and_writes, takes_the_data_of_a_part]
)
def test_an_input_may_begin_elsewhere_in_its_storage(program: Program, remove: str) -> None:
    """Metadata that a call gives to an input begin where that call's input begins."""

    def at(offset: int) -> tuple[Tensor]:
        return (MEMORY.clone().as_strided((2, 3), (3, 1), offset),)

    captured = capture(program, at(0), remove=remove, on_guard_failure="recapture")
    for offset in (0, 4, 5):
        expected, actual = observe(program, at(offset)), observe(captured, at(offset))
        assert not list(differences(expected, actual, strides=True, aliasing=True, rtol=0, atol=0))
        assert expected.inputs[0].storage_offset() == actual.inputs[0].storage_offset()


def test_metadata_that_a_compiled_program_gives_begin_where_its_input_does() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(adds_a_dim_in_place, backend="functionalize")
    for offset in (0, 4):
        arguments = [MEMORY.clone().as_strided((2, 3), (3, 1), offset) for _ in range(2)]
        expected, actual = observe(adds_a_dim_in_place, arguments[:1]), observe(compiled, arguments[1:])
        assert not list(differences(expected, actual, strides=True, aliasing=True, rtol=0, atol=0))


@pytest.mark.parametrize("asks", [lambda x: x.is_leaf, lambda x: x.grad_fn is None])
@pytest.mark.parametrize("leaf_first", [False, True])
def test_a_program_that_asks_for_leaves_gets_the_answer_of_each_call(asks: Program, leaf_first: bool) -> None:
    leaf = torch.ones(3, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        return x * 2 if asks(x) else x * 3

    arguments = [leaf, leaf * 1] if leaf_first else [leaf * 1, leaf]
    captured = capture(program, arguments[:1])
    for x in (*arguments, *arguments):
        assert torch.equal(captured(x), program(x))


def test_a_view_with_a_history_in_inference_mode() -> None:
    base = torch.arange(6.0, requires_grad=True) * 1
    view = base.as_strided((3,), (1,), 2)
    with torch.inference_mode():
        captured = capture(lambda x: x * 2, (view,))
        assert torch.equal(captured(view), view * 2)


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_results_are_conjugated_and_negated_lazily_where_eager_does(remove: str) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).conj(), (x * 3).conj().imag

    leaf = torch.tensor([[1 + 2j, 3 - 1j], [2j, 4.0]], requires_grad=True)
    captured = capture(run, (leaf,), remove=remove)
    gradients = []
    for function in (run, captured):
        first, second = function(leaf)
        assert first.is_conj() and second.is_neg()
        gradients.append(torch.autograd.grad(torch.view_as_real(first.resolve_conj()).sum() + second.sum(), leaf)[0])
    for want, got in zip(run(leaf), captured(leaf), strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_a_computed_input_that_grows_keeps_its_place_in_its_storage(remove: str) -> None:
    """No write of autograd's: what has no gradient may be written into a tensor that requires some."""

    def program(x: Tensor, y: Tensor) -> None:
        torch.eq(y, 2, out=x)

    def at(offset: int) -> tuple[Tensor, ...]:
        memory = MEMORY[:9].clone().mul_(torch.ones(9, requires_grad=True))
        return memory.as_strided((1, 3), (2, 2), offset), torch.arange(12.0), memory

    captured = capture(program, at(1)[:2], remove=remove)
    for offset in (0, 1, 2):
        (x, y, memory), (wanted, *_) = at(offset), at(offset)
        captured(x, y)
        program(wanted, y)
        assert torch.equal(x, wanted)
        assert (x.storage_offset(), x.stride()) == (wanted.storage_offset(), wanted.stride())
        assert x.untyped_storage().nbytes() == memory.untyped_storage().nbytes() == 4 * (12 + offset)


def test_unsafe_pieces_have_versions_of_their_own_in_inference_mode() -> None:
    def program(x: Tensor) -> None:
        x.unsafe_chunk(2)[0].add_(1)

    example, x, wanted = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    with torch.inference_mode():
        capture(program, (example,))(x)
        program(wanted)
    assert torch.equal(x, wanted)
    assert x._version == wanted._version == 0


def test_a_mask_makes_one_size_where_nothing_is_cached() -> None:
    meta_cache.clear()  # in inference mode fake tensors do not remember what size their data gave
    with torch.inference_mode():
        captured = capture(lambda x: x[x > 0], (torch.ones(2),))
        assert torch.equal(captured(torch.arange(2.0)), torch.ones(1))


@pytest.mark.parametrize("place", [(), (2, (1,), (4,))], ids=["a tensor", "a place of it"])
def test_a_tensor_that_requires_gradients_is_set_in_one_write(place: tuple[Any, ...]) -> None:
    def program(x: Any, y: Tensor) -> None:
        x.set_(y, *place)

    def computed() -> Tensor:
        return torch.arange(4.0).mul_(torch.ones(4, requires_grad=True))

    captured, x, wanted = capture(program, (computed(), MEMORY)), computed(), computed()
    captured(x, MEMORY)
    program(wanted, MEMORY)
    assert torch.equal(x, wanted)
    assert x._version == wanted._version == 2


def test_a_derivative_of_a_gradient_where_an_input_shows_a_part_of_its_storage() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return (x * x * x * y.as_strided((1,), (1,), 8)).sum()

    y = torch.empty(0).set_(MEMORY.untyped_storage(), 0, (2,), (1,))  # no view, to torch
    x = torch.ones(3, requires_grad=True)
    captured = capture(program, (x, y))
    (gradient,) = torch.autograd.grad(captured(x, y), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], torch.full((3,), 6 * 8.0))


def test_tensors_are_sizes_of_padding() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, (x[0] * 2).long()))  # type: ignore[arg-type]  # eager takes a number's tensor

    captured = capture(run, (torch.ones(3),))
    for x in (torch.ones(3), torch.tensor([2.0, 1, 1]), torch.tensor([0.0, 1, 1])):
        torch.testing.assert_close(captured(x), run(x))


def test_a_leaf_that_is_detached_in_place_is_no_computed_tensor() -> None:
    def program(x: Tensor) -> Tensor:
        return x.detach_().requires_grad_()

    captured = capture(program, (torch.ones(2, requires_grad=True),))
    assert captured(torch.ones(2, requires_grad=True)).is_leaf
    with pytest.raises(UnsupportedMutationError, match="in place, and then sets requires_grad again"):
        captured(torch.ones(2, requires_grad=True) * 2)


def test_unsafe_pieces_require_gradients_in_inference_mode_as_views_do() -> None:
    with torch.inference_mode(False):
        example, x = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    with torch.inference_mode():
        captured = capture(lambda x: x.unsafe_chunk(2)[0], (example,))
        assert captured(x).requires_grad == x.unsafe_chunk(2)[0].requires_grad


@pytest.mark.parametrize("size", [(), (3,), (2, 3)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_margin_losses_of_one_row_are_numbers(size: tuple[int, ...], reduction: str) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.multilabel_margin_loss(x, y, reduction=reduction)

    x, y = torch.rand(size, requires_grad=True), torch.zeros(size, dtype=torch.int64)
    given, wanted = capture(program, (x, y))(x, y), program(x, y)
    assert given.size() == wanted.size()
    assert torch.equal(given, wanted)
    assert torch.equal(*(torch.autograd.grad(loss.sum(), x)[0] for loss in (given, wanted)))


_EQUATIONS = {
    "square": ((3, 3), (3, 1)),
    "tall": ((5, 3), (5, 2)),
    "wide": ((3, 5), (3, 2)),
    "batch": ((2, 5, 3), (2, 5, 2)),
    "of one vector": ((5, 3), (5,)),
    "of vectors": ((2, 5, 3), (2, 5)),
    "broadcast": ((4, 1, 5, 3), (1, 2, 5, 2)),
    "none": ((0, 3), (0, 1)),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("driver", [None, "gels", "gelsd", "gelss", "gelsy"])
@pytest.mark.parametrize("equations", _EQUATIONS)
def test_least_squares_are_laid_out_as_in_eager(equations: str, driver: str | None) -> None:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.linalg.lstsq(a, b, driver=driver))

    torch.manual_seed(0)
    given = [torch.randn(size, requires_grad=True) for size in _EQUATIONS[equations]]
    rows, columns = _EQUATIONS[equations][0][-2:]
    if driver in ("gelss", "gelsd") and rows > columns:
        with pytest.raises(UnsupportedProgramError, match=r"(?s)least squares.*residuals.*another driver"):
            capture(program, given)
        return
    ours, eager = capture(program, given)(*given), program(*given)
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, check_stride=True, rtol=1e-3, atol=1e-4)
        assert one.requires_grad == other.requires_grad
    gradients = [torch.autograd.grad(one[0].sum(), given) for one in (ours, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-3)


def test_least_squares_of_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match=r"(?s)lstsq.* on the device 'meta'.*solve it on the CPU"):
        capture(lambda x: torch.linalg.lstsq(x, x).solution, (torch.empty(3, 3, device="meta"),))


@torch.library.custom_op("functionalize_capture_finds::add_one", mutates_args=("x",))
def add_one(x: Tensor) -> None:
    x.add_(1)


def test_a_custom_op_writes_to_state() -> None:
    total = torch.zeros(3)

    def program(x: Tensor) -> Tensor:
        add_one(total)
        return x + total

    captured = capture(program, (torch.ones(3),))
    assert captured(torch.ones(3)).tolist() == [2.0] * 3
    assert captured(torch.ones(3)).tolist() == [3.0] * 3
    assert total.tolist() == [2.0] * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.slow
def test_bodies_of_higher_order_ops_call_modules_and_close_over_state() -> None:
    from torch._higher_order_ops.map import map as mapped

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            y = torch.cond(x.sum() > 0, lambda x: self.inner(x), lambda x: x * 2, (x,))
            return mapped(lambda row, scale: row * scale, y, self.inner.weight[0])  # type: ignore[arg-type]

    model = Model()
    captured = capture(model, (torch.ones(2, 3),))
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        assert torch.allclose(captured(x), model(x))


@pytest.mark.slow
def test_a_resize_of_what_the_data_give_a_size_is_refused() -> None:
    """What the storage gained, and what is in it, would depend on the data."""

    def resized(x: Tensor) -> Tensor:
        found = x[x > 0]
        return found.resize_(4, 3)

    def resized_by_an_out(x: Tensor) -> Any:
        places = x.nonzero()
        return torch.min(x, -1, out=(x.flip(1), places))

    with pytest.raises(UnsupportedMutationError, match=r"in a resized storage, which held a tensor of size \(u\d"):
        capture(resized, (MEMORY,))
    with pytest.raises(UnsupportedMutationError, match=r"in a resized storage, which held a tensor of size \(u\d"):
        capture(resized_by_an_out, (MEMORY.view(4, 6),))
    assert capture(lambda x: x[x > 0].resize_(0), (MEMORY,))(MEMORY).shape == (0,)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bit", [torch._neg_view, torch.conj])
def test_lazy_bits_of_results_in_one_memory(mode: Any, bit: Any) -> None:
    """In inference mode no tensor is a view of another: each of them could have been the one that was computed."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        first, second = x * 2j, x * 3j
        return bit(first), first, bit(second), bit(second)[:1]

    with mode():
        for want, got in zip(run(MEMORY), capture(run, (MEMORY,))(MEMORY), strict=True):
            assert torch.equal(want, got)
            assert (want.is_conj(), want.is_neg()) == (got.is_conj(), got.is_neg())


def test_what_ends_a_program_is_not_cast() -> None:
    """Autocast of the CPU knows no float16: the storage that has grown is put together without it."""

    def run(x: Tensor) -> None:
        x.resize_(14)
        x[8:].fill_(0)

    x, other = (torch.arange(9, dtype=torch.float16)[1:7] for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture(run, (x,))(x)
    run(other)
    assert torch.equal(x, other)


@pytest.mark.parametrize("op", [torch.abs, torch.angle])
def test_a_resized_out_of_a_real_part_is_contiguous(op: Any) -> None:
    def run(x: Tensor, out: Tensor) -> None:
        op(x, out=out)

    for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.complex64)):
        outs = [torch.empty(0) for _ in range(3)]
        run(x.t(), outs[0])
        capture(run, (x.t(), outs[1]))(x.t(), outs[2])
        assert outs[2].stride() == outs[0].stride()


def test_a_resized_input_has_a_storage_as_large_as_that_of_the_capture() -> None:
    """A larger one holds what the input gains, a smaller one does not hold what the graph reads."""

    def run(x: Tensor) -> Tensor:
        x.resize_(4)
        x[2:].add_(1)
        return x * 2

    program, memory = capture(run, (torch.ones(2),), on_guard_failure="recapture"), torch.arange(8.0)
    assert torch.equal(program(memory[:2]), torch.tensor([0.0, 2, 6, 8]))
    with pytest.raises(InputMismatchError, match="the storage size in bytes of the input `x` is 32, and was 8 when"):
        capture(run, (torch.ones(2),))(memory[:2])


def test_an_input_moves_to_what_another_one_has_gained() -> None:
    def run(x: Any, y: Tensor) -> None:
        y.resize_(18)
        y[12:].fill_(1)
        x.set_(y.untyped_storage(), 3, (4,), (3,))

    program = capture(run, (torch.zeros(()), torch.arange(12.0)))
    x, y = torch.zeros(()), torch.arange(12.0)
    program(x, y)
    assert x.tolist() == [3, 6, 9, 1]
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_deep_copies_share_memory_as_the_originals_do() -> None:
    def program(x: Tensor) -> Any:
        base = x.detach() * 2
        part, other = base[1:], x.detach().t()
        base.add_(1)
        copies = copy.deepcopy({"base": base, "part": part, "other": other})
        copies["base"].mul_(10)
        return copies["base"], copies["part"], copies["other"], base

    x = torch.arange(4.0).view(2, 2)
    for run in (capture(program, (x,)), functionalize(program), make_fx(functionalize(program))(x)):
        for ours, theirs in zip(run(x), program(x), strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    one, two, *_ = capture(program, (x,))(x)
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def test_an_optimizers_state_is_copied_inside() -> None:
    def make() -> Callable[[Tensor], Any]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(module.parameters())

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
            return state["state"][0]["exp_avg"], copy.deepcopy(module).weight.detach(), state["param_groups"][0]["lr"]

        return step

    mine, eager = make(), make()
    program = capture(mine, (torch.ones(2, 3),))
    for number in range(3):
        x = torch.full((2, 3), number + 0.5)
        torch.testing.assert_close(program(x), eager(x))


def test_a_deep_copy_of_what_is_no_leaf_is_refused_as_in_eager() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="graph leaves"):
        capture(lambda x: copy.deepcopy(x * 2), (x,))


def grows_what_it_was_given(x: Tensor, y: Tensor) -> None:
    y.data = x.data
    y.resize_((1, 2, 5)).view(-1)[2:].fill_(-2)


def is_set_to_what_has_grown(x: Tensor, y: Tensor) -> Tensor:
    first, _, last = y.chunk(3, -1)
    torch.cat([x, x], 0, out=last)
    x.set_(last)  # type: ignore[call-overload]
    return first * 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("program", [grows_what_it_was_given, is_set_to_what_has_grown])
def test_an_input_is_set_to_memory_that_another_one_gains(program: Program) -> None:
    def inputs() -> list[Tensor]:
        return [torch.arange(2.0), torch.arange(7.0)]

    captured = capture(program, tuple(inputs()))
    seen = observe(program, inputs()), observe(captured, inputs())
    assert not list(differences(*seen, strides=True, aliasing=True, rtol=None, atol=None))


@pytest.mark.parametrize("pieces", [lambda x: (x[0:2], x[2:4]), lambda x: x.chunk(2)])
def test_a_view_that_gets_other_data_has_the_gradient_that_it_had(pieces: Program) -> None:
    def program(x: Tensor) -> Any:
        one, other = pieces(x)
        one.data = other.data
        return one

    for called in (program, capture(program, (torch.ones(4, 3, requires_grad=True),))):
        x = torch.randn(4, 3, requires_grad=True)
        result = called(x)
        result.backward(torch.ones(2, 3) * 3)
        assert x.grad is not None
        assert torch.equal(result, x[2:4]) and torch.equal(x.grad, torch.tensor([[3.0]] * 2 + [[0.0]] * 2).expand(4, 3))


def test_views_of_what_shows_other_elements_have_no_gradients_in_fake_tensors() -> None:
    def program(x: Tensor) -> None:
        whole = x * 2
        part, _ = whole.vsplit(2)
        whole.as_strided_((1, 3), (1, 1), 20)
        part.sum().backward()

    with pytest.raises(UnsupportedMutationError, match="after its metadata, or its base's, changed"):
        capture(program, (torch.ones(8, 3, requires_grad=True),))


@pytest.mark.parametrize("dividend", [7, 7.5, True])
def test_numbers_are_divided_by_tensors(dividend: float) -> None:
    n = torch.tensor([2, -3])
    assert torch.equal(capture(lambda n: dividend // n, (n,))(n), dividend // n)


MADE_OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "two": lambda x: torch.tensor([x.sum(), x.mean()]),
    "nested": lambda x: torch.tensor([[x.sum()], [x[:1]]]),
    "with a number": lambda x: torch.tensor([x.sum().double(), 2]),
    "with a float": lambda x: torch.tensor([x.sum().long(), 0.5, x.sum().item()]),
    "truths": lambda x: torch.tensor([x.sum() > 2, True]),
    "a dtype": lambda x: torch.tensor([1.5, x.sum().int()], dtype=torch.int32),
    "a leaf": lambda x: torch.tensor([x.sum()], requires_grad=True) * 2,
    "all": lambda x: torch.tensor(list(x.unbind()), dtype=torch.float64),
    "as_tensor": lambda x: torch.as_tensor([x.sum(), x.sum()]),
    "asarray": lambda x: torch.asarray([x.sum(), x.sum()], copy=True),
    "new_tensor": lambda x: x.new_tensor([x.sum().double(), 1]),
    "by keyword": lambda x: torch.asarray(obj=x * 2),
}


@pytest.mark.parametrize("name", MADE_OF_TENSORS)
def test_tensors_that_are_made_of_lists_of_tensors(name: str) -> None:
    function = MADE_OF_TENSORS[name]
    x = torch.arange(3.0) * 2
    expected, result = function(x), capture(function, (torch.ones(3),))(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert result.requires_grad == expected.requires_grad


def test_what_has_torch_fill_memory_says_so() -> None:
    with pytest.raises(UnsupportedProgramError, match=r"a Python list of tensors(.|\n)*torch\.stack"):
        capture(lambda x: torch.FloatTensor([x.sum(), x.mean()]), (torch.ones(3),))


def test_copies_of_tensors_are_in_their_memory() -> None:
    def program(x: Tensor) -> Any:
        twice = x * 2
        same, parameter = copy.copy(twice), copy.copy(torch.nn.Parameter(x * 3))
        same.add_(1)
        copy.copy(x).mul_(5)
        return twice, same, parameter, parameter.is_leaf, parameter.requires_grad

    x, y = torch.ones(3), torch.ones(3)
    torch.testing.assert_close(capture(program, (x,))(x), program(y), rtol=0, atol=0)
    assert torch.equal(x, y)


def test_a_copy_of_a_computed_tensor_is_a_leaf() -> None:
    def program(x: Tensor) -> Tensor:
        copied: Tensor = copy.copy(x * 2)
        return copied.mul_(2)

    for run in (program, lambda x: capture(program, (x,))(x)):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            run(torch.ones(3, requires_grad=True))
