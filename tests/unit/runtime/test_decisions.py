"""Decisions by data: programs whose `if` and `while` ask tensors, called on data that decide in several ways."""

from __future__ import annotations

import builtins
import itertools
import math
import numbers
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from functionalize import DataDependentError, InputMismatchError, capture
from functionalize.report import build
from tests.support.decisions import PROGRAMS, Subject, compared

Draw = Callable[[torch.Generator], tuple[Any, ...]]
BOUNDS = (8, 6, 8, 3, 3, 7, 1)  # of variants


def follows(run: Callable[..., Any], *inputs: Any, calls: int = 20, **options: Any) -> int:
    """Compare a stateless function with eager, on each of some inputs in turn; how many variants it has."""
    rows = [row if isinstance(row, tuple) else (row,) for row in inputs]
    turns = iter([tuple(tensor.clone() for tensor in rows[number % len(rows)]) for number in range(calls + 1)])
    program = compared(lambda: Subject(run, []), lambda generator: next(turns), calls, **options)
    return len(program.variants)


def flip(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else -x


ONES = torch.ones(3)


@pytest.mark.every(5)
@pytest.mark.parametrize(("name", "bound"), list(zip(PROGRAMS, BOUNDS, strict=True)))
def test_programs_that_decide_by_data_are_eager_in_100_calls(name: str, bound: int) -> None:
    assert min(bound, 2) <= len(compared(*PROGRAMS[name]).variants) <= bound


def test_a_decision_is_an_output_a_guard_and_an_assertion() -> None:
    def run(x: Tensor) -> Tensor:
        x.add_(1)
        if x.sum() > 0:
            return x * 2
        return x.sin()

    program = capture(run, (torch.zeros(3),))
    (decision,) = program.variants[0].decisions
    assert decision.answer is True and decision.location.endswith("in run: if x.sum() > 0:")
    assert [str(spec.arg.name) for spec in program.signature.output_specs] == ["add", "mul", "_local_scalar_dense"]
    assert "if x.sum() > 0: -> True" in str(program.guards[-1])
    for graph in (program.with_copy_epilogue(), program.variants[0].with_assertions()):
        x = torch.zeros(3)
        assert torch.equal(graph(x)[-1], torch.full((3,), 2.0))
        x = torch.full((3,), -2.0)
        with pytest.raises(RuntimeError, match="-> True"):
            graph(x)
        assert torch.equal(x, torch.full((3,), -2.0))


def test_the_graph_computes_what_it_decides_by_once() -> None:
    program = capture(flip, (ONES,))
    nodes = [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert nodes == ["sum_1", "gt", "_local_scalar_dense", "add"]


def test_numbers_that_only_flow_into_tensors_make_no_variants() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        total, most = x.sum().item(), x.long().max().item()
        nested, half = torch.tensor([[total, 1], [x[0].item(), 2]]), torch.tensor(total, dtype=torch.half)
        return x * total, x + most / 2, nested, half, torch.as_tensor(most)

    assert follows(run, *(torch.rand(3) * 9 for _ in range(20))) == 1


def test_an_integer_is_asked_for_where_a_float_was_rounded() -> None:
    rows = [torch.tensor([0.1 * number, 1.0]) for number in range(20)]
    assert follows(lambda x: torch.arange(int(x.sum())), *rows) == 1
    assert follows(lambda x: torch.ones(3)[[*range(int(x.sum()))]], *rows) == 2


def test_not_a_number_is_no_number() -> None:
    def run(x: Tensor) -> Tensor:
        value = x.sum().item()
        if value != value:
            return x.new_zeros(2)
        if value > 2:
            return x
        return x * 2 if value <= 2 else x * 3  # type: ignore[unreachable,unused-ignore]

    assert follows(run, ONES, ONES / 2, ONES * torch.nan, calls=9) == 3


QUESTIONS: list[Callable[[Tensor, Tensor], bool]] = [
    torch.equal,
    torch.allclose,
    lambda a, b: 4 in (a + b),
    lambda a, b: bool((a == b).all()),
]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_questions_of_tensors(ask: Callable[[Tensor, Tensor], bool]) -> None:
    def run(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a * 2 if ask(a, b) else b.clone()

    assert follows(run, (ONES, ONES * 2), (ONES, ONES)) == 2


WHERE: list[Callable[[Tensor, int], Any]] = [
    lambda seen, place: seen[place],
    lambda seen, place: seen[None][0, place],
    lambda seen, place: seen[place : place + 1],
    lambda seen, place: not seen[place],
]


@pytest.mark.parametrize("part", WHERE)
def test_flags_at_data_dependent_positions(part: Callable[[Tensor, int], Any]) -> None:
    def run(x: Tensor, seen: Tensor) -> Any:
        smallest = x * 2 if part(seen, x.argmin().item()) else x + 1  # type: ignore[arg-type]
        return smallest, [place for place in (x > 1).nonzero().flatten().tolist() if part(seen, place)]

    seen = torch.tensor([True, False, True])
    examples = [(torch.tensor(x), seen) for x in ([0.0, 2.0, 2.0], [2.0, 0.0, 2.0])]
    assert follows(run, *examples, calls=6) == 2


def test_questions_of_complex_numbers() -> None:
    assert follows(lambda x: x.conj() if x.sum().item().imag > 1 else x * 2, ONES * 1j, ONES * (2 + 0j), calls=6) == 2


@pytest.mark.parametrize("ask", [bool, torch.is_nonzero, Tensor.is_nonzero])
def test_whether_the_elements_that_the_data_count_are_true(ask: Callable[[Tensor], bool]) -> None:
    def run(x: Tensor) -> Tensor:
        (places,) = torch.where(x == 3)
        return x + 1 if ask(places) else x - 1

    assert follows(run, torch.tensor([1, 3, 2]), torch.tensor([3, 1, 2]), calls=4) == 2
    program = capture(run, (torch.tensor([1, 3, 2]),))
    for data, text in (([3, 3, 0], "more than one value"), ([0, 0, 0], "no values")):
        for call in (run, program, lambda x: capture(run, (x,))):
            with pytest.raises(RuntimeError, match=f"Boolean value of Tensor with {text} is ambiguous"):
                call(torch.tensor(data))


def test_istft_asks_its_window() -> None:
    window = torch.hann_window(16)

    def run(x: Tensor) -> Tensor:
        return torch.istft(torch.stft(x, 16, window=window, return_complex=True), 16, window=window)

    assert follows(run, *(torch.rand(64) for _ in range(4)), calls=4) == 1


@pytest.mark.slow
def test_higher_order_ops_beside_decisions() -> None:
    def run(x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))
        return y * 2 if y.sum() > 4 else y

    assert follows(run, ONES, -ONES, ONES / 9) == 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu")])
def test_modes_of_torch_beside_decisions(mode: Callable[[], Any]) -> None:
    weight = torch.randn(3, 3)

    def run(x: Tensor) -> Tensor:
        y = x @ weight
        return y * 2 if y.float().sum() > 0 else y

    with mode():
        assert follows(run, ONES[None], -ONES[None], calls=4) == 2


def test_transforms_inside_decide() -> None:
    def run(x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda v: (v.sin() if x.sum() > 0 else v.cos()).sum())(x)
        return torch.vmap(torch.neg)(gradient) if gradient.sum() < 0 else gradient

    assert follows(run, ONES, -ONES, ONES * 2) == 3


def test_data_dependent_sizes_decide() -> None:
    def run(x: Tensor) -> list[Tensor]:
        places = x.nonzero()
        if places.numel() == 0:
            return []
        x.zero_()
        return [row + 1 for row in places]

    assert follows(run, ONES, torch.zeros(3), torch.tensor([0.0, 1, 0])) == 3


def test_data_decide_beside_symbolic_sizes() -> None:
    def run(x: Tensor) -> Tensor:
        places = x.nonzero()[:, 0]
        return x[places] * 2 if places.numel() > x.shape[0] // 2 else x[places]

    rows = [torch.tensor(one * n) for one in ([1.0, 0, 0, 1], [0.0, 1, 1]) for n in range(2, 6)]
    assert follows(run, *rows, dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}}) == 2


