"""How often each feature of random worlds came to which verdict."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from tests.sweeps.fuzz.verdict import FAILED, NOT_COUNTED, PASSED, REFUSED, Verdict
from tests.sweeps.fuzz.worlds.generate import generate

_STATUSES = (PASSED, REFUSED, FAILED, NOT_COUNTED)


def by_feature(results: Sequence[tuple[int, str, Verdict]], length: int) -> str:
    """A table by feature; those that fail most often come first."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for seed, _, verdict in results:
        for feature in generate(seed, length).features:
            counts[feature][verdict.status] += 1
    if not counts:
        return ""
    lines = [f"{'feature':40}" + "".join(f"{status:>13}" for status in _STATUSES)]
    for feature, count in sorted(counts.items(), key=lambda item: -item[1][FAILED] / item[1].total()):
        lines.append(f"{feature:40}" + "".join(f"{count[status]:13}" for status in _STATUSES))
    return "\n".join([*lines, ""])
