"""Random numbers for tensors whose sizes the data give, in eager's order; numbers of Python's that nobody looks at."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from functionalize import capture
from functionalize.errors import UnsupportedProgramError

F = nn.functional


def _rows(x: Tensor) -> int:
    """How many numbers are positive."""
    return (x > 0).nonzero().size(0)


def _filled(method: str, *args: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return getattr(torch.full((7, _rows(x)), 0.5).t(), method)(*args)  # type: ignore[no-any-return]

    return run


def _gaps(make: Callable[[int], Tensor], part: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Writes normal numbers to a part of a tensor."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        whole = make(_rows(x))
        part(whole).normal_()
        return whole

    return run


def _like(make: Callable[[int, int], Tensor], draw: Callable[..., Any] = torch.randn_like) -> Callable[..., Any]:
    return lambda x, y: draw(make(_rows(x), _rows(y)))


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=True)


def _of_matmul(n: int, m: int) -> Tensor:
    return torch.matmul(torch.ones(1, n, 8), torch.ones(1, 8, 16)).transpose(1, 2)


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "transposed": _like(lambda n, m: torch.zeros(7, n).t()),
    "transposed batch": _like(lambda n, m: torch.zeros(2, n, 3).transpose(1, 2)),
    "product": _like(_of_matmul),
    "permuted, two sizes": _like(lambda n, m: torch.zeros(2, n, m, 3).permute(0, 3, 1, 2)),
    "swapped, two sizes": _like(lambda n, m: torch.zeros(n, m, 3).transpose(0, 1)),
    "channels last": _like(lambda n, m: torch.ones(2, 7, n, 3).to(memory_format=torch.channels_last), torch.rand_like),
    "in order": _like(lambda n, m: torch.zeros(2, n, 3).view(2, -1, 3)),
    "a part, transposed": _like(lambda n, m: torch.zeros(7, n, 5)[:, 1:].transpose(0, 1)),
    "a part, permuted": _like(lambda n, m: torch.zeros(7, n, m)[:, 1:].permute(2, 0, 1)),
    "split": _like(lambda n, m: torch.zeros(2, n, 8).split(4, 2)[1].transpose(1, 2)),
    "convolution": _like(lambda n, m: torch.conv1d(torch.zeros(2, n, 3).transpose(1, 2), torch.ones(4, 3, 1)).mT),
    "expanded": _like(lambda n, m: torch.zeros(n, 1).expand(-1, m)),
    "expanded, transposed": _like(lambda n, m: torch.zeros(n, 1).expand(-1, m).t()),
    "another dtype": _like(lambda n, m: torch.zeros(7, n).t(), lambda x: torch.rand_like(x, dtype=torch.float64)),
    "integers": _like(lambda n, m: torch.zeros(7, n).t(), lambda x: torch.randint_like(x, 100)),
    "dropout": _like(lambda n, m: torch.ones(2, n, 7).transpose(1, 2), _dropped),
    "dropout, channels last": _like(
        lambda n, m: torch.ones(2, 7, n, 3).to(memory_format=torch.channels_last), _dropped
    ),
    "alpha dropout": _like(lambda n, m: torch.ones(2, n, 7).mT, lambda x: F.alpha_dropout(x, 0.5, training=True)),
    "bernoulli": _like(lambda n, m: torch.full((7, n), 0.5).t(), torch.bernoulli),
    "multinomial": _like(lambda n, m: torch.rand(7, n + 2).mT.mT, lambda x: torch.multinomial(x, 2)),
    "weighted, transposed": _like(lambda n, m: torch.ones(7, n).t(), lambda x: torch.multinomial(x, 2)),
    "probabilities in place": lambda x, y: torch.zeros(7, _rows(x)).t().bernoulli_(torch.full((7,), 0.5)),
    "around": _like(lambda n, m: torch.zeros(7, n).t(), lambda x: torch.normal(x, 1.0)),
    "sizes": lambda x, y: torch.randn(3, _rows(x), 5).transpose(0, 2) * torch.rand(5, _rows(x), 1),
    "normal_": _filled("normal_"),
    "uniform_": _filled("uniform_"),
    "bernoulli_": _filled("bernoulli_", 0.3),
    "exponential_": _filled("exponential_"),
    "random_": _filled("random_", 0, 50),
    "columns": _gaps(lambda n: torch.zeros(n, 30), lambda x: x[:, :20]),
    "each second column": _gaps(lambda n: torch.zeros(n, 7), lambda x: x[:, ::2]),
    "all but the first rows": _gaps(lambda n: torch.zeros(7, n, 3), lambda x: x[:, 1:]),
    "all but the first rows, transposed": _gaps(lambda n: torch.zeros(7, n, 3), lambda x: x[:, 1:].transpose(0, 1)),
    "columns, transposed": _gaps(lambda n: torch.zeros(n, 40), lambda x: x.t()[::2]),
}
_COUNTS = [(5, 4), (3, 6), (8, 0), (1, 3), (2, 2), (0, 3), (4, 1)]


def _of_counts(counts: tuple[int, int]) -> tuple[Tensor, Tensor]:
    x, y = (torch.tensor([1.0] * n + [-1.0] * (8 - n)) for n in counts)
    return x, y


def _drawn(run: Callable[..., Any], *args: Any) -> tuple[Any, Tensor]:
    """What a program gives, or the class of its error, and where it leaves the generator."""
    torch.manual_seed(3)
    try:
        return run(*args), torch.get_rng_state()
    except RuntimeError as error:
        assert not isinstance(error, UnsupportedProgramError)
        return RuntimeError, torch.get_rng_state()


def assert_drawn_alike(program: Any, eager: Any, *args: Any) -> None:
    drawn, expected = _drawn(program, *args), _drawn(eager, *args)
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0) if isinstance(expected[0], Tensor) else None
    assert (drawn[0] is RuntimeError) == (expected[0] is RuntimeError)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_eager(name: str) -> None:
    program = capture(PROGRAMS[name], _of_counts(_COUNTS[0]))
    for counts in _COUNTS:
        assert_drawn_alike(program, PROGRAMS[name], *_of_counts(counts))


@pytest.mark.parametrize("name", ["product", "dropout", "permuted, two sizes", "channels last"])
def test_exported(name: str) -> None:
    exported = capture(PROGRAMS[name], _of_counts(_COUNTS[0])).to_exported_program().module()
    for counts in [(5, 4), (3, 6), (8, 2)]:
        assert_drawn_alike(exported, PROGRAMS[name], *_of_counts(counts))


def test_sizes_of_inputs_decide_how_a_part_is_drawn() -> None:
    """A kernel draws otherwise for sixteen numbers or more, if they have no gaps."""

    def run(x: Tensor) -> Tensor:
        x[:, :3].normal_()
        return x.t()[1:].normal_()

    program = capture(run, (torch.zeros(2, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for rows in (2, 3, 7, 12, 17 * 19, 17 * 23 + 16):
        torch.manual_seed(0)
        drawn = program(torch.zeros(rows, 4))
        torch.manual_seed(0)
        assert torch.equal(drawn, run(torch.zeros(rows, 4)))


def test_a_data_dependent_order() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.randn_like(torch.zeros(40).as_strided((3, 4), (_rows(x), 2)))

    first, _ = _of_counts((8, 0))
    assert_drawn_alike(capture(run, (first,)), run, first)
    with pytest.raises(UnsupportedProgramError, match=r"which is data-dependent\n    at .*test_draws_by_data"):
        capture(run, (_of_counts((1, 0))[0],))


# Numbers of Python and NumPy


class _SkipsLayers(nn.Module):
    """Skips layers in training, as encoders of speech do: it draws in evaluation, too, and looks at nothing."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            drawn = self.draw()
            skip = self.training and drawn < 0.5
            if not skip:
                x = x * 2 + number + torch.rand(2)
        return x


