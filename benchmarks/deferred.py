"""A Llama of seven billion parameters, deferred: time and memory, beside eager construction of one a tenth its size.

Then one of its layers is materialized: its size, and by how much the process grew. Each row is a process of its own, so
that the peak of its memory is its own; what importing and a first small use take is not counted. `--check` fails where
what is promised does not hold.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from benchmarks.measure import environment, table
from functionalize import deferred_init, materialize_module

Row = dict[str, float]


def llama(width: int, layers: int) -> Callable[[], Any]:
    """A constructor of a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = width // 128
    inner = width * 11008 // 4096
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads
    )
    return lambda: LlamaForCausalLM(config)


SEVEN_BILLION, A_TENTH = (4096, 32), (1536, 18)


def peak() -> float:
    """Megabytes that the process held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 10)


def measured(call: Callable[[], Any]) -> tuple[Any, Row]:
    """What a call gives, its seconds, and the megabytes by which the process grew at most."""
    before, start = peak(), time.perf_counter()
    result = call()
    return result, {"seconds": time.perf_counter() - start, "grown": peak() - before}


def eager() -> Row:
    """Eager construction of the small one."""
    make = llama(*A_TENTH)
    llama(128, 1)()
    model, row = measured(make)
    return row | {"parameters": count(model)}


def deferred() -> Row:
    """Deferred construction of the large one."""
    make = llama(*SEVEN_BILLION)
    deferred_init(llama(128, 1))
    model, row = measured(lambda: deferred_init(make))
    return row | {"parameters": count(model)}


def layer() -> Row:
    """One layer of the large one, materialized."""
    model = deferred_init(llama(*SEVEN_BILLION))
    small: Any = deferred_init(llama(128, 1))
    materialize_module(small)
    one = model.model.layers[17]
    _, row = measured(lambda: materialize_module(one))
    return row | {"parameters": count(one)}


def count(module: torch.nn.Module) -> float:
    """How many parameters there are."""
    return float(sum(parameter.numel() for parameter in module.parameters()))


ROWS: dict[str, tuple[str, Callable[[], Row]]] = {
    "eager": ("eager construction, a tenth of the size", eager),
    "deferred": ("deferred construction", deferred),
    "layer": ("one of its layers, materialized", layer),
}


def line(row: str, one: Row) -> list[str]:
    """A row as text."""
    size = f"{one['parameters'] * 4 / (1 << 20):,.0f} MB"
    grown, seconds = f"{one['grown']:,.0f} MB", f"{one['seconds']:.2f} s"
    return [ROWS[row][0], f"{one['parameters'] / 1e6:,.0f} M", size, grown, seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where what is promised does not hold")
    parser.add_argument("--row", choices=ROWS, help="measure one row here, and print it as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.row:
        print(json.dumps(ROWS[options.row][1]()))
        return
    command = [sys.executable, __file__, "--row"]
    found = {row: json.loads(subprocess.check_output([*command, row], text=True)) for row in ROWS}
    print(environment())
    print(table(["", "parameters", "their size", "memory at most", "time"], [line(*one) for one in found.items()]))
    if options.check:
        own = found["layer"]["parameters"] * 4 / (1 << 20)
        assert found["deferred"]["grown"] < 200, found
        assert found["deferred"]["seconds"] < found["eager"]["seconds"], found
        assert found["layer"]["grown"] < 1.1 * own, found


if __name__ == "__main__":
    main()
