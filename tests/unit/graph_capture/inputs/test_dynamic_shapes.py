"""``dynamic_shapes``: one program for many sizes, and errors for those that it is not right for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

from functionalize import DataDependentError, InputMismatchError, capture
from functionalize.verify import assert_functional
from functionalize.verify.observation import clone_inputs, differences, observe

Inputs = Callable[[int], tuple[Any, ...]]


def assert_for_sizes(func: Callable[..., Any], inputs: Inputs, spec: Any, sizes: tuple[int, ...] = (5, 3, 8)) -> Any:
    program = capture(func, inputs(sizes[0]), dynamic_shapes=spec)
    assert_functional(program.graph_module, "mutations_and_views")
    for size in sizes:
        given = inputs(size)
        want, got = observe(func, clone_inputs(given)), observe(program, clone_inputs(given))
        assert not list(differences(want, got, strides=True, aliasing=True, rtol=None, atol=None)), size
    return program


def written(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    cache[: x.size(0)].copy_(x)
    flat = x.view(-1)
    flat.add_(1)
    return cache.sum(), flat, x.t(), x * x.size(0), x[1:]


def test_symbols_flow_through_views_writes_and_outputs() -> None:
    for spec in ({"x": {0: Dim.DYNAMIC}}, ({0: Dim.AUTO}, None), [[Dim("rows", min=3, max=9), Dim.STATIC], None]):
        assert_for_sizes(written, lambda n: (torch.randn(n, 4), torch.zeros(9, 4)), spec)


def test_sizes_out_of_range_are_refused_by_name() -> None:
    program = capture(written, (torch.randn(5, 4), torch.zeros(9, 4)), dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    for size in (1, 10):
        with pytest.raises(InputMismatchError, match=rf"dimension 0 of the input `x` is {size}, .* for 2 to 9"):
            program(torch.randn(size, 4), torch.zeros(9, 4))


def test_dimensions_of_one_name_are_equal() -> None:
    batch = Dim("batch", min=2, max=6)
    program = assert_for_sizes(
        lambda x, y: x @ y.t(), lambda n: (torch.randn(n, 4), torch.randn(n, 4)), ({0: batch}, {0: batch}), (5, 3)
    )
    with pytest.raises(InputMismatchError, match=r"dimension 0 of the input `y` is 4, .* captured for 3"):
        program(torch.randn(3, 4), torch.randn(4, 4))
    with pytest.raises(InputMismatchError, match=r"is 7, .* for 2 to 6"):
        program(torch.randn(7, 4), torch.randn(7, 4))


def test_derived_dimensions() -> None:
    half = Dim("half", min=2, max=16)
    program = assert_for_sizes(
        lambda x, y: x + y.view(2, -1)[0],
        lambda n: (torch.randn(n), torch.randn(2 * n)),
        ({0: half}, {0: 2 * half}),
    )
    with pytest.raises(InputMismatchError, match="`y` is 7"):
        program(torch.randn(4), torch.randn(7))


def test_a_dimension_that_cannot_differ_is_refused_unless_the_program_may_decide() -> None:
    def run(x: Tensor) -> Tensor:
        return x.view(5, 4) * 2

    with pytest.raises(InputMismatchError, match="dynamic, but the program supports only"):
        capture(run, (torch.randn(5, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    program = capture(run, (torch.randn(5, 4),), dynamic_shapes=({0: Dim.AUTO},))
    assert program(torch.ones(5, 4)).shape == (5, 4)
    with pytest.raises(InputMismatchError):
        program(torch.ones(6, 4))


def test_a_decision_on_a_size_is_checked() -> None:
    def run(x: Tensor) -> Tensor:
        return x + 1 if x.size(0) > 4 else x - 1

    program = capture(run, (torch.ones(6),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert torch.equal(program(torch.zeros(9)), torch.ones(9))
    with pytest.raises(InputMismatchError, match=r"is 3, .* captured for 5 or more"):
        program(torch.zeros(3))


def test_the_spec_follows_containers_and_modules() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4).eval(), torch.nn.ReLU(inplace=True))
    assert_for_sizes(module, lambda n: (torch.randn(n, 3, 8, 8),), {"input": {0: Dim.DYNAMIC}})
    assert_for_sizes(
        lambda batch: batch["x"][0].mul_(2) + batch["y"],
        lambda n: ({"x": [torch.ones(n, 2)], "y": torch.ones(2)},),
        {"batch": {"x": [{0: Dim.DYNAMIC}], "y": None}},
    )


def test_numbers_of_symbols_are_given_back() -> None:
    program = capture(lambda x: (x.size(0) * 2, x.sum().item()), (torch.ones(3),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert program(torch.ones(5)) == (10, 5.0)


def test_a_spec_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="names 'z', but the arguments are x, cache"):
        capture(written, (torch.ones(5, 4), torch.ones(9, 4)), dynamic_shapes={"z": None})
    with pytest.raises(ValueError, match="names dimension 2 of 'x', which has 2"):
        capture(written, (torch.ones(5, 4), torch.ones(9, 4)), dynamic_shapes={"x": {2: Dim.AUTO}})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (5, "5 for the arguments"),
        ("abc", "'abc'.* for the arguments"),
        (({0: Dim("n")}, None, None), "for the arguments\n.*tuple of 2"),
        ((None,), "for the arguments"),
        (({0: "n!"}, None), "the text 'n!' for a size"),
        (({0: 2.5}, None), "2.5 for dimension 0 of 'x'\n.*the size itself, 5"),
        (({0: 4}, None), "4 for dimension 0 of 'x'"),
        (({"a": 3}, None), "dimension 'a' of 'x', which has 2"),
        (({-3: Dim.AUTO}, None), "dimension -3 of 'x'"),
        ((Dim.AUTO, None), "for 'x'"),
        (([Dim.AUTO], None), "for 'x'\n.*tuple of 2"),
        ((None, {"a": [Dim("n")]}), "for 'rest.a'"),
        ((None, {"b": None}), "for 'rest'"),
        ((None, [None]), "for 'rest'"),
        ((None, 7), "for 'rest'"),
        ((None, {"a": [{0: Dim.AUTO}, None, None]}), "for 'rest.a'"),
    ],
)
def test_a_malformed_spec_is_refused(spec: Any, said: str) -> None:
    inputs = (torch.ones(5, 4), {"a": [torch.ones(3), 2]})
    with pytest.raises(ValueError, match=f"(?s){said}"):
        capture(lambda x, rest: x + rest["a"][1], inputs, dynamic_shapes=spec)


def test_a_size_in_the_place_of_a_dim_is_static() -> None:
    for spec in (({0: 5, 1: None}, None), {"rest": {"a": [[3], None]}}):
        capture(lambda x, rest: x + 1, (torch.ones(5, 4), {"a": [torch.ones(3), 2]}), dynamic_shapes=spec)


def told(n: Tensor) -> Any:
    size = n.item()
    torch._check(size >= 1)
    torch._check(size < 9)
    return size


BY_DATA: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pad": lambda x, n: F.pad(x, (0, told(n))),
    "reflect": lambda x, n: F.pad(x[None], (0, told(n)), mode="reflect"),
    "nearest": lambda x, n: F.interpolate(x[None, None], size=(told(n),)),
    "bilinear": lambda x, n: F.interpolate(x.view(1, 1, 2, 2), size=(told(n), 3), mode="bilinear"),
    "scale": lambda x, n: F.interpolate(x[x > 0][None, None], scale_factor=2.0),
    "dropout": lambda x, n: (F.dropout(x[x > 0], 0.5), F.dropout(x, 0.3), F.alpha_dropout(x[x > 1], 0.4)),
}


@pytest.mark.parametrize("name", BY_DATA)
def test_ops_on_data_dependent_sizes(name: str) -> None:
    func = BY_DATA[name]
    program = capture(func, (torch.arange(1.0, 5.0, requires_grad=True), torch.tensor(2)))
    for values, count in (([1.0, 2.0, 3.0, 4.0], 2), ([1.0, -2.0, 3.0, 4.0], 3)):
        found = []
        for run in (func, program):
            torch.manual_seed(0)
            x = torch.tensor(values, requires_grad=True)
            results = run(x, torch.tensor(count))
            results = results if isinstance(results, tuple) else (results,)
            sum(result.sin().sum() for result in results).backward()
            found.append([*results, x.grad])
        torch.testing.assert_close(found[1], found[0])


ROUNDED: dict[str, Callable[[Any], Any]] = {
    "round": lambda n: round(n / 2),
    "floor": lambda n: math.floor(n / 3),
    "ceil": lambda n: math.ceil(n / 3) + 1,
    "trunc": lambda n: math.trunc(n / 3),
    "rest": lambda n: n - round(n / 3),
    "both": lambda n: math.ceil(math.floor(n / 3) / 2) * 2,
    "int": lambda n: int(n * 0.5),
    "power": lambda n: int(n**0.5),
    "decimal": lambda n: int(round(n / 3, 1) * 2),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_sizes(name: str) -> None:
    def run(x: Tensor) -> Tensor:
        y = x[: ROUNDED[name](x.shape[0])]
        y.mul_(2)
        return y + 1

    program, served = capture(run, (torch.arange(8.0),), dynamic_shapes=({0: Dim.AUTO},)), 0
    for size in (8, 5, 9, 27, 30):
        x, y = torch.arange(float(size)), torch.arange(float(size))
        try:
            got = program(x)
        except InputMismatchError:
            continue
        assert torch.equal(got, run(y))
        assert torch.equal(x, y)
        served += 1
    assert served >= (1 if name in ("int", "power", "decimal") else 4)  # torch takes those for the number that they are


def test_errors_that_name_a_size_are_no_guards() -> None:
    """Gradients that eager refuses, since what they need was written: the program itself is right for all sizes."""
    weight = torch.ones(3, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y = x * weight
        x.mul_(2)
        return y

    program = capture(run, (torch.ones(4, 3),), dynamic_shapes={"x": {0: Dim("batch", min=2, max=16)}})
    x = torch.ones(6, 3)
    y = program(x)
    assert torch.equal(x, torch.full((6, 3), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_size_that_became_known_is_a_number() -> None:
    def run(x: Tensor) -> Tensor:
        y = x[x > 0]
        return y * torch.arange(4) if y.untyped_storage().nbytes() <= 40 else y

    x = torch.tensor([1.0, -1, 2, 3, 4])
    program = capture(run, (x,))
    torch.testing.assert_close(program(x), run(x))
    with pytest.raises(DataDependentError, match="data-dependent sizes"):
        program(x.abs())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_of_sequences_whose_lengths_are_tensors(reduction: str) -> None:
    def run(x: Tensor, lengths: Tensor) -> Tensor:
        labels, steps = torch.tensor([[1, 2, 3], [1, 1, 3]]), torch.tensor([5, 4])
        return F.ctc_loss(x.log_softmax(2), labels, steps, lengths, reduction=reduction)

    x = torch.randn(5, 2, 4, requires_grad=True)
    program = capture(run, (x, torch.tensor([2, 1])))
    for lengths in (torch.tensor([2, 1]), torch.tensor([3, 1]), torch.tensor([1, 2])):
        want, got = run(x, lengths), program(x, lengths)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))
    assert len(program.variants) == 1


@pytest.mark.parametrize("reduction", ["mean", "none", "sum"])
@pytest.mark.parametrize("labels", [[[1, 2, 3], [1, 1, 3]], [1, 2, 1, 1, 3]], ids=["padded", "joined"])
def test_losses_of_sequences_whose_lengths_are_numbers(reduction: str, labels: list[Any]) -> None:
    def run(x: Tensor) -> Tensor:
        loss: Any = F.ctc_loss  # stated of tensors alone
        result: Tensor = loss(x.log_softmax(2), torch.tensor(labels), (5, 4), (2, 3), 0, reduction)
        return result

    x = torch.randn(5, 2, 4, requires_grad=True)
    want, got = run(x), capture(run, (x,))(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))


def test_writes_before_sizes_are_known_to_be_equal() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(2) @ y.mul_(3)

    auto = torch.export.Dim.AUTO
    args = torch.randn(4, 3), torch.randn(3, 5)
    program = capture(run, args, dynamic_shapes=({0: auto, 1: auto}, {0: auto}))
    assert [write.target for write in program.mutations] == ["x", "y"]
    assert len(program.signature.output_specs) == 3
    mine = torch.randn(6, 2), torch.randn(2, 5)
    given = [value.clone() for value in mine]
    torch.testing.assert_close(program(*mine), run(*given))
    torch.testing.assert_close(list(mine), given)


MODES = [
    *(("linear", 1, False), ("bilinear", 2, False), ("bilinear", 2, True), ("bicubic", 2, False), ("bicubic", 2, True)),
    *(("trilinear", 3, False), ("nearest", 1, False), ("nearest", 2, False), ("nearest", 3, False)),
    *(("nearest-exact", 2, False), ("area", 2, False)),
]


@pytest.mark.parametrize(("mode", "dims", "antialias"), MODES)
def test_interpolation_by_a_scale_is_that_of_the_kernels(mode: str, dims: int, antialias: bool) -> None:
    """Torch's decompositions, which take over for symbols, scale where the kernels copy (3 to 3)."""

    def scaled(x: Tensor) -> Tensor:
        return F.interpolate(x * 2, scale_factor=1.3, mode=mode, antialias=antialias)

    def images(size: int) -> Tensor:
        return torch.randn(2, 3, *(size + 2 * dim for dim in range(dims)), requires_grad=True)

    program = capture(scaled, (images(7),), dynamic_shapes=({2 + dim: Dim.DYNAMIC for dim in range(dims)},))
    for size in (3, 7, 9):
        x = images(size)
        want, got = scaled(x), program(x)
        assert torch.equal(want, got) and want.stride() == got.stride()
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (want, got)))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_targets_end_at_the_first_that_is_negative(reduction: str) -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, target, reduction=reduction)

    def rows(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 4, requires_grad=True), torch.tensor([[0, 2, -1, 1]] * count)

    program = capture(loss, rows(3), dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}))
    for count in (2, 5):
        x, target = rows(count)
        want, got = loss(x, target), program(x, target)
        assert torch.equal(want, got)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (want, got)))


