"""Numbers that a program only writes down: into logs, by ``print`` and ``logging``, into messages of errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functionalize import capture
from functionalize.errors import NotCapturedWarning

CALLS = 4
VALUES = [torch.tensor([float(number), 0.5]) for number in range(CALLS)]
notes: list[Any] = []
logger = logging.getLogger("tests.written_numbers")


def formatted(x: torch.Tensor) -> torch.Tensor:
    notes.append(f"{x.sum():.4f}")
    return x * 2


def formatted_item(x: torch.Tensor) -> torch.Tensor:
    notes.append(f"loss {x.sum().item():8.3f} of {x.max().item()}")
    return x * 2


def by_percent(x: torch.Tensor) -> torch.Tensor:
    notes.append("%d: %.2f%% %s" % (3, float(x.sum()), "text"))  # noqa: UP031
    return x * 2


def by_percent_of_tensor(x: torch.Tensor) -> torch.Tensor:
    notes.append("%.1f" % x.sum())  # noqa: UP031
    return x * 2


def by_method(x: torch.Tensor) -> torch.Tensor:
    notes.append("{:.3f} {}".format(x.sum().item(), "text"))
    return x * 2


def as_text(x: torch.Tensor) -> torch.Tensor:
    notes.append("loss: " + str(x.sum().item()))
    return x * 2


def in_a_dict(x: torch.Tensor) -> torch.Tensor:
    notes.append({"loss": f"{x.sum():.2f}", "count": [f"{int(x.sum())}"]})
    return x * 2


def by_a_variable(x: torch.Tensor) -> torch.Tensor:
    message = f"loss {x.sum().item():.2f}"
    print(message)
    notes.append(message)
    return x * 2


def printed(x: torch.Tensor) -> torch.Tensor:
    print("loss", x.sum().item(), f"{x.max():.1f}", x.shape, sep="; ", end=".\n")
    print("done", file=sys.stderr)
    return x * 2


def logged(x: torch.Tensor) -> torch.Tensor:
    logger.warning("loss %.3f", x.sum().item())
    logger.warning(f"loss {x.sum().item():.3f}")
    return x * 2


def checked(x: torch.Tensor) -> torch.Tensor:
    require(x.sum().item() > 0, f"the sum is {x.sum().item()}")
    return x * 2


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"not so: {message}")


def asserted(x: torch.Tensor) -> torch.Tensor:
    message = f"the sum is {x.sum().item()}"
    if x.sum().item() <= 0:
        raise AssertionError(message)
    if x.max() < 0:
        raise ValueError(message)
    return x * 2


PROGRAMS = (
    *(formatted, formatted_item, by_percent, by_percent_of_tensor, by_method, as_text, in_a_dict, by_a_variable),
    *(printed, logged, checked, asserted),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_only_written_down_makes_no_variant(
    program: Callable[[torch.Tensor], torch.Tensor],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    captured = capture(program, (torch.ones(2),))
    assert not notes
    assert not any(capsys.readouterr())
    results, written = [], []
    for run in (captured, program):
        caplog.clear()
        results.append([run(value) for value in VALUES])
        records = [
            (record.getMessage(), record.levelno, record.funcName)
            for record in caplog.records
            if record.name == logger.name
        ]
        written.append(([*notes], capsys.readouterr(), records))
        notes.clear()
    assert written[0] == written[1]
    assert all(map(torch.equal, *results))
    assert len(captured.variants) == 1


def test_a_failing_check_has_eagers_message() -> None:
    captured = capture(checked, (torch.ones(2),))
    with pytest.raises(ValueError, match=r"not so: the sum is -4\.0"):
        captured(torch.full((2,), -2.0))
    with pytest.raises(ValueError, match=r"not so: the sum is -4\.0"):
        capture(checked, (torch.full((2,), -2.0),))


def compared(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if f"{x.sum():.1f}" == "2.0" else x - 1


def joined(x: torch.Tensor) -> torch.Tensor:
    parts = []
    parts.append(f"{x.sum():.1f}")
    return x * len("".join(parts))


def kept_and_compared(x: torch.Tensor) -> torch.Tensor:
    text = f"{x.sum():.1f}"
    notes.append(text)
    return x + 1 if text.startswith("2") else x


def by_locals(x: torch.Tensor) -> torch.Tensor:
    text = f"{x.sum():.1f}"
    notes.append(text)
    return x * len(locals()["text"])


def as_a_name(x: torch.Tensor) -> torch.Tensor:
    return x * {"n2": 2, "n12": 12}[f"n{int(x.sum())}"]


def caught(x: torch.Tensor) -> torch.Tensor:
    message = f"{x.sum().item():.2f}"
    try:
        require(message == "", message)
    except ValueError as error:
        return x * len(str(error))
    return x


def padded(x: torch.Tensor) -> torch.Tensor:
    notes.append(f"{x.sum().item()!r:>12}")
    return x * 2


def printed_in_a_tuple(x: torch.Tensor) -> torch.Tensor:
    values = f"{x.sum():.1f}", 2
    return x * len(values[0])


READING = [compared, joined, kept_and_compared, by_locals, as_a_name, caught, padded, printed_in_a_tuple]


@pytest.mark.parametrize("program", READING)
def test_text_that_the_program_reads_decides(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    captured = capture(program, (torch.ones(2),))
    for value in (torch.ones(2), torch.full((2,), 6.0), torch.ones(2)):
        result, kept = captured(value), [*notes]
        notes.clear()
        torch.testing.assert_close(result, program(value), rtol=0, atol=0)
        assert kept == notes
        notes.clear()
    assert len(captured.variants) == 2


def nested(x: torch.Tensor) -> torch.Tensor:
    print((f"{x.sum():.1f}", 2))
    print("a", end=f"{x.sum():.1f}")
    return x * 2


def test_text_in_a_container_is_printed_by_the_capture(capsys: pytest.CaptureFixture[str]) -> None:
    capture(nested, (torch.ones(2),))(torch.ones(2))
    assert "('2.0', 2)" in capsys.readouterr().out


def given(x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return x * 2, f"{x.sum():.2f}"


def test_floats_in_too_many_ways_run_the_program_as_written() -> None:
    captured = capture(given, (torch.ones(2),), cache_size=2)
    assert captured(VALUES[1])[1] == "1.50"
    with pytest.warns(NotCapturedWarning, match="more than 2 calls"):
        result, text = captured(VALUES[2])
    assert text == "2.50"
    torch.testing.assert_close(result, VALUES[2] * 2)
    assert captured(torch.ones(2))[1] == "2.00"


def test_two_lines_of_one_module_state(capsys: pytest.CaptureFixture[str]) -> None:
    class Meter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.written_lines: list[str] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.written_lines.append(f"{x.sum():.2f}")
            print(f"{len(self.written_lines) > 0} {x.mean().item():.2f}")
            return x * 2

    mine, theirs = Meter(), Meter()
    captured = capture(mine, (torch.ones(2),))
    for value in VALUES:
        captured(value)
        line = capsys.readouterr()
        theirs(value)
        assert line == capsys.readouterr()
    assert mine.written_lines == theirs.written_lines
