"""Deferred constructions: what is materialized is what eager would have made, bit for bit, whole and in parts."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from functionalize import (
    DeferredError,
    NotDeferredError,
    capture,
    deferred_init,
    is_deferred,
    is_fake,
    materialize_module,
    materialize_tensor,
)
from functionalize.deferred.api import recording
from functionalize.deferred.random import mersenne
from tests.support.deferred import assert_same, check, compare, module, pair, parameter, state
from tests.support.transformer_models import TRANSFORMERS

np = pytest.importorskip("numpy")


# Modules of torch

_ARGUMENTS: list[tuple[Any, ...]] = [(), (4,), (4, 4), (2, 4), (4, 4, 2), (4, 4, 4), (8, 2, 2), (4, 2, 2, 2), ([4, 4],)]


_SMALL = {"Transformer": (8, 2, 1, 1, 16)}


def _modules() -> dict[str, tuple[type[nn.Module], tuple[Any, ...]]]:
    """Every class of torch.nn that some plain arguments construct, with the first such arguments."""
    found: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {}
    for name, kind in sorted(vars(nn).items()):
        if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
            continue
        for arguments in [_SMALL[name]] if name in _SMALL else _ARGUMENTS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    kind(*arguments)
            except Exception:
                continue
            found[name] = kind, arguments
            break
    return found


MODULES = _modules()


def test_most_modules_of_torch_are_constructed() -> None:
    assert len(MODULES) > 130
    assert {"Linear", "LSTM", "Conv3d", "Embedding", "MultiheadAttention", "LazyLinear", "BatchNorm2d"} <= set(MODULES)


@pytest.mark.every(5)
@pytest.mark.parametrize("shard", range(4))
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modules_of_torch(shard: int) -> None:
    for name in sorted(MODULES)[shard::4]:
        kind, arguments = MODULES[name]
        check(kind, *arguments)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("shard", [0, pytest.param(1, marks=pytest.mark.full)])
def test_modules_of_the_module_database(shard: int) -> None:
    from torch.testing._internal.common_modules import module_db

    for info in module_db[shard::2]:
        seen = set()
        inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=True)
        for one in inputs:
            args, kwargs = one.constructor_input.args, one.constructor_input.kwargs
            if repr((args, kwargs)) not in seen:
                seen.add(repr((args, kwargs)))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    check(info.module_cls, *args, **kwargs)


INITS = ["uniform_", "normal_", "ones_", "zeros_", "eye_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_"]
INITS += ["kaiming_normal_", "trunc_normal_", "orthogonal_"]


@pytest.mark.parametrize("name", INITS)
def test_inits(name: str) -> None:
    check(parameter(lambda: getattr(nn.init, name)(torch.empty(6, 5))))


OTHER_INITS: dict[str, Callable[[], Tensor]] = {
    "constant": lambda: nn.init.constant_(torch.empty(6, 5), 3.5),
    "dirac": lambda: nn.init.dirac_(torch.empty(4, 3, 5)),
    "sparse": lambda: nn.init.sparse_(torch.empty(9, 5), 0.3),
    "trunc_normal_narrow": lambda: nn.init.trunc_normal_(torch.empty(30, 5), std=2.0, a=-0.5, b=0.5),
    "trunc_normal_one_sided": lambda: nn.init.trunc_normal_(torch.empty(30, 5), a=1.5, b=3.0),
    "normal_of_few": lambda: nn.init.normal_(torch.empty(7)),
    "normal_of_a_part": lambda: nn.init.normal_(torch.empty(40, 30).t()[3:11]),
    "half": lambda: nn.init.normal_(torch.empty(33, 5, dtype=torch.float16)),
    "bfloat16": lambda: nn.init.uniform_(torch.empty(33, 5, dtype=torch.bfloat16)),
    "double": lambda: nn.init.normal_(torch.empty(33, 5, dtype=torch.float64)),
    "complex": lambda: torch.randn(5, 4, dtype=torch.complex64).conj(),
    "integers": lambda: torch.randint(-5, 100, (30,)).float(),
    "permutation": lambda: torch.randperm(20).float(),
    "bernoulli": lambda: torch.bernoulli(torch.full((20,), 0.5)),
    "exponential": lambda: torch.empty(30).exponential_(),
    "dropout": lambda: nn.functional.dropout(torch.ones(40), 0.5),
    "multinomial": lambda: torch.multinomial(torch.ones(20), 9).float(),
    "lists": lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(2, 3),
    "broadcast": lambda: torch.randn(1, 4).expand(3, 4).clone(),
    "product": lambda: torch.randn(4, 5) @ torch.randn(5, 3),
    "stack": lambda: torch.stack([torch.randn(3) for _ in range(4)]),
}


@pytest.mark.parametrize("name", OTHER_INITS)
def test_other_ways_to_begin(name: str) -> None:
    check(parameter(OTHER_INITS[name]))


@pytest.mark.every(5)
@pytest.mark.slow(seconds=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    model: Any = TRANSFORMERS[name]
    make = model[0] if isinstance(model, tuple) else model
    check(make)


@pytest.mark.full(seconds=600)
@pytest.mark.parametrize("shard", range(4))
def test_all_models_of_transformers(shard: int) -> None:
    pytest.importorskip("transformers")
    from tests.sweeps.zoo.deferred import RIGHT, WRONG, judged
    from tests.sweeps.zoo.from_transformers import names

    verdicts = [judged(name) for name in names()[shard::4]]
    assert not [verdict for verdict in verdicts if verdict.status == WRONG]
    assert sum(verdict.status == RIGHT for verdict in verdicts) > 100


class Block(nn.Module):
    """As in torchvision: two convolutions, each with a norm, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.layers = nn.ModuleList(
            nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1)) for width in (16, 32)
        )
        self.fc = nn.Linear(64, 10)
        for one in self.modules():
            if isinstance(one, nn.Conv2d):
                nn.init.kaiming_normal_(one.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(one, nn.BatchNorm2d):
                nn.init.constant_(one.weight, 1)
        for one in self.modules():
            if isinstance(one, Block):
                nn.init.constant_(one.bn2.weight, 0)


def test_a_resnet() -> None:
    check(ResNet)


# Memory: views, writes, ties


def test_views_and_writes_in_any_order() -> None:
    def make(self: Any) -> None:
        self.a = nn.Parameter(torch.randn(4, 6))
        self.b = nn.Buffer(self.a.data.view(-1))
        self.a.data.add_(2)
        self.b[3:9].mul_(5)
        self.c = nn.Buffer(self.a.data.t()[1:3])
        self.d = nn.Buffer(torch.zeros(5, 5).fill_diagonal_(3).index_fill_(0, torch.tensor([1]), 4))
        with torch.no_grad():
            self.a[0] = torch.arange(6.0)
        self.e = nn.Buffer(torch.arange(10)[2:7])

    deferred: Any = check(module(make))
    deferred.a.data.zero_()
    assert not deferred.b.any() and not deferred.c.any()


def test_data_and_storages_are_set() -> None:
    real = torch.randn(3)

    def make(self: Any) -> None:
        self.a = nn.Parameter(torch.empty(2))
        self.a.data = torch.randn(3, 3)
        self.a.data.mul_(2)
        self.b = nn.Parameter(torch.empty(2))
        self.b.data = real
        self.c = nn.Buffer(torch.zeros(4))
        self.c.set_(torch.ones(3).mul_(3))
        self.d = nn.Buffer(torch.arange(9))
        self.d.resize_(2, 3)
        self.e = nn.Buffer(torch.zeros(4))
        self.e.data = self.a.data.view(-1)[2:5]

    check(module(make))
    assert real.shape == (3,)


def test_ties() -> None:
    def make(self: Any) -> None:
        self.embedding = nn.Embedding(10, 4, padding_idx=3)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embedding.weight
        self.again = nn.ParameterList([self.out.weight, nn.Parameter(torch.randn(2))])

    deferred: Any = check(module(make))
    assert deferred.out.weight is deferred.embedding.weight is deferred.again[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    ],
)
def test_parametrizations(make: Callable[[], nn.Module]) -> None:
    eager, _ = pair(make)
    deferred = check(make)
    x = torch.randn(2, next(iter(eager.parameters())).size(-1) if eager.in_features is None else eager.in_features)
    assert torch.equal(eager.eval()(x), deferred.eval()(x))