def test_random_numbers_are_drawn_once() -> None:
    def run(x: Tensor) -> Tensor:
        noise = torch.rand(3)
        nn.functional.dropout(x, 0.5)  # unread, and drawn
        while noise[0] > 0.3:
            noise = torch.rand(3)
        return x + noise + torch.randn(3)

    assert follows(run, ONES, calls=40) < 12


def test_a_generator_among_the_arguments_goes_on_once() -> None:
    def run(x: Tensor, generator: torch.Generator) -> Tensor:
        if torch.rand((), generator=generator) > 0.5:
            return x
        return x + torch.rand(3, generator=generator)

    ours, theirs = torch.Generator(), torch.Generator()
    program = capture(run, (ONES, ours), on_guard_failure="recapture")
    for _ in range(12):
        assert torch.equal(program(ONES, ours), run(ONES, theirs))
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert len(program.variants) == 2


# What is refused, and what is raised


@pytest.mark.slow
def test_decisions_are_refused_where_there_are_no_data_or_where_they_are_not_to_decide() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    for example in (fake, torch.ones(3, device="meta")):
        with pytest.raises(DataDependentError, match=r"(?s)return x \+ 1 if x.sum\(\) > 0 else -x.*torch.cond"):
            capture(flip, (example,))
    with pytest.raises(DataDependentError, match=r"torch\.cond"):
        capture(flip, (ONES,), on_data="raise")
    with pytest.raises(DataDependentError, match=r"torch\.cond"):
        capture(lambda x: torch.equal(x, x + 1), (ONES,), on_data="raise")
    with pytest.raises(ValueError, match="on_data must be 'decide' or 'raise', not 'guess'"):
        capture(flip, (ONES,), on_data="guess")


