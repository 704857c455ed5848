"""What cannot be captured is refused at the capture or the call: by name, with the line, the reason and a way out."""

from __future__ import annotations

import copy
import io
import pickle
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _disable_current_modes

from functionalize import InputMismatchError, UnsupportedProgramError, capture

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(prototype|torch.jit|nested tensors|NJT|is_fx_tracing|not recommended):UserWarning",
    "ignore:.*(torch.jit).*:DeprecationWarning",
)


class Named(torch.Tensor):
    """A subclass that only Python functions see."""


def two() -> Any:
    return TwoTensor(torch.ones(2, 3), torch.ones(2, 3))


def linear(weight: Tensor) -> nn.Module:
    module = nn.Linear(3, 3)
    module.weight = nn.Parameter(weight)
    return module


class Holder(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def drawn_twice(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        y = x + torch.rand(3)
    return y + torch.rand(3)


def with_another_state(x: Tensor) -> Tensor:
    torch.set_rng_state(torch.roll(torch.get_rng_state(), 8))
    return x + torch.rand(3)


def seeded(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    generator.manual_seed(5)
    return lambda x: x + torch.rand(3, generator=generator.manual_seed(5))


def with_attribute(tensor: Tensor, name: str, value: Any) -> Tensor:
    setattr(tensor, name, value)
    return tensor


CONSTANTS: dict[str, Any] = {"named": torch.ones(3).as_subclass(Named)}
X = torch.ones(2, 3)
TEXTS: list[str] = []
BY_TEXT: dict[str, int] = {}


def differentiated_scan(x: Tensor) -> Tensor:
    def body(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = carry * x + row
        return new, new.clone()

    return scan(body, torch.zeros(3), torch.ones(4, 3))[0]  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "input": (lambda: lambda x: x * 2, lambda: X.as_subclass(Named), "`x` is a Named"),
    "nested input": (lambda: lambda x: x * 2, lambda: torch.nested.nested_tensor([X, X]), "`x` is a nested tensor"),
    "mkldnn input": (lambda: lambda x: x.to_dense(), X.to_mkldnn, "`x` is a mkldnn tensor"),
    "state": (lambda: linear(X.as_subclass(Named)), lambda: X, "`weight` is a Named"),
    "lazy state": (lambda: nn.LazyLinear(3), lambda: X, "`weight` has no size yet"),
    "reached by functions": (lambda: lambda x: x + CONSTANTS["named"], lambda: X, "the program uses is a Named"),
    "script module": (
        lambda: Holder(torch.jit.script(nn.Linear(3, 3))),
        lambda: X,
        "the module `inner` is a ScriptModule",
    ),
    "where memory is": (lambda: lambda x: x + (x.data_ptr() > 0), lambda: X, "reads the address of a tensor"),
    "an array": (lambda: lambda x: x + int(x.numpy().sum()), lambda: X, "makes a NumPy array from a tensor"),
    "a backward that goes further": (
        lambda: lambda x: x.sum().backward(),
        lambda: torch.ones(3, requires_grad=True) * 2,
        "runs a backward into the operators that computed its inputs",
    ),
    "a hook that stays": (
        lambda: lambda x: x.register_hook(lambda gradient: gradient * 2) and x * 2,
        lambda: torch.ones(3, requires_grad=True),
        "registers a hook on the gradient of `x`",
    ),
    "is a view": (lambda: lambda x: x + int(x._is_view()), lambda: X[1:], "depends on whether `x` is a view"),
    "a state that is set again": (lambda: drawn_twice, lambda: X, "sets the state of a torch generator"),
    "another state": (lambda: with_another_state, lambda: X, "sets the state of a torch generator"),
    "a seed as before": (lambda: seeded(torch.Generator()), lambda: X, "sets the state of a torch generator"),
    "an attribute given": (lambda: lambda x: setattr(x, "scale", 2), lambda: X, "sets the attribute `scale` of `x`"),
    "an object as attribute": (
        lambda: lambda x: x * x.scales[0],
        lambda: with_attribute(torch.ones(3), "scales", [2]),
        "reads the attribute `scales` of `x`, a list",
    ),
    "a scan": (
        lambda: differentiated_scan,
        lambda: torch.ones(3, requires_grad=True),
        "computes gradients through an operator whose body torch compiles separately",
    ),
    "a compressed sparse tensor": (
        lambda: lambda x: torch.sparse_csr_tensor(torch.arange(4), torch.arange(3), x, (3, 3)) @ x,
        lambda: X,
        "makes a compressed sparse tensor from its parts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, given, what = REFUSED[name]
    func, x = make(), given()
    with pytest.raises(UnsupportedProgramError, match=what) as raised:
        capture(func, (x,))
    _, place, why, way_out = str(raised.value).split("\n    ")
    assert re.match(r"at   .*test_refusals\.py:\d+ in", place)
    assert why.startswith("why  ")
    assert way_out.startswith("try  ")


def test_a_call_with_a_subclass_is_refused() -> None:
    program = capture(lambda x: x.mul_(2), (torch.ones(2, 3),))
    given = two()
    with pytest.raises(InputMismatchError, match=r"the class of the input `x` is <class '.*TwoTensor'>"):
        program(given)
    with pytest.raises(InputMismatchError, match="the size of the input `x` is 'nested'"):
        program(torch.nested.nested_tensor([X, X]))
    torch.testing.assert_close(given.a, torch.ones(2, 3))
    module = nn.Linear(3, 3)
    of_module = capture(module, (X,))
    module.weight = nn.Parameter(torch.ones(3, 3).as_subclass(Named))
    with pytest.raises(InputMismatchError, match=r"the class of the state `weight` is <class '.*Named'>"):
        of_module(X)
    again = capture(lambda x: x * 2, (X,), on_guard_failure="recapture")
    assert again(given).b.equal(2 * torch.ones(2, 3))


SPARSE: dict[str, tuple[Callable[..., Any], Callable[[], Tensor]]] = {
    "through": (lambda s: s * 2, X.to_sparse),
    "product": (lambda s: torch.sparse.mm(s, torch.ones(3, 2)), X.to_sparse),
    "written": (lambda s: s.mul_(2).to_dense(), X.to_sparse),
    "rows": (lambda s: s @ torch.ones(3, 2), X.to_sparse_csr),
    "made": (lambda x: (x.to_sparse() * 2, x.to_sparse_csr()), X.clone),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_tensors_are_captured(name: str) -> None:
    func, make = SPARSE[name]
    program = capture(func, (make(),))
    given, wanted = make(), make()
    for got, want in zip(
        torch.utils._pytree.tree_leaves([program(given), given]),
        torch.utils._pytree.tree_leaves([func(wanted), wanted]),
        strict=True,
    ):
        assert got.layout == want.layout
        torch.testing.assert_close(got.to_dense(), want.to_dense())


def without_modes(x: Tensor) -> Tensor:
    with _disable_current_modes():
        y = x * 2
    return y + 1


def test_what_was_computed_unseen_is_no_constant() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # a thread that is there before the capture
        with pytest.raises(RuntimeError, match="an object, that another thread is capturing"):
            capture(lambda x: pool.submit(lambda: x * 2).result() + 1, (X,))
    what = r"a tensor of size \(2, 3\) and torch.float32, used by aten.add.Tensor"
    with pytest.raises(UnsupportedProgramError, match=what) as raised:
        capture(without_modes, (X,))
    assert re.search(r"at   .*test_refusals\.py:\d+ in", str(raised.value))


@pytest.mark.slow
def test_what_a_program_hides_is_refused() -> None:
    hidden: SimpleQueue[Tensor] = SimpleQueue()

    def run(x: Tensor) -> Tensor:
        y = x * 2
        hidden.put(y)
        return y

    what = r"a tensor of size \(2, 3\) that the program computes is still held by an object of the class SimpleQueue"
    with pytest.raises(UnsupportedProgramError, match=what) as raised:
        capture(run, (X,))
    assert re.search(r'at   .*test_refusals\.py", line \d+, in run +y = x \* 2', str(raised.value))


def test_iterators_are_refused() -> None:
    rows = iter([X, X])
    with pytest.raises(UnsupportedProgramError, match="the variable `rows` of the program is a list_iterator"):
        capture(lambda x: x + next(rows), (X,))
    assert len(list(rows)) == 2


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_program_is_bound_to_its_state(duplicate: Callable[[Any], Any]) -> None:
    program = capture(nn.Linear(3, 2), (X,))
    with pytest.raises(TypeError, match="a captured program cannot be copied or pickled"):
        duplicate(program)
    assert torch.equal(program(X), program(X))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x, str(x)),
        lambda x: {f"{x * 2}": x},
        lambda x: [x, {"text": ("of", repr([x]))}],
        lambda x: TEXTS.append(str(x)),
        lambda x: BY_TEXT.update({str(x): 1}),
    ],
)
def test_texts_of_tensors_are_not_kept(program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedProgramError, match="contains the text of a tensor"):
        capture(program, (X,))
    assert not (TEXTS or BY_TEXT)


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_tensors_that_the_program_saves_are_refused(save: Callable[[Any, Any], None]) -> None:
    layer = torch.nn.Linear(2, 2)

    def program(x: Tensor) -> Tensor:
        save(layer.state_dict(), io.BytesIO())
        return x

    with pytest.raises(UnsupportedProgramError, match=r"the program saves a tensor \(torch.save, pickle\)"):
        capture(program, (torch.ones(2),))


def resized_and_gone(x: Tensor) -> Tensor:
    y = x * 2
    total = y.sum()
    y.untyped_storage().resize_(0)
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(size)
    x.fill_(1)
    return total


def frees_its_result(x: Tensor) -> Tensor:
    y = x * 2
    y.untyped_storage().resize_(0)
    return y


def writes_a_byte(x: Tensor) -> None:
    x.untyped_storage()[0] = 1


PAST_TENSORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "frees an input": (lambda x: [x.untyped_storage().resize_(0)].clear(), "resizes the storage"),
    "makes room": (lambda x: [x.untyped_storage().resize_(64)].clear(), "resizes the storage"),
    "frees a result": (frees_its_result, "resizes the storage"),
    "fills": (lambda x: [x.untyped_storage().fill_(0)].clear(), "bytes of a storage directly"),
    "writes a byte": (writes_a_byte, "bytes of a storage directly"),
    "reads a byte": (lambda x: x.untyped_storage()[0], "bytes of a storage"),
    "gives a storage": (lambda x: x.untyped_storage(), "UntypedStorage"),
    "gives a list with one": (lambda x: [x.untyped_storage()], "UntypedStorage"),
}


@pytest.mark.parametrize(("program", "what"), PAST_TENSORS.values(), ids=PAST_TENSORS)
def test_what_is_done_to_storages_past_tensors_is_refused(program: Callable[[Tensor], Any], what: str) -> None:
    x = torch.ones(3)
    with pytest.raises(UnsupportedProgramError, match=what):
        capture(program, (x,))
    assert x.untyped_storage().nbytes() == 12 and torch.equal(x, torch.ones(3))


def test_storages_that_are_as_they_were_in_the_end_may_be_resized() -> None:
    x = torch.zeros(3)
    assert torch.equal(capture(resized_and_gone, (x,))(x), torch.tensor(0.0)) and torch.equal(x, torch.ones(3))


# What no operator shows: each refusal names the line that does it, and what it advises works

ARRAY, TENSOR, NOTES = np.zeros(3), torch.zeros(3), dict[str, Any]()
OWN, OF_NUMPY, OF_TORCH = random.Random(0), np.random.default_rng(0), torch.Generator()
DRAW = "draw with torch"


def drawing(draw: Callable[[], float]) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        number = draw()  # here
        return y * number

    return program


def writes_to_an_array(x: Tensor) -> Tensor:
    y = x * 2
    ARRAY[0] += 5  # here
    return y


def writes_to_a_tensor(x: Tensor) -> Tensor:
    TENSOR[0] += 5
    return x * 2


def gives_an_attribute(x: Tensor) -> Tensor:
    y = x * 2
    x.note = 3  # type: ignore[attr-defined]  # here
    return y


def keeps_a_note(x: Tensor) -> Tensor:
    NOTES["x"] = 3
    return x * 2


def seeds_its_own(x: Tensor) -> Tensor:
    y = torch.rand(3, generator=OF_TORCH)
    OF_TORCH.manual_seed(0)  # here
    return x * y


def makes_its_own(x: Tensor) -> Tensor:
    return x * torch.rand(3, generator=torch.Generator().manual_seed(7))


def gives_a_generator(x: Tensor) -> Any:
    return (x * number for number in range(3))  # here


UNSEEN: dict[str, tuple[Callable[[Tensor], Any], str, Callable[[Tensor], Any]]] = {
    "random": (drawing(lambda: random.random()), DRAW, drawing(lambda: torch.rand(()).item())),
    "a shuffle": (drawing(lambda: random.sample([1, 2, 3], 2)[0]), DRAW, lambda x: x[torch.randperm(3)]),
    "NumPy": (drawing(lambda: np.random.rand()), DRAW, lambda x: x * torch.rand(()).item()),
    "an object": (drawing(lambda: OWN.random()), DRAW, lambda x: x * torch.rand(())),
    "an object of NumPy's": (drawing(lambda: OF_NUMPY.random()), DRAW, lambda x: x * torch.rand(())),
    "an array": (writes_to_an_array, r"write to a tensor that is made from.*torch.tensor\(array\)", writes_to_a_tensor),
    "an attribute": (gives_an_attribute, "a dict or an attribute of an object", keeps_a_note),
    "a seed": (seeds_its_own, "make a generator", makes_its_own),
    "a generator": (gives_a_generator, "a list, a dict", lambda x: [x * number for number in range(3)]),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_operator_shows_is_refused_at_its_line_with_advice_that_works(name: str) -> None:
    program, advice, advised = UNSEEN[name]
    state = random.getstate(), ARRAY.tolist(), OWN.getstate()
    with pytest.raises(UnsupportedProgramError, match=rf"try  .*{advice}") as raised:
        capture(program, (torch.ones(3),))
    place = str(raised.value).split("\n    ")[1]
    assert re.match(r"at   .*test_refusals\.py:\d+ in .*(# here|lambda)", place), place
    assert (random.getstate(), ARRAY.tolist(), OWN.getstate()) == state
    captured, found = capture(advised, (torch.ones(3),)), list[Any]()
    for call in (advised, captured):
        torch.manual_seed(0)
        TENSOR.zero_()
        found.append([*(call(torch.ones(3)) for _ in range(3)), TENSOR.clone()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_number_that_was_drawn_before_is_passed_as_a_tensor() -> None:
    captured = capture(lambda x, number: x * number, (torch.ones(3), torch.tensor(random.random())))
    for _ in range(3):
        number = random.random()
        assert torch.equal(captured(torch.ones(3), torch.tensor(number)), torch.ones(3) * torch.tensor(number))