def test_copies_of_modules() -> None:
    eager, deferred = pair(nn.TransformerEncoder, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    materialize_module(deferred)
    compare(eager, deferred)  # the layer was real, and so are its copies
    layer: Any = nn.TransformerEncoderLayer
    check(lambda: nn.TransformerEncoder(layer(8, 2, 16, batch_first=True), 2))
    eager, deferred = pair(nn.Linear, 3, 4)
    copied = copy.deepcopy(deferred)
    materialize_module(copied)
    compare(eager, copied)
    assert is_deferred(deferred)

    def shared(self: Any) -> None:
        self.a, self.c = nn.Buffer(torch.randn(4, 4)), nn.Buffer(torch.randn(6)[1:4])
        self.b = nn.Buffer(self.a[1])
        self.d, self.e, self.f = map(nn.Buffer, copy.deepcopy([self.a, self.b, self.c]))
        self.d.zero_()

    check(module(shared))


# Data-dependent numbers


def test_numbers_of_a_construction() -> None:
    def make(self: Any) -> None:
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.total = float(self.weight.detach().sum())
        self.rates = torch.linspace(0, 0.3, 4).tolist()
        self.some = bool((self.weight > 0).any())
        self.array = self.weight.detach().numpy().sum()
        self.same = torch.equal(self.weight, self.weight.clone())
        self.many = len(self.weight[self.weight > 0])
        self.positive = nn.Buffer(self.weight.data[self.weight.data > 0])
        self.where = nn.Buffer(self.weight.data.nonzero())
        self.extra = nn.Parameter(torch.randn(3) if self.weight[0, 0] > 0 else torch.randn(2))

    check(module(make))
    eager, deferred = pair(module(make))
    for name in ("total", "rates", "some", "array", "same", "many"):
        assert getattr(eager, name) == getattr(deferred, name), name


def test_a_decision_by_a_tensor_that_changed() -> None:
    switch = torch.ones(3)
    deferred = deferred_init(parameter(lambda: torch.ones(2) if switch.sum() > 2 else torch.zeros(2)))
    switch.zero_()
    with pytest.raises(DeferredError, match="`switch` was changed"):
        materialize_module(deferred)


def test_arrays_of_numpy_are_not_written() -> None:
    def make() -> Tensor:
        weight = torch.ones(3)
        weight.numpy()[0] = 5
        return weight

    with pytest.raises(ValueError, match="read-only"):
        deferred_init(make)


# Tensors from outside


def test_real_tensors_and_arrays_are_read() -> None:
    outside, array = torch.randn(3, 4), np.arange(6.0).reshape(2, 3)

    def make(self: Any) -> None:
        self.a = nn.Parameter(torch.empty(3, 4))
        self.b, self.c = nn.Buffer(torch.empty(2, 3)), nn.Buffer(torch.tensor(array))
        with torch.no_grad():
            self.a.copy_(outside)
        self.b.copy_(torch.from_numpy(array))
        self.d, self.e = nn.Buffer(outside * 2), nn.Parameter(torch.from_numpy(array) + torch.randn(2, 3))
        self.register_buffer("itself", outside)

    deferred: Any = check(module(make))
    assert deferred.itself is outside and deferred.a.data_ptr() != outside.data_ptr()


def test_tensors_from_outside_that_changed() -> None:
    outside, array, quiet = torch.ones(3), np.ones(3), torch.ones(3)
    first = deferred_init(parameter(lambda: outside * 2))
    second = deferred_init(parameter(lambda: torch.from_numpy(array) * 2))
    with torch.inference_mode():
        inference = torch.ones(3)
        third = deferred_init(parameter(lambda: inference.clone()))
        inference.add_(1)
    fourth = deferred_init(parameter(lambda: quiet * 2))
    outside.add_(1)
    array[1] = 0
    with pytest.raises(DeferredError, match=r"`outside` was changed after[^`]*test_deferred.py:\d+ in") as caught:
        materialize_module(first)
    assert "why  " in str(caught.value) and "try  " in str(caught.value)
    for changed in (second, third):
        with pytest.raises(DeferredError, match="was changed after"):
            materialize_module(changed)
    materialize_module(fourth)


def test_tensors_from_outside_are_not_written() -> None:
    outside = torch.ones(3)
    with pytest.raises(DeferredError, match=r"add_.*was made outside the deferred construction"):
        deferred_init(lambda: outside.add_(torch.ones(3)))
    assert outside.tolist() == [1, 1, 1]
    weight = deferred_init(torch.ones, 3)
    with pytest.raises(DeferredError, match="was made outside the deferred construction"):
        outside.copy_(weight)
    check(nn.Linear, 3, 3)


def test_a_checkpoint_is_loaded() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    trained = make().state_dict()
    loaded = deferred_init(make)
    loaded.load_state_dict(trained)
    materialize_module(loaded)
    assigned = deferred_init(make)
    assigned.load_state_dict(trained, assign=True)
    assert not is_deferred(assigned)
    in_part = deferred_init(make)
    in_part.load_state_dict({name: value for name, value in trained.items() if name[0] == "0"}, strict=False)
    materialize_module(in_part)
    for one in (loaded, assigned):
        assert all(torch.equal(value, trained[name]) for name, value in one.state_dict().items())
    assert torch.equal(in_part.get_parameter("0.weight"), trained["0.weight"])


# Random numbers


def test_constructions_one_after_another_draw_as_in_eager() -> None:
    torch.manual_seed(1)
    first, number, second = nn.Linear(3, 4), torch.rand(2), nn.Linear(3, 4)
    torch.manual_seed(1)
    deferred = deferred_init(nn.Linear, 3, 4)
    assert torch.equal(torch.rand(2), number)
    other = deferred_init(nn.Linear, 3, 4)
    torch.manual_seed(99)
    for one, two in ((other, second), (deferred, first)):
        materialize_module(one)
        compare(two, one)
    after = torch.get_rng_state()
    torch.manual_seed(99)
    assert torch.equal(torch.get_rng_state(), after)


def test_seeds_and_forks_inside() -> None:
    def make(self: Any) -> None:
        self.a = nn.Parameter(torch.randn(3))
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.b = nn.Parameter(torch.randn(3))
        self.c = nn.Parameter(torch.randn(20))
        kept = torch.get_rng_state()
        self.d = nn.Parameter(torch.randn(5))
        torch.set_rng_state(kept)
        self.e, self.f = nn.Parameter(torch.randn(5)), nn.Parameter(torch.rand(3))
        torch.manual_seed(3)
        self.g = nn.Parameter(torch.randn(3))
        torch.manual_seed(3)

    deferred: Any = check(module(make))
    assert torch.equal(deferred.d, deferred.e) and torch.equal(deferred.b, deferred.g)


def test_generators_of_ones_own() -> None:
    generator = torch.Generator()

    def make() -> nn.Module:
        generator.manual_seed(5)
        layer = nn.Linear(30, 4)
        nn.init.normal_(layer.weight, generator=generator)
        nn.init.trunc_normal_(layer.bias, generator=generator)
        return layer

    check(make)
    make()
    after = generator.get_state()
    deferred_init(make)
    assert torch.equal(generator.get_state(), after)


def test_skipping_is_drawing() -> None:
    generator = torch.Generator()
    generator.manual_seed(3)
    for count in (1, 623, 624, 625, 1248, 100_000):
        before = generator.get_state()
        assert torch.equal(mersenne.jumped(before, count), mersenne.drawn(before, count)), count
        torch.rand(count % 17, generator=generator)


@pytest.mark.slow(seconds=5)
def test_large_tensors_are_skipped() -> None:
    eager, deferred = pair(lambda: nn.Sequential(nn.Linear(5500, 5001), nn.Linear(3, 3), nn.Linear(300, 20)))
    for index in (2, 1):
        materialize_module(deferred[index])
        compare(eager[index], deferred[index])
    assert is_deferred(deferred[0])


# Afterwards


def _halved(model: Any) -> None:
    model.half()


def _moved(model: Any) -> None:
    model.to("cpu", torch.float64)


def _longer(model: Any) -> None:
    model.append(nn.Linear(5, 2))


def _begun_anew(model: Any) -> None:
    nn.init.normal_(model[0].weight)
    model[1].weight.data.fill_(3)


def _frozen(model: Any) -> None:
    model.eval().requires_grad_(False)


def _normed(model: Any) -> None:
    parametrizations.weight_norm(model[0])


def _other_data(model: Any) -> None:
    model[0].bias.data = torch.ones(2)
    model[1].weight.data = deferred_init(torch.ones, 4) if is_deferred(model) else torch.ones(4)
    with torch.no_grad():
        model[0].weight[0] = model[0].bias[0]


def test_changes_inside_of_a_construction() -> None:
    def make(self: Any) -> None:
        self.a = nn.Linear(3, 4).double()
        self.b = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.float16)
        self.b[0].weight.data.add_(1)
        self.half()
        self.a.weight.data[0] = self.b[0].bias.data[:3]

    check(module(make))


