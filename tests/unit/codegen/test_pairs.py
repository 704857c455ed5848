"""Does a functional variant compute what its op writes? Mutating ops run beside it, on torch's own samples.

Each mutating op that runs below a sample's in-place or `out=` call is run on clones twice, once itself and
once as its functional variant, and what it wrote is held against the result that its row names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functionalize.ops import tables
from functionalize.ops.tables import Kind, OpRow

aten = torch.ops.aten
SAMPLES = 3
PARTS = 14  # of the operators


def cloned(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


class Call:
    """One call of an op, with its arguments by name and the op's own defaults for those left out."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.row = op, tables.row(op)
        names = [argument.name for argument in op._schema.arguments]
        self.given = dict(zip(names, args, strict=False)) | kwargs

    def __getitem__(self, name: str) -> Any:
        if name in self.given:
            return self.given[name]
        return next(a.default_value for a in self.op._schema.arguments if a.name == name)

    def functional(self) -> list[Any]:
        """Run the functional variant; return its results."""
        row = self.row
        assert row.functional is not None
        variant = tables.overload(row.functional)
        outs = {w.name for w in row.written if w.position is None}
        names = row.functional_args or [a.name for a in self.op._schema.arguments if a.name not in outs]
        target = self[row.written[0].name]
        keywords = dict(row.constants) | {option: getattr(target, option) for option in row.options}
        taken = [a for a in variant._schema.arguments if a.name not in keywords and a.name != "pin_memory"]
        positional = []
        for name, parameter in zip(names, taken, strict=False):
            if parameter.kwarg_only:
                keywords[parameter.name] = self[name]
            else:
                positional.append(self[name])
        results = variant(*positional, **keywords)
        return [results] if len(variant._schema.returns) == 1 else list(results or [])


