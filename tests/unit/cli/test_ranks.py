"""Commands on programs of many ranks, of which one is there: what a rank says, and whether all ranks agree."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner, Result

from functionalize._torch.distributed.worlds import fake_world
from functionalize.cli.app import commands
from functionalize.cli.ranks import Issued, disagreement

PROGRAMS = """
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()

def layered(x):
    return collectives.all_reduce(collectives.all_reduce(x * 2, "sum", tp), "avg", dp) * 3

def skipping(x):
    return x * 2 if dist.get_rank() == 3 else layered(x)

def shifted(x):
    return layered(x + mesh.get_local_rank("tp"))

def placed(x):
    return collectives.all_reduce(x + dist.get_rank(), "sum", tp)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "rank_programs.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> Result:
        sys.modules.pop("rank_programs", None)  # its mesh is of one world
        return CliRunner().invoke(commands, [*arguments, "f32[4]"])

    return command


def test_a_rank_of_many_is_traced_with_its_volume(run: Any) -> None:
    done = run("trace", "rank_programs:layered", "--world", "1024", "--rank", "7")
    assert done.exit_code == 0, done.output
    assert "1 x all_reduce over tp (2 ranks), 16 B" in done.output
    assert "1 x all_reduce over dp (512 ranks), 16 B" in done.output
    assert not dist.is_initialized()
    data = json.loads(run("trace", "rank_programs:layered", "--world", "4", "--json").output)
    assert [row["axis"] for row in data["collectives"]] == ["tp", "dp"]


@pytest.mark.parametrize("options", [["--rank", "1"], ["--world", "2", "--rank", "2"]])
def test_a_rank_needs_a_world_that_has_it(run: Any, options: list[str]) -> None:
    done = run("trace", "rank_programs:layered", *options)
    assert (done.exit_code == 1 and "--world" in done.output) or "no rank 2" in done.output


def test_a_process_that_has_a_group_gets_no_other() -> None:
    with fake_world(2, 1):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 2)
        with pytest.raises(RuntimeError, match="has a default process group"), fake_world(2, 0):
            pass
    with pytest.raises(ValueError, match="no rank 2"), fake_world(2, 2):
        pass


@pytest.mark.slow(seconds=20)
def test_all_ranks_are_verified_at_once(run: Any) -> None:
    done = run("verify", "rank_programs:shifted", "--world", "4")
    assert done.exit_code == 0, done.output
    assert "all 4 ranks issue 2 collectives, in one order" in done.output
    assert "results equal eager's on all ranks" in done.output


@pytest.mark.full(seconds=20)
def test_graphs_that_differ_by_rank_and_ranks_that_wait_for_ever(run: Any) -> None:
    done = run("verify", "rank_programs:placed", "--world", "2")
    assert done.exit_code == 0 and "1 numbers in the graphs differ by rank" in done.output
    done = run("verify", "rank_programs:skipping", "--world", "4")
    assert done.exit_code == 1, done.output
    assert "rank 2: all_reduce of 16 B over tp (ranks 2, 3)" in done.output
    assert "rank 3: has ended" in done.output


def order(*entries: tuple[str, Sequence[int]]) -> list[Issued]:
    return [Issued(name, "", "", tuple(ranks), 4, "line") for name, ranks in entries]


def test_orders_in_which_no_rank_waits_for_ever() -> None:
    first, second = ("all_reduce", (0, 1)), ("all_reduce", (1, 2))
    assert disagreement([order(first), order(first, second), order(second)]) == []
    assert disagreement([order(first), order(second, first), order(second)]) == []
    everyone = ("barrier", (0, 1, 2))
    stuck = disagreement([order(first, everyone), order(everyone, first), order(everyone)])
    assert [line.partition(" of")[0] for line in stuck] == ["rank 0: all_reduce", "rank 1: barrier", "rank 2: barrier"]
    assert disagreement([order(("all_reduce", (0, 1))), order(("broadcast", (0, 1)))])
    assert disagreement([order(("send", (0, 1))), order(("receive", (0, 1)))]) == []