CHANGES = [_halved, _moved, _longer, _begun_anew, _frozen, _normed, _other_data]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_construction(change: Callable[[nn.Module], None]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    eager, deferred = pair(make)
    for one in (eager, deferred):
        torch.manual_seed(5)
        change(one)
    materialize_module(deferred)
    compare(eager, deferred)


def test_devices() -> None:
    assert not torch.cuda.is_available()

    class OnCuda(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4, device="cuda")
            self.kind = "cuda" if self.linear.weight.is_cuda else "cpu"

    deferred = deferred_init(OnCuda)
    assert deferred.kind == "cuda" and deferred.linear.weight.device == torch.device("cuda", 0)
    with pytest.raises(DeferredError, match="made for the device cuda"):
        materialize_module(deferred)
    materialize_module(deferred, device="cpu")
    assert deferred.linear.weight.device.type == "cpu" and deferred.linear.weight.std() > 0
    eager, deferred_linear = pair(nn.Linear, 3, 4)
    deferred_init(deferred_linear.cuda)
    deferred_init(deferred_linear.to, "cpu")
    deferred_init(deferred_linear.to, "cuda")
    assert deferred_linear.weight.is_cuda
    materialize_module(deferred_linear, device="cpu", dtype=torch.float64)
    assert torch.equal(deferred_linear.weight, eager.weight.double())
    norm = deferred_init(nn.BatchNorm1d, 3)
    materialize_module(norm, dtype=torch.float16, device="meta")
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    assert norm.running_mean.dtype == torch.float16 and norm.num_batches_tracked.dtype == torch.int64
    assert norm.weight.is_meta and isinstance(norm.weight, nn.Parameter)


def test_everything_that_refers_to_a_parameter_sees_it_materialized() -> None:
    deferred: Any = deferred_init(nn.LSTM, 3, 4)
    optimizer = torch.optim.SGD(deferred.parameters(), 0.1)
    kept, weight = list(deferred.parameters()), deferred.weight_hh_l0
    materialize_module(deferred)
    assert weight is deferred.weight_hh_l0 is deferred._flat_weights[1]
    assert all(one is two and not is_fake(one) for one, two in zip(kept, deferred.parameters(), strict=True))
    deferred(torch.randn(2, 3))[0].sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before)
    assert not any(name.startswith(("_functionalize", "_item_memo")) for name in weight.__dict__)


