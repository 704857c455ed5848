"""A table of hooks of each kind: whether a capture leaves them alone, runs them in a training step, and in gradients.

Each program runs on twin worlds, in eager and captured, three times: equal in all that can be seen, or refused, and
then nothing has changed. Limits: versions of gradients that a call makes anew are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_pre_hook

from functionalize import capture
from functionalize.errors import InputMismatchError, UnsupportedMutationError, UnsupportedProgramError

REFUSALS = (UnsupportedMutationError, UnsupportedProgramError, InputMismatchError)
EXAMPLES = [torch.arange(6.0).reshape(2, 3) / 4 + number for number in range(3)]
EQUAL, REFUSED = "equal", "refused"
CHANGES = "the backward of the program changes"  # said when somebody asks for the gradients
WRITES = "the backward writes to a tensor that existed before"
LEFT = "registers a hook .* and does not remove it"
NODES = "refers to autograd nodes"
ADDED_UP = "autograd node that accumulates the gradient of `world.first.weight` has hooks"
KEPT = "of class AccumulateGrad, was made by the program"


class World:
    """A model, its optimizer, and what hooks write to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.model = nn.Sequential(self.first, nn.Tanh(), self.last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.weight = self.first.weight
        self.log: list[Tensor] = []
        self.counts = {"hook": 0}
        self.total = torch.zeros(())
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        self.sums: dict[str, Tensor] = {}
        self.nodes: list[Any] = []

    def count(self, *_: Any) -> None:
        """A hook of any kind."""
        self.counts["hook"] += 1

    def keep(self, gradient: Tensor) -> None:
        """A hook that adds to a list."""
        self.log.append(gradient)

    def set(self, gradient: Tensor) -> None:
        """A hook that gives a tensor other data."""
        self.total.data = self.total.data * 0.5 + gradient.sum()

    def name(self, gradient: Tensor) -> None:
        """A hook that formats a number."""
        self.names[self.weight] = f"{gradient.sum():.1f}"

    def add(self, gradient: Tensor) -> None:
        """A hook that writes to a tensor."""
        self.total.add_(gradient.sum())

    def keep_last(self, *gradients: Any) -> None:
        """The same, of a module."""
        self.keep(gradients[-1][0])

    def add_last(self, *gradients: Any) -> None:
        """The same, of a module."""
        self.add(gradients[-1][0])

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().sum()
        return loss

    @property
    def look(self) -> dict[str, Any]:
        """All that can be seen of it."""
        found: dict[str, Any] = {"log": list(self.log), "counts": dict(self.counts), "sums": dict(self.sums)}
        found["total"], found["version of total"] = self.total.clone(), self.total._version
        for name, parameter in self.model.named_parameters():
            found[name], found[f"version of {name}"] = parameter.detach().clone(), parameter._version
            found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
            hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            found[f"hooks of {name}"] = [len(one or ()) for one in hooks]
        for name, module in self.model.named_modules():
            found[f"hooks of the module {name}"] = [len(v) for k, v in vars(module).items() if k.endswith("_hooks")]
        found["hooks of all modules"] = [len(v) for k, v in vars(modules).items() if k.endswith("_hooks")]
        return found


Handles = list[Any]
Forward = Callable[[World, Tensor, Handles], Tensor]  # the handles that it adds are removed by the program


def drawing(gradient: Tensor) -> Tensor:
    """A hook that leaves out half of a gradient, and doubles it by a function that returns its argument."""
    F.dropout(gradient, 0.5, training=False).mul_(2)
    return F.dropout(gradient, 0.5)


def twice(gradient: Tensor) -> Tensor:
    return gradient * 2


def twice_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def steps_in_hooks(world: World) -> Handles:
    optimizers: dict[Tensor, Any] = {one: torch.optim.SGD([one], lr=0.1) for one in world.model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return [parameter.register_post_accumulate_grad_hook(step) for parameter in world.model.parameters()]


def by_name(world: World) -> Handles:
    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        world.sums[world.names[parameter]] = parameter.grad.sum()

    return [parameter.register_post_accumulate_grad_hook(note) for parameter in world.model.parameters()]


def node_of(world: World) -> Any:
    """What adds up the gradient of a weight: as long as somebody holds it."""
    world.nodes.append(get_gradient_edge(world.weight).node)
    return world.nodes[-1]


def first_twice(module: Any, *gradients: Any) -> Any:
    """A hook on the gradients of a module."""
    return (gradients[0][0] * 2,)


class Tripled(torch.autograd.Function):
    """A square with another gradient than its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x * 3


def with_function(world: World, *, counts: bool) -> Handles:
    class Own(Tripled):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            world.count()
            return gradient * 2

    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = (Own if counts else Tripled).apply(x)  # type: ignore[no-untyped-call]
            return made

    world.model.insert(1, Middle())
    return []


def scaled_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(2)


# What the caller registers before: how; what becomes of a training step, of gradients through a call.
BEFORE: dict[str, tuple[Callable[[World], Handles], str, str]] = {
    "on a tensor": (lambda w: [w.weight.register_hook(twice)], EQUAL, EQUAL),
    "two on a tensor": (lambda w: [w.weight.register_hook(h) for h in (twice, lambda g: g + 1)], EQUAL, EQUAL),
    "on a tensor, counting": (lambda w: [w.weight.register_hook(w.count)], EQUAL, EQUAL),
    "on a tensor, keeping": (lambda w: [w.weight.register_hook(w.keep)], EQUAL, EQUAL),
    "on a tensor, setting": (lambda w: [w.weight.register_hook(w.set)], EQUAL, EQUAL),
    "on a tensor, naming": (lambda w: [w.weight.register_hook(w.name)], EQUAL, EQUAL),
    "on a tensor, drawing": (lambda w: [w.weight.register_hook(drawing)], EQUAL, EQUAL),
    "on a tensor, adding": (lambda w: [w.weight.register_hook(w.add)], EQUAL, EQUAL),
    "after accumulation": (lambda w: [w.weight.register_post_accumulate_grad_hook(twice_in_place)], EQUAL, EQUAL),
    "after accumulation, stepping": (steps_in_hooks, EQUAL, EQUAL),
    "after accumulation, by parameter": (by_name, EQUAL, EQUAL),
    "forward": (lambda w: [w.first.register_forward_hook(lambda m, i, o: o * 2)], EQUAL, EQUAL),
    "forward, keeping": (lambda w: [w.first.register_forward_hook(lambda m, i, o: w.keep(o.detach()))], EQUAL, EQUAL),
    "forward, before": (lambda w: [w.last.register_forward_pre_hook(lambda m, i: (i[0] * 2,))], EQUAL, EQUAL),
    "backward": (lambda w: [w.last.register_full_backward_hook(first_twice)], EQUAL, EQUAL),
    "backward, before": (
        lambda w: [w.last.register_full_backward_pre_hook(first_twice)],
        EQUAL,
        EQUAL,
    ),
    "backward, counting": (lambda w: [w.last.register_full_backward_hook(w.count)], EQUAL, CHANGES),
    "backward, keeping": (lambda w: [w.last.register_full_backward_hook(w.keep_last)], EQUAL, CHANGES),
    "backward, adding": (lambda w: [w.last.register_full_backward_hook(w.add_last)], EQUAL, WRITES),
    "forward, of all": (lambda w: [modules.register_module_forward_hook(lambda m, i, o: o * 2)], EQUAL, EQUAL),
    "forward, of all, counting": (lambda w: [modules.register_module_forward_pre_hook(w.count)], EQUAL, EQUAL),
    "backward, of all": (
        lambda w: [
            modules.register_module_full_backward_hook(lambda m, *g: first_twice(m, *g) if type(m) is nn.Tanh else None)
        ],
        EQUAL,
        EQUAL,
    ),
    "of a node": (lambda w: [node_of(w).register_hook(w.count)], ADDED_UP, EQUAL),
    "of a node, before": (lambda w: [node_of(w).register_prehook(lambda g: (g[0] * 2,))], ADDED_UP, EQUAL),
    "of many": (lambda w: [register_multi_grad_hook([*w.model.parameters()], w.count)], NODES, EQUAL),
    "of many, the first": (
        lambda w: [register_multi_grad_hook([*w.model.parameters()], w.count, mode="any")],
        EQUAL,
        EQUAL,
    ),
    "of an optimizer": (lambda w: [w.optimizer.register_step_pre_hook(scaled_gradients)], EQUAL, EQUAL),
    "of an optimizer, after": (lambda w: [w.optimizer.register_step_post_hook(w.count)], EQUAL, EQUAL),
    "of all optimizers": (lambda w: [register_optimizer_step_pre_hook(w.count)], EQUAL, EQUAL),
    "a function of autograd": (lambda w: with_function(w, counts=False), EQUAL, EQUAL),
    "a function of autograd, counting": (lambda w: with_function(w, counts=True), EQUAL, CHANGES),
}


def on_result(hook: Callable[[World], Callable[..., Any]], by: str = "register_hook") -> Forward:
    """A program with a hook on a tensor that it computes, or on the tensor's node."""

    def forward(world: World, x: Tensor, handles: Handles) -> Tensor:
        y: Tensor = world.first(x)
        getattr(y if by == "register_hook" else y.grad_fn, by.removeprefix("node."))(hook(world))
        loss: Tensor = world.last(y.tanh()).square().sum()
        return loss

    return forward


def registering(register: Callable[[World], Any], *, removed: bool = True) -> Forward:
    """A program that registers a hook, and perhaps removes it before it returns."""

    def forward(world: World, x: Tensor, handles: Handles) -> Tensor:
        handle = register(world)
        if removed:
            handles.append(handle)
        return world.loss(x)

    return forward


def saving(pack: Callable[[World], Any], unpack: Callable[[World], Any]) -> Forward:
    def forward(world: World, x: Tensor, handles: Handles) -> Tensor:
        with saved_tensors_hooks(pack(world), unpack(world)):
            return world.loss(x)

    return forward


def test_what_hooks_pack_is_held_by_autograd_alone() -> None:
    layer = nn.Linear(3, 3)

    def moved(x: Tensor) -> Tensor:
        with save_on_cpu():
            return layer(x).exp().sin()  # type: ignore[no-any-return]

    x = EXAMPLES[0]
    ours, eager = capture(moved, (x,))(x), moved(x)
    assert torch.equal(ours, eager)
    assert torch.equal(*(torch.autograd.grad(y.sum(), layer.weight)[0] for y in (ours, eager)))


def of_many_results(world: World, x: Tensor, handles: Handles) -> Tensor:
    y = world.first(x)
    z = y.tanh()
    register_multi_grad_hook((y, z), lambda gradients: world.add(gradients[0]))
    loss: Tensor = world.last(z).square().sum()
    return loss


def counted(world: World) -> Callable[[Tensor], Tensor]:
    def same(tensor: Tensor) -> Tensor:
        world.count()
        return tensor

    return same


# What the program registers.
INSIDE: dict[str, tuple[Forward, str, str]] = {
    "on a result": (on_result(lambda w: twice), EQUAL, EQUAL),
    "on a result, counting": (on_result(lambda w: w.count), EQUAL, CHANGES),
    "on a result, keeping": (on_result(lambda w: w.keep), EQUAL, CHANGES),
    "on a result, setting": (on_result(lambda w: w.set), EQUAL, WRITES),
    "on a result, naming": (on_result(lambda w: w.name), EQUAL, "branches on the value of a tensor"),
    "on a result, drawing": (on_result(lambda w: drawing), EQUAL, EQUAL),
    "on a result, adding": (on_result(lambda w: w.add), EQUAL, WRITES),
    "of a node": (on_result(lambda w: lambda i, o: (twice(i[0]), *i[1:]), "node.register_hook"), EQUAL, EQUAL),
    "of a node, before": (on_result(lambda w: lambda o: (o[0] * 2,), "node.register_prehook"), EQUAL, EQUAL),
    "of a node, counting": (on_result(lambda w: w.count, "node.register_hook"), EQUAL, CHANGES),
    "on a parameter": (registering(lambda w: w.weight.register_hook(twice)), EQUAL, EQUAL),
    "on a parameter, left": (registering(lambda w: w.weight.register_hook(twice), removed=False), LEFT, LEFT),
    "after accumulation": (
        registering(lambda w: w.weight.register_post_accumulate_grad_hook(twice_in_place)),
        EQUAL,
        EQUAL,
    ),
    "of what adds up": (
        registering(lambda w: get_gradient_edge(w.weight).node.register_prehook(lambda g: (g[0] * 2,))),
        EQUAL,
        EQUAL,
    ),
    "of what adds up, kept": (registering(lambda w: node_of(w).register_prehook(lambda g: (g[0] * 2,))), KEPT, KEPT),
    "forward": (registering(lambda w: w.first.register_forward_hook(lambda m, i, o: o * 2)), EQUAL, EQUAL),
    "forward, left": (
        registering(lambda w: w.first.register_forward_hook(lambda m, i, o: o * 2), removed=False),
        EQUAL,
        EQUAL,
    ),
    "backward": (registering(lambda w: w.last.register_full_backward_hook(first_twice)), EQUAL, EQUAL),
    "forward, of all": (
        registering(lambda w: modules.register_module_forward_hook(lambda m, i, o: o * 2)),
        EQUAL,
        EQUAL,
    ),
    "of many": (registering(lambda w: register_multi_grad_hook([*w.model.parameters()], w.count)), EQUAL, EQUAL),
    "of many, the first": (
        registering(lambda w: register_multi_grad_hook([*w.model.parameters()], w.count, mode="any")),
        EQUAL,
        EQUAL,
    ),
    "of many results": (of_many_results, EQUAL, WRITES),
    "of an optimizer": (registering(lambda w: w.optimizer.register_step_post_hook(w.count)), EQUAL, EQUAL),
    "of an optimizer, left": (
        registering(lambda w: w.optimizer.register_step_post_hook(w.count), removed=False),
        EQUAL,
        EQUAL,
    ),
    "of saved tensors": (saving(lambda w: lambda t: t * 0.5, lambda w: lambda t: t * 1.5), EQUAL, EQUAL),
    "of saved tensors, counting": (saving(lambda w: lambda t: t, counted), EQUAL, CHANGES),
    "of saved tensors, counting what is saved": (saving(counted, lambda w: lambda t: t), EQUAL, EQUAL),
}


def plain(world: World, x: Tensor, handles: Handles) -> Tensor:
    return world.loss(x)


def nothing(world: World) -> Handles:
    return []


CASES: dict[str, tuple[Callable[[World], Handles], Forward, str, str]]
CASES = {f"before: {name}": (register, plain, step, through) for name, (register, step, through) in BEFORE.items()}
CASES |= {f"inside: {name}": (nothing, forward, step, through) for name, (forward, step, through) in INSIDE.items()}


@contextmanager
def hooked(case: str) -> Iterator[tuple[World, Forward]]:
    """A world with the hooks of a case; those of all modules are removed in the end."""
    register, forward, *_ = CASES[case]
    world, before = World(), {k: dict(v) for k, v in vars(modules).items() if k.endswith("_hooks")}
    handles = register(world)
    try:
        yield world, forward
    finally:
        for handle in handles:
            handle.remove()
        assert before == {k: dict(v) for k, v in vars(modules).items() if k.endswith("_hooks")}


def step_of(world: World, forward: Forward) -> Callable[[Tensor], Tensor]:
    """A training step."""

    def step(x: Tensor) -> Tensor:
        handles: Handles = []
        world.optimizer.zero_grad()
        loss = forward(world, x, handles)
        loss.backward()
        world.optimizer.step()
        for handle in handles:
            handle.remove()
        return loss.detach()

    return step


def loss_of(world: World, forward: Forward) -> Callable[[Tensor], Tensor]:
    """The forward alone."""

    def loss(x: Tensor) -> Tensor:
        handles: Handles = []
        found = forward(world, x, handles)
        for handle in handles:
            handle.remove()
        return found

    return loss


def stepped(world: World, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A training step around a forward."""

    def step(x: Tensor) -> Tensor:
        found = loss(x)
        found.backward()
        world.optimizer.step()
        world.optimizer.zero_grad()
        return found.detach()

    return step


Step = Callable[[Tensor], Tensor]


def in_eager(case: str, make: Callable[[World, Forward], Step]) -> list[tuple[Tensor, dict[str, Any]]]:
    with hooked(case) as (world, forward):
        step = make(world, forward)
        return [(step(x), world.look) for x in EXAMPLES]


def assert_alike(wanted: list[tuple[Tensor, dict[str, Any]]], step: Step, world: World) -> None:
    for x, (result, look) in zip(EXAMPLES, wanted, strict=True):
        torch.testing.assert_close(step(x), result)
        now = world.look
        assert now.keys() == look.keys()
        for name, value in look.items():
            torch.testing.assert_close(now[name], value, msg=partial("{}: {}".format, name))


def assert_unchanged(before: dict[str, Any], world: World) -> None:
    for name, value in world.look.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, msg=partial("{}: {}".format, name))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.every(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_capture_leaves_hooks_and_what_they_write_alone(case: str) -> None:
    wanted = in_eager(case, step_of)
    with hooked(case) as (world, forward):
        before = world.look
        for make in (step_of, loss_of):
            try:
                capture(make(world, forward), (EXAMPLES[0],))
            except REFUSALS as error:
                assert "\n    why  " in str(error)
            assert_unchanged(before, world)
        assert_alike(wanted, step_of(world, forward), world)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
@pytest.mark.every(5)
def test_hooks_in_a_training_step(case: str) -> None:
    end = CASES[case][2]
    wanted = in_eager(case, step_of)
    with hooked(case) as (world, forward):
        before = world.look
        if end == EQUAL:
            assert_alike(wanted, capture(step_of(world, forward), (EXAMPLES[0],)), world)
            return
        with pytest.raises(UnsupportedProgramError, match=end):
            capture(step_of(world, forward), (EXAMPLES[0],))
        assert_unchanged(before, world)


@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("case", CASES)
def test_hooks_where_a_call_is_differentiated(case: str) -> None:
    end = CASES[case][3]
    wanted = in_eager(case, lambda world, forward: stepped(world, loss_of(world, forward)))
    with hooked(case) as (world, forward):
        before = world.look
        if end == EQUAL:
            assert_alike(wanted, stepped(world, capture(loss_of(world, forward), (EXAMPLES[0],))), world)
            return
        with pytest.raises((UnsupportedProgramError, UnsupportedMutationError, RuntimeError), match=end):
            stepped(world, capture(loss_of(world, forward), (EXAMPLES[0],)))(EXAMPLES[0])
        assert_unchanged(before, world)


# What changes between calls


def test_a_hook_that_removes_another_is_followed() -> None:
    """The first call finds the other, later ones do not: two variants."""

    def once(world: World) -> Handles:
        other = world.first.register_forward_hook(lambda m, i, o: o * 2)
        return [other, world.last.register_forward_pre_hook(lambda m, i: other.remove())]

    def run(world: World, forward: Step) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(forward(x).detach(), world.look) for x in EXAMPLES]

    worlds = World(), World()
    for world in worlds:
        once(world)
    wanted = run(worlds[0], worlds[0].loss)
    program = capture(worlds[1].loss, (EXAMPLES[0],))
    assert_alike(wanted, lambda x: program(x).detach(), worlds[1])


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_of_all_modules_that_came_later_is_noticed(before: bool) -> None:
    place: Callable[..., Any] = modules.register_module_forward_hook
    if before:
        place = modules.register_module_forward_pre_hook
    world = World()
    program = capture(world.loss, (EXAMPLES[0],))
    wanted = program(EXAMPLES[1]).detach()
    handle = place((lambda m, i: (i[0] * 2,)) if before else (lambda m, i, o: o * 2))
    try:
        with pytest.raises(InputMismatchError, match="_global_forward_"):
            program(EXAMPLES[1])
    finally:
        handle.remove()
    torch.testing.assert_close(program(EXAMPLES[1]).detach(), wanted)


@pytest.mark.slow
def test_other_hooks_on_a_gradient_are_noticed() -> None:
    world = World()
    handle = world.weight.register_hook(twice)
    program = capture(step_of(world, plain), (EXAMPLES[0],))
    program(EXAMPLES[0])
    handle.remove()
    handle = world.weight.register_hook(lambda gradient: gradient * 3)
    with pytest.raises(InputMismatchError, match=r"world.first.weight: hooks"):
        program(EXAMPLES[0])
    again = capture(step_of(world, plain), (EXAMPLES[0],), on_guard_failure="recapture")
    twin = World()
    twin.model.load_state_dict(world.model.state_dict())
    twin.weight.register_hook(lambda gradient: gradient * 3)
    again(EXAMPLES[1])
    step_of(twin, plain)(EXAMPLES[1])
    torch.testing.assert_close(twin.weight, world.weight)


def test_hooks_of_an_argument_run_once_where_a_call_is_differentiated() -> None:
    def gradients(run: Step) -> list[Tensor]:
        leaf = torch.ones(3, requires_grad=True)
        x = leaf * 2
        for tensor in (leaf, x):
            tensor.register_hook(twice)
        run(x).sum().backward()
        assert leaf.grad is not None
        return [leaf.grad]

    program = capture(lambda x: x.sin() + x.view(-1), (torch.ones(3, requires_grad=True),))
    torch.testing.assert_close(gradients(program), gradients(lambda x: x.sin() + x.view(-1)))


@pytest.mark.parametrize("backward", [False, True])
def test_a_program_that_removes_a_hook_of_its_caller_is_followed(backward: bool) -> None:
    """By a handle; a capture leaves the hook there, the first call removes it."""

    def world() -> tuple[Step, nn.Parameter, Tensor]:
        weight, other = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
        handles = [weight.register_hook(twice), other.register_hook(twice)]  # nobody else knows of `other`

        def step(x: Tensor) -> Tensor:
            if backward:
                weight.grad = None
                (x * weight).sum().backward()
            for handle in handles:
                handle.remove()
            return x * 1 if weight.grad is None else weight.grad.clone()

        return step, weight, other

    twin, own = world(), world()
    program = capture(own[0], (EXAMPLES[0],))
    assert own[1]._backward_hooks and own[2]._backward_hooks
    for x in EXAMPLES:
        torch.testing.assert_close(program(x), twin[0](x))
        assert [one._backward_hooks for one in own[1:]] == [one._backward_hooks for one in twin[1:]]


@pytest.mark.parametrize("where", ["state", "local", "the tensor alone"])
def test_a_hook_that_knows_its_tensor_is_no_refusal(where: str) -> None:
    def world() -> tuple[Step, nn.Parameter]:
        weight, state = nn.Parameter(torch.ones(3)), dict[str, Tensor]()

        def step(x: Tensor) -> Tensor:
            kept = state if where == "state" else {}
            y = (x * weight).tanh()

            def keep(gradient: Tensor) -> None:
                kept["gradient"] = gradient * (
                    y.detach() if where == "the tensor alone" else kept["activation"].detach()
                )

            y.register_hook(keep)
            if where != "the tensor alone":
                kept["activation"] = y
            (y * x).sum().backward()
            return kept["gradient"]

        return step, weight

    (step, mine), (eager, its) = world(), world()
    program = capture(step, (EXAMPLES[0],))
    for x in EXAMPLES:
        torch.testing.assert_close(program(x), eager(x))
        torch.testing.assert_close(mine.grad, its.grad)