def test_more_ways_than_the_cache_holds_are_an_error_that_writes_nothing() -> None:
    def run(x: Tensor) -> Tensor:
        x.add_(1)
        return x.new_zeros(len(range(int(x[0]))))

    program = capture(run, (ONES * 0,), cache_size=3)
    for number in (1, 2, 0):
        assert program(ONES * number).shape == (number + 1,)
    x = ONES * 7
    with pytest.raises(
        DataDependentError, match=r"(?s)more than 3 different ways.*\n    at   .*int\(x\[0\]\).*value is 8.*cache_size"
    ):
        program(x)
    assert torch.equal(x, ONES * 7) and len(program.variants) == 3 and program(ONES * 1).shape == (2,)


@pytest.mark.slow
def test_the_program_raises_its_own_error_and_has_written_what_it_writes_before() -> None:
    log = torch.zeros(1)

    def run(x: Tensor) -> Tensor:
        log.add_(1)
        if x.sum() > 0:
            raise ValueError(f"a sum of {x.sum().item()}")
        log.add_(1)
        return x * 2

    program = capture(run, (-ONES,))
    with pytest.raises(ValueError, match=r"a sum of 3\.0"):
        program(ONES)
    assert log == 1 and torch.equal(program(-ONES), -2 * ONES) and log == 3
    with pytest.raises(ValueError, match="a sum of"):
        capture(run, (ONES,))


def test_an_error_on_the_way_that_the_data_do_not_take_is_not_seen() -> None:
    table = torch.arange(4.0)

    def run(x: Tensor) -> Tensor:
        place = x.long().sum()
        return table[place] * x if place < 4 else x

    for requires_grad in (False, True):
        x, y = torch.ones(1, requires_grad=requires_grad), torch.full((1,), 9.0, requires_grad=requires_grad)
        program = capture(run, (x,))
        assert torch.equal(program(y), y) and torch.equal(program(x), x)


def test_what_a_way_writes_to_autograd_is_undone() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        if y.sum() > 0:
            x.requires_grad_()
        return x * 2

    program = capture(run, (torch.ones(3), ONES))
    x, y = torch.ones(3), torch.ones(3)
    assert not program(x, -ONES).requires_grad and not x.requires_grad
    assert program(y, ONES).requires_grad and y.requires_grad


def test_numbers_and_sizes_in_sets_are_decided() -> None:
    assert follows(lambda x: x + len({x.nonzero().size(0), 2}), torch.tensor([1, 2]), torch.tensor([0, 1])) == 2
    assert follows(lambda x: x + {1: 5}.get(int(x.max()), 7), torch.tensor([1, 2]), torch.tensor([0, 1])) == 2
    assert follows(lambda x: x + len(set(x.tolist())), torch.tensor([1, 2]), torch.tensor([1, 1])) == 2
    assert follows(lambda x: x + len({int(one) for one in x}), torch.tensor([1, 2]), torch.tensor([1, 1])) == 2


# Gradients


def gradients_follow(run: Callable[[Tensor], Tensor], *values: Tensor, again: bool = False) -> int:
    program = capture(run, (values[0].clone().requires_grad_(),))
    for value in values * 3:
        found = []
        for call in (program, run):
            x = value.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=again)
            found.append(torch.autograd.grad(gradient.sum(), x)[0] if again else gradient)
        assert torch.equal(*found)
    return len(program.variants)


@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_each_variant(again: bool) -> None:
    def run(x: Tensor) -> Tensor:
        y = x**3
        while y.sum() > 3:
            y = y * x / 2
        return y

    assert gradients_follow(run, ONES, ONES * 1.5, ONES * 1.7, -ONES, again=again) > 1


