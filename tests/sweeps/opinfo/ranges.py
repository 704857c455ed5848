"""Which programs take fewer batch sizes when they are captured than ``torch.export`` says that they take.

``python -m tests.sweeps ranges`` goes through all samples of torch's operator and module databases, and every
fourth model of the zoo, and prints what is narrower. The first dimension of the first tensor, and of all others that
have as many rows, is to lie between 2 and 64. Limits: what ``torch.export`` does not take counts for nothing.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim

from functionalize import capture
from functionalize.verify.observation import clone_inputs
from tests.sweeps.opinfo import modules
from tests.sweeps.opinfo.cases import Case, main_dtype, op_names, op_table, samples
from tests.sweeps.opinfo.programs import build
from tests.sweeps.options import add_shard, parser, shard_of
from tests.sweeps.pool import Loss, Work, run_all, whole

LOW, HIGH = 2, 64
SECONDS = 1200  # for all samples of a name
KINDS = ("operators", "gradients", "modules", "zoo")
# Whose gradients torch computes by formulas that take a size for a number, or branch on it.
_NAMES = """
cumprod diagonal_scatter index_put linalg.cond linalg.lu linalg.lu_factor linalg.lu_factor_ex linalg.pinv linalg.qr
linalg.svdvals lu lu_unpack masked.cumprod masked_select norm.nuc pca_lowrank pinverse prod qr sgn slice_scatter
svd_lowrank trace
"""
BRANCHING = frozenset(_NAMES.split())
RIGHT, NARROWER, NOT_COUNTED = "right", "narrower", "not counted"


@dataclass(frozen=True)
class Batched:
    """A program whose inputs have a batch that may differ."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def sizes(self) -> Any:
        """``dynamic_shapes`` for it; None where its first tensor has no batch within the bounds."""
        tensors = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        if not tensors or not tensors[0].dim() or not LOW <= tensors[0].size(0) <= HIGH:
            return None
        rows, batch = tensors[0].size(0), Dim("batch", min=LOW, max=HIGH)

        def spec(leaf: Any) -> Any:
            return {0: batch} if isinstance(leaf, Tensor) and leaf.dim() and leaf.size(0) == rows else None

        args, kwargs = pytree.tree_map(spec, (self.args, self.kwargs))
        return (*args, *kwargs.values()) if args else kwargs


