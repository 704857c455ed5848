"""What ONNX Runtime, where it is installed, says of a file before it is given away: it has no kernel for some types.

Invariant: a file that is given away is one that the engine loads. Limits: it names one operator at a time; of its
providers besides the CPU's, those of the machine that writes are asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from functionalize.call_stack import line_in
from functionalize.errors import UnsupportedExportError

_CPU = "CPUExecutionProvider"
_OTHERS = frozenset({"CUDAExecutionProvider", "ROCMExecutionProvider", "DmlExecutionProvider"})
_NODE = re.compile(r"node (?:with name )?['(]([^')]+)[')]")
_FOREWORD = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .*? failed: ?)?")
_TARGET = re.compile(r"target=torch\.ops\.([\w.]+)")
_TRACE, _FROM = "pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node"  # what torch's exporter leaves at nodes


def refuse_what_it_does_not_load(path: Path, model: Any) -> None:
    """Load a file; ``model``: what is in it.

    Raises:
        UnsupportedExportError: the engine does not take it.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return
    others = [name for name in onnxruntime.get_available_providers() if name in _OTHERS]
    error = _error(path, [_CPU])
    if error is not None and (not others or _error(path, [*others, _CPU]) is not None):
        raise UnsupportedExportError("ONNX", _causes(str(error), list(model.graph))) from error


def _error(path: Path, providers: Sequence[str]) -> Exception | None:
    """What some providers have against a file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        onnxruntime.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # it has several kinds, of no common class
        return error
    return None


def _causes(message: str, nodes: Sequence[Any]) -> list[str]:
    """The operator that the engine names, wherever the program has it, each line once."""
    named, why = _NODE.search(message), "ONNX Runtime: " + _FOREWORD.sub("", message).strip()
    kinds = [(node.op_type, _types(node)) for node in nodes if named and node.name == named[1]]
    found = [_cause(node, why) for node in nodes if (node.op_type, _types(node)) in kinds]
    whole = UnsupportedExportError.cause(
        "ONNX Runtime cannot load the file",
        why=why,
        hint="use other operators, or pass check=False if you use another engine",
    )
    return list(dict.fromkeys(found)) or [whole]


def _types(node: Any) -> str:
    known = [one.dtype for one in node.inputs if one is not None and one.dtype is not None]
    return ", ".join(dict.fromkeys(str(dtype).lower() for dtype in known))


def _cause(node: Any, why: str) -> str:
    target = _TARGET.search(node.metadata_props.get(_FROM, ""))
    return UnsupportedExportError.cause(
        f"{target[1] if target else node.name} (in ONNX: {node.op_type} of {_types(node)})",
        why=why,
        hint="convert its inputs to torch.float32, or use other operators; pass check=False if you use another "
        "engine or provider",
        at=line_in(node.metadata_props.get(_TRACE)),
    )