@pytest.mark.slow
def test_a_checkpointed_region_decides_again_as_it_did() -> None:
    def region(x: Tensor) -> Tensor:
        y = x.sin()
        return y.exp() if y.sum() > 0 else y.cos()

    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(region, x, use_reentrant=False)
        return y * 2

    assert gradients_follow(run, ONES, -ONES) == 2


class Halved(torch.autograd.Function):
    """Its backward decides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2 if gradient.sum() > 1 else gradient


halved: Callable[[Tensor], Tensor] = Halved.apply


def test_a_decision_in_the_backward_needs_the_backward_inside() -> None:
    program = capture(lambda x: halved(x).sum(), (ONES.clone().requires_grad_(),))
    x = ONES.clone().requires_grad_()
    with pytest.raises(DataDependentError, match=r"(?s)the backward.*in backward: return gradient / 2 if.*inside"):
        program(x).backward()
    model = nn.Linear(3, 3)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = halved(model(x)).mean() * x.sum()
        loss.backward()
        return loss.detach()

    program = capture(step, (ONES,))
    for scale in (1, 9, 1, -1):
        step(ONES * scale)
        wanted, model.weight.grad = model.weight.grad, None
        program(ONES * scale)
        torch.testing.assert_close(model.weight.grad, wanted, rtol=0, atol=0)


def test_numbers_of_all_values_in_elementwise_operators() -> None:
    def run(x: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        y, n = x.to(torch.int32), number.item()
        listed = torch._foreach_mul([x, y], n) + torch._foreach_add([x], [n])
        return x**n, n**x, x.clamp(n), y * n, torch.add(x, x, alpha=n), torch.lerp(x, x + 1, n), *listed

    floats, integers = ([torch.tensor(n) for n in ns] for ns in ((0.5, 1.0, 2.0, -1.5, 0.0, math.inf), (3, 1, 0, 2)))
    assert follows(run, *((torch.rand(3) * 5, number) for number in floats)) == 1
    assert follows(lambda x, number: (x ** number.item(), x // number.item()), *((ONES, n) for n in integers)) == 1


def test_one_question_of_all_parameters_is_one_decision() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    def run(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    run(ONES)
    (decision,) = capture(run, (ONES,)).variants[0].decisions
    assert decision.location.endswith("if weight_decay != 0:")


@pytest.mark.slow
def test_optimizers_that_decide_by_their_state() -> None:
    def make(kind: Any) -> Callable[[], Subject]:
        def made() -> Subject:
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
            optimizer = kind(model.parameters(), lr=0.01)

            def run(x: Tensor) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()  # type: ignore[no-any-return]

            return Subject(run, list(model.parameters()))

        return made

    def draw(generator: torch.Generator) -> tuple[Tensor]:
        return (torch.randn(8, 4, generator=generator),)

    counts = [
        len(compared(make(kind), draw, calls=12).variants)
        for kind in (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adafactor)
    ]
    assert counts[0] == 2 + 1 and counts[1] <= 2 and counts[2] < 10


# Variants


def test_variants_are_found_by_what_is_known_of_a_call() -> None:
    def run(x: Tensor) -> Tensor:
        count = 0
        while count < 4 and x[count] > 0:
            count += 1
        return x * count

    captured: list[int] = []
    program = capture(run, (torch.ones(4),))
    for count in (0, 1, 2, 3, 4, 2, 0, 3):
        x = torch.tensor([1.0] * count + [-1.0] * (4 - count))
        assert torch.equal(program(x), run(x))
        captured.append(len(program.variants))
    assert captured == [2, 3, 4, 5, 5, 5, 5, 5]
    assert [len(variant.decisions) for variant in program.variants] == [4, 1, 2, 3, 4]
    branches = build(program).branches
    assert [branch.way for branch in branches if branch.way] == [1, 5, 4, 3, 2]
    assert max(branch.depth for branch in branches) == 4 and "while count < 4" in branches[0].text


def test_a_report_shows_the_tree(tmp_path: Any) -> None:
    program = capture(flip, (ONES,))
    program(-ONES)
    text = program.report(tmp_path / "report.html").read_text()
    assert "variant 2" in text and "if x.sum() &gt; 0 else" in text
    assert 'id="variants"' not in capture(torch.sin, (ONES,)).report(tmp_path / "other.html").read_text()


def test_variants_differ_in_what_they_return() -> None:
    def run(x: Tensor) -> Any:
        return {"big": x * 2} if x.sum() > 0 else (x, [x.sum()])

    assert follows(run, ONES, -ONES) == 2


def test_kinds_of_calls_have_variants_of_their_own() -> None:
    program = capture(flip, (ONES,), cache_size=2, on_guard_failure="recapture")
    for size in (3, 4, 5, 3):
        for sign in (1, -1):
            x = torch.ones(size) * sign
            assert torch.equal(program(x), flip(x))
    assert len(program.variants) == 4  # of the last two sizes


def test_python_state_is_followed_beside_decisions() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.unread = 1  # type: ignore[assignment]

    def run(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y * 2 if x.sum() > 0 else y

    program = capture(run, (ONES,))
    model.unread = 2  # type: ignore[assignment]
    assert torch.equal(program(-ONES), run(-ONES)) and torch.equal(program(ONES), run(ONES))
    model.eval()[0].bias = None  # type: ignore[assignment]
    with pytest.raises(InputMismatchError):
        program(ONES)


def test_two_threads_make_variants() -> None:
    program = capture(flip, (ONES,))
    failed: list[BaseException] = []

    def work(sign: int) -> None:
        try:
            for _ in range(20):
                assert torch.equal(program(ONES * sign), flip(ONES * sign))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(sign,)) for sign in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(program.variants) == 2


@pytest.mark.slow
def test_a_program_holds_no_example() -> None:
    import gc
    import weakref

    class Data:
        """Tells when it goes."""

    x, data = torch.ones(3), Data()
    x.data_holder, ref = data, weakref.ref(data)  # type: ignore[attr-defined]
    program = capture(flip, (x,))
    del x, data
    gc.collect()
    assert ref() is None and torch.equal(program(-ONES), ONES)


def test_a_number_of_data_changes_a_tensor_of_known_data() -> None:
    def scaled(x: Tensor) -> Tensor:
        known = torch.tensor(1.0)
        known *= x.item()
        return x + (1 - known.item())

    program = capture(scaled, (torch.tensor(0.25),))
    for value in (0.25, 3.0):
        assert program(torch.tensor(value)) == 1


def test_functions_of_math_make_no_variants() -> None:
    def run(x: Tensor) -> tuple[Tensor, float]:
        n = x.sum().item()
        return x * math.exp(n) + math.sqrt(abs(n)), math.hypot(n, 3.0)

    program = capture(run, (ONES,))
    for x in (ONES * 2, -ONES, torch.rand(3)):
        (ours, one), (theirs, other) = program(x), run(x)
        assert torch.equal(ours, theirs) and one == other and type(one) is float
    assert len(program.variants) == 1 and math.exp(0) == 1


def test_the_least_and_the_largest_of_numbers_are_no_decisions() -> None:
    def clipped(x: Tensor) -> Any:
        norm = x.norm().item()
        return x * min(1.0, 2.0 / (norm + 1e-6)), max(norm, 1.0, 3.5), max([norm, 0.5])

    program = capture(clipped, (torch.ones(3),))
    for value in (1.0, 9.0, 0.01, math.nan, 0.0):
        x = torch.full((3,), value)
        assert str(program(x)) == str(clipped(x))
    assert len(program.variants) == 1 and max is builtins.max and max.__module__ == "builtins"


def test_a_whole_number_among_floats_stays_one() -> None:
    program = capture(lambda x: min(1, x.sum().item()), (torch.ones(3),))
    assert [str(program(torch.full((3,), value))) for value in (9.0, 0.25)] == ["1", "0.75"]


def test_functions_of_math_have_gradients() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() * math.exp(y.sum().item())).sum()

    x = torch.rand(3, requires_grad=True)
    program = capture(run, (x, ONES))
    for y in (ONES, torch.rand(3)):
        ours, theirs = (torch.autograd.grad(one(x, y), x, create_graph=True)[0] for one in (program, run))
        assert torch.equal(ours, theirs)
        assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (ours, theirs)))


def test_a_list_of_numbers_in_two_places() -> None:
    class World:
        def __init__(self) -> None:
            self.first = self.second = [1.0]

    world, other = World(), World()

    def run(one: World, x: Tensor) -> Tensor:
        assert one.first is one.second
        return x * one.first[0] + one.second[0]

    program, captures = capture(lambda x: run(world, x), (ONES,)), []
    for number in (1.0, 2.0, 3.0, 4.0):
        world.first = world.second = [number]
        other.first = other.second = [number]
        assert torch.equal(program(ONES), run(other, ONES))
        captures.append(len(program.variants))
    assert captures == [1, 2, 2, 2]  # another list of the same number is like the first
    world.second = [5.0]
    with pytest.raises(AssertionError):
        program(ONES)


def test_a_decision_by_an_input_waits_for_those_before_it() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        size = int(x.exp().sum().log().round())  # the last of the graph
        return x * size if y > 0 else x - size

    program = capture(run, (ONES, torch.ones(())))
    for number, y in ((2.0, 1.0), (3.0, -1.0), (4.0, 1.0), (2.0, -1.0)):
        x = torch.full_like(ONES, number)
        assert torch.equal(program(x, torch.tensor(y)), run(x, torch.tensor(y)))


def test_a_scheduler_that_waits_for_a_plateau() -> None:
    def world() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

        def step(x: Tensor) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step(loss.detach())
            return float(optimizer.param_groups[0]["lr"])

        return step, scheduler

    (step, scheduler), (wanted, other) = world(), world()
    batches = list(torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0)))
    program = capture(step, (batches[0],))
    for x in batches:
        assert program(x) == wanted(x)
        assert scheduler.state_dict() == other.state_dict()


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.slow
def test_a_checkpointed_region_runs_again_as_it_ran_where_numbers_are_inputs(p: float) -> None:
    def world() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(p))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = checkpoint(model, x, use_reentrant=False).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()  # type: ignore[no-any-return]

        return step, model

    (step, model), (wanted, other) = world(), world()
    x = torch.rand(2, 3)
    program = capture(step, (x,))
    for seed in range(3):
        torch.manual_seed(seed)
        loss = program(x)
        torch.manual_seed(seed)
        assert torch.equal(loss, wanted(x))
        assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    "written",
    [
        str,
        repr,
        "{:.2f}".format,
        lambda number: f"{number}",
        lambda number: f"{[number]}",
        "%.1f".__mod__,
        "%s".__mod__,
    ],
)
def test_data_dependent_numbers_as_text(written: Callable[[Any], str]) -> None:
    log: list[str] = []

    def run(x: Tensor) -> Tensor:
        log.append(written(x.sum().item()))
        return x * 2

    program = capture(run, (ONES,))
    assert not log
    for number in (1.0, 2.5, 1.0):
        program(ONES * number)
        run(ONES * number)
    assert log[::2] == log[1::2]


def test_whether_a_data_dependent_number_is_whole() -> None:
    def run(x: Tensor) -> Tensor:
        total: Any = x.sum().item()
        return x * 2 if total.is_integer() else x * 3

    assert follows(run, ONES, ONES / 4, ONES / 0) == 2


@pytest.mark.parametrize(
    "compute", [lambda n: n // 0.1, lambda n: 1.0 // n, lambda n: n // math.inf, lambda n: n**2, lambda n: n**-3]
)
def test_arithmetic_of_data_dependent_numbers_is_pythons(compute: Callable[[Any], Any]) -> None:
    def run(x: Tensor) -> Any:
        return x * compute(x.item())

    numbers = torch.tensor([1.0, -0.7, 2.5, 1e10, -3.0], dtype=torch.float64).unbind()
    assert follows(run, *numbers, calls=5) == 1
    exported = capture(run, (numbers[0],)).to_exported_program().module()
    for number in numbers:
        assert torch.equal(exported(number), run(number))


@pytest.mark.parametrize("bound", [math.inf, -math.inf, math.nan])
def test_data_dependent_numbers_beside_what_is_not_finite(bound: float) -> None:
    def run(x: Tensor) -> Tensor:
        number: Any = x.item()
        higher, scaled = number > bound, 2 - number != bound
        apart, added, turned = number - bound < 0, bound + number == bound, min(number * bound, 1.0) <= bound
        return torch.stack([x + 1 if one else x - 1 for one in (higher, scaled, apart, added, turned)])

    numbers = torch.tensor([3.0, -3.0, math.inf, -math.inf, math.nan], dtype=torch.float64).unbind()
    assert (follows(run, *numbers, calls=5) == 1) == math.isnan(bound)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dims", [(), (0,), ((0, 1),)])
def test_squeezing_a_data_dependent_size_is_a_decision(dims: tuple[Any, ...], inplace: bool) -> None:
    def squeezed(x: Tensor) -> Tensor:
        found = x.nonzero()
        return found.squeeze_(*dims) if inplace else found.squeeze(*dims)

    program = capture(squeezed, (torch.tensor([1.0, 0.0, 2.0]),))
    strict = capture(squeezed, (torch.tensor([1.0, 0.0, 2.0]),), on_data="raise")
    for values in ([1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]):
        x = torch.tensor(values)
        assert torch.equal(program(x), squeezed(x)) and program(x).shape == squeezed(x).shape
        if sum(value != 0 for value in values) == 1:
            with pytest.raises(DataDependentError, match=r"dimensions|do not satisfy"):
                strict(x)
        else:
            assert strict(x).shape == squeezed(x).shape


def _copied(found: Tensor) -> Tensor:
    into = torch.zeros(3)
    into[:3] = found
    return into


BROADCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "with a size that is known": lambda found: found + torch.ones(3),
    "with another data-dependent number": lambda found: found * found[found > 1.5],
    "in place": lambda found: torch.ones(3).mul_(found),
    "copied": _copied,
    "expanded": lambda found: found.expand(2, 3) * 2,
    "broadcast": lambda found: torch.broadcast_tensors(found, torch.ones(3))[0] * 2,
    "of two dimensions": lambda found: found[:, None] + torch.ones(3, 2),
    "as batches": lambda found: torch.matmul(found.reshape(-1, 1, 1), torch.ones(3, 1, 2)),
    "as batches of tensors": lambda found: torch.ones(2, 3, 2, 1) @ found.view(1, -1, 1, 1),
    "by letters": lambda found: torch.einsum("bi,bij->bj", found[:, None], torch.ones(3, 1, 2)),
    "chosen": lambda found: torch.where(torch.ones(3) > 0, found, 0.0),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.parametrize("first", [1, 3])
def test_whether_a_data_dependent_size_is_broadcast_is_a_decision(name: str, first: int) -> None:
    def program(x: Tensor) -> Tensor:
        return BROADCAST[name](x[x > 0])

    def with_positive(count: int) -> Tensor:
        return torch.tensor([1.0, 2.0, 3.0][:count] + [-1.0] * (4 - count))

    captured = capture(program, (with_positive(first),))
    for count in (first, 4 - first, 2, first):
        x = with_positive(count)
        try:
            expected = program(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                captured(x)
        else:
            assert torch.equal(captured(x), expected)
    assert len(captured.variants) <= 3


class Meter:
    """An average, as training scripts have it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.item()
        assert isinstance(value, (float, int))
        self.total, self.count = self.total + value, self.count + 1