def test_attributes_hooks_and_gradients_of_parameters() -> None:
    seen: list[Tensor] = []

    def make() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer(torch.ones(2, 3)).sum().backward()
        layer.weight.tag = "no decay"  # type: ignore[attr-defined]
        layer.weight.register_hook(seen.append)
        return layer

    eager, deferred = pair(make)
    assert is_deferred(deferred.weight.grad)
    materialize_module(deferred)
    assert deferred.weight.tag == "no decay" and torch.equal(deferred.weight.grad, eager.weight.grad)
    deferred(torch.ones(2, 3)).sum().backward()
    assert len(seen) == 1


def test_parts_of_a_module() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    deferred = deferred_init(make)
    materialize_module(deferred, buffers_only=True)
    assert not any(map(is_fake, deferred.buffers())) and all(map(is_fake, deferred.parameters()))
    materialize_module(deferred, check_fn=lambda one: isinstance(one, nn.Linear))
    assert [is_deferred(child) for child in deferred.children()] == [False, True]
    materialize_module(deferred)
    materialize_module(deferred)


def test_a_write_to_what_was_materialized() -> None:
    weight = deferred_init(torch.ones, 3)
    view, real = weight.view(-1)[1:], materialize_tensor(weight)
    assert materialize_tensor(weight) is real
    assert materialize_tensor(view).untyped_storage().data_ptr() == real.untyped_storage().data_ptr()
    with pytest.raises(DeferredError, match="is already materialized"):
        weight.add_(1)


