"""Captured training steps, optimizers, gradients and caches: several calls in a row, held against eager."""

from __future__ import annotations

import copy
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export.graph_signature import OutputKind
from torch.nn.utils import prune

from functionalize import (
    DataDependentError,
    InputMismatchError,
    UnsupportedProgramError,
    capture,
)
from functionalize.verify import assert_functional

Step = Callable[..., Any]
Maker = Callable[[], tuple[Step, torch.nn.Module, Any]]


def state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    yield from module.state_dict().items()
    for name, parameter in module.named_parameters():
        yield f"{name}.grad", parameter.grad
    for number, state in enumerate(optimizer.state.values() if optimizer is not None else ()):
        yield from ((f"{number}.{key}", value) for key, value in state.items())


def assert_alike(make: Maker, batches: Callable[[], tuple[Any, ...]], calls: int = 3) -> Any:
    """Capture one twin, and let it and the other take the same steps."""
    torch.manual_seed(0)
    mine, module, optimizer = make()
    torch.manual_seed(0)
    eager, other, its = make()
    torch.manual_seed(1)
    program = capture(mine, batches())
    assert_functional(program.graph_module, "mutations_and_views")
    for call in range(calls):
        torch.manual_seed(call)
        got = program(*batches())
        torch.manual_seed(call)
        torch.testing.assert_close(got, eager(*batches()))
        ours, theirs = dict(state_of(module, optimizer)), dict(state_of(other, its))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=f"call {call}: {name}")
    return program


def perceptron() -> torch.nn.Module:
    parts = (torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True))
    return torch.nn.Sequential(*parts, torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 4), torch.randint(0, 3, (5,))


def stepping(kind: Any, options: dict[str, Any], *, zero: bool = True) -> Maker:
    def make() -> tuple[Step, torch.nn.Module, Any]:
        module = perceptron()
        optimizer = kind(module.parameters(), **options)

        def step(x: Tensor, y: Tensor) -> Tensor:
            if zero:
                optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, module, optimizer

    return make


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Rprop, {}),
]


NAMES = [f"{kind.__name__}-{number}" for number, (kind, _) in enumerate(OPTIMIZERS)]


@pytest.mark.every(5)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=NAMES)
def test_training_steps(kind: Any, options: dict[str, Any]) -> None:
    program = assert_alike(stepping(kind, options), batch)
    kinds = [spec.kind for spec in program.signature.output_specs]
    assert kinds.count(OutputKind.PARAMETER_MUTATION) == 5 and kinds.count(OutputKind.GRADIENT_TO_PARAMETER) == 5


def test_gradients_that_are_added_up() -> None:
    assert_alike(stepping(torch.optim.Adam, {}, zero=False), batch)


def test_backward_alone() -> None:
    def make() -> tuple[Step, torch.nn.Module, Any]:
        module = perceptron()

        def step(x: Tensor, y: Tensor) -> None:
            torch.nn.functional.cross_entropy(module(x), y).backward()

        return step, module, None

    assert_alike(make, batch)


def test_a_module_with_an_optimizer_is_a_training_step() -> None:
    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(self.body(x), y)

    mine = Loss()
    eager = copy.deepcopy(mine)
    ours, theirs = (torch.optim.Adam(module.parameters()) for module in (mine, eager))
    program = capture(mine, batch(), optimizer=ours)
    assert not ours.state, "its first step makes it"
    for call in range(3):
        torch.manual_seed(call)
        loss = program(*batch())
        torch.manual_seed(call)
        theirs.zero_grad()
        wanted = eager(*batch())
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(loss, wanted.detach())
        torch.testing.assert_close(dict(state_of(mine, ours)), dict(state_of(eager, theirs)))
    targets = [spec.target for spec in capture(mine, batch(), optimizer=ours).signature.input_specs]
    assert "optimizer.state.0.exp_avg" in targets and "body.4.weight" in targets
    with pytest.raises(TypeError, match="must return a loss"):
        capture(perceptron(), (batch()[0],), optimizer=ours)


def test_an_optimizer_keeps_state_that_it_has() -> None:
    step, module, optimizer = stepping(torch.optim.Adam, {})()
    step(*batch())
    before = {name: copy.deepcopy(value) for name, value in state_of(module, optimizer)}
    capture(step, batch())
    torch.testing.assert_close(dict(state_of(module, optimizer)), before)


