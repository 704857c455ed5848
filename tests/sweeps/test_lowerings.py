"""The table of JAX lowerings: the core ATen set, torch's operator database, the fuzzer's programs, real models.

Whole sweeps are ``python -m tests.sweeps lowerings`` and ``python -m tests.sweeps lowered-programs``.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax")

import jax

from functionalize import capture, jaxify
from functionalize.backends.jax import from_torch, lowering, to_torch
from tests.support.ledger import RIGHT, Ledger, Row
from tests.support.models import MODELS
from tests.support.routes import GRADIENTS, JAX, ROUTES, SWEPT
from tests.support.transformer_models import TRANSFORMERS
from tests.sweeps.lowerings import fuzz
from tests.sweeps.lowerings.core import coverage
from tests.sweeps.lowerings.rows import Table, rows
from tests.sweeps.lowerings.sweep import DTYPES
from tests.sweeps.opinfo.cases import op_names

SHARES = 200  # of torch's operator database: one has its turn


def test_the_core_set_is_covered() -> None:
    """As docs/reference/export-details.md says."""
    covered = coverage(lowering)
    kinds = Counter(how.split(":")[0] for how in covered.values())
    assert not kinds["missing"]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "export-details.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| core ATen"))
    wanted = [len(covered), *(kinds[kind] for kind in ("row", "decomposed", "refused", "missing"))]
    assert re.findall(r"\d+", row) == list(map(str, wanted))


def swept(table: Table, names: Sequence[str], dtypes: list[str], count: int = 1) -> list[Row]:
    """The cases of some operators, of which the ledger must allow each."""
    ledger = table.ledger()
    found = [row for name in names for row in rows(name, dtypes, count, table.check(), ledger)]
    assert not (objections := ledger.objections(found)), "\n".join(objections)
    return found


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ["add", "div.floor_rounding", "index_put", "var", "scatter_reduce.amax", "as_strided"])
def test_operators_of_the_database(name: str) -> None:
    found = swept(Table(JAX), [name], ["float32", "int64"])
    assert {row.status for row in found} == {RIGHT}, found


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cholesky", "linalg.cholesky", "cumprod", "nn.functional.conv2d", "index_put"])
def test_gradients_of_operators_of_the_database(name: str) -> None:
    """Whole: ``python -m tests.sweeps lowerings --gradients``."""
    found = swept(Table(JAX, GRADIENTS), [name], ["float64"], 2)
    assert RIGHT in {row.status for row in found}, found


TRIANGLES: dict[str, Any] = {
    "cholesky": torch.linalg.cholesky,
    "cholesky, upper": lambda x: torch.linalg.cholesky(x, upper=True),
    "eigenvalues": torch.linalg.eigvalsh,
    "eigenvectors": lambda x: torch.linalg.eigh(x, UPLO="U")[1].abs(),
}


@pytest.mark.parametrize("name", TRIANGLES)
def test_factorizations_read_one_triangle_and_give_gradients_to_both(name: str) -> None:
    function, upper = TRIANGLES[name], torch.triu(torch.ones(3, 3, dtype=torch.float64), 1)
    for x in (
        torch.tensor([[4.0, 1, 0.5], [1, 3, 0.25], [0.5, 0.25, 2]], dtype=torch.float64) + upper * n for n in (0, 1)
    ):
        leaf = x.clone().requires_grad_()
        value = function(leaf)
        (value * value * torch.arange(3)).sum().backward()
        call = jaxify(function)
        with jax.enable_x64(True):
            found, backward = jax.vjp(call, from_torch(x))
            (gradient,) = backward(2 * found * np.arange(3))
        np.testing.assert_allclose(value.detach().numpy(), found, rtol=1e-10)
        assert leaf.grad is not None
        np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=1e-10, atol=1e-12)


PRODUCTS: dict[str, Any] = {
    "addmm": lambda begin, x, y: torch.addmm(begin, x[0], y[0]),
    "addmm, factors": lambda begin, x, y: torch.addmm(begin, x[0], y[0], beta=2, alpha=3),
    "baddbmm": torch.baddbmm,
    "addmv": lambda begin, x, y: torch.addmv(begin, x[0], y[0, :, 0]),
    "conv1d": lambda begin, x, y: torch.conv1d(x, y, begin),
    "conv_transpose1d": lambda begin, x, y: torch.conv_transpose1d(x[:, :3], y, begin),
}
ADDED: dict[str, tuple[int, ...]] = {"addmv": (7,), "baddbmm": (3, 7, 7), "conv1d": (3,), "conv_transpose1d": (7,)}


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_16_bits_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """With what is added to them, which nearly cancels some: of a sum that is rounded before, little is right."""
    function = PRODUCTS[name]
    x, y = ((10 * torch.randn(3, 7, 7)).to(dtype) for _ in range(2))
    nothing = torch.zeros(ADDED.get(name, (7, 7)), dtype=torch.float64)
    product = function(nothing, x.double(), y.double()).flatten()[: nothing.numel()].view(nothing.size())
    begin = (-0.95 * product).to(dtype)
    exact = function(begin.double(), x.double(), y.double()).to(dtype)
    arrays = [from_torch(tensor) for tensor in (begin, x, y)]
    call = jaxify(function)
    torch.testing.assert_close(to_torch(call(*arrays)), exact)
    gradients = jax.grad(lambda *given: call(*given).sum(), (0, 1, 2))(*arrays)
    assert [one.dtype for one in gradients] == [one.dtype for one in arrays]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeta_and_polygamma_at_poles_and_of_negative_numbers(dtype: torch.dtype) -> None:
    """And the gradients by the second argument, of which torch has formulas."""
    inf, nan = float("inf"), float("nan")
    places = [-inf, -20.4, -7.3, -2.0, -1.3, -1e-8, -0.0, 0.0, 0.25, 0.5, 0.99, 1.0, 1.5, 2.0, 3.0, 9.0, 50.0, inf, nan]
    x, q = (one.flatten().clone() for one in torch.meshgrid(*[torch.tensor(places, dtype=dtype)] * 2, indexing="ij"))

    def functions(x: torch.Tensor, q: torch.Tensor) -> Any:
        return torch.special.zeta(x, q), *(torch.special.polygamma(n, q) for n in (1, 2, 5))

    def slope(x: torch.Tensor, q: torch.Tensor) -> Any:
        q = q.clone().requires_grad_()
        with torch.enable_grad():
            total = sum(value.where(value.isfinite(), 0).sum() for value in functions(x, q))
            return torch.autograd.grad(total, q)[0]

    limit = 1e-5 if dtype == torch.float32 else 1e-10
    leaves = torch.utils._pytree.tree_leaves
    for function in (functions, slope):
        _, found = capture(function, (x, q)).to_jax().jit()({}, from_torch(x), from_torch(q))
        for mine, theirs in zip(leaves(found), leaves(function(x, q)), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=limit * 10, atol=limit)


def test_jax_differentiates_zeta_as_torch_does() -> None:
    x = torch.tensor([3.0, 3.0, 2.0, 1.0, 0.5])
    q = torch.tensor([1.5, -1.3, -2.6, 2.0, 3.0], requires_grad=True)
    expected = torch.autograd.grad(torch.special.zeta(x, q).sum(), q)[0]
    with torch.no_grad():
        program = jaxify(torch.special.zeta)
    arrays = from_torch(x), from_torch(q)
    jax: Any = importlib.import_module("jax")
    found = jax.grad(lambda q: program(arrays[0], q).sum())(arrays[1])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    _, forward = jax.jvp(lambda q: program(arrays[0], q), (arrays[1],), (jax.numpy.ones(5),))
    np.testing.assert_allclose(forward, expected, rtol=1e-5)


@pytest.mark.slow(seconds=10)
@pytest.mark.every(5)
@pytest.mark.parametrize("to", [to for to in SWEPT if Table(ROUTES[to]).ledger().floors])
def test_a_share_of_the_database(to: str) -> None:
    """Other operators for each commit, in all dtypes, by a route whose ledger was written by a whole sweep.

    Whole: ``python -m tests.sweeps lowerings``.
    """
    if to == "onnx":
        pytest.importorskip("onnxscript", reason="needs onnxscript")
    swept(Table(ROUTES[to]), op_names()[int(os.environ.get("FUZZ_SEED", "0")) % SHARES :: SHARES], DTYPES)


@pytest.mark.full
def test_every_operator_of_the_database() -> None:
    swept(Table(JAX), op_names(), ["float32", "int64"])


@pytest.mark.slow(seconds=15)
def test_programs_of_the_fuzzer() -> None:
    check_fuzzed(range(20), "jax")


@pytest.mark.every(5)
@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("to", ["module", "core_aten", "onnx"])
def test_programs_of_the_fuzzer_that_are_exported(to: str) -> None:
    if to == "onnx":
        pytest.importorskip("onnxscript", reason="needs onnxscript")
    check_fuzzed(range(90, 105), to)


def check_fuzzed(seeds: Iterable[int], to: str) -> None:
    found = [row for seed in seeds for row in fuzz.rows(fuzz.Seed(seed, to))]
    assert not (objections := Ledger(f"lowerings-fuzz-{to}").objections(found)), "\n".join(objections)
    assert sum(row.status == RIGHT for row in found) > 15


WRITES: dict[str, Any] = {
    "view": lambda x: x.view(-1)[2:].mul_(2),
    "reshape": lambda x: x.reshape(2, 8)[1].mul_(2),
    "t": lambda x: x.t()[0].mul_(2),
    "transpose": lambda x: x.transpose(0, 1)[1].mul_(2),
    "permute": lambda x: x.permute(1, 0)[1].mul_(2),
    "select": lambda x: x.select(1, 2).mul_(2),
    "slice": lambda x: x[1:3, ::2].mul_(2),
    "narrow": lambda x: x.narrow(0, 1, 2).mul_(2),
    "diagonal": lambda x: x.diagonal(1).mul_(2),
    "unsqueeze": lambda x: x.unsqueeze(0)[0, 1].mul_(2),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1)[1].mul_(2),
    "expand": lambda x: x[:1, :1].expand(1, 1).mul_(2),
    "chunk": lambda x: x.chunk(2)[1].mul_(2),
    "split": lambda x: x.split([1, 3])[0].mul_(2),
    "unbind": lambda x: x.unbind(1)[3].mul_(2),
    "unfold": lambda x: x.unfold(0, 2, 2)[1].mul_(2),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 1), 1).mul_(2),
    "flatten": lambda x: x.flatten()[3:5].mul_(2),
    "detach": lambda x: x.detach()[0].mul_(2),
    "view of dtype": lambda x: x.view(torch.int32)[0].bitwise_and_(0),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_through_views_are_kept(name: str) -> None:
    """Each is a new value of the input."""
    x = torch.arange(1.0, 17.0).reshape(4, 4)
    array, before = from_torch(x), x.clone()
    written = jaxify(WRITES[name])(array).arguments["x"]
    WRITES[name](x)
    assert not torch.equal(x, before)
    np.testing.assert_array_equal(written, x.numpy())


def _models() -> Iterator[Any]:
    """All of them in both modes; a few in each run of the suite."""
    often = {("llama", False), ("mamba", False), ("resnet", True)}
    for name in ("bert", "gpt2", "llama", "t5", "vit", "resnet", "mamba", "whisper"):
        for training in (False, True):
            mark = pytest.mark.slow(seconds=10) if (name, training) in often else pytest.mark.full
            yield pytest.param(name, training, marks=mark, id=f"{name}-{'train' if training else 'eval'}")


def _drop_nothing(model: torch.nn.Module) -> None:
    """Set each probability of dropout to zero: of the layers, and of what functions are called with."""
    owners = [owner for module in model.modules() for owner in (module, getattr(module, "config", module))]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(owner, torch.nn.Dropout))):
                setattr(owner, name, 0.0)


@pytest.mark.every(5)
@pytest.mark.parametrize(("name", "training"), list(_models()))
def test_models(name: str, training: bool) -> None:
    """Three calls in a row, jitted: what the model returns, and its buffers."""
    make, inputs = TRANSFORMERS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # configurations warn about kernels that are not installed
        model = make().train(training)
        _drop_nothing(model)
        batch = inputs()
        model(**batch)  # which sets what the configuration leaves open
        program = capture(model, (), batch).to_jax()
        step, state = program.jit(), program.initial_state
        for _ in range(3):
            batch = inputs()
            expected = model(**batch)
            state, outputs = step(state, **{key: from_torch(value) for key, value in batch.items()})
            assert outputs.keys() == expected.keys()
            np.testing.assert_allclose(outputs["logits"], expected.logits.detach(), atol=1e-5)
    buffers = {path: value for path, value in model.named_buffers() if path in state}
    for path, value in buffers.items():
        np.testing.assert_allclose(state[path], value, atol=1e-5)


@pytest.mark.slow
def test_decoding_with_a_static_cache() -> None:
    """Transformers' own cache, whose position moves on: keys, values and counters come back as new values."""
    function, args = next(model for model in MODELS if model.name == "kv-cache-decode").build()
    program = capture(function, args).to_jax()
    step, state = program.jit(), program.initial_state
    arrays = torch.utils._pytree.tree_map(from_torch, args[1:])
    for _ in range(3):
        expected = function(*args)
        weights = torch.utils._pytree.tree_map(from_torch, args[0])
        state, (outputs, written) = step(state, weights, *arrays)
        np.testing.assert_allclose(outputs, expected, atol=1e-5)
        arrays = (arrays[0], written["layers"])
    for mine, theirs in zip(arrays[1], args[2], strict=True):
        for key, value in theirs.items():
            np.testing.assert_allclose(mine[key], value, atol=1e-5)


@pytest.mark.slow
def test_a_model_with_an_attention_mask_is_written_as_for_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    jax = pytest.importorskip("functionalize.backends.jax")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes)).eval()
    ids, mask = torch.randint(20, (2, 5)), torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    with torch.no_grad():
        program = capture(model, (ids,), {"attention_mask": mask}, is_exporting=True)
        expected = model(ids, attention_mask=mask).last_hidden_state
    run = jax.load(program.to_stablehlo(tmp_path / "model.stablehlo"))
    found = run(ids.numpy(), attention_mask=mask.numpy())["last_hidden_state"]
    torch.testing.assert_close(jax.to_torch(found), expected, rtol=1e-4, atol=1e-5)
