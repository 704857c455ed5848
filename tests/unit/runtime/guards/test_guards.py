"""What a captured program takes for granted of its calls: other calls are refused with the reason, or captured anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from functionalize import InputMismatchError, NotCapturedWarning, UnsupportedProgramError, capture

Context = Callable[[], contextlib.AbstractContextManager[Any]]


def assert_same(want: Any, got: Any) -> None:
    torch.testing.assert_close(got, want, check_stride=True, rtol=0, atol=0)


@contextlib.contextmanager
def setting(setter: Callable[[Any], Any], value: Any, usual: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(usual)


@dataclass(frozen=True)
class Case:
    """A program, the inputs of its capture, those of a call, and what the refusal of that call says."""

    program: Callable[..., Any]
    captured: Callable[[], tuple[Any, ...]]
    called: Callable[[], tuple[Any, ...]]
    says: str
    around: Context = field(default=contextlib.nullcontext)


def bump(x: Tensor) -> Tensor:
    return x.contiguous().add_(1)


def _same(make: Callable[[], tuple[Any, ...]], **rest: Any) -> dict[str, Any]:
    return {"captured": make, "called": make, **rest}


def _ones() -> tuple[Tensor]:
    return (torch.ones(2, 2),)


CASES = {
    "strides": Case(
        lambda x: x.flatten(), lambda: (torch.zeros(2, 3),), lambda: (torch.arange(6.0).view(3, 2).t(),), "strides"
    ),
    "expanded": Case(bump, lambda: (torch.zeros(1).expand(3),), lambda: (torch.zeros(3),), "strides"),
    "a transpose that is copied": Case(bump, lambda: (torch.zeros(2, 2),), lambda: (torch.zeros(2, 2).t(),), "strides"),
    "memory format": Case(
        lambda x: x.relu(),
        lambda: (torch.ones(1, 2, 3, 3),),
        lambda: (torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),),
        "strides",
    ),
    "storage offset": Case(
        lambda x: torch.as_strided(x, (2,), (1,), 0),
        lambda: (torch.arange(5.0)[0:3],),
        lambda: (torch.arange(5.0)[2:5],),
        "storage offset",
    ),
    "conjugate bit": Case(
        lambda x: x * 2 if x.is_conj() else x * 3,
        lambda: (torch.tensor([1 + 2j]),),
        lambda: (torch.tensor([1 + 2j]).conj(),),
        "conjugate bit",
    ),
    "dtype": Case(torch.sin, lambda: (torch.ones(2),), lambda: (torch.ones(2, dtype=torch.float64),), "dtype"),
    "a number of another type": Case(
        lambda x, n: x * n, lambda: (torch.ones(2, dtype=torch.int64), 1), lambda: (torch.ones(2).long(), 1.0), "nested"
    ),
    "a number": Case(lambda x, n: x * n, lambda: (torch.ones(2), 2), lambda: (torch.ones(2), 3), "`n` is 3, and was 2"),
    "autocast": Case(
        lambda x: x @ x, **_same(_ones, says="autocast on cpu", around=lambda: torch.autocast("cpu", torch.bfloat16))
    ),
    "inference mode": Case(lambda x: x + 1, **_same(_ones, says="inference mode", around=torch.inference_mode)),
    "default dtype": Case(
        lambda x: x + torch.ones(2),
        **_same(
            _ones,
            says="default dtype",
            around=lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        ),
    ),
    "deterministic algorithms": Case(
        lambda x: x + torch.are_deterministic_algorithms_enabled(),
        **_same(
            _ones,
            says="deterministic algorithms",
            around=lambda: setting(torch.use_deterministic_algorithms, True, False),
        ),
    ),
}


@pytest.mark.parametrize("calls", (0, 2), ids=["first", "third"])  # later ones are checked in another way
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_another_call_is_refused_and_changes_nothing_or_is_captured_anew(case: Case, calls: int) -> None:
    program = capture(case.program, case.captured())
    for _ in range(calls):
        assert_same(case.program(*case.captured()), program(*case.captured()))
    given, untouched = case.called(), case.called()
    with case.around(), pytest.raises(InputMismatchError, match=case.says):
        program(*given)
    assert_same(untouched, given)
    assert_same(case.program(*case.captured()), program(*case.captured()))  # goes on

    again = capture(case.program, case.captured(), on_guard_failure="recapture")
    for _ in range(2):
        mine, eager = case.called(), case.called()
        with case.around():
            got, want = again(*mine), case.program(*eager)
        assert_same(want, got)
        assert_same(eager, mine)


def test_a_default_device_is_a_mode() -> None:
    program = capture(lambda x: x + torch.ones(2), (torch.ones(2),))
    with torch.device("meta"), pytest.raises(InputMismatchError, match=r"default device is .*meta"):
        program(torch.ones(2, device="cpu"))


def test_another_generator_is_refused_and_none_draws() -> None:
    def run(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(3, generator=generator)

    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    program = capture(run, (torch.ones(3), first))
    before = first.get_state()
    with pytest.raises(InputMismatchError, match="the argument `generator`"):
        program(torch.ones(3), second)
    assert torch.equal(first.get_state(), before)
    assert torch.equal(program(torch.ones(3), first), run(torch.ones(3), torch.Generator().manual_seed(1)))


def test_a_subclass_is_refused() -> None:
    program = capture(lambda x: x * 2, (torch.ones(3),))
    with pytest.raises(InputMismatchError, match=r"class of the input `x` is .*TwoTensor"):
        program(TwoTensor(torch.ones(3), torch.ones(3)))


class Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.scale, self.names = torch.nn.Dropout(0.5), 2, ["a"]

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(x)
        return dropped * self.scale + len(self.names)


def test_python_state_that_changes_the_graph_is_refused() -> None:
    changes: dict[str, Callable[[Noisy], object]] = {
        "drop.training": lambda module: module.eval(),
        "names": lambda module: module.names.append("b"),
        "_forward_hooks": lambda module: module.register_forward_hook(lambda module, args, output: output + 1),
    }
    for name, change in changes.items():
        module, x = Noisy(), torch.ones(4)
        program, again = capture(module, (x,)), capture(module, (x,), on_guard_failure="recapture")
        change(module)
        with pytest.raises(InputMismatchError, match=rf"`{name}`|`training`|`len\({name}\)`"):
            program(x)
        torch.manual_seed(0)
        want = module(x)
        torch.manual_seed(0)
        assert torch.equal(again(x), want), name


def test_a_number_that_has_changed_is_an_input() -> None:
    module, x = Noisy().eval(), torch.ones(4)
    program = capture(module, (x,))
    assert "scale" not in [spec.target for spec in program.signature.input_specs]
    for scale in (2, 3, 7, -1, 2):
        module.scale = scale
        assert torch.equal(program(x), module(x))
    assert len(program.variants) == 2
    module.scale = 0.5  # type: ignore[assignment]
    assert torch.equal(program(x), module(x))


def test_state_that_leaves_the_graph_as_it_is_is_followed() -> None:
    module, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    program = capture(module, (x,))
    module.eval()
    assert torch.equal(program(x), module(x))


FACTOR = 2


def test_variables_of_functions_are_guarded() -> None:
    global FACTOR
    flag, table = True, {"shift": 1}

    def run(x: Tensor) -> Tensor:
        return (x * FACTOR if flag else -x) + table["shift"]

    x = torch.ones(2)
    program = capture(run, (x,), on_guard_failure="recapture")
    strict = capture(run, (x,))
    flag = False
    with pytest.raises(InputMismatchError, match="`flag` is False, and was True"):
        strict(x)
    assert torch.equal(program(x), run(x))
    flag, table["shift"] = True, 5
    assert torch.equal(program(x), run(x))
    FACTOR = 3
    try:
        assert torch.equal(program(x), run(x))
    finally:
        FACTOR = 2


def test_a_log_is_no_guard() -> None:
    calls: list[int] = []

    def run(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return x + 1

    program = capture(run, (torch.ones(2),))
    assert torch.equal(program(torch.ones(2)), torch.full((2,), 2.0)) and calls == [0]


def test_grad_mode_and_requires_grad_are_followed() -> None:
    def run(x: Tensor) -> Tensor:
        return x * 2 if torch.is_grad_enabled() else x * 3

    program = capture(run, (torch.ones(2),))
    with torch.no_grad():
        assert torch.equal(program(torch.ones(2)), torch.full((2,), 3.0))
    x = torch.ones(2, requires_grad=True)
    program(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2,), 2.0))
    assert not program(torch.ones(2)).requires_grad


def test_arguments_are_told_apart_by_name() -> None:
    def run(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + 2 * y + 3 * z

    x, y, z = torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([100.0])
    program = capture(run, (x,), {"z": z, "y": y})
    for got in (program(x, y=y, z=z), program(x, y, z), program(z=z, x=x, y=y), program(x, y, z=z)):
        assert torch.equal(got, run(x, y, z))
    for args, kwargs, says in (
        ((x, y), {}, "without z"),
        ((x,), {"y": y, "z": z, "w": z}, "with w"),
        ((x, y, z, z), {}, "more arguments"),
    ):
        with pytest.raises(InputMismatchError, match=says):
            program(*args, **kwargs)


def test_a_mode_that_the_program_leaves_is_left_by_a_call() -> None:
    def run(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    x = torch.ones(2, requires_grad=True)
    try:
        program = capture(run, (x,))
        assert torch.is_grad_enabled()
        got = program(x)
        assert not torch.is_grad_enabled() and not got.requires_grad
    finally:
        torch.set_grad_enabled(True)


def test_programs_are_kept_and_bounded() -> None:
    runs: SimpleQueue[torch.Size] = SimpleQueue()  # by captures: a list would be added to by calls as well

    def run(x: Tensor) -> Tensor:
        runs.put(x.size())
        return x * 2

    program = capture(run, (torch.ones(1, 2),), on_guard_failure="recapture", cache_size=3)
    for _ in range(3):
        for size in (2, 3, 4):
            assert torch.equal(program(torch.ones(1, size)), torch.full((1, size), 2.0))
    assert runs.qsize() == 3
    program(torch.ones(1, 5))
    program(torch.ones(1, 4))
    assert runs.qsize() == 4
    with pytest.raises(ValueError, match="cache_size must be at least 1"):
        capture(run, (torch.ones(2),), cache_size=0)


def test_nan_among_the_arguments_is_itself() -> None:
    program = capture(lambda x, fill: x.masked_fill(x > 0, fill), (torch.ones(2), float("nan")))
    assert program(torch.ones(2), float("nan")).isnan().all()


def test_guards_are_data() -> None:
    program = capture(Noisy(), (torch.ones(4),))
    listed = [str(guard) for guard in program.guards]
    for line in (
        "the call: grad mode True",
        "the call: autocast on cpu None",
        "the call: cache of autocast True",
        "`drop.training`: value True",
        "`scale`: value 2",
        "the input `x`: strides (1,)",
        "the input `x`: dtype torch.float32",
    ):
        assert line in listed


def test_guards_of_a_module_are_of_what_the_capture_met() -> None:
    """A missing bias and a tuple of numbers are attributes as others are, also where one asks after they changed."""
    conv = torch.nn.Conv2d(1, 1, 2, bias=False)
    captured = capture(conv, (torch.ones(1, 1, 3, 3),))
    conv.padding, conv.training = (1, 1), False
    values = {guard.subject: str(guard.expected) for guard in captured.guards if guard.property == "value"}
    assert {values["`padding`"], values["`bias`"], values["`training`"]} == {"tuple(0, 0)", "None", "True"}
    assert values["`_forward_hooks`"] == "OrderedDict()"


def test_a_call_that_was_written_down_does_what_the_first_did() -> None:
    """From the second call on one function checks, computes and writes back."""
    cache, x = torch.zeros(4), torch.ones(4)

    def step(x: Tensor, *, scale: int) -> tuple[Tensor, Tensor]:
        return cache.mul_(scale).add_(x), x.mul_(2) - 1

    own = torch.zeros(4)
    program = capture(step, (x,), {"scale": 3})
    for scale in (3, 3, 3):
        version = x._version
        want = own.mul_(scale).add_(x)
        got, less = program(x, scale=scale)
        assert got is cache and x._version == version + 1
        assert_same((want, x - 1), (cache, less))
    with pytest.raises(InputMismatchError, match="`scale` is 4, and was 3"):
        program(x, scale=4)


def test_results_of_another_layout_than_before_are_laid_out_as_in_eager() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.nonzero(x)

    program = capture(run, (torch.ones(3),), remove="mutations")
    for values in ([1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]):
        x = torch.tensor(values)
        assert_same(run(x), program(x))


def test_a_product_of_views_is_that_of_eager_with_views_removed() -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        view = x.permute(0, 2, 1)
        return torch.bmm(view, w.unsqueeze(0).expand(2, 3, 5)), view  # one copy is a result as well

    inputs = torch.randn(2, 3, 4), torch.randn(3, 5)
    program = capture(run, inputs)
    for _ in range(3):
        got = program(*inputs)
        assert_same(run(*inputs), got)
        assert got[1].data_ptr() == inputs[0].data_ptr()


def test_a_hook_that_came_later_is_noticed_where_the_program_computes_gradients() -> None:
    layer = torch.nn.Linear(2, 1)

    def step(x: Tensor) -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    program = capture(step, (torch.ones(3, 2),))
    program(torch.ones(3, 2))
    handle = layer.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(InputMismatchError, match=r"the state .*weight.* has hooks on its gradient, and had none when"):
        program(torch.ones(3, 2))
    handle.remove()
    program(torch.ones(3, 2))
    assert_same(torch.full((1, 2), 3.0), layer.weight.grad)


def test_whether_an_input_is_a_view_is_a_guard_where_the_program_asks() -> None:
    program = capture(lambda x: x + int(x._is_view()), (torch.ones(2),))
    assert_same(torch.ones(2), program(torch.ones(2)))
    with pytest.raises(InputMismatchError, match="the input `x` is a view, and was not when"):
        program(torch.ones(3)[1:])
    assert_same(torch.full((2,), 2.0), capture(lambda x: x * 2, (torch.ones(2),))(torch.ones(3)[1:]))


X = torch.zeros(2, 3)
SENTENCES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "the strides of the input `x` are (1, 2), and were (3, 1)": (torch.sin, (X,), (torch.zeros(3, 2).t(),)),
    "the size of the input `x` is (3, 2), and was (2, 3)": (torch.sin, (X,), (torch.zeros(3, 2),)),
    "the dtype of the input `x` is torch.int64, and was torch.float32": (torch.sin, (X,), (X.long(),)),
    "the storage offset of the input `x` is 3, and was 0": (
        lambda x: x + x.storage_offset(),
        (X[0],),
        (X[1],),
    ),
    "the input `x` is a view, and was not": (lambda x: x + int(x._is_view()), (X,), (torch.zeros(3, 2).view(2, 3),)),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentences(sentence: str) -> None:
    func, before, now = SENTENCES[sentence]
    program = capture(lambda x: func(x), before)
    with pytest.raises(InputMismatchError) as caught:
        program(*now)
    assert str(caught.value).startswith(f"{sentence} when the program was captured\n")


def test_sentences_of_the_number_of_dimensions_and_of_modes() -> None:
    program = capture(lambda x: x * 2, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    with pytest.raises(
        InputMismatchError, match=r"size of the input `x` is of 1 dimension, and was of 2 dimensions when"
    ):
        program(X[0])
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(InputMismatchError, match=r"^the use of deterministic algorithms is"):
            program(X)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("write", [lambda x, part: part.zero_(), lambda x, part: x.zero_()], ids=["view", "tensor"])
def test_whether_an_input_is_a_view_is_a_guard_where_it_is_told_to_require_gradients(write: Any) -> None:
    """Views of it, once their memory is written, are to autograd views of what it is a view of."""

    def run(x: Tensor) -> Tensor:
        x.requires_grad_()
        part = x[:1]
        with torch.no_grad():
            write(x, part)
        return part

    def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
        return torch.autograd.grad(function(x).sum(), x, allow_unused=True)[0]

    assert gradient(run, torch.ones(2)) is not None
    assert gradient(run, torch.ones(3)[1:]) is None
    program = capture(run, (torch.ones(2),))
    assert gradient(program, torch.ones(2)) is not None
    with pytest.raises(InputMismatchError, match="the input `x` is a view, and was not when"):
        program(torch.ones(3)[1:])
    program = capture(lambda x: x.requires_grad_() * 2, (torch.ones(2),))
    assert program(torch.ones(3)[1:]).requires_grad


def test_a_call_that_cannot_be_captured_anew_is_eagers() -> None:
    """Where an operator refuses the fake tensors of a call, the program is run: it mostly raises."""

    def least(x: Tensor) -> Tensor:
        return x.mul_(2).amin(1)

    program = capture(least, (torch.ones(2, 3),), on_guard_failure="recapture")
    x = torch.ones(2, 2, 0)
    with pytest.raises(IndexError, match="reduction dim 2"):
        torch.amin(x, 2)
    with pytest.raises(IndexError, match="reduction dim 1 to have non-zero size"):
        program(torch.ones(2, 0))

    def size(x: Tensor) -> Tensor:
        return torch.abs(x, out=x)  # the meta kernel takes no complex `out=`

    program = capture(size, (torch.ones(3),), on_guard_failure="recapture")
    numbers = torch.full((3,), 3 + 4j)
    with pytest.warns(NotCapturedWarning, match="could not be captured"):
        assert program(numbers) is numbers
    assert torch.equal(numbers, torch.full((3,), 5 + 0j))
    program = capture(size, (torch.ones(3),))
    with pytest.raises(InputMismatchError, match="the dtype of the input `x`"):
        program(numbers)


class Retrying(torch.nn.Module):
    """Catches what an operator raises by the data, when it has written state and drawn random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.tried: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.nn.functional.dropout(x, 0.3)
        try:
            self.tried.append("as it is")
            found: Tensor = torch.linalg.cholesky(x)
        except RuntimeError:
            self.tried.append("with more on its diagonal")
            found = torch.linalg.cholesky(x + 50 * torch.eye(2)) + torch.rand(2, 2)
        return found


