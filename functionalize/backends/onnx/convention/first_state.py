"""What the state of a program is before its first call: in the metadata of its file, where optimizers leave it.

Optimizers and quantizers of files drop weights that no node reads, and keep the metadata. Large state is weights all
the same: metadata are text, and a file has at most two gigabytes.

Invariant: what is written is read back equal, or loading says what is lost. Limits: state in the CPU's memory.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch

from functionalize.backends.onnx.convention.metadata import KEY, Convention, State

if TYPE_CHECKING:  # loads onnxscript's packages, which a file that is run needs not
    from functionalize.backends.onnx.convention.naming import Names

_IN_METADATA = 2**26  # bytes


def write_first_values(model: Any, convention: Convention, values: Mapping[str, torch.Tensor], names: Names) -> None:
    """Put values, by the paths of the state, into a model (`onnx_ir.Model`). ``names``: those that the model has."""
    raw = {path: value.contiguous().reshape(-1).view(torch.uint8) for path, value in values.items()}
    raw = {path: elements for path, elements in raw.items() if elements.any()}  # -0.0 is no zero
    small = sum(elements.numel() for elements in raw.values()) <= _IN_METADATA
    for state in convention.state:
        elements = raw.get(state.target)
        if elements is None:
            continue
        state.initial = names.claim(f"{KEY}.initial.{state.input}")
        if small:
            model.metadata_props[state.initial] = base64.b64encode(elements.numpy().tobytes()).decode()
        else:
            _add_weight(model, state.initial, values[state.target].contiguous())


def _add_weight(model: Any, name: str, value: torch.Tensor) -> None:
    import onnx_ir

    tensor: Any = onnx_ir.tensor(value, name=name)
    look = {"shape": tensor.shape, "type": onnx_ir.TensorType(tensor.dtype), "const_value": tensor}
    model.graph.initializers[name] = onnx_ir.Value(name=name, **look)


def first_values(
    model: Any, convention: Convention, path: Path | None, given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The values in a model (`onnx.ModelProto`), by the paths of the state.

    ``path``: of its file, if it has one; ``given``: what some are instead.

    Raises:
        ValueError: a value is in no place where it was written; or ``given`` does not fit the state.
    """
    entries = {entry.key: entry.value for entry in model.metadata_props}
    weights = {weight.name: weight for weight in model.graph.initializer}
    first, lost = dict[str, torch.Tensor](), list[State]()
    for state in convention.state:
        value = first[state.target] = torch.zeros(state.shape, dtype=getattr(torch, state.dtype))
        if state.target in given or state.initial is None:
            continue
        if state.initial in entries:
            raw = base64.b64decode(entries[state.initial])
        elif state.initial in weights:
            raw = _raw(weights[state.initial], path)
        else:
            lost.append(state)
            continue
        value.copy_(torch.frombuffer(bytearray(raw), dtype=value.dtype).reshape(state.shape))
    if lost:
        raise ValueError(_without(lost, "the model" if path is None else str(path)))
    for name, value in given.items():
        _set(first, name, value)
    return first


def _raw(weight: Any, path: Path | None) -> bytes:
    try:
        if path is not None and onnx.external_data_helper.uses_external_data(weight):
            onnx.external_data_helper.load_external_data_for_tensor(weight, str(path.parent))
    except Exception as error:  # of the operating system, or onnx's own
        raise ValueError(
            f"{path} cannot be loaded: {error}\n    try  keep its `.data` file beside it, or write it again"
        ) from error
    return bytes(weight.raw_data)


def _without(lost: list[State], label: str) -> str:
    names = ", ".join(f"`{state.target}` ({state.dtype}, {state.shape})" for state in lost)
    dropped = ", ".join(f"`{state.initial}`" for state in lost)
    return (
        f"{label} has no first value for its state {names}\n"
        f"    why  a tool changed the file and dropped {dropped}: optimizers drop weights that no operator reads\n"
        f"    try  pass the values, onnx.load(path, state={{path: tensor}}), for example from the `state` of a program "
        "that was loaded from the original file"
    )


def _set(first: Mapping[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    if name not in first:
        raise ValueError(f"the program has no state `{name}`\n    try  one of: {', '.join(first) or 'none'}")
    target = first[name]
    if target.size() != value.size() or target.dtype is not value.dtype:
        raise ValueError(
            f"the state `{name}` has size {list(target.size())} and {target.dtype}, but its first value has size "
            f"{list(value.size())} and {value.dtype}\n"
            "    try  pass a tensor of that size and dtype"
        )
    target.copy_(value.detach())