def test_what_a_construction_did_before_it_raised() -> None:
    weight = deferred_init(torch.ones, 3)

    def fail() -> None:
        weight.add_(1)
        raise KeyError

    with pytest.raises(KeyError):
        deferred_init(fail)
    assert materialize_tensor(weight).tolist() == [2, 2, 2]


def test_lazy_modules() -> None:
    def make(self: Any) -> None:
        self.linear, self.conv, self.norm = nn.LazyLinear(3), nn.LazyConv2d(2, 1), nn.LazyBatchNorm1d()
        self.linear(torch.zeros(2, 5))
        self.conv(torch.zeros(1, 2, 3, 3))
        self.norm(torch.randn(2, 5))

    check(module(make))
    later: Any = deferred_init(nn.LazyLinear, 3)
    materialize_module(later)
    assert later(torch.ones(2, 4)).shape == (2, 3) and type(later.weight) is nn.Parameter


def test_nested_constructions() -> None:
    def nested(self: Any) -> None:
        self.a, self.b = deferred_init(nn.Linear, 3, 3), nn.Linear(3, 3)

    def plain(self: Any) -> None:
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    torch.manual_seed(2)
    eager = module(plain)()
    torch.manual_seed(2)
    deferred = deferred_init(module(nested))
    materialize_module(deferred)
    compare(eager, deferred)