def flat(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Pairs(TorchDispatchMode):
    """Holds each mutating op against its functional variant."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        row = tables.row(func)
        if row.composite and (outcome := func.decompose(*args, **kwargs)) is not NotImplemented:
            return outcome
        if comparable(row):
            self.compare(Call(func, *cloned((args, kwargs))), Call(func, *cloned((args, kwargs))))
        return func(*args, **kwargs)

    def compare(self, first: Call, second: Call) -> None:
        names = [argument.name for argument in second.op._schema.arguments]
        kwarg_only = {a.name for a in second.op._schema.arguments if a.kwarg_only}
        second.op(
            *(second[name] for name in names if name not in kwarg_only and name in second.given),
            **{name: value for name, value in second.given.items() if name in kwarg_only},
        )
        try:
            results = first.functional()
        except Exception as error:  # not one of the refusals by eager that a sweep passes over
            raise AssertionError(f"{first.row.name} runs and {first.row.functional} does not: {error}") from error
        self.seen.add(second.row.name)
        for written in second.row.written:
            if written.when is not None and not second[written.when]:
                continue
            for after, value in zip(flat(second[written.name]), flat(written.value_among(results)), strict=True):
                value = value.to(after.dtype).expand_as(after)
                torch.testing.assert_close(after, value, equal_nan=True, check_stride=False, msg=second.row.name)


def comparable(row: OpRow) -> bool:
    """Ops that write data, by a functional variant that computes and does not draw or only allocate."""
    allocates = "empty" in row.name or row.name in ("aten::resize", "aten::set_")
    return row.kind is not Kind.FUNCTIONAL and row.functional is not None and not row.random and not allocates


def dtype_of(info: Any) -> torch.dtype:
    supported = info.supported_dtypes("cpu")
    return next((d for d in (torch.float32, torch.complex64, torch.int64) if d in supported), torch.bool)


def calls(info: Any, sample: Any) -> Iterator[Callable[[], Any]]:
    """The in-place call and the `out=` call of a sample, where the op has them."""
    inplace = info.get_inplace()
    if inplace is not None and info.inplace_variant is not None:
        yield lambda: inplace(cloned(sample.input), *sample.args, **sample.kwargs)
    if getattr(info, "supports_out", False):
        with contextlib.suppress(Exception):  # samples that the op refuses are another test's matter
            expected = info(cloned(sample.input), *sample.args, **sample.kwargs)
            out = pytree.tree_map_only(torch.Tensor, torch.empty_like, expected)
            if isinstance(out, torch.Tensor) or (isinstance(out, tuple) and all(flat(out))):
                yield lambda: info(cloned(sample.input), *sample.args, **sample.kwargs, out=out)


@pytest.mark.slow(seconds=30)
@pytest.mark.every(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")  # of the samples, such as those of deprecated ops
def test_functional_variants_compute_what_is_written(part: int) -> None:
    from torch.testing._internal import (
        common_methods_invocations as database,
    )  # takes seconds, which fast tests need not

    watch = Pairs()
    known = database.op_db + database.foreach_unary_op_db + database.foreach_binary_op_db
    infos = [info for info in known if info.supported_dtypes("cpu")]
    for info in infos[part::PARTS]:
        samples = info.sample_inputs("cpu", dtype_of(info))
        for sample, _ in zip(samples, range(SAMPLES), strict=False):
            for call in calls(info, sample):
                with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError), watch:
                    call()
    assert len(watch.seen) > 390 // PARTS, sorted(watch.seen)


def test_optimizers_write_what_their_variants_return() -> None:
    def state() -> list[torch.Tensor]:
        return [torch.rand(3) + 0.1, torch.rand(2, 2) + 0.1]

    steps = [torch.tensor(1.0), torch.tensor(2.0)]
    options = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    adam = {**options, "beta1": 0.9, "beta2": 0.99, "amsgrad": True}
    with Pairs() as watch:
        for op in (aten._fused_adam_.default, aten._fused_adamw_.default):
            op(state(), state(), state(), state(), state(), steps, **adam)
        sgd = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.1, "nesterov": False}
        aten._fused_sgd_.default(state(), state(), state(), **sgd, maximize=False, is_first_step=False)
        adagrad = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
        aten._fused_adagrad_.default(state(), state(), state(), steps, **adagrad)
    assert len(watch.seen) == 4


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_its_statistics_only_in_training(training: bool) -> None:
    def arguments() -> tuple[torch.Tensor, ...]:
        return (torch.rand(4, 3), torch.rand(3), torch.rand(3), torch.zeros(3), torch.ones(3))

    with Pairs() as watch:
        for op in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
            args = arguments()
            op(*args, training, 0.1, 1e-5)
            assert bool((args[3] == 0).all()) is not training
    assert len(watch.seen) == 2


def test_batch_norm_update_stats_writes_although_its_schema_denies_it() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    aten.batch_norm_update_stats.default(torch.rand(4, 3), mean, var, 0.1)
    assert bool((mean != 0).all())
    assert "aten::batch_norm_update_stats" in tables.UNPAIRED


@pytest.mark.parametrize("op", [aten._cummax_helper.default, aten._cummin_helper.default])
def test_cumulative_extrema_are_paired_by_hand(op: Any) -> None:
    with Pairs() as watch:
        op(torch.rand(4, 3), torch.empty(4, 3), torch.empty(4, 3, dtype=torch.int64), 0)
    assert watch.seen == {op.name()}


def test_gradients_are_paired_by_hand() -> None:
    image, weight = torch.rand(2, 3, 6, 6), torch.rand(4, 3, 3, 3)
    outs = {"grad_input": torch.empty(0), "grad_weight": torch.empty(0), "grad_bias": torch.empty(0)}
    sizes = ([3, 3], [1, 1], [0, 0])
    volume, pooled = torch.rand(1, 2, 4, 4, 4), torch.rand(1, 2, 2, 2, 2)
    with Pairs() as watch:
        aten._slow_conv2d_backward.grad_input(torch.rand(2, 4, 4, 4), image, weight, *sizes, **outs)
        aten.adaptive_avg_pool3d_backward.grad_input(pooled, volume, grad_input=torch.empty_like(volume))
        aten.polygamma_.default(torch.rand(3) + 0.5, 1)
    assert len(watch.seen) == 3