def test_numbers_are_part_of_the_program() -> None:
    def times(x: Tensor, n: int) -> Tensor:
        return x * n

    inputs = (torch.ones(4), 3)
    for spec in (Dim.AUTO, Dim.STATIC, None, 3):
        program = capture(times, inputs, dynamic_shapes=({0: Dim("size")}, spec))
        assert torch.equal(program(torch.ones(5), 3), torch.full((5,), 3.0))
    with pytest.raises(ValueError, match=r"(?s)for 'n', which is the number 3.*constant of the program.*recapture"):
        capture(times, inputs, dynamic_shapes=(None, Dim.DYNAMIC))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_steps_for_other_batches(make: Any) -> None:
    layers = [torch.nn.Linear(3, 2, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())

    def stepping(layer: torch.nn.Linear) -> Any:
        update = make(layer.parameters(), lr=0.1, fused=True)

        def step(x: Tensor) -> None:
            update.zero_grad()
            layer(x).square().mean().backward()
            update.step()

        return step

    program = capture(stepping(layers[0]), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("n", max=16)},))
    eager = stepping(layers[1])
    for batch in (4, 7):
        x = torch.randn(batch, 3)
        program(x), eager(x)
    torch.testing.assert_close(layers[0].weight, layers[1].weight)


def image_programs() -> dict[str, tuple[torch.nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    whole = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(inplace=True),
        torch.nn.ConvTranspose2d(4, 4, 3, stride=2, groups=2),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 2),
    )
    last: Any = torch.nn.Conv2d(3, 4, 3)  # stubs know no memory formats of modules
    return {
        "1d": (torch.nn.Conv1d(3, 4, 3, padding=1), (3, 8)),
        "2d": (torch.nn.Conv2d(3, 4, 3), (3, 4, 4)),
        "1x1": (torch.nn.Conv2d(3, 4, 1), (3, 4, 4)),
        "by channel": (torch.nn.Conv2d(3, 3, 3, groups=3, dilation=2), (3, 6, 6)),
        "3d": (torch.nn.Conv3d(3, 4, 2), (3, 3, 3, 3)),
        "transposed": (torch.nn.ConvTranspose2d(3, 4, 3, output_padding=1, stride=2), (3, 3, 3)),
        "channels last": (last.to(memory_format=torch.channels_last), (3, 4, 4)),
        "model": (whole, (3, 3, 3)),
    }