def test_several_threads() -> None:
    same: dict[int, bool] = {}

    def work(seed: int) -> None:
        one, two = torch.Generator(), torch.Generator()
        one.manual_seed(seed)
        two.manual_seed(seed)
        weight = deferred_init(lambda: torch.empty(50, 50).normal_(generator=one)).add_(1)
        same[seed] = torch.equal(materialize_tensor(weight), torch.empty(50, 50).normal_(generator=two).add_(1))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == dict.fromkeys(range(8), True)


@pytest.mark.slow
def test_nothing_is_kept() -> None:
    kept, outside = recording(), torch.ones(1000)

    def sizes() -> tuple[int, ...]:
        gc.collect()
        kept.sweep()
        names = kept.tracer.graph._graph_namespace._obj_to_name
        return len(kept.cells), len(kept.tracer.graph.nodes), len(kept.tracer.tensor_attrs), len(names)

    before = sizes()
    for _ in range(3):
        deferred = deferred_init(lambda: nn.ParameterList([nn.Linear(3, 3).weight, nn.Parameter(outside * 2)]))
        materialize_tensor(deferred[0])
        materialize_module(deferred)
    assert sizes() <= before
    assert not any(value is outside for value in kept.tracer.tensor_attrs)
    alive, outside = weakref.ref(outside), torch.ones(0)
    del deferred
    assert sizes() <= before and alive() is None


