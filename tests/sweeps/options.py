"""The options that sweeps share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TypeVar

Name = TypeVar("Name")


def parser(sweep: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of a sweep, with ``--jobs``."""
    made = argparse.ArgumentParser(prog=f"python -m tests.sweeps {sweep}", description=description)
    add_jobs(made)
    return made


def add_jobs(made: argparse.ArgumentParser) -> None:
    made.add_argument("--jobs", type=int, default=2, help="worker processes")


def add_shard(made: argparse.ArgumentParser) -> None:
    made.add_argument("--shard", default="1/1", help="I/N: every N-th name, from the I-th on, counted from 1")


def shard_of(names: Sequence[Name], shard: str) -> Sequence[Name]:
    """The names of a shard, as `--shard` names it."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise SystemExit(f"--shard wants I/N with 1 <= I <= N, got {shard!r}")
    return names[int(match[1]) - 1 :: int(match[2])]