def test_a_data_dependent_number_is_of_its_class() -> None:
    meters = Meter(), Meter()

    def run(x: Tensor, meter: Meter) -> Any:
        meter.update(x.sum())
        found = x.sum().item(), (x > 0).sum().item()
        classes = float, int, bool, numbers.Number, Tensor
        return x * 2, [[isinstance(number, kind) for kind in classes] for number in found]

    x = torch.ones(2)
    program = capture(lambda x: run(x, meters[1]), (x,))
    assert run(x, meters[0])[1:] == program(x)[1:]
    assert vars(meters[0]) == vars(meters[1])


def test_a_dynamic_size_is_a_whole_number() -> None:
    def run(x: Tensor) -> Tensor:
        return x.sum(0) if isinstance(x.shape[0], int) else x.sum(1)

    program = capture(run, (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert torch.equal(program(torch.ones(4, 2)), run(torch.ones(4, 2)))


ON_NUMBERS = {
    "options": lambda n, m: nn.functional.dropout(torch.ones(3), 0.5, n > 100).tolist(),
    "keys": lambda n, m: ({m: n, (m, 1): 2, True: 3}[m], {m, m + 1}, m in {1: 0}, n in {6.0}, Counter([m, m])),
    "truths": lambda n, m: ((n > 0) == True, sum([n > 0, m > 2]), {True: 1, False: 2}[n > 0]),  # noqa: E712
    "divmod": lambda n, m: (divmod(n, 2.5), divmod(-n, 2), divmod(7, m)),
    "parts": lambda n, m: (n.real, n.imag, m.real, m.imag, m.numerator, m.denominator),
    "not": lambda n, m: ~m,
    "compiled from text": eval("lambda n, m: (f'{n:.2f}', str(m), repr(n))"),
}


@pytest.mark.parametrize("name", ON_NUMBERS)
def test_what_numbers_have_beside_arithmetic(name: str) -> None:
    def run(x: Tensor) -> Any:
        return ON_NUMBERS[name](x.sum().item(), (x > 0).sum().item())

    program = capture(run, (torch.ones(3),))
    for x in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-0.5, 1.25, -4.0])):
        assert run(x) == program(x)


