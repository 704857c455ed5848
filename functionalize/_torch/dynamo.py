"""What a Dynamo backend needs of torch's compiler stack.

Invariant: imported by the Dynamo backend alone: ``torch._dynamo`` takes seconds to load. Limits: plain tensors.
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

_FLOATING = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}  # as a guard writes them


def default_dtype_before() -> torch.dtype:
    """The default dtype under which calls of the graph that Dynamo found begin: by now it is as they leave it."""
    guard: Any = convert_frame.initial_global_state
    if guard is None:
        return torch.get_default_dtype()
    return _FLOATING.get(json.loads(guard.__getstate__())["default_dtype"], torch.get_default_dtype())


def in_compiled_autograd() -> bool:
    """Whether what is compiled is a backward that torch's compiled autograd found: a graph of autograd's own nodes."""
    return bool(compiled_autograd.in_compiled_autograd_region)


def to_fakes(inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Fake tensors for the inputs of a Dynamo graph, of the sizes and symbols that Dynamo gave them."""
    context = TracingContext.try_get()
    mode = (context.fake_mode if context is not None else None) or detect_fake_mode(list(inputs))
    static = mode is None
    mode = mode or new_fake_mode(symbolic=False)
    known = context.tensor_to_context if context is not None else {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is mode):
            return value
        symbols = known.get(value)
        source = None if symbols is None else symbols.tensor_source
        shapes = True if static else None
        return mode.from_tensor(
            value, static_shapes=shapes, symbolic_context=symbols, source=source, trace=symbols is None
        )

    return mode, [fake(_without_lost_base(value)) for value in inputs]


def known_number(fake: Any) -> bool:
    """Whether Dynamo knows a tensor to hold a number that differs from call to call: it makes such of Python's."""
    return isinstance(fake, FakeTensor) and fake.device.type == "cpu" and fake.item_memo is not None


def of_sizes(fakes: Sequence[Any], sizes: Mapping[int, tuple[Any, Any]]) -> tuple[FakeTensorMode, list[Any]] | None:
    """Fake tensors of another mode, without symbols: of sizes and strides that are given by position, or of their own.

    Numbers, and tensors that hold one, have the number in it. None where this does not describe all of a fake tensor.
    """
    tensors = [fake for fake in fakes if isinstance(fake, FakeTensor)]
    plain = (
        fake.layout is torch.strided and not (fake.is_nested or fake.is_conj() or fake.is_neg()) for fake in tensors
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
    """A view whose base has got another storage, as a tensor of its own: torch would make them share memory again."""
    base = value._base if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else None
    if base is None or storage_key(base) == storage_key(value):
        return value
    return value.data.requires_grad_(value.requires_grad)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of a fake one, with the number that Dynamo knows it to hold."""
    alias = tensor.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, FakeTensor) and isinstance(alias, FakeTensor) and tensor.item_memo is not None:
        alias.item_memo = tensor.item_memo
    return alias


@contextlib.contextmanager
def sizes_by_data(mode: FakeTensorMode) -> Iterator[None]:
    """Where sizes may be data-dependent: Dynamo breaks its graphs there, but their backwards may have such sizes."""
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


_guards = weakref.WeakKeyDictionary[Any, int]()  # how many an environment of symbols had


def has_new_guards(mode: FakeTensorMode) -> bool:
    """Whether more is taken for granted of the symbols of a mode than when this was asked first."""
    environment = mode.shape_env
    known = 0 if environment is None else len(environment.guards)
    return environment is not None and _guards.setdefault(environment, known) != known


def asks_version(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's asks for the version of a tensor, to compute with it."""
    return node.target is _tensor_version and not keeps_version(node)


def keeps_version(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's asks for a version only for it to be set back."""
    return node.target is _tensor_version and all(user.target is _unsafe_set_version_counter for user in node.users)


def asks_base(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's asks of what an input is a view, and it is one."""
    asked = node.all_input_nodes if node.target is getattr and node.args[1:] == ("_base",) else []
    values = [source.meta.get("example_value") for source in asked if source.op == "placeholder"]
    return any(isinstance(value, torch.Tensor) and is_view_to_autograd(value) for value in values)


def leaves_inference_mode(graph: torch.fx.Graph) -> bool:
    """Whether a graph sets inference mode off; Dynamo compiles for calls in that mode and others alike."""
    entered = graph.find_nodes(op="call_function", target=torch.autograd.grad_mode._enter_inference_mode)
    return any(node.args[0] is False for node in entered)


@contextlib.contextmanager
def run_apart(mode: FakeTensorMode) -> Iterator[None]:
    """Where another compiler runs: what it notes of its graph is not taken for what is noted of Dynamo's."""
    with tracing(TracingContext(mode)), torch.no_grad(), without_autocast():
        yield


def note_origin(node: torch.fx.Node) -> None:
    """Give a node what Dynamo notes of the node that runs: the user's lines, the modules."""
    meta = torch.fx.traceback.get_current_meta()
    for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "custom"):
        if name in meta:
            node.meta.setdefault(name, meta[name])
