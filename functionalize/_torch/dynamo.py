"""The parts of torch's compiler stack that a Dynamo backend needs.

Invariant: only the Dynamo backend imports this: ``torch._dynamo`` takes seconds to load. Limits: plain tensors.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher  # kernels in Python, which know symbols
from torch._dynamo import compiled_autograd, convert_frame
from torch._dynamo.backends.registry import lookup_backend  # a compiler by its name
from torch._dynamo.tensor_version_op import _tensor_version, _unsafe_set_version_counter  # nodes of its graphs
from torch._guards import TracingContext, detect_fake_mode, tracing  # where Dynamo keeps its symbols
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from functionalize._torch.dispatch import without_autocast
from functionalize._torch.fakes import new_fake_mode
from functionalize._torch.symbols.sizes import hint_of
from functionalize._torch.tensors import is_view_to_autograd, storage_key

_FLOATING = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}  # by their numbers in a guard


def default_dtype_before() -> torch.dtype:
    """The default dtype at the start of a call of Dynamo's graph; the current one is that at its end."""
    guard: Any = convert_frame.initial_global_state
    if guard is None:
        return torch.get_default_dtype()
    return _FLOATING.get(json.loads(guard.__getstate__())["default_dtype"], torch.get_default_dtype())


def in_compiled_autograd() -> bool:
    """Whether torch's compiled autograd has a backward compiled: a graph of autograd's own nodes."""
    return bool(compiled_autograd.in_compiled_autograd_region)


def to_fakes(inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Fake tensors for the inputs of a Dynamo graph, of the sizes and symbols that Dynamo gave them."""
    context = TracingContext.try_get()
    mode = (context.fake_mode if context is not None else None) or detect_fake_mode(list(inputs))
    static = mode is None
    mode = mode or new_fake_mode(symbolic=False)
    contexts = context.tensor_to_context if context is not None else {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is mode):
            return value
        symbols = contexts.get(value)
        source = None if symbols is None else symbols.tensor_source
        shapes = True if static else None
        return mode.from_tensor(
            value, static_shapes=shapes, symbolic_context=symbols, source=source, trace=symbols is None
        )

    return mode, [fake(_without_lost_base(value)) for value in inputs]


def known_number(fake: Any) -> bool:
    """Whether a tensor holds a number that differs from call to call: Dynamo passes numbers of Python's so."""
    return isinstance(fake, FakeTensor) and fake.device.type == "cpu" and fake.item_memo is not None


def of_sizes(fakes: Sequence[Any], sizes: Mapping[int, tuple[Any, Any]]) -> tuple[FakeTensorMode, list[Any]] | None:
    """Fake tensors of another mode, without symbols, with the sizes and strides that ``sizes`` has by position.

    For numbers, and tensors that hold a number, ``sizes`` has the number first. Tensors that it lacks keep their sizes.
    None if size and strides do not describe some fake tensor completely.
    """
    tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
    plain = (
        isinstance(fake, FakeTensor)
        and fake.layout is torch.strided
        and not (fake.is_nested or fake.is_conj() or fake.is_neg())
        for fake in tensors
    )
    if not all(plain):
        return None
    mode: FakeTensorMode = new_fake_mode(symbolic=False)

    def made(place: int, fake: Any) -> Any:
        if not isinstance(fake, FakeTensor):
            return sizes[place][0] if place in sizes else fake
        holds = known_number(fake)
        size, stride = (fake.size(), fake.stride()) if holds or place not in sizes else sizes[place]
        offset: Any = fake.storage_offset()
        offset = offset if type(offset) is int else hint_of(offset)
        end = offset + (0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)))
        memory = torch.empty(end, dtype=fake.dtype, device=fake.device).untyped_storage()
        tensor: Any = torch.empty(0, dtype=fake.dtype, device=fake.device).set_(memory, offset, size, stride)
        if holds:
            tensor.item_memo = sizes[place][0]
        return tensor.requires_grad_(fake.requires_grad)

    with mode, torch.no_grad():
        return mode, [made(place, fake) for place, fake in enumerate(fakes)]


def _without_lost_base(value: Any) -> Any:
    """A tensor in place of a view whose base got another storage: torch would make the two share memory again."""
    base = value._base if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else None
    if base is None or storage_key(base) == storage_key(value):
        return value
    return value.data.requires_grad_(value.requires_grad)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of a fake one, with the number that it holds for Dynamo."""
    alias = tensor.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, FakeTensor) and isinstance(alias, FakeTensor) and tensor.item_memo is not None:
        alias.item_memo = tensor.item_memo
    return alias


@contextlib.contextmanager
def sizes_by_data(mode: FakeTensorMode) -> Iterator[None]:
    """Allow data-dependent sizes: Dynamo breaks its graphs at them, but backwards of its graphs may have them."""
    environment = mode.shape_env
    if environment is None:
        yield
        return
    before = environment.settings
    environment.settings = replace(before, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    try:
        yield
    finally:
        environment.settings = before


_guards = weakref.WeakKeyDictionary[Any, int]()  # how many guards an environment of symbols had


def has_new_guards(mode: FakeTensorMode) -> bool:
    """Whether a mode's symbols have more guards than at the first call of this function."""
    environment = mode.shape_env
    count = 0 if environment is None else len(environment.guards)
    return environment is not None and _guards.setdefault(environment, count) != count


def asks_version(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's reads the version of a tensor, to compute with it."""
    return node.target is _tensor_version and not keeps_version(node)


def keeps_version(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's reads a version only to set it back."""
    return node.target is _tensor_version and all(user.target is _unsafe_set_version_counter for user in node.users)


def asks_base(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's reads the ``_base`` of an input that is a view."""
    asked = node.all_input_nodes if node.target is getattr and node.args[1:] == ("_base",) else []
    values = [source.meta.get("example_value") for source in asked if source.op == "placeholder"]
    return any(isinstance(value, torch.Tensor) and is_view_to_autograd(value) for value in values)


def leaves_inference_mode(graph: torch.fx.Graph) -> bool:
    """Whether a graph turns inference mode off; Dynamo uses one graph for calls in that mode and outside of it."""
    entered = graph.find_nodes(op="call_function", target=torch.autograd.grad_mode._enter_inference_mode)
    return any(node.args[0] is False for node in entered)


@contextlib.contextmanager
def own_tracing_context(mode: FakeTensorMode) -> Iterator[None]:
    """Run another compiler, whose notes on its graph must not mix with those on Dynamo's."""
    with tracing(TracingContext(mode)), torch.no_grad(), without_autocast():
        yield


def note_origin(node: torch.fx.Node) -> None:
    """Copy to a node what Dynamo notes of the node that runs: the user's lines, the modules."""
    meta = torch.fx.traceback.get_current_meta()
    for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "custom"):
        if name in meta:
            node.meta.setdefault(name, meta[name])