@pytest.mark.parametrize("requires", [False, True])
def test_what_an_operator_raises_by_the_data_is_raised_in_the_program(requires: bool) -> None:
    def outcome(module: Any, x: Tensor, number: int) -> Any:
        torch.manual_seed(number)
        try:
            return module(x), torch.get_rng_state()
        except RuntimeError as error:
            return str(error), torch.get_rng_state()

    eager, module, good = Retrying(), Retrying(), torch.tensor([[3.0, 1.0], [1.0, 4.0]], requires_grad=requires)
    captured = capture(module, (good,))
    for number, x in enumerate((good, good, -good, good, -good, -good, good)):
        want, got = outcome(eager, x, number), outcome(captured, x, number)
        assert (want[0] == got[0]) if isinstance(want[0], str) else torch.equal(want[0], got[0])
        assert_same([want[1], eager.calls], [got[1], module.calls])
        assert eager.tried == module.tried
    assert len(captured.variants) <= 2


def at_index(x: Tensor, n: Tensor) -> Tensor:
    try:
        return x[n]
    except IndexError:
        return x[:1]


def at_number(x: Tensor, n: Tensor) -> Tensor:
    try:
        return x[n.item()]  # type: ignore[index]
    except IndexError:
        return x[0]


def at_one_that_there_may_be(x: Tensor, n: Tensor) -> Tensor:
    chosen = x[x > n]
    try:
        return chosen[torch.tensor([1])]
    except IndexError:
        return chosen * 2


