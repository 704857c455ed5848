"""Compares a transformed function with the eager one: what a caller can see of a call, and how two calls differ.

Invariant: both run on copies of the inputs, which share storage exactly where the inputs do, under the same seed.
Limits: what the caller can see of one call; aliasing is compared by storage, so tensors without a strided storage
(sparse, MKL-DNN) are compared by value alone; storages of no bytes count as unshared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from functionalize._torch import FakeTensor, copy_of_memory, is_zero_tensor, pytree
from functionalize.errors import NotEquivalentError, is_own
from functionalize.transform.api import functionalize
from functionalize.verify.functional import assert_functional


def assert_equivalent(
    func: Callable[..., Any],
    *inputs: Any,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    remove: str = "mutations",
    tracing_mode: Literal["real", "fake", "symbolic"] | None = None,
    strides: bool = False,
    aliasing: bool | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> GraphModule | None:
    """Raise unless a transformed function behaves like the eager one for its caller.

    Both run on copies of the inputs that share storages as the inputs do, with the same random seed. It compares
    values, dtypes and shapes of outputs; values, shapes, strides and gradients of the inputs after the call; which
    outputs and inputs share a storage or are the same object; and the types of exceptions. If this package raises the
    exception, its text must be eager's too.

    Args:
        func: the eager function; its arguments and results may be any pytree.
        *inputs: the arguments.
        transform: the transform to check (default: `functionalize(func, remove=remove)`).
        remove: for the default transform, and for `assert_functional` on the graph.
        tracing_mode: None to call the transformed function directly; "real", "fake" or "symbolic" to trace
            it with `make_fx` on one copy, check the graph with `assert_functional`, and run it on another.
        strides: whether to compare strides of outputs as well.
        aliasing: whether to compare aliasing (default: only without tracing, as a graph without views returns no
            aliases).
        seed: the random seed of every run.
        rtol: as in `torch.testing.assert_close`.
        atol: as in `torch.testing.assert_close`.

    Returns:
        The graph, if one was traced.

    Raises:
        NotEquivalentError: the functions differ; the message says in what.
        NotFunctionalError: the traced graph contains mutations.

    Example:
        >>> import torch
        >>> from functionalize.verify import assert_equivalent
        >>> def bump(x):
        ...     x[0].add_(1)
        ...     return x.sum()
        >>> graph = assert_equivalent(bump, torch.zeros(3), tracing_mode="fake")
    """
    transformed = transform(func) if transform is not None else functionalize(func, remove=remove)
    expected = observe(func, clone_inputs(inputs), seed)
    graph: GraphModule | None = None
    if tracing_mode is not None and expected.error is None:
        torch.manual_seed(seed)
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(transformed, tracing_mode=tracing_mode)(*clone_inputs(inputs))
        assert_functional(graph, remove)
        transformed = torch.no_grad()(graph)  # gradients are nodes of it; it writes back to leaves
    actual = observe(transformed, clone_inputs(inputs), seed)
    aliasing = graph is None if aliasing is None else aliasing
    lines = list(differences(expected, actual, strides=strides, aliasing=aliasing, rtol=rtol, atol=atol))
    if lines:
        name = getattr(func, "__name__", repr(func))
        listed = "\n".join(f"  {line}" for line in lines)
        raise NotEquivalentError(f"`{name}` and its transform differ:\n{listed}") from actual.error
    return graph


@dataclass(frozen=True)
class Observation:
    """All that a caller can see of one call: its outputs or its error, and its inputs afterwards."""

    inputs: list[Any]
    outputs: list[Any]
    spec: pytree.TreeSpec | None
    error: Exception | None


def observe(func: Callable[..., Any], inputs: Sequence[Any], seed: int = 0) -> Observation:
    """Call once under a seed and keep what the caller can see. The inputs are used as they are, uncopied."""
    leaves = pytree.tree_leaves(inputs)
    torch.manual_seed(seed)
    try:
        result = func(*inputs)
    except Exception as error:
        return Observation(leaves, [], None, error)
    outputs, spec = pytree.tree_flatten(result)
    return Observation(leaves, outputs, spec, None)


def differences(
    expected: Observation,
    actual: Observation,
    *,
    strides: bool,
    aliasing: bool,
    rtol: float | None,
    atol: float | None,
) -> Iterator[str]:
    """How two observations differ, in words; nothing if a caller cannot distinguish them."""
    if expected.error is not None or actual.error is not None:
        if not raises_alike(expected.error, actual.error):
            yield f"exception: {_error_text(actual.error)}, eager gives {_error_text(expected.error)}"
        return
    if expected.spec != actual.spec:
        yield f"outputs: structure {actual.spec}, eager gives {expected.spec}"
        return
    for label, wants, gets, with_strides in (
        ("output", expected.outputs, actual.outputs, strides),
        ("input after the call", expected.inputs, actual.inputs, True),
    ):
        for index, (want, got) in enumerate(zip(wants, gets, strict=True)):
            for line in leaf_differences(want, got, strides=with_strides, rtol=rtol, atol=atol):
                yield f"{label} {index}: {line}"
    if aliasing:
        yield from _aliasing_differences(expected, actual)


def raises_alike(expected: Exception | None, actual: Exception | None) -> bool:
    """Whether an error equals eager's: by its class, or by its text if it is an error of this package.

    An error of this package is a `RuntimeError`, like most errors of eager, but has another meaning.
    """
    if expected is None or actual is None:
        return expected is actual
    if is_own(actual) and not is_own(expected):
        return str(actual) == str(expected)
    return isinstance(actual, type(expected))


def _error_text(error: Exception | None) -> str:
    return "none" if error is None else f"{type(error).__name__}: {error}"


def leaf_differences(
    want: Any, got: Any, *, strides: bool, rtol: float | None = None, atol: float | None = None
) -> Iterator[str]:
    """How two results of a function differ, in words; nothing if they agree. NaN equals NaN."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = want is got or want == got or (want != want and got != got)
        if type(want) is not type(got) or not same:
            yield f"{got!r}, eager gives {want!r}"
        return
    if isinstance(got, FakeTensor) and not isinstance(want, FakeTensor):
        yield f"{got}, which has no data"
        return
    for aspect in ("dtype", "shape", "device", "layout"):
        if getattr(want, aspect) != getattr(got, aspect):
            yield f"{aspect} {getattr(got, aspect)}, eager gives {getattr(want, aspect)}"
            return
    if strides and want.layout is torch.strided and _real_strides(want) != _real_strides(got):
        yield f"strides {got.stride()}, eager gives {want.stride()}"
    try:
        torch.testing.assert_close(got.detach(), want.detach(), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        yield "values: " + " ".join(str(error).split())
    if _is_leaf(want) and _is_leaf(got):
        yield from _grad_differences(want.grad, got.grad)


def _grad_differences(want: torch.Tensor | None, got: torch.Tensor | None) -> Iterator[str]:
    if want is not None and got is not None:
        yield from (f"grad: {line}" for line in leaf_differences(want, got, strides=False))
    elif want is not got:
        yield f"grad {got}, eager gives {want}"


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds a gradient of its own. Autograd raises for a view that a write has made unusable."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _real_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides along dimensions of more than one position; the strides of other dimensions address no element."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _aliasing_differences(expected: Observation, actual: Observation) -> Iterator[str]:
    for words, key in (("share storage", _storage_key), ("are one object", id)):
        want, got = _groups(expected, key), _groups(actual, key)
        lost, added = sorted(want - got), sorted(got - want)
        for group in lost:
            yield f"aliasing: in eager {', '.join(group)} {words}; the transform gives {added}"
        if added and not lost:
            yield f"aliasing: {added} {words}, but not in eager"


def _groups(seen: Observation, key: Callable[[torch.Tensor], int]) -> set[tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for role, leaves in (("input", seen.inputs), ("output", seen.outputs)):
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                groups.setdefault(key(leaf), []).append(f"{role} {number}")
    return {tuple(group) for group in groups.values() if len(group) > 1}


def _storage_key(tensor: torch.Tensor) -> int:
    """A key that two tensors have in common if they share memory; empty and sparse tensors share no memory."""
    if tensor.layout is not torch.strided or is_zero_tensor(tensor) or tensor.untyped_storage().nbytes() == 0:
        return -id(tensor)
    return tensor.untyped_storage().data_ptr()


def clone_inputs(inputs: Any) -> Any:
    """Copy a pytree of inputs: tensors that share a storage, or are the same object, do so in the copy too.

    Strides, offsets, conjugate bits, `requires_grad`, gradients and `torch.nn.Parameter` are kept; generators
    are cloned with their state; other leaves are not copied.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[int, Any] = {}

    def clone(leaf: Any) -> Any:
        if id(leaf) not in memo:
            memo[id(leaf)] = _clone_leaf(leaf, storages)
        return memo[id(leaf)]

    return pytree.tree_map(clone, inputs)


def _clone_leaf(leaf: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(leaf, torch.Generator):
        return leaf.clone_state()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch.no_grad():
        copy = _clone_tensor(leaf.detach(), storages)
    if isinstance(leaf, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, requires_grad=leaf.requires_grad)
    copy.requires_grad_(leaf.requires_grad)
    if leaf.is_leaf and leaf.grad is not None:
        copy.grad = leaf.grad.clone()
    return copy


def _clone_tensor(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor or tensor.is_neg():
        return tensor.clone()
    key = _storage_key(tensor)
    copy = copy_of_memory(tensor, storages.get(key))
    if key >= 0:  # a negative key is the id of a tensor object, which another may get once that is freed
        storages[key] = copy.untyped_storage()
    return copy