@pytest.mark.parametrize("example", [4, 20])
@pytest.mark.parametrize("name", image_programs())
def test_which_kernel_a_convolution_takes_is_no_condition_on_the_batch(name: str, example: int) -> None:
    module, size = image_programs()[name]
    form = torch.channels_last if name == "channels last" else torch.contiguous_format

    def images(count: int) -> Tensor:
        return torch.randn(count, *size).to(memory_format=form).requires_grad_()

    program = capture(module, (images(example),), dynamic_shapes={"input": {0: Dim("batch", min=2, max=64)}})
    for count in (2, 15, 16, 64):
        x = images(count)
        want, got = module(x), program(x)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)))
    with pytest.raises(InputMismatchError, match=r"is 65, .* for 2 to 64"):
        program(images(65))


def test_a_kernel_that_lays_its_result_out_otherwise_is_a_condition() -> None:
    """With one thread, a kernel for few images gives rows, and one for many channels."""
    threads, form = torch.get_num_threads(), torch.channels_last_3d
    torch.set_num_threads(1)
    try:
        module: Any = torch.nn.Conv3d(3, 4, 1)
        module.to(memory_format=form)
        x = torch.randn(4, 3, 2, 2, 2).to(memory_format=form)
        more = torch.randn(20, 3, 2, 2, 2).to(memory_format=form)
        assert (module(x).stride()[1] == 1) != (module(more).stride()[1] == 1)
        with pytest.raises(InputMismatchError, match=r"does not support 16\n.*\n.*batch < 16\n.*min=2, max=15"):
            capture(module, (x,), dynamic_shapes=({0: Dim("batch", min=2, max=64)},))
        capture(module, (x,), dynamic_shapes=({0: Dim("batch", min=2, max=15)},))
    finally:
        torch.set_num_threads(threads)


