"""The fixed part of the zoo, each model by eager, captured and eager again; all of it: `python -m tests.sweeps zoo`.

Beside it, what the zoo itself does: that it tells results apart, and makes configurations small that still fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.ledger import REFUSED, RIGHT, WRONG
from tests.sweeps.zoo.check import CRASH, EAGER, MODES, Verdict, check, ledger_of, rows_of
from tests.sweeps.zoo.ci import CI
from tests.sweeps.zoo.diffusers_inputs import attempts, normal
from tests.sweeps.zoo.families import FAMILIES
from tests.sweeps.zoo.observe import difference, fakes, observe
from tests.sweeps.zoo.shrink import Scale, small
from tests.sweeps.zoo.specimen import Candidate, Family, by_module, smallest
from tests.sweeps.zoo.sweep import cause, main, summary


@pytest.mark.slow(seconds=10)
@pytest.mark.every(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(name for _, name in CI))
def test_captured_models_equal_eager(name: str, mode: str) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    verdict = check(FAMILIES["transformers"], name, mode)
    assert verdict.status != EAGER, verdict.reason
    assert not (objections := ledger_of().objections(rows_of(verdict))), objections


def family(model: nn.Module, *shapes: tuple[int, ...]) -> Family:
    def candidates(name: str) -> Iterator[Candidate]:
        yield Candidate(model, lambda: (tuple(torch.randn(shape) for shape in shapes), {}))

    return Family("own", lambda: ["model"], candidates)


class Statistics(nn.Module):
    """Writes a buffer, draws, and has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.layer(x)}


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such thing")


class Unsteady(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Unsteady.calls += 1
        return x + Unsteady.calls


class Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.data_ptr() * 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("model", "status", "reason"),
    [
        (Statistics(), RIGHT, ""),
        (Raising(), EAGER, "no such thing"),
        (Unsteady(), EAGER, "eager does not repeat itself"),
        (Refusing(), REFUSED, "capture: UnsupportedProgramError"),
    ],
)
def test_verdicts(model: nn.Module, status: str, reason: str, mode: str) -> None:
    with warnings.catch_warnings():
        verdict = check(family(model, (3, 4)), "model", mode)
    assert verdict.status == status, verdict.reason
    assert reason in verdict.reason


@dataclass
class Box:
    part: Any


def test_what_two_calls_left_is_told_apart() -> None:
    model = nn.BatchNorm1d(2)
    x = torch.arange(6.0).reshape(3, 2)

    def told(one: Any, other: Any) -> str | None:
        return difference(observe(one, model), observe(other, model))

    assert told([Box(x)], [Box(x.clone())]) is None
    assert told({"a": x}, {"a": x + 1}) is not None
    assert "requires_grad" in (told(x, x.clone().requires_grad_()) or "")
    assert "strides" in (told(x, x.t().contiguous().t()) or "")
    assert "dtype" in (told(Box(x), Box(x.double())) or "")
    assert "other paths" in (told([x], [x, x]) or "")
    assert told(Box(3), Box(4)) is not None
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert "a FakeTensor" in (told(Box(x), Box(fake)) or "")
    assert fakes({"a": [Box(fake)]}) == ["['a'][0].part"]


def test_changed_buffers_and_gradients_are_told() -> None:
    model = nn.BatchNorm1d(2)
    before = observe(None, model)
    model(torch.randn(3, 2))
    assert "buffers" in (difference(before, observe(None, model)) or "")
    linear = nn.Linear(2, 2)
    before = observe(None, linear)
    linear(torch.randn(3, 2)).sum().backward()
    assert "gradients" in (difference(before, observe(None, linear)) or "")


@pytest.mark.parametrize(
    ("name", "value", "scale", "expected"),
    [
        ("hidden_size", 768, Scale(8), 96),
        ("num_attention_heads", 12, Scale(8), 12),
        ("num_attention_heads", 16, Scale(8, heads=True), 2),
        ("head_dim", 128, Scale(8), 16),
        ("head_dim", 128, Scale(8, heads=True), 128),
        ("axes_dims_rope", (16, 56, 56), Scale(8), (2, 7, 7)),
        ("axes_dims_rope", (16, 56, 56), Scale(8, heads=True), (16, 56, 56)),
        ("norm_num_groups", 32, Scale(8), 4),
        ("num_hidden_layers", 24, Scale(8), 2),
        ("vocab_size", 32000, Scale(8), 128),
        ("image_size", 224, Scale(8), 64),
        ("patch_size", 16, Scale(8), 16),
        ("hidden_sizes", [64, 128, 320], Scale(8), [8, 16, 40]),
        ("depths", [2, 2, 18], Scale(8), [2, 2, 2]),
        ("num_local_experts", 64, Scale(8), 4),
        ("num_experts_per_tok", 8, Scale(8), 2),
        ("rope_theta", 10000.0, Scale(8), 10000.0),
        ("use_cache", True, Scale(8), True),
    ],
)
def test_settings_become_small(name: str, value: Any, scale: Scale, expected: Any) -> None:
    assert small(name, value, scale) == expected


class Denoiser(nn.Module):
    """A model as those of diffusers are."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Any = None, guidance: Any = None) -> Any:
        return sample


def test_arguments_by_names_and_settings() -> None:
    plain, guided = Denoiser(in_channels=7, text_dim=5), Denoiser(in_channels=7, guidance_embeds=True)
    calls = [{name: tuple(one.shape) for name, one in attempt()[1].items()} for attempt in attempts(plain, {})]
    assert calls[0] == {"sample": (2, 7, 16, 16), "timestep": (2,), "encoder_hidden_states": (2, 8, 5)}
    assert {"sample": (2, 16, 7), "timestep": (2,)} in calls
    assert "guidance" in next(attempts(guided, {}))()[1]
    own = next(attempts(plain, {"sample": normal(3, "text_dim")}))()[1]
    assert tuple(own["sample"].shape) == (3, 5)


def test_families_have_one_small_model_of_each_module() -> None:
    assert smallest(["vit_large_16", "vit_tiny_16", "vit_small_16"]) == "vit_tiny_16"
    assert by_module({"resnet50": "resnet", "resnet18": "resnet", "alexnet": "alexnet"}) == ["alexnet", "resnet18"]


def test_summary_groups_by_cause() -> None:
    verdicts = [
        Verdict("f", "a", "eval", WRONG, "call 1: results: a FakeTensor, at ['keys']"),
        Verdict("f", "b", "eval", WRONG, "call 1: results: a FakeTensor, at .values[0]"),
        Verdict("f", "c", "eval", CRASH, "capture: KeyError: 'x'"),
        Verdict("f", "d", "eval", RIGHT),
    ]
    assert cause(verdicts[0]) == cause(verdicts[1])
    text = summary(verdicts)
    assert "| f eval | 1 | 0 | 2 | 1 | 0 |" in text
    assert "a/eval, b/eval" in text


@pytest.mark.parametrize("arguments", [["--shard", "3/2"], ["--shard", "x"]])
def test_a_shard_that_is_none_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="--shard wants I/N"):
        main(arguments)