def _of_numpy_now() -> Any:
    state: Any = numpy.random.get_state()
    return state[2]


def _of_numpy() -> float:
    return numpy.random.uniform(0, 1)


def _of_python() -> float:
    return random.random() if random.randint(3, 4) is None else random.uniform(0, 1)


@pytest.mark.parametrize("draw", [_of_numpy, _of_python])
def test_numbers_that_nobody_looks_at_are_drawn_by_calls(draw: Callable[[], float]) -> None:
    model = _SkipsLayers(draw).eval()
    before = random.getstate(), _of_numpy_now()
    program = capture(model, (torch.ones(2),))
    assert before == (random.getstate(), _of_numpy_now())
    for seed in range(3):
        results = []
        for run in (program, model):
            random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
            results.append((run(torch.ones(2)).tolist(), random.random(), numpy.random.rand()))
        assert results[0] == results[1]
    model.train()
    with pytest.raises(UnsupportedProgramError, match="draws numbers from"):
        capture(model, (torch.ones(2),))


_KEPT = list[Any]()


def _keeping(x: Tensor) -> Tensor:
    _KEPT.append(random.random())
    return x + 1


_LOOKING: dict[str, Callable[[Tensor], Any]] = {
    "factor": lambda x: x * random.random(),
    "argument": lambda x: torch.mul(x, random.random()),
    "dropout": lambda x: F.dropout(x, random.random()),
    "tensor": lambda x: x + torch.tensor(random.random()),
    "full": lambda x: torch.full((2,), numpy.random.uniform()),
    "decision": lambda x: x if random.random() < 0.5 else -x,
    "truth": lambda x: x if numpy.random.randint(2) else -x,
    "result": lambda x: (x + 1, numpy.random.uniform(0, 1)),
    "kept": _keeping,
    "text": lambda x: (f"{random.random()}", x + 1)[1],
    "class": lambda x: x + 1 if isinstance(random.random(), float) else x,
    "array": lambda x: (numpy.random.uniform(0, 1, 3), x + 1)[1],
    "size": lambda x: torch.zeros(random.randint(1, 3)),
    "index": lambda x: x[random.randint(0, 1)],
    "shuffled": lambda x: (random.shuffle([1, 2]), x + 1)[1],
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", _LOOKING)
def test_numbers_that_are_looked_at_are_refused(name: str) -> None:
    before = random.getstate(), _of_numpy_now()
    with pytest.raises(UnsupportedProgramError, match=r"draws numbers from(.|\n)*test_draws_by_data"):
        capture(_LOOKING[name], (torch.ones(2),))
    assert before == (random.getstate(), _of_numpy_now())
    assert not _KEPT


def test_an_error_of_the_program_stays() -> None:
    def run(x: Any) -> Any:
        random.random()
        return x + "text"

    with pytest.raises(TypeError, match="unsupported operand"):
        capture(run, (torch.ones(2),))


# A model that speaks


def _vits(noise: float) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.VitsConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, window_size=2, ffn_dim=16,
        flow_size=8, spectrogram_bins=9, upsample_initial_channel=8, upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]],
        prior_encoder_num_flows=1, prior_encoder_num_wavenet_layers=1, posterior_encoder_num_wavenet_layers=1,
        duration_predictor_num_flows=1, use_stochastic_duration_prediction=False, noise_scale=noise,
    )  # fmt: skip
    return transformers.VitsModel(config).eval()


def _tokens(seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 20, (1, 6), generator=torch.Generator().manual_seed(seed))}


@pytest.mark.slow(seconds=10)
@pytest.mark.filterwarnings("ignore")
def test_speech(tmp_path: Path) -> None:
    with torch.no_grad():
        model = _vits(0.7)
        program = capture(model, (), _tokens(0), is_exporting=True)
        for run in (program, program.to_exported_program().module()):
            for seed in range(3):
                torch.manual_seed(seed)
                expected = model(**_tokens(seed)).waveform
                torch.manual_seed(seed)
                torch.testing.assert_close(run(**_tokens(seed)).waveform, expected)
        with pytest.raises(UnsupportedProgramError, match="returns a tensor of data-dependent size"):
            program.to_jax()