def branching(x: Tensor) -> Tensor:
    if x.shape[0] > 5:
        return x + 1
    return x * 2


def halved(x: Tensor) -> Tensor:
    return x.view(2, -1) + 1


def summed(x: Tensor, y: Tensor) -> Tensor:
    return x.sum(1) + y.sum(1)


def joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y])[:6] + 1


BATCH = Dim("batch", min=2, max=64)
NARROWED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, tuple[str, ...]]] = {
    "branch": (branching, (BATCH,), "from 2 to 64, .* not support 6", ("x.shape[0] > 5", "batch <= 5", "max=5)")),
    "open": (branching, (Dim("batch"),), "from 2 on", ("x.shape[0] > 5", "Dim('batch', min=2, max=5)")),
    "anonymous": (branching, (Dim.DYNAMIC(min=2, max=64),), "2 to 64", ("x.size(0) <= 5", "Dim.DYNAMIC(min=2, max=5)")),
    "derived": (
        branching,
        (2 * Dim("half"),),
        "from 2 on, .* not support 6",
        ("2*half <= 5", "2*Dim('half', min=1, max=2)"),
    ),
    "even": (halved, (BATCH,), "does not support", ("x.view(2, -1)", "2 * Dim('part_of_batch', min=2, max=32)")),
    "slice": (lambda x: x[1:] * 2, (BATCH,), "does not support 2", ("x[1:] * 2", "Dim('batch', min=3, max=64)")),
    "equal": (summed, (BATCH, Dim("rows")), "does not support 2", ("x.sum(1)", "batch == rows", "one Dim for both")),
    "both": (joined, (BATCH, Dim("rows")), "batch = 2, rows = 2", ("torch.cat([x, y])", "batch + rows >= 6")),
    "number": (lambda x: x + torch.ones(4, 3), (BATCH,), "only the size 4", ("torch.ones(4, 3)", "batch == 4")),
    "hinted": (lambda x: x + torch.ones(4, 3), (Dim.DYNAMIC,), "only the size 4", ("x.size(0) == 4",)),
}