def test_the_first_step_and_later_ones_are_two_variants() -> None:
    module = torch.nn.Linear(2, 2)
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([*module.parameters(), unused])

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()

    program = capture(step, (torch.ones(2),))
    assert not optimizer.state and not hasattr(optimizer, "_opt_called")
    for _ in range(4):
        program(torch.ones(2))
    assert [float(state["step"]) for state in optimizer.state.values()] == [4, 4]
    assert unused not in optimizer.state, "it gets no gradient"
    assert len(program.variants) == 2


def test_hyperparameters_are_inputs() -> None:
    torch.manual_seed(0)
    step, module, optimizer = stepping(torch.optim.SGD, {"lr": 0.1})()
    torch.manual_seed(0)
    twin, eager, other = stepping(torch.optim.SGD, {"lr": 0.1})()
    program = capture(step, batch())
    assert "optimizer.param_groups.0.lr" in [spec.target for spec in program.signature.input_specs]
    for rate in (0.1, 0.01, 0.003):
        optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = rate
        given = batch()
        torch.manual_seed(0)
        program(*given)
        torch.manual_seed(0)
        twin(*given)
        torch.testing.assert_close(dict(state_of(module, optimizer)), dict(state_of(eager, other)))
    assert len(program.variants) <= 2, "the first step makes the state"


def test_an_optimizer_that_decides_by_data_is_refused_with_its_line() -> None:
    step, _, _ = stepping(torch.optim.RAdam, {})()
    step(*batch())  # in the first step it knows what it counts from
    with pytest.raises(DataDependentError, match=r"(?s)radam.py:\d+ in .*capturable=True"):
        capture(step, batch(), on_data="raise")


# Gradients through a call


def test_gradients_flow_through_a_call() -> None:
    mine = perceptron()
    eager = copy.deepcopy(mine)
    program = capture(mine, (batch()[0],))
    for call in range(2):
        x, _ = batch()
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for module, run, given in ((mine, program, inputs[0]), (eager, eager, inputs[1])):
            torch.manual_seed(call)
            run(given).square().sum().backward()
            assert module[0].weight.grad is not None  # type: ignore[index]
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        torch.testing.assert_close(dict(state_of(mine, None)), dict(state_of(eager, None)), rtol=1e-4, atol=1e-4)


class Twice(torch.autograd.Function):
    """A square whose backward says otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 100


def test_gradients_are_those_of_the_original() -> None:
    """What runs under ``no_grad`` has none, and a function of the user's has those that it says."""
    w = torch.tensor([2.0, 3.0], requires_grad=True)

    def run(x: Tensor) -> Any:
        with torch.no_grad():
            scale = (w * 2).sum()
        return (Twice.apply(w) * x * scale).sum()  # type: ignore[no-untyped-call]

    found: list[Any] = []
    for step in (run, capture(run, (torch.ones(2),))):
        w.grad = None
        step(torch.tensor([1.0, 10.0])).backward()
        found.append(w.grad)
    torch.testing.assert_close(found[0], torch.tensor([1000.0, 10000.0]))
    torch.testing.assert_close(found[1], found[0])


def test_gradients_flow_through_a_written_input() -> None:
    def run(x: Tensor) -> Tensor:
        x[0].add_(x[1] * 3)
        return x.mul_(2).sin().sum()

    leaves = [torch.tensor([1.0, 2, 3], requires_grad=True) for _ in range(2)]
    steps: list[Step] = [run, capture(run, (leaves[0] * 1,))]
    for leaf, step in zip(leaves, steps, strict=True):
        x = leaf * 1
        (step(x) + x.square().sum()).backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_gradients_through_a_written_input_that_shares_memory() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(2).sum() + y.square().sum()

    gradients = []
    for step in (run, capture(run, ((x := torch.randn(3, requires_grad=True) * 1), x.view(3, 1)))):
        leaf = torch.tensor([1.0, 2, 3], requires_grad=True)
        x = leaf * 1
        step(x, x.view(3, 1)).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_inputs_keep_what_autograd_saved() -> None:
    x = torch.randn(3, requires_grad=True)

    def run(x: Tensor, seen: Tensor) -> Tensor:
        y = x * 3 + seen
        seen.add_(1)
        return y.sum()

    program, seen = capture(run, (x, torch.ones(3))), torch.ones(3)
    program(x, seen).backward()
    assert torch.equal(seen, torch.full((3,), 2.0))
    torch.testing.assert_close(x.grad, torch.full((3,), 3.0))