def test_no_tensor_is_referred_to_weakly_between_operations() -> None:
    made, real = deferred_init(nn.BatchNorm1d, 3), nn.BatchNorm1d(3)
    assert not any(weakref.getweakrefs(tensor) for _, tensor in state(made))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        made.load_state_dict(real.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    materialize_module(made)
    compare(real, made)


# Capture


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_capture_before_materialization(remove: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))

    eager, deferred = pair(make)
    x = torch.randn(5, 3)
    program = capture(deferred, (x,), remove=remove)
    assert is_deferred(deferred)
    materialize_module(deferred)
    compare(eager, deferred)
    assert torch.equal(program(x), eager(x))
    compare(eager, deferred)  # the statistics that both wrote
    program(x).sum().backward()
    eager(x).sum().backward()
    for one, two in zip(eager.parameters(), deferred.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)


# Refusals


@torch.library.custom_op("deferred::without_meta", mutates_args=())
def without_meta(x: Tensor) -> Tensor:
    return x + 1


@torch.library.custom_op("deferred::writes", mutates_args=("x",))
def writes(x: Tensor) -> None:
    x.add_(1)


def test_custom_operators() -> None:
    writes.register_fake(lambda x: None)

    def make() -> Tensor:
        x = torch.ones(3)
        writes(x)
        return x

    assert materialize_tensor(deferred_init(make)).tolist() == [2, 2, 2]
    with pytest.raises(DeferredError, match=r"deferred::without_meta[\s\S]*no meta kernel[\s\S]*register_fake"):
        deferred_init(lambda: without_meta(torch.ones(3)))


def test_refusals() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        foreign = torch.ones(2)
    assert not is_deferred(foreign)
    with pytest.raises(NotDeferredError, match="not made inside deferred_init"):
        materialize_tensor(foreign)
    with pytest.raises(ValueError, match="cannot materialize"):
        materialize_module(nn.ParameterList([nn.Parameter(foreign)]))
    with pytest.raises(TypeError, match="a module's class or a function"):
        deferred_init(nn.Linear(2, 2).weight)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a Linear that exists already"):
        deferred_init(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="takes a module, not a Tensor"):
        materialize_module(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a tensor, not a str"):
        materialize_tensor("weight")  # type: ignore[arg-type]
    with pytest.raises(DeferredError, match="inside the construction that makes it"):
        deferred_init(lambda: materialize_tensor(torch.ones(3)))
    for ask in (torch.Tensor.share_memory_, torch.utils.dlpack.from_dlpack, lambda tensor: tensor.untyped_storage()[0]):
        with pytest.raises(DeferredError, match="reads the memory"):
            deferred_init(lambda ask=ask: ask(torch.ones(3)))
    with pytest.raises(DeferredError, match="layout torch"):
        materialize_tensor(deferred_init(lambda: torch.ones(3).to_sparse()))
    with pytest.raises(DeferredError, match="address of a deferred tensor"):
        deferred_init(lambda: torch.ones(3).data_ptr())
    with pytest.raises(DeferredError, match="inside a traced function"):
        make_fx(lambda x: deferred_init(torch.ones, 3) + x)(torch.ones(3))
    with pytest.raises(TypeError, match="cannot be saved"):
        torch.save(deferred_init(nn.Linear, 2, 2).state_dict(), "/dev/null")
    check(nn.Linear, 3, 3)


def test_names_of_a_state_that_is_deferred() -> None:
    _, deferred = pair(nn.BatchNorm1d, 3)
    assert {name: tensor.device.type for name, tensor in state(deferred)} == dict.fromkeys(dict(state(deferred)), "cpu")
    assert all(isinstance(one, nn.Parameter) for one in deferred.parameters())
    assert_same(materialize_tensor(deferred.weight), torch.nn.Parameter(torch.ones(3)))