# By name: a program, the size of its example, and the one that it is to have.
SIZE_OF_ONE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, int]] = {
    "slice": (lambda x: x[1:] * 2, 2, 3),
    "computed": (lambda x: x[: x.shape[0] - 1].sum(0), 2, 3),
    "step": (lambda x: x[::2] * 2, 2, 3),
    "half": (lambda x: x[: x.shape[0] // 2] * 2, 3, 4),
    "convolution": (lambda x: torch.conv1d(x.T[None], torch.ones(1, 3, 3)), 3, 4),
    "window": (lambda x: x.unfold(0, 3, 1).sum(), 3, 4),
}


@pytest.mark.parametrize("name", SIZE_OF_ONE)
def test_a_size_that_comes_out_as_1_in_the_example(name: str) -> None:
    func, size, wanted = SIZE_OF_ONE[name]
    for dim in (Dim("batch"), Dim.DYNAMIC)[: 1 if name == "half" else 2]:  # which a hint leaves open
        with pytest.raises(InputMismatchError, match=r"dynamic_shapes (makes|asks for)") as caught:
            capture(func, (torch.randn(size, 3),), dynamic_shapes=({0: dim},))
        text = str(caught.value)
        assert f"an example in which dimension 0 of the input `x` is {wanted} or more" in text
        assert "at   " in text and "test_dynamic_shapes.py" in text
        assert (f"min={wanted}" in text) == (dim is not Dim.DYNAMIC)
    program = capture(func, (torch.randn(wanted, 3),), dynamic_shapes=({0: Dim("batch", min=wanted)},))
    for rows in (wanted, wanted + 1, wanted + 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(program(x), func(x))


@pytest.mark.parametrize("name", NARROWED)
def test_sizes_that_were_asked_for_and_that_the_program_does_not_take(name: str) -> None:
    func, dims, said, parts = NARROWED[name]
    args = tuple(torch.randn(4, 3) for _ in dims)
    with pytest.raises(InputMismatchError, match=said) as caught:
        capture(func, args, dynamic_shapes=tuple({0: dim} for dim in dims))
    text = str(caught.value)
    assert all(part in text for part in (*parts, "test_dynamic_shapes.py", "Dim.AUTO")), text
    program = capture(func, args, dynamic_shapes=tuple({0: Dim.AUTO} for _ in dims))
    torch.testing.assert_close(program(*args), func(*args))
    advice = text.partition("try  ")[2].partition(", or ")[0]
    if "Dim" in advice:
        dims = (BATCH, BATCH) if advice == "one Dim for both sizes" else (eval(advice),)
        capture(func, args, dynamic_shapes=tuple({0: dim} for dim in dims))


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((Dim("batch", min=5), None), "`x` is 4, but dynamic_shapes asks for 5 or more"),
        ((Dim("batch", max=3), None), "`x` is 4, but dynamic_shapes asks for 3 or less"),
        ((BATCH, BATCH), "`y` is 3, but dynamic_shapes asks for one size for all dimensions of that name"),
        ((BATCH, 2 * BATCH), "`y` is 3, but dynamic_shapes asks for 4 or more"),
        ((None, 2 * Dim("half")), r"`y` is 3, but dynamic_shapes asks for 2\*half"),
    ],
)
def test_examples_of_other_sizes_than_those_asked_for(dims: tuple[Any, Any], said: str) -> None:
    spec = tuple(None if dim is None else {0: dim} for dim in dims)
    with pytest.raises(InputMismatchError, match=said):
        capture(lambda x, y: x.sum() + y.sum(), (torch.ones(4, 2), torch.ones(3, 2)), dynamic_shapes=spec)


def test_sizes_that_the_backward_alone_does_not_take() -> None:
    def run(x: Tensor, mask: Tensor) -> Tensor:
        return torch.masked_select(x, mask)

    def inputs(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, requires_grad=True), torch.ones(count, 3, dtype=torch.bool)

    spec = ({0: BATCH}, {0: BATCH})
    program = capture(run, inputs(4), dynamic_shapes=spec)
    for count in (4, 9, 4, 6):
        x, mask = inputs(count)
        program(x, mask).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.ones(count, 3))
    with torch.no_grad():
        assert program(*inputs(9)).shape == (27,)