# Caches of transformers


def decoder() -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    return config, LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_caches_of_transformers(kind: str) -> None:
    from transformers import DynamicCache, StaticCache

    config, model = decoder()

    def fresh() -> Any:
        if kind == "dynamic":
            cache: Any = DynamicCache(config=config)
        else:
            cache = StaticCache(config=config, max_cache_len=8)
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        return cache

    def step(token: Tensor, cache: Any) -> Tensor:
        logits: Tensor = model(token, past_key_values=cache, use_cache=True).logits
        return logits

    program = capture(step, (torch.tensor([[4]]), fresh()))
    mine, eager = fresh(), fresh()
    for token in ([[4]], [[5]])[: 2 if kind == "static" else 1]:
        torch.testing.assert_close(program(torch.tensor(token), mine), step(torch.tensor(token), eager))
        for ours, theirs in zip(mine.layers, eager.layers, strict=True):
            torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))
    if kind == "dynamic":
        with pytest.raises(InputMismatchError, match="cache_layers_0_keys"):
            program(torch.tensor([[5]]), mine)


def test_dicts_keyed_by_tensors_are_added_to() -> None:
    parameter, counts, kept = torch.nn.Parameter(torch.ones(3)), dict[Tensor, int](), dict[Any, Tensor]()
    kept[parameter] = torch.full((3,), 2.0)

    def run(x: Tensor) -> Tensor:
        counts[parameter] = counts.get(parameter, 0) + 1
        kept.setdefault("more", torch.zeros(3))
        return x * kept[parameter] * counts[parameter]

    program = capture(run, (torch.ones(3),))
    assert counts == {} and list(kept) == [parameter]
    for count in (1, 2, 3):
        assert torch.equal(program(torch.ones(3)), torch.full((3,), 2.0 * count))
    assert counts == {parameter: 3} and list(kept) == [parameter, "more"]


def test_what_only_a_method_in_c_holds_is_left_as_it_was() -> None:
    kept, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    add, times = kept.add_, parameter.mul
    program = capture(lambda x: add(1) * x, (torch.ones(3),))
    assert kept.tolist() == [1.0] * 3 and kept._version == 0
    assert program(torch.ones(3)).tolist() == kept.tolist() == [2.0] * 3
    assert kept._version == 1

    with pytest.raises(UnsupportedProgramError, match="leaves a gradient on a tensor of size"):
        capture(lambda x: times(x).sum().backward(), (torch.ones(3),))
    assert parameter.grad is None


weight = torch.ones(3)  # no variable of what has an attribute of this name


def test_attributes_are_no_variables() -> None:
    layer = torch.nn.Linear(3, 3)

    def run(x: Tensor) -> Tensor:
        return x @ layer.weight

    program = capture(run, (weight,))
    assert [entry.target for entry in program.signature.input_specs] == ["layer.weight", "layer.bias", None]
    assert torch.equal(program(torch.zeros(3)), torch.zeros(3))


def test_objects_in_a_tuple_are_compared_by_who_they_are_and_by_their_own_content() -> None:
    def make(scale: float) -> types.SimpleNamespace:
        return types.SimpleNamespace(count=0, scale=scale, marks=[])

    def program(x: Tensor, holder: types.SimpleNamespace) -> Any:
        holder.pair[0].count += 1
        return x * holder.pair[0].scale * holder.pair[1].scale + len(holder.pair[1].marks)

    mine = types.SimpleNamespace(pair=(make(2.0), make(3.0)))
    captured = capture(lambda x: program(x, mine), (torch.ones(2),), on_guard_failure="recapture")
    twin = copy.deepcopy(mine)

    def compare() -> None:
        assert torch.equal(captured(torch.ones(2)), program(torch.ones(2), twin))
        assert mine.pair[0].count == twin.pair[0].count

    for _ in range(5):
        compare()
    assert len(captured.variants) == 2  # the count is an input of the second
    for both in (mine, twin):
        both.pair[1].scale = 5.0
    compare()
    for both in (mine, twin):
        both.pair[1].marks.append(1)
    compare()
    for both in (mine, twin):
        both.pair = both.pair[0], make(7.0)
    compare()
    for both in (mine, twin):
        both.pair = both.pair[1], both.pair[0]
    compare()