class _Module(nn.Module):
    """A function as ``torch.export`` takes it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


@dataclass(frozen=True)
class Checked:
    """What came out for a program, and why it is narrower."""

    program: str
    status: str
    reason: str


def check(program: Batched) -> Checked:
    """Hold a capture against ``torch.export``."""
    sizes = program.sizes()
    if sizes is None:
        return Checked(program.name, NOT_COUNTED, "no batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            copied = copy.deepcopy(program.run)
            capture(copied, *_fresh(program), dynamic_shapes=sizes)
        except Exception as error:
            if not _exported(program, sizes):
                return Checked(program.name, NOT_COUNTED, "torch.export")
            return Checked(program.name, NARROWER, f"{type(error).__name__}: {error}")
    return Checked(program.name, RIGHT, "")


def _fresh(program: Batched) -> tuple[Any, Any]:
    args, kwargs = pytree.tree_map_only(Tensor, _copied, (program.args, program.kwargs))
    return args, kwargs


def _copied(tensor: Tensor) -> Tensor:
    made: Tensor = clone_inputs(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def _exported(program: Batched, sizes: Any) -> bool:
    """Whether ``torch.export`` takes it, with all of the sizes."""
    copied = copy.deepcopy(program.run)
    module = copied if isinstance(copied, nn.Module) else _Module(copied)
    args, kwargs = _fresh(program)
    if not isinstance(copied, nn.Module):
        sizes = (sizes,)
    try:
        exported = torch.export.export(module, args, kwargs, dynamic_shapes=sizes)
    except Exception:
        return False
    ranges = [(bounds.lower, bounds.upper) for bounds in exported.range_constraints.values()]
    return (LOW, HIGH) in ranges


def operators(name: str, limit: int | None, *, gradients: bool) -> Iterator[Batched]:
    """The samples of an operator, as functions of tensors."""
    dtype = main_dtype(op_table()[name])
    if dtype is None:
        return
    for number, _ in enumerate(samples(name, dtype, limit)):
        case = Case(name, "call", dtype, number, "capture", "views")
        try:
            program = build(case)
        except Exception:
            continue
        inputs = tuple(
            tensor.requires_grad_(gradients and (tensor.is_floating_point() or tensor.is_complex()))
            for tensor in clone_inputs(program.inputs)
        )
        yield Batched(f"{name}/{number}" + "/gradients" * gradients, program.run, inputs, {})


def of_modules(name: str, limit: int | None, *, train: bool) -> Iterator[Batched]:
    """The samples of a module, in float32."""
    for sample in modules.samples(name, limit, train):
        args, kwargs = pytree.tree_map_only(Tensor, _single, (sample.args, sample.kwargs))
        yield Batched(f"{sample.name}/{'train' if train else 'eval'}", sample.module.float(), args, kwargs)


def _single(tensor: Tensor) -> Tensor:
    made = tensor.detach().float() if tensor.dtype is torch.float64 else tensor.detach()
    return made.requires_grad_(tensor.requires_grad)


def of_zoo(family: str, name: str) -> Iterator[Batched]:
    """A model of the zoo with the first arguments that eager takes."""
    from tests.sweeps.zoo.families import FAMILIES

    candidates = FAMILIES[family].candidates(name)
    while True:
        try:
            candidate = next(candidates)
            model, (args, kwargs) = candidate.model.eval(), candidate.inputs()
            copy.deepcopy(model)(*args, **kwargs)
        except StopIteration:
            return
        except Exception:  # the next may run; after an error of a generator there is none
            continue
        yield Batched(f"{family} {name}", model, args, kwargs)
        return


def programs(of: str, name: str, limit: int | None = None) -> Iterator[Batched]:
    """The programs of one kind: what goes by a name."""
    if of == "zoo":
        family, _, model = name.partition(" ")
        yield from of_zoo(family, model)
    elif of == "modules":
        for train in (True, False):
            yield from of_modules(name, limit, train=train)
    else:
        yield from operators(name, limit, gradients=of == "gradients")


def names(of: str) -> list[str]:
    """What goes by a name, of one kind."""
    if of == "zoo":
        from tests.sweeps.zoo.families import FAMILIES

        return [f"{family} {name}" for family in FAMILIES for name in _installed(family)][::4]
    return modules.module_names() if of == "modules" else op_names()


def _installed(family: str) -> Sequence[str]:
    from tests.sweeps.zoo.families import FAMILIES

    try:
        return FAMILIES[family].names()
    except ImportError:
        return ()


@dataclass(frozen=True)
class Named:
    """The programs that go by a name."""

    of: str
    name: str
    limit: int | None


def _check_named(named: Named) -> list[Checked]:
    warnings.simplefilter("ignore")
    return [check(program) for program in programs(named.of, named.name, named.limit)]


def _lost(named: Named, loss: Loss) -> list[Checked]:
    return [Checked(named.name, NARROWER, loss.reason)]


WORK: Work[Named, Named, list[Checked]] = Work(whole, _check_named, _lost, SECONDS)


def main(arguments: list[str]) -> int:
    """Run the command line; 0 if nothing is narrower."""
    made = parser("ranges", __doc__)
    made.add_argument("--only", default="", help="only names that match this regular expression")
    made.add_argument("--of", choices=KINDS, action="append")
    made.add_argument("--limit", type=int, help="how many samples of each")
    add_shard(made)
    options = made.parse_args(arguments)
    counts: Counter[str] = Counter()
    tasks = [
        Named(of, name, options.limit)
        for of in options.of or KINDS
        for name in shard_of([name for name in names(of) if re.search(options.only, name)], options.shard)
    ]
    for checked in (one for some in run_all(WORK, tasks, options.jobs) for one in some):
        counts[checked.status] += 1
        if checked.status == NARROWER:
            print(f"{checked.program}: {checked.reason}", flush=True)
    print(dict(counts))
    return 1 if counts[NARROWER] else 0