def test_captures_for_calls_out_of_the_range() -> None:
    def run(x: Tensor) -> Tensor:
        return x.view(-1, 2) * 2

    spec = ({0: Dim("rows", min=2, max=16)},)
    program = capture(run, (torch.ones(4, 2),), dynamic_shapes=spec, on_guard_failure="recapture")
    for count in (5, 1, 20, 21, 0):
        assert torch.equal(program(torch.ones(count, 2)), torch.full((count, 2), 2.0))
    other = capture(summed, (torch.ones(4, 2),) * 2, dynamic_shapes=({0: BATCH},) * 2, on_guard_failure="recapture")
    for x, y in ((torch.ones(3, 2), torch.ones(3, 2)), (torch.ones(3, 2), torch.ones(1, 2))):
        assert torch.equal(other(x, y), summed(x, y))


@pytest.mark.filterwarnings("error::functionalize.NotCapturedWarning")
@pytest.mark.parametrize("spec", [({0: Dim.AUTO}, {0: Dim.AUTO}), {"x": {0: "rows"}, "mask": {0: "rows"}}])
def test_a_later_call_may_have_other_arguments(spec: Any) -> None:
    def masked(x: Tensor, mask: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        result = x if mask is None else x * mask
        return result if scale is None else result * scale

    x, mask = torch.arange(4.0), torch.ones(4)
    program = capture(masked, (x[:3], mask[:3]), dynamic_shapes=spec, on_guard_failure="recapture")
    for arguments in ((x,), (x, None), (x, mask), (x, mask, mask), (x[:2],), (x, 2.0), (x, x[0])):
        torch.testing.assert_close(program(*arguments), masked(*arguments))