class Scaled(nn.Module):
    """A layer that looks at the class of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if type(x) is Tensor and isinstance(x, Tensor) else 3
        return torch.mul(self.linear(x), factor)


def test_bodies_of_conditions_look_at_classes() -> None:
    layer = Scaled()

    def run(x: Tensor) -> Any:
        number = x.sum().item()
        chosen = torch.cond(x.sum() > 0, lambda x: layer(x), lambda x: x * 2, (x,))
        return chosen * (number if type(number) is float and isinstance(number, float) else 0)

    program = capture(run, (torch.ones(3),))
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(program(x), run(x))
    assert "type" not in globals()


def test_floats_that_products_give_are_those_of_a_call() -> None:
    embedding, linear = nn.Embedding(4, 8), nn.Linear(8, 7)

    @torch.no_grad()
    def run(x: Tensor) -> list[float]:
        return [float(score) for score in linear(embedding(x).mean(0)).log_softmax(-1).topk(2).values]

    for first, second in itertools.combinations(range(4), 2):  # rounded otherwise where the weight is a copy
        x = torch.tensor([first, second])
        assert capture(run, (x,))(x) == run(x)


def test_texts_of_tensors_without_dimensions() -> None:
    def run(x: Tensor) -> Any:
        return f"{x.sum():.3f}", "{:>5d}".format((x > 0).sum()), "%.1e" % x[0]  # noqa: UP031, UP032

    program = capture(run, (torch.ones(2),))
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.5]), torch.tensor([1.0, 2.0])):
        assert program(x) == run(x)
    assert len(program.variants) == 3


class Places:
    """Dicts of several kinds, keyed by data-dependent numbers."""

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()
        self.last: OrderedDict[Any, Any] = OrderedDict()
        self.pairs: dict[Any, Any] = {}
        self.seen: set[Any] = set()

    def note(self, x: Tensor) -> Tensor:
        for position in x.argsort().tolist():
            self.counts[position] += 1
            self.last[position] = x
            self.last.move_to_end(position)
        for sign in (x > 0).tolist():
            self.counts[sign] += 1
        self.pairs[position, x[0].item()] = len(self.last)
        self.seen.add(position)
        return x * self.counts[position]


def test_dicts_that_are_keyed_by_data_dependent_numbers() -> None:
    places, theirs, x = Places(), Places(), torch.tensor([3.0, 1.0])
    program = capture(places.note, (x,), on_guard_failure="recapture", cache_size=20)
    assert not any(vars(places).values())
    for batch in (x, x, torch.tensor([1.0, -2.0]), torch.tensor([0.5, 2.0])):
        assert torch.equal(program(batch), theirs.note(batch))
        assert list(places.last) == list(theirs.last)
        assert (places.counts, places.pairs, places.seen) == (theirs.counts, theirs.pairs, theirs.seen)
        assert all(type(key) in (int, bool) for key in places.counts)


def test_dicts_are_as_they_were_where_the_program_raises() -> None:
    counts: Counter[Any] = Counter({5: 1})
    module = nn.Linear(2, 2)
    weight = module.weight

    def run(x: Tensor) -> None:
        counts[x.argmax().item()] += 1
        module.weight.data.zero_()
        raise KeyError("of the program's")

    with pytest.raises(KeyError, match="of the program's"):
        capture(run, (torch.ones(2),))
    assert counts == {5: 1} and module.weight is weight and bool(weight.any())


def test_functions_are_called_by_the_names_of_their_arguments() -> None:
    functional: Any = torch.nn.functional
    runs: tuple[Callable[[Any], Any], ...] = (
        lambda x: torch.select(input=x, dim=0, index=1),
        lambda x: functional.batch_norm(x, running_mean=torch.zeros(2), running_var=torch.ones(2)),
    )
    for run in runs:
        x = torch.arange(6.0).reshape(3, 2)
        assert torch.equal(capture(run, (x,))(x), run(x))


def test_truth_is_asked_by_the_name_of_the_argument() -> None:
    program = capture(lambda x, flag: x * 2 if torch.is_nonzero(input=flag) else x, (torch.ones(2), torch.tensor(1)))
    assert torch.equal(program(torch.ones(2), torch.tensor(1)), torch.full((2,), 2.0))
    assert torch.equal(program(torch.ones(2), torch.tensor(0)), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_the_truth_of_a_number_makes_two_variants(dtype: torch.dtype) -> None:
    """Whatever the number is: ten sums, two ways."""

    def branch(x: Tensor) -> Tensor:
        return x * 2 if x.sum() else x - 1

    program = capture(branch, (torch.ones(2, dtype=dtype),))
    for number in range(10):
        x = torch.full((2,), number, dtype=dtype)
        torch.testing.assert_close(program(x), branch(x))
    assert len(program.variants) == 2