@pytest.mark.parametrize(
    "keys",
    [("first", "second"), ((0, 1), (1, ("x", None))), (object(), (object(), 2)), (int, len), (frozenset({1}), 1.5)],
    ids=["strings", "tuples", "objects", "callables", "sets"],
)
def test_the_order_of_a_dict_is_state(keys: tuple[Any, Any]) -> None:
    first, second = keys
    table: dict[Any, Tensor] = {first: torch.ones(2), second: torch.zeros(2)}
    program = capture(lambda x: x + next(iter(table.values())), (torch.ones(2),), on_guard_failure="recapture")
    for _ in range(3):
        assert torch.equal(program(torch.ones(2)), 1 + next(iter(table.values())))
        table[first] = table.pop(first)
        table[second] = table.pop(second)
        table[first] = table.pop(first)


def test_a_call_follows_the_order_of_modules() -> None:
    layers = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    for number, parameter in enumerate(layers.parameters()):
        nn.init.constant_(parameter, number + 1)

    def run(x: Tensor) -> Tensor:
        for layer in layers.values():
            x = layer(x)
        return x

    program = capture(run, (torch.ones(2),))
    first = program(torch.ones(2))
    layers["one"] = layers.pop("one")
    assert torch.equal(program(torch.ones(2)), run(torch.ones(2)))
    assert not torch.equal(program(torch.ones(2)), first)


def test_a_cache_of_the_last_ones_is_kept_in_order() -> None:
    def cache() -> tuple[Callable[[Tensor, str], Tensor], dict[str, Tensor]]:
        last: OrderedDict[str, Tensor] = OrderedDict()

        def run(x: Tensor, key: str) -> Tensor:
            if key in last:
                last.move_to_end(key)
            last[key] = last.get(key, 0) + x
            if len(last) > 2:
                last.popitem(last=False)
            return torch.stack(list(last.values())).sum(0)

        return run, last

    (eager, want), (run, got) = cache(), cache()
    program = capture(run, (torch.ones(2), "a"), on_guard_failure="recapture", cache_size=16)
    for number, key in enumerate("ababcbacca"):
        x = torch.full((2,), float(number))
        assert torch.equal(program(x, key), eager(x, key))
        assert list(want) == list(got) and all(map(torch.equal, want.values(), got.values()))


def _new_before_old() -> tuple[Step, Callable[[], Any]]:
    table: dict[str, Any] = {"a": 1}

    def run(x: Tensor) -> Tensor:
        old = dict(table)
        table.clear()
        table[f"b{len(old)}"] = x
        table.update(old)
        return x * len(table)

    return run, lambda: list(table)


def _new_to_the_front() -> tuple[Step, Callable[[], Any]]:
    table = OrderedDict[str, Any](a=1)

    def run(x: Tensor) -> Any:
        table[f"c{len(table)}"] = x
        table.move_to_end(f"c{len(table) - 1}", last=False)
        table.move_to_end("a")
        return x * len(table)

    return run, lambda: list(table)


def _set_again() -> tuple[Step, Callable[[], Any]]:
    module = nn.BatchNorm1d(2)

    def run(x: Tensor) -> Any:
        weight, mean, eps = module.weight, module.running_mean, module.eps
        del module.weight, module.running_mean, module.eps
        module.weight, module.eps = weight, eps
        module.register_buffer("running_mean", mean)
        return module(x.expand(3, 2))

    return run, lambda: [*map(list, (vars(module), dict(module.named_parameters()), dict(module.named_buffers())))]


def _pruned() -> tuple[Step, Callable[[], Any]]:
    module = nn.Linear(2, 2)
    nn.init.ones_(module.weight)

    def run(x: Tensor) -> Any:
        prune.l1_unstructured(module, "weight", 1)
        found = module(x)
        prune.remove(module, "weight")
        return found - module.bias

    return run, lambda: list(dict(module.named_parameters()))


def _keyed_by_tensors() -> tuple[Step, Callable[[], Any]]:
    keys = [torch.ones(1), torch.ones(1), torch.ones(1)]
    table = dict.fromkeys(keys, 1)

    def run(x: Tensor) -> Tensor:
        table[keys[0]] = table.pop(keys[0])
        table.pop(keys[1], None)
        return x * len(table)

    return run, lambda: [next(n for n, one in enumerate(keys) if one is key) for key in table]


