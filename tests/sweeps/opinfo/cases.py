"""Which programs the sweep runs. Invariant: a case's name alone rebuilds it, inputs included.

Limits: the samples are those of torch's operator database, on the CPU, without gradients.
"""

from __future__ import annotations

import random
import sys
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

TEMPLATES = ("call", "inplace", "inplace_view", "inplace_input", "out")
EXTRA_TEMPLATES = ("out_resize",)
MODES = ("fake", "real", "symbolic", "capture", "gradients", "compiled")
REMOVES = {"views": "mutations_and_views", "mutations": "mutations"}
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "float16": torch.float16,
}
FURTHER = ("uint8", "int8", "int16", "int32", "bfloat16", "complex128")  # which backends have kernels of their own for
ALL_DTYPES = DTYPES | {name: getattr(torch, name) for name in FURTHER}
FIRST_SAMPLES = 2  # "the first samples", in dtypes and modes beside the main ones


@dataclass(frozen=True, order=True)
class Case:
    """One program on one sample. `str(case)` is its name; `Case.parse` reads it back."""

    op: str
    template: str
    dtype: str
    sample: int
    mode: str
    remove: str

    def __str__(self) -> str:
        return f"{self.op}/{self.template}/{self.dtype}/{self.sample}/{self.mode}/{self.remove}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read `op/template/dtype/sample/mode/remove`; ValueError says which part is wrong."""
        parts = text.rsplit("/", 5)
        if len(parts) != 6 or not parts[3].isdigit():
            raise ValueError(f"a case is op/template/dtype/sample/mode/remove, got {text!r}")
        op, template, dtype, sample, mode, remove = parts
        known: dict[str, Any] = {op: op_table(), template: TEMPLATES + EXTRA_TEMPLATES, dtype: ALL_DTYPES}
        known |= {mode: MODES, remove: REMOVES}
        for part, choices in known.items():
            if part not in choices:
                raise ValueError(f"{part!r} in {text!r} is none of {', '.join(choices)}")
        return cls(op, template, dtype, int(sample), mode, remove)


@dataclass(frozen=True)
class Selection:
    """Which cases of each op to run. `stride` thins out the samples after the first ones."""

    every_sample: bool = True
    stride: int = 1
    other_dtypes: bool = True
    other_modes: bool = True
    extra_templates: bool = True
    dtype: str | None = None
    mode: str | None = None
    template: str | None = None
    remove: str | None = None


FIRST = Selection(every_sample=False, other_dtypes=False, other_modes=False, extra_templates=False)
CI = Selection(stride=18)  # about three minutes on two cores
FULL = Selection()


@cache
def op_table() -> dict[str, OpInfo]:
    """Every op of the database by its full name, `name.variant`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database calls deprecated functions while it builds itself
        from torch.testing._internal import common_methods_invocations as database

        op_db = database.op_db
    # Entries that draw random numbers seed the generator inside, which a captured program may not: who runs them seeds.
    for module in [module for name, module in sys.modules.items() if name.startswith("torch.testing.")]:
        if hasattr(module, "wrapper_set_seed"):
            vars(module)["wrapper_set_seed"] = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {op.full_name: op for op in op_db}


def op_names() -> list[str]:
    """Every op's full name, in the database's order."""
    return list(op_table())


def main_dtype(op: OpInfo) -> str | None:
    """The dtype in which every sample runs: float32, or the first that the op has."""
    supported = op.supported_dtypes("cpu")
    return next((name for name, dtype in DTYPES.items() if dtype in supported), None)


@cache
def samples(op_name: str, dtype: str, limit: int | None) -> list[SampleInput]:
    """The op's samples in a fixed order and with fixed values, the first `limit` of them."""
    import numpy

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    op = op_table()[op_name]
    return list(islice(op.sample_inputs("cpu", ALL_DTYPES[dtype], requires_grad=False), limit))


def sample_of(case: Case) -> SampleInput:
    """The sample of a case. IndexError: the op has fewer samples than that."""
    few = case.sample < FIRST_SAMPLES
    return samples(case.op, case.dtype, FIRST_SAMPLES if few else None)[case.sample]


def cases_of(op_name: str, selection: Selection) -> Iterator[Case]:
    """All cases of one op, the cheap and telling ones first."""
    op = op_table()[op_name]
    dtype = main_dtype(op)
    if dtype is None:
        return
    for case in _unfiltered(op_name, op, dtype, selection):
        wanted = (
            selection.dtype in (None, case.dtype)
            and selection.mode in (None, case.mode)
            and selection.template in (None, case.template)
            and selection.remove in (None, case.remove)
        )
        if wanted:
            yield case


def _unfiltered(op_name: str, op: OpInfo, dtype: str, selection: Selection) -> Iterator[Case]:
    count = len(samples(op_name, dtype, None if selection.every_sample else 1))
    few = FIRST_SAMPLES if selection.stride == 1 else 1
    groups = [(dtype, sample, "fake", "views") for sample in range(0, count, selection.stride)]
    if selection.other_modes:
        variants = (("fake", "mutations"), ("real", "views"), ("symbolic", "views"), ("capture", "views"))
        groups += [(dtype, sample, *variant) for variant in variants for sample in range(min(count, few))]
    if selection.other_dtypes:
        supported = op.supported_dtypes("cpu")
        for other in DTYPES:
            if other != dtype and DTYPES[other] in supported:
                there = len(samples(op_name, other, FIRST_SAMPLES))
                groups += [(other, sample, "fake", "views") for sample in range(min(there, few))]
    derived = selection.other_modes and op.supports_autograd and DTYPES["float64"] in op.supported_dtypes("cpu")
    step = 1 if selection.stride == 1 else 4 * selection.stride  # these take much longer than the others
    chosen = zlib.crc32(op_name.encode()) % step == 0
    if derived and chosen:
        yield Case(op_name, "call", "float64", 0, "gradients", "views")
    if selection.other_modes and chosen:
        yield from (Case(op_name, "call", dtype, sample, "compiled", "views") for sample in range(min(count, few)))
    templates = _templates(op, selection)
    for name, sample, mode, remove in groups:
        for template in templates:
            yield Case(op_name, template, name, sample, mode, remove)


def _templates(op: OpInfo, selection: Selection) -> list[str]:
    templates = ["call"]
    if op.inplace_variant is not None:
        templates += ["inplace", "inplace_view", "inplace_input"]
    if op.supports_out:
        templates += ["out"] + (["out_resize"] if selection.extra_templates else [])
    return templates
