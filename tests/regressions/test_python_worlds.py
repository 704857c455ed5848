"""Programs that the fuzzer of Python worlds found, as small as they come: calls do to a twin world what eager does."""

from __future__ import annotations

import pytest

from tests.sweeps.fuzz.verdict import PASSED, Verdict
from tests.sweeps.fuzz.worlds.check import check_world
from tests.sweeps.fuzz.worlds.program import CLOSURE, FORMS, Line, World

LEAF_VIEW = "p00 = torch.arange(6.0).reshape(2, 3).requires_grad_()"
# What is declared, what each call does; then what is returned, and what else differs from a plain world.
WORLDS: dict[str, tuple[list[str], list[str], dict[str, object]]] = {
    "a leaf that is a view is frozen": ([LEAF_VIEW], ["p00.requires_grad_(False)"], {}),
    "a default is written": (
        ["f00 = lambda n, t=torch.ones(3), *, u=torch.zeros(3): t.add_(1) * n + u.add_(2)"],
        ["y = y * f00(2)"],
        {},
    ),
    "a result whose data are kept, beside a backward": (
        ["p00 = nn.Parameter(torch.ones(3))", "p00.grad = torch.ones(3)", "l00 = []"],
        ["(y * p00).sum().backward()", "y = y * 2", "l00[:] = [y.detach()]"],
        {"requires_grad": True},
    ),
    "hooks on a parameter that a result does not depend on": (
        [
            "p00 = nn.Parameter(torch.ones(3))",
            "l00 = []",
            "h00 = p00.register_hook(lambda g: l00.append(1))",
            "h01 = p00.register_post_accumulate_grad_hook(lambda p: l00.append(2))",
            "m00 = Net()",
        ],
        ["y = m00(y) + (0 if p00.grad is None else p00.grad)"],
        {"after": "backward"},
    ),
    "the last bit of what has no backward": (
        [
            "m00 = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3))",
            "p04 = nn.Parameter(torch.arange(3.0) + 1)",
        ],
        [
            "y = m00(y)",
            "y.register_hook(lambda g: g * 2)",
            "y = y * 2",
            "(y * p04).sum().backward()",
            "p04.data.add_(1)",
        ],
        {},
    ),
    "an argument is returned where there is no gradient to add": (
        ["p00 = nn.Parameter(torch.ones(3))"],
        ["y = y if p00.grad is None else y + p00.grad", "(y * p00).sum().backward()"],
        {},
    ),
    "a gradient is put on what its caller has frozen": (
        ["p00 = nn.Parameter(torch.ones(3))"],
        ["p00.grad = torch.ones_like(p00)"],
        {"changes": ["", "p00.requires_grad_(False)"]},
    ),
    "a gradient is read where its caller has frozen the parameter": (
        ["p00 = nn.Parameter(torch.ones(3))"],
        [
            "y = y * 2 if p00.grad is None else y * p00.grad",
            "(y.detach() * p00).sum().backward() if p00.requires_grad else 0",
        ],
        {"changes": ["", "p00.requires_grad_(False)", "p00.grad = None"]},
    ),
    "a hook makes a result a view whose data are kept, beside a backward": (
        [
            "p00 = nn.Parameter(torch.ones(3))",
            "m00 = nn.Linear(3, 3)",
            "m00.register_full_backward_pre_hook(lambda m, o: (o[0] * 3,))",
            "t00 = torch.ones(3)",
        ],
        ["(p00 * y).sum().backward()", "y = m00(y)", "t00 = y.detach()"],
        {},
    ),
    "one gradient is there, one is not": (
        ["p00 = nn.Parameter(torch.ones(3))", "p01 = nn.Parameter(torch.ones(3))", "p01.grad = torch.ones(3)"],
        ["(y * p00).sum().backward()", "(y * p01).sum().backward()"],
        {},
    ),
    "a gradient is only read": (
        ["p00 = nn.Parameter(torch.ones(3))", "p00.grad = torch.ones(3)", "z00 = torch.optim.SGD([p00], lr=0.5)"],
        ["z00.step()"],
        {"changes": ["", "z00.zero_grad()"]},
    ),
    "a list leaves its place and is added to": (
        ["l00 = [1]", "l01 = [l00, torch.ones(3)]"],
        ["l01.clear()", "l00.append(2)"],
        {},
    ),
    "a cache by arguments beside a backward": (
        ["p00 = nn.Parameter(torch.ones(3))", "f00 = functools.lru_cache(lambda n: torch.ones(3) * n)"],
        ["y = y * f00(2)", "(y * p00).sum().backward()"],
        {},
    ),
    "a gradient that only later calls find is dropped": (
        ["p00 = nn.Parameter(torch.ones(3))"],
        ["y = y * p00", "p00.grad = None"],
        {"after": "backward"},
    ),
    "a step without gradients": (
        ["p00 = nn.Parameter(torch.ones(3))", "z00 = torch.optim.SGD([p00], lr=0.5)"],
        ["z00.step()"],
        {"changes": ["", "p00.grad = torch.ones(3)", "p00.grad = None"]},
    ),
    "a tensor is no longer in a set": (
        ["t00 = torch.ones(3)", "s00 = {t00}"],
        ["y = y + (1 if t00 in s00 else 2)"],
        {"changes": ["", "t00 = torch.full((3,), 7.0)"], "again": "recapture"},
    ),
    "a hook is removed that alone knows a list, beside an object that changes": (
        [
            "p00 = nn.Parameter(torch.ones(3))",
            "o00 = Plain(torch.ones(3))",
            "o00.inner = Slots(o00.a)",
            "l00 = [2]",
            "h00 = p00.register_hook(lambda g: l00.append(1))",
        ],
        ["(y * p00).sum().backward()", "o00.a = o00.a * 2", "h00.remove()"],
        {},
    ),
    "a view is bound by a partial": (
        ["t00 = torch.arange(6.0).reshape(2, 3)", "f00 = functools.partial(torch.mul, t00)"],
        ["y = y * f00(2)"],
        {"requires_grad": True},
    ),
}


def _world(name: str, form: str = CLOSURE) -> World:
    declared, steps, options = WORLDS[name]
    changes = options.get("changes", [""])
    assert isinstance(changes, list)
    between = tuple((Line(change),) if change else () for change in changes)
    plain = {"result": "y", **options, "changes": between}
    return World(form, tuple(map(Line, declared)), tuple(map(Line, steps)), **plain)  # type: ignore[arg-type]


@pytest.mark.every(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.slow
def test_a_world_is_as_eager_leaves_it(name: str, form: str) -> None:
    assert check_world(_world(name, form)) == Verdict(PASSED)