def embedded(x: Tensor, n: Tensor) -> Tensor:
    try:
        return torch.nn.functional.embedding(n, x[:, None])
    except:  # noqa: E722
        return x


@pytest.mark.parametrize("program", [at_index, at_number, at_one_that_there_may_be, embedded])
def test_an_index_out_of_range_is_caught(program: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.arange(3.0)
    captured = capture(program, (x, torch.tensor(0)))
    for number in (0, 1, 7, 2, 1):
        assert_same(program(x, torch.tensor(number)), captured(x, torch.tensor(number)))


def test_whether_inputs_in_one_memory_are_views_of_one_tensor_is_a_guard() -> None:
    """A write to one of them changes the gradients of the other, else it does not."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        y.fill_(1)
        return x * 2

    def arguments(views: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        leaf, memory = torch.ones(2, requires_grad=True), torch.ones(2)
        if views:
            memory.mul_(leaf)
            return leaf, (memory[:], memory.view(2))
        x, y = (torch.empty(0).set_(memory.untyped_storage(), 0, (2,), (1,)).mul_(leaf) for _ in range(2))
        return leaf, (x, y)

    def gradient(function: Callable[..., Tensor], views: bool) -> float:
        leaf, given = arguments(views)
        return float(torch.autograd.grad(function(*given).sum(), leaf)[0].sum())

    program = capture(run, arguments(False)[1])
    assert [gradient(run, False), gradient(run, True), gradient(program, False)] == [4, 0, 4]
    with pytest.raises(InputMismatchError, match=r"`y` and the input `x` share memory \(.*, views of one tensor\)"):
        gradient(program, True)


def test_attributes_of_tensors_are_read_and_compared() -> None:
    layer = torch.nn.Linear(2, 2)
    weight: Any = layer.weight
    weight.decay = 0.5
    weight.ema = torch.zeros(2, 2)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            weight.ema.mul_(weight.decay).add_(1)
        return x * weight.ema * getattr(x, "scale", 1)  # type: ignore[no-any-return]

    def scaled(scale: int | None) -> Any:
        x: Any = torch.ones(2, 2)
        if scale is not None:
            x.scale = scale
        return x

    program, again = capture(run, (scaled(None),)), capture(run, (scaled(2),), on_guard_failure="recapture")
    assert "the input `x`: attribute `scale` not there" in map(str, program.guards)
    with pytest.raises(InputMismatchError, match="the attribute `scale` of the input `x` is 3, and was not there"):
        program(scaled(3))
    assert_same(torch.zeros(2, 2), weight.ema)
    for scale, mean in ((2, 1.0), (None, 1.5), (3, 1.75)):
        assert_same(torch.full((2, 2), mean * (scale or 1)), again(scaled(scale)))
    weight.ema, weight.decay = torch.ones(2, 2), 2.0
    assert_same(torch.full((2, 2), 6.0), again(scaled(2)))


def test_attributes_of_tensors_that_the_program_does_not_read_are_not_compared() -> None:
    program = capture(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
    assert not [guard for guard in program.guards if "attribute" in str(guard)]


def test_results_of_enable_grad_require_gradients_under_no_grad() -> None:
    @torch.enable_grad()
    def run(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        program = capture(run, (x,))
        y = program(x)
    assert y.requires_grad
    assert_same(torch.full((2,), 2.0), torch.autograd.grad(y.sum(), x)[0])


def test_whether_an_argument_is_a_parameter_is_compared_where_the_program_names_the_class() -> None:
    def run(x: Tensor) -> Tensor:
        return x * 2 if isinstance(x, torch.nn.Parameter) else x * 3

    plain, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    program, again = capture(run, (plain,)), capture(run, (plain,), on_guard_failure="recapture")
    with pytest.raises(InputMismatchError, match=r"the kind of the input `x` is <class '.*\.Parameter'>"):
        program(parameter)
    for x in (parameter, plain, parameter):
        assert_same(run(x), again(x))


def test_gradients_left_at_inputs_that_required_none_are_added_to_those_there() -> None:
    def program(x: Tensor) -> Tensor:
        part = x.select(0, 1)
        x.requires_grad_()
        part = x.select(0, 1)
        part.sum().backward()
        return x

    def given(gradient: bool) -> Tensor:
        x = torch.ones(2, 2)
        x.grad = torch.full((2, 2), 0.5) if gradient else None
        return x

    captured = capture(program, (given(False),), on_guard_failure="recapture")
    for gradient in (True, False, True):
        expected, found = program(given(gradient)).grad, captured(given(gradient)).grad
        assert expected is not None and found is not None and torch.equal(expected, found)


def collecting(**kwargs: Tensor) -> dict[str, Tensor]:
    return {name: value * number for number, (name, value) in enumerate(kwargs.items())}


class Collecting(torch.nn.Module):
    def forward(self, x: Tensor, *, y: Tensor, **kwargs: Tensor) -> Any:
        return x - y, collecting(**kwargs)


@pytest.mark.parametrize("program", [collecting, Collecting()])
def test_the_order_of_collected_arguments_is_compared(program: Any) -> None:
    x, y = torch.ones(1), torch.full((1,), 5.0)
    given = {} if program is collecting else {"y": y, "x": x}
    named = {} if program is collecting else {"x": x, "y": y}
    for how in ("raise", "recapture"):
        captured = capture(program, (), {**named, "a": x, "b": y}, on_guard_failure=how)
        for _ in range(2):
            assert_same(program(a=x, b=y, **given), captured(a=x, **given, b=y))
            if how == "raise":
                with pytest.raises(InputMismatchError, match="called with b, a in this order"):
                    captured(**given, b=y, a=x)
            else:
                assert_same(program(b=y, a=x, **given), captured(**given, b=y, a=x))


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_how_a_gradient_lies_is_compared_where_the_program_sees_it() -> None:
    def world() -> tuple[Tensor, Any]:
        weight = torch.ones(2, 2, requires_grad=True)

        def step(x: Tensor) -> Any:
            (x @ weight).sum().backward()
            gradient: Any = weight.grad
            return gradient.flatten(), gradient.stride(), gradient.contiguous().add_(1), gradient.storage_offset()

        return weight, step

    (mine, step), (its, eager) = world(), world()
    mine.grad = torch.ones(2, 2)
    captured = capture(step, (torch.ones(2, 2),))
    lies: list[Callable[[], torch.Tensor]] = [
        lambda: torch.ones(2, 2),
        lambda: torch.arange(4.0).view(2, 2).t(),
        lambda: torch.arange(6.0)[2:].view(2, 2),
    ]
    for make in [*lies, *lies]:
        mine.grad, its.grad = make(), make()
        assert_same(eager(torch.zeros(2, 2)), captured(torch.zeros(2, 2)))
        assert_same(its.grad, mine.grad)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_how_a_gradient_lies_does_not_matter_where_it_is_added_to() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    captured = capture(lambda x: (x @ weight).sum().backward(), (torch.ones(2, 2),))
    for gradient in (None, torch.ones(2, 2), torch.ones(2, 2).t(), torch.ones(3, 2).t()[:, 1:]):
        weight.grad = gradient
        captured(torch.ones(2, 2))
        torch.testing.assert_close(weight.grad, torch.full((2, 2), 2.0 if gradient is None else 3.0))
    assert weight.grad is gradient
    assert len(captured.variants) <= 2  # with a gradient that is supposed, and one that is there


@pytest.mark.parametrize("how", ["raise", "recapture"])
def test_which_memory_a_gradient_shares_is_compared(how: str) -> None:
    def world() -> tuple[list[Tensor], Callable[[Tensor], Any]]:
        weight, other = (torch.ones(3, requires_grad=True) for _ in range(2))
        bucket = torch.zeros(3)

        def step(x: Tensor) -> Any:
            (weight * x).sum().backward()
            return bucket * 1, other.detach() * 1

        return [weight, other, bucket], step

    placed: list[Callable[[Tensor, Tensor], Tensor | None]] = [
        lambda other, bucket: bucket,
        lambda other, bucket: None,
        lambda other, bucket: torch.zeros(3),
        lambda other, bucket: bucket[:],
        lambda other, bucket: other.detach(),
    ]
    for first in placed:
        (mine, step), (its, eager) = world(), world()
        mine[0].grad = first(*mine[1:])
        captured = capture(step, (torch.ones(3),), on_guard_failure=how)
        for place in [first, *placed]:
            mine[0].grad, its[0].grad = place(*mine[1:]), place(*its[1:])
            for _ in range(2):
                assert_same(eager(torch.ones(3)), captured(torch.ones(3)))
                assert_same([*its, its[0].grad], [*mine, mine[0].grad])


def test_which_memory_a_gradient_shares_does_not_matter_where_the_program_drops_it() -> None:
    weight, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    bucket = torch.zeros(6)

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        (weight * other * x).sum().backward()
        return bucket + 1

    weight.grad, other.grad = torch.zeros(3), torch.zeros(3)
    captured = capture(step, (torch.ones(3),))
    captured(torch.ones(3))
    for gradient in (bucket[:3], bucket[3:], torch.zeros(3)):
        weight.grad = gradient
        assert_same(torch.ones(6), captured(torch.ones(3)))
    assert len(captured.variants) == 1


def test_zeros_in_state_have_signs() -> None:
    class Owner:
        n = 0.0

    def step(owner: Any, x: Tensor) -> Tensor:
        owner.n = -owner.n
        return x * 0 + 1 / torch.full((), owner.n)

    mine, its = Owner(), Owner()
    captured = capture(lambda x: step(mine, x), (torch.ones(1),), on_guard_failure="recapture")
    for _ in range(4):
        assert_same(step(its, torch.ones(1)), captured(torch.ones(1)))


@pytest.mark.parametrize("ask", [bool, len, lambda state: any(True for _ in state)])
def test_an_emptied_state_of_an_optimizer_is_noticed(ask: Callable[[Any], Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()

    def step(x: Tensor) -> Tensor:
        return x * (2 if ask(optimizer.state) else 3)

    captured = capture(step, (torch.ones(1),), on_guard_failure="recapture")
    assert_same(torch.full((1,), 2.0), captured(torch.ones(1)))
    assert_same(torch.full((1,), 2.0), captured(torch.ones(1)))
    optimizer.state.clear()
    assert_same(torch.full((1,), 3.0), captured(torch.ones(1)))
    assert not optimizer.state


def _clone_that_requires_gradients(x: Tensor) -> Tensor:
    w = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad((w * w * x.detach()).sum(), w)
    return gradient


def _parameter_that_is_written(x: Tensor) -> Tensor:
    w = torch.nn.Parameter(x.detach().clone())
    with torch.no_grad():
        w[0].zero_()
        w.sub_(0.5)
    w.data.mul_(2)
    (w * w).sum().backward()
    assert w.grad is not None
    return w.grad


def _step_of_an_optimizer(x: Tensor) -> Tensor:
    w = torch.nn.Parameter(torch.ones(x.shape[1]))
    optimizer = torch.optim.SGD([w], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (x.detach() * w).pow(2).sum().backward()
        optimizer.step()
    return w.detach()


def _views_of_a_leaf(x: Tensor) -> Tensor:
    w = x.detach().clone()
    row = w[1]
    w.requires_grad_()
    with torch.no_grad():
        w.mul_(2)
    return w.detach() + row


def _hook_on_a_view_that_is_written(x: Tensor) -> Tensor:
    w = x.detach().clone().requires_grad_()
    y = w * 1
    row = y[1]
    row.register_hook(lambda gradient: gradient * 2)
    row.mul_(3)
    (gradient,) = torch.autograd.grad((y * y).sum(), w)
    return gradient


def _turned_in_place(x: Tensor) -> Tensor:
    w = x.detach().clone().requires_grad_()
    y = w * 1
    y.t_()
    (gradient,) = torch.autograd.grad((y * y).sum(), w)
    return gradient


def _asks_its_own(x: Tensor) -> Tensor:
    y, w = x.detach().clone(memory_format=torch.contiguous_format), torch.ones(2, requires_grad=True)
    z = y[1:]
    y.add_(1)
    asked = [y._version, y._is_view(), z._base is y, z.storage_offset(), y.untyped_storage().nbytes(), y.stride(0)]
    asked += [w.is_leaf, (w * 2).grad_fn is not None, w.grad is None, y.is_contiguous(), y.is_inference()]
    (y * 2).detach_()
    return y * torch.tensor([float(answer) for answer in asked]).sum()


_MEMORY = torch.arange(48.0).view(8, 6)
OWN = [
    _clone_that_requires_gradients,
    _parameter_that_is_written,
    _step_of_an_optimizer,
    _views_of_a_leaf,
    _hook_on_a_view_that_is_written,
    _turned_in_place,
    _asks_its_own,
]


def _of_another_version() -> Tensor:
    return torch.ones(4, 6).add_(1).add_(1)


def _with_hooks() -> Tensor:
    x = torch.ones(4, 6, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 3)
    return x


def _with_a_gradient() -> Tensor:
    x = torch.ones(4, 6, requires_grad=True)
    x.sum().backward()
    return x


GIVEN: dict[str, Callable[[], Tensor]] = {
    "a slice": lambda: _MEMORY[2:6],
    "a slice of columns": lambda: _MEMORY.t()[:4, 1:7],
    "transposed": lambda: torch.arange(24.0).view(6, 4).t(),
    "written before": _of_another_version,
    "computed": lambda: torch.ones(4, 6, requires_grad=True) * 2,
    "with hooks": _with_hooks,
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("program", OWN)
def test_what_a_program_asks_of_its_own_tensors_says_nothing_about_inputs(
    program: Callable[[Tensor], Tensor], given: str
) -> None:
    found, wanted = capture(program, (GIVEN[given](),))(GIVEN[given]()), program(GIVEN[given]())
    assert_same(wanted, found)
    assert found._is_view() is wanted._is_view()


@pytest.mark.parametrize("program", OWN)
def test_calls_of_such_programs_may_pass_other_tensors_than_the_capture(program: Callable[[Tensor], Tensor]) -> None:
    plain: list[Callable[[], Tensor]] = [lambda: torch.ones(4, 6), _of_another_version, lambda: _MEMORY.clone()[1:5]]
    captured = capture(program, (_MEMORY[2:6],))
    for make in plain:
        assert_same(program(make()), captured(make()))
    requiring: list[Callable[[], Tensor]] = [GIVEN["computed"], _with_hooks, _with_a_gradient]
    captured = capture(program, (torch.ones(4, 6, requires_grad=True),))
    for make in requiring:
        assert_same(program(make()), captured(make()))


QUESTIONS: dict[str, tuple[Callable[[Tensor], Any], Callable[[], Tensor], str]] = {
    "storage_offset": (lambda x: x.storage_offset(), lambda: _MEMORY[2:6], "storage offset"),
    "of a view": (lambda x: x[1:].storage_offset(), lambda: _MEMORY[2:6], "storage offset"),
    "_version": (lambda x: x._version, _of_another_version, "version"),
    "_version of a view": (lambda x: x.detach()[1]._version, _of_another_version, "version"),
    "bytes": (lambda x: x.untyped_storage().nbytes(), lambda: _MEMORY[:4], "storage size in bytes"),
    "is_view": (lambda x: x._is_view(), lambda: _MEMORY[:4], "is a view"),
    "base": (lambda x: x[0]._base is x, lambda: _MEMORY[:4], "is a view"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_a_program_asks_of_one_input_is_compared_of_that_input(question: str) -> None:
    ask, other, says = QUESTIONS[question]

    def program(x: Tensor, y: Tensor) -> Tensor:
        return x + y + float(ask(x))

    captured = capture(program, (torch.ones(4, 6), torch.ones(4, 6)))
    assert_same(program(torch.ones(4, 6), other()), captured(torch.ones(4, 6), other()))
    with pytest.raises(InputMismatchError, match=rf"`x`[^`]*{says}|{says}[^`]*`x`"):
        captured(other(), torch.ones(4, 6))
    if says != "is a view":
        again = capture(program, (torch.ones(4, 6), torch.ones(4, 6)), on_guard_failure="recapture")
        assert_same(program(other(), torch.ones(4, 6)), again(other(), torch.ones(4, 6)))


def test_leaves_that_a_function_of_autograd_leads_to_are_compared() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        function = (x * 2).grad_fn
        assert function is not None
        return y * (type(function.next_functions[0][0]).__name__ == "AccumulateGrad")

    leaf, computed = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 1
    captured = capture(program, (leaf, leaf.detach().clone().requires_grad_()))
    assert_same(program(leaf, computed), captured(leaf, computed))
    assert_same(program(computed, leaf), captured(computed, leaf))


@pytest.mark.parametrize("ask", [lambda x: x.detach_(), lambda x: x._base.sum(), lambda x: x._is_view()])
def test_a_question_that_cannot_be_answered_names_its_line(ask: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedProgramError, match=r"whether `x` is a view[\s\S]*test_guards.py:\d+ in <lambda>"):
        capture(lambda x: x * 2 + 0 * float(ask(x) is None), (_MEMORY[2:6],))
