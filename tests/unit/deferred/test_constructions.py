"""Constructions of all kinds, as users write them: each is, bit for bit, what eager makes, whole and part by part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions, nn
from torch.nn.utils import parametrizations, parametrize, prune

from functionalize import deferred_init, fake_mode
from tests.support.deferred import check, module

np = pytest.importorskip("numpy")
Make = Callable[[Any], None]
MAKES: dict[str, Make] = {}


def construction(make: Make) -> Make:
    """One of those that are tested."""
    MAKES[make.__name__] = make
    return make


@pytest.mark.every(5)
@pytest.mark.parametrize("name", MAKES)
def test_constructions(name: str) -> None:
    check(module(MAKES[name]))


def buffers(self: nn.Module, *tensors: torch.Tensor) -> None:
    """Give a module buffers."""
    for number, tensor in enumerate(tensors):
        self.register_buffer(f"b{number}", tensor)


# Memory


@construction
def parts_are_initialized(self: Any) -> None:
    weight = torch.empty(12, 4)
    for part in weight.chunk(3):
        nn.init.xavier_uniform_(part)
    square = torch.randn(5, 5)
    square.diagonal().fill_(1)
    square.diagonal(1).uniform_()
    self.weight = nn.Parameter(weight)
    buffers(self, square.tril_(), square.diagonal())


@construction
def one_memory_seen_as_others(self: Any) -> None:
    pairs, plain, overlapping = torch.randn(4, 2), torch.randn(4, 4), torch.randn(10)
    complex_ones = torch.view_as_complex(pairs)
    complex_ones.mul_(1j)
    integers = plain.view(torch.int32)
    integers.bitwise_and_(~1)
    windows = overlapping.as_strided((4, 3), (2, 1))
    overlapping.mul_(2)
    buffers(self, complex_ones, complex_ones.real, pairs, integers, plain, windows, overlapping)


@construction
def flat_memory_of_all_parameters(self: Any) -> None:
    self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    flat, at = torch.empty(sum(one.numel() for one in self.layers.parameters())), 0
    for one in self.layers.parameters():
        flat[at : at + one.numel()].copy_(one.data.view(-1))
        one.data = flat[at : at + one.numel()].view_as(one)
        at += one.numel()
    self.flat = nn.Parameter(flat)


@construction
def data_of_data(self: Any) -> None:
    self.a = nn.Parameter(torch.empty(3, 3))
    self.a.data = torch.randn(3, 3)
    self.a.data[1] = 0
    self.b = nn.Parameter(self.a.data)
    self.a.data = self.a.data.t()
    self.a.data.mul_(3)
    self.b.data.copy_(torch.arange(9.0).view(3, 3))
    values = torch.randn(10)
    buffers(self, torch.empty(0).set_(values.untyped_storage(), 0, (5,), (2,)))
    values.add_(1)


@construction
def results_are_written_to_tensors(self: Any) -> None:
    sums, drawn, joined = torch.empty(4), torch.empty(4), torch.empty(8)
    torch.add(torch.randn(4), 1, out=sums)
    torch.randn(4, out=drawn)
    torch.cat([sums, drawn], out=joined)
    lists = [torch.randn(3) for _ in range(3)]
    torch._foreach_mul_(lists, 2.0)
    buffers(self, sums, drawn, joined, *lists, torch.empty(0).resize_(2, 2).fill_(1))


@construction
def other_formats(self: Any) -> None:
    self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    rows = torch.empty(10, 10)[::2, 1:].normal_()
    self.weight = nn.Parameter(torch.empty(6, 8).t())
    nn.init.kaiming_normal_(self.weight)
    buffers(self, torch.randn_like(images), torch.rand_like(images[:, :2]), torch.empty(40, 30).t().normal_(), rows)


@construction
def from_device_meta(self: Any) -> None:
    self.linear = nn.Linear(3, 4, device="meta").to_empty(device="cpu")
    nn.init.normal_(self.linear.weight)
    nn.init.zeros_(self.linear.bias)
    self.meta = nn.Linear(3, 3, device="meta")


# Random numbers


@construction
def draws(self: Any) -> None:
    buffers(self, torch.randperm(17), torch.multinomial(torch.rand(9), 4), torch.bernoulli(torch.rand(9)))
    self.more = nn.Module()
    some = torch.empty(7)
    buffers(
        self.more,
        torch.normal(torch.randn(5), torch.rand(5)),
        some.clone().exponential_(),
        some.clone().log_normal_(),
        some.clone().cauchy_(),
        some.clone().geometric_(0.3),
        torch.randint(0, 2**40, (5,)),
        torch.poisson(torch.rand(5) * 4),
        torch.binomial(torch.full((4,), 9.0), torch.rand(4)),
        torch.empty(5, dtype=torch.bool).random_(),
        torch.randn(3, dtype=torch.complex64),
        nn.functional.gumbel_softmax(torch.randn(3, 4)),
        nn.functional.rrelu(torch.randn(9), training=True),
        torch.randn(1),
        torch.randn(3, dtype=torch.float64),
        torch.randn(17),
        torch.vmap(lambda x: x + torch.randn(4), randomness="different")(torch.randn(3, 4)),
    )


@construction
def draws_of_distributions(self: Any) -> None:
    ones = torch.ones(3)
    of = (
        distributions.Normal(0.0, 1.0),
        distributions.Dirichlet(ones),
        distributions.Beta(ones, ones),
        distributions.Categorical(ones / 3),
        distributions.MultivariateNormal(torch.zeros(3), torch.eye(3)),
        distributions.Gamma(ones, ones),
    )
    buffers(self, *(one.sample((4,)) for one in of))


@construction
def states_of_generators(self: Any) -> None:
    one, two = torch.Generator().manual_seed(3), torch.Generator()
    first = torch.randn(30, generator=one)
    two.set_state(one.get_state())
    third = one.clone_state()
    alike = [torch.randn(30, generator=generator) for generator in (two, one, third)]
    buffers(self, first, *alike, torch.randn(3), torch.randperm(9, generator=two))


@construction
def the_default_generator_is_asked(self: Any) -> None:
    first = torch.randn(30)
    state = torch.get_rng_state()
    second = torch.randn(30)
    torch.manual_seed(torch.initial_seed())
    again = torch.randn(30)
    torch.set_rng_state(state)
    buffers(self, first, state, second, again, torch.randn(30), torch.randn(3, generator=torch.default_generator))


@construction
def shapes_are_tried_on_fake_tensors(self: Any) -> None:
    with fake_mode():
        width = nn.Linear(3, 4).weight.size(0)
    self.linear = nn.Linear(width, 3)


# Data-dependent numbers


@construction
def data_are_asked_for(self: Any) -> None:
    values = torch.randn(5)
    numbers = torch.arange(5)
    assert 3 in numbers and len(numbers) == 5
    buffers(
        self,
        torch.tensor(list(values)),
        torch.as_tensor([[values[0], 1.0], [2.0, values[1]]]),
        torch.tensor(np.asarray(values) * 2),
        torch.from_numpy(np.linalg.svd(torch.randn(4, 4).numpy())[0]),
        torch.full((2,), float(f"{values[0]:.3f}")),
        numbers.unique(),
        values[values > 0],
        torch.repeat_interleave(torch.arange(3), torch.tensor([1, 2, 3])),
    )
    for number in range(int(values.argmax())):
        setattr(self, f"layer{number}", nn.Linear(2, int(torch.randint(1, 5, ()))))


@construction
def means_are_sought(self: Any) -> None:
    points = torch.randn(20, 3)
    centers = points[torch.randperm(20)[:4]].clone()
    for _ in range(3):
        nearest = torch.cdist(points, centers).argmin(1)
        for number in range(4):
            if (nearest == number).any():
                centers[number] = points[nearest == number].mean(0)
    self.centers = nn.Parameter(centers)


# Modules that compute while they are made


@construction
def weights_are_parametrized(self: Any) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).T

    for number, kind in enumerate(("matrix_exp", "cayley", "householder")):
        setattr(self, f"orthogonal{number}", parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map=kind))
    self.orthogonal0.weight = torch.linalg.qr(torch.randn(4, 4))[0]
    self.spectral = parametrizations.spectral_norm(nn.Conv2d(3, 4, 2))
    self.once = nn.Linear(4, 4)
    parametrize.register_parametrization(self.once, "weight", Symmetric())
    parametrize.remove_parametrizations(self.once, "weight")
    self.pruned = nn.Linear(5, 4)
    prune.l1_unstructured(self.pruned, "weight", 0.4)


@construction
def weights_are_trained(self: Any) -> None:
    self.weight = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.Adam([self.weight])
    for _ in range(2):
        optimizer.zero_grad()
        ((self.weight @ self.weight.T - torch.eye(4)) ** 2).sum().backward()
        optimizer.step()
    self.weight.grad = None
    self.norm = nn.BatchNorm1d(4)
    self.norm(torch.randn(8, 4))


@construction
def modules_are_copied_and_loaded(self: Any) -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
    nn.init.normal_(self.copies[0][0].weight)
    self.loaded, self.assigned = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2))
    self.loaded.load_state_dict(self.copies[0].state_dict())
    self.assigned.load_state_dict(layer.state_dict(), assign=True)
    self.average = torch.optim.swa_utils.AveragedModel(layer)
    self.average.update_parameters(layer)


@construction
def dtypes_by_default(self: Any) -> None:
    before = torch.get_default_dtype()
    for number, dtype in enumerate((torch.float64, torch.float16)):
        torch.set_default_dtype(dtype)
        try:
            setattr(self, f"layer{number}", nn.Linear(20, 10))
        finally:
            torch.set_default_dtype(before)
    with torch.device("cpu"), torch.no_grad():
        self.low = nn.Linear(30, 4).bfloat16()
        self.low.weight.normal_().clamp_(-1, 1)
    nn.init.trunc_normal_(self.low.weight)


@construction
def errors_are_caught(self: Any) -> None:
    self.first = nn.Linear(3, 4)
    try:
        torch.randn(3) @ torch.randn(4)
    except RuntimeError:
        self.second = nn.Parameter(torch.randn(4))


def test_where_a_construction_that_raises_leaves_the_generator() -> None:
    def fail() -> None:
        nn.Linear(3, 4)
        torch.randperm(5)
        raise KeyError

    after = []
    for call in (fail, lambda: deferred_init(fail)):
        torch.manual_seed(1)
        with pytest.raises(KeyError):
            call()
        after.append(torch.rand(3))
    assert torch.equal(*after)