@pytest.mark.parametrize("make", [_new_before_old, _new_to_the_front, _set_again, _pruned, _keyed_by_tensors])
def test_calls_leave_the_order_that_the_program_leaves(make: Callable[[], tuple[Step, Callable[[], Any]]]) -> None:
    """Of keys, attributes, parameters and buffers."""
    x = torch.arange(1.0, 3.0)
    (program, found), (twin, expected) = make(), make()
    before, captured = found(), capture(program, (x,), on_guard_failure="recapture")
    assert found() == before
    for _ in range(3):
        assert torch.equal(captured(x), twin(x))
        assert found() == expected()
    assert found() != before


def test_attributes_that_a_caller_adds_are_seen_where_the_program_changes_others() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2 if hasattr(self, "doubles") else x * 3

    module = Counting()
    program = capture(module, (torch.ones(2),), on_guard_failure="recapture")
    assert program(torch.ones(2)).tolist() == program(torch.ones(2)).tolist() == [3, 3]
    module.__dict__["doubles"] = True
    assert program(torch.ones(2)).tolist() == [2, 2]


_SUMMED: Any = ()


@pytest.mark.parametrize("place", ["attribute", "global variable", "list"])
def test_tuples_of_tensors_are_as_long_as_they_were(place: str) -> None:
    global _SUMMED
    holder, ones = types.SimpleNamespace(parts=(torch.ones(2),)), torch.ones(2)
    listed: list[Any] = [(torch.ones(2),)]
    _SUMMED = (torch.ones(2),)

    def of_attribute(x: Tensor) -> Tensor:
        return sum(holder.parts, x)

    def of_variable(x: Tensor) -> Tensor:
        return sum(_SUMMED, x)

    def of_list(x: Tensor) -> Tensor:
        return sum(listed[0], x)

    function = {"attribute": of_attribute, "global variable": of_variable, "list": of_list}[place]
    program = capture(function, (torch.zeros(2),), on_guard_failure="recapture")
    for count in (1, 2, 3, 1):
        holder.parts = _SUMMED = listed[0] = (ones,) * count
        assert program(torch.zeros(2)).tolist() == [count, count]


def test_numbers_in_variables_that_functions_close_over_become_inputs() -> None:
    def world() -> Any:
        count, total, marks = 0, torch.zeros(2), [1.0, 2.0]

        def run(x: Tensor) -> Tensor:
            nonlocal count, total, marks
            count, marks = count + 1, [marks[1], marks[0] + 1]
            total = total + x * count * marks[0]
            return total

        return run, lambda: (count, total.tolist(), marks)

    (eager, theirs), (run, ours) = world(), world()
    program = capture(run, (torch.ones(2),))
    for _ in range(6):
        assert torch.equal(program(torch.ones(2)), eager(torch.ones(2)))
        assert ours() == theirs()
    assert len(program._specializations.kept) <= 3


def test_a_program_that_another_one_calls_is_a_part_of_it() -> None:
    def made() -> tuple[Any, nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        inner: Any = capture(model, (torch.ones(2, 3),), on_guard_failure="recapture")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, forward: Any = model) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = forward(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model, lambda x: step(x, inner)

    eager, twin, _ = made()
    _, model, calls = made()
    program = capture(calls, (torch.ones(2, 3),), on_guard_failure="recapture")
    for round_ in range(4):
        if round_ == 2:
            twin.eval(), model.eval()
        x = torch.randn(2, 3)
        torch.manual_seed(round_)
        want = eager(x)
        torch.manual_seed(round_)
        torch.testing.assert_close(program(x), want)
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("after", [1, 2, 9, 30])
def test_an_interrupt_while_things_are_put_back(after: int) -> None:
    """Objects are as they were, also where the user's Ctrl-C comes in at the end of a capture."""
    layer, state = nn.Linear(3, 3), types.SimpleNamespace(count=0, last=torch.zeros(3))
    weight, last, inside = layer.weight, state.last, -1

    def program(x: Tensor) -> Any:
        state.count += 1
        state.last = layer(x)[0]
        return state.last * state.count

    def interrupt(frame: Any, event: str, argument: object) -> None:
        nonlocal inside
        began = event == "call" and frame.f_code.co_name == "put_back" and inside < 0
        inside += event == "call" and (began or inside >= 0)
        if inside == after:
            inside += 1
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            capture(program, (torch.ones(2, 3),))
    finally:
        sys.setprofile(None)
    assert layer.weight is weight and state.last is last and state.count == 0
    assert type(program(torch.ones(2, 3))) is Tensor
