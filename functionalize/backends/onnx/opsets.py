"""ONNX models for other opsets than those that torch's exporter writes, by onnxscript's and ONNX's converters.

Invariant: a model that is given on has the opset that was asked for. Limits: what the converters know; that the result
computes the same is seen by who runs it.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from onnxscript.version_converter import convert_version

from functionalize.errors import UnsupportedExportError

_WHERE_IN_ONNX = re.compile(r"^\S+: \w+: Assertion `\w+` failed: ")


class _Said(logging.Handler):
    """What the converters log, which is where they say why they cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self.reasons.append(_WHERE_IN_ONNX.sub("", str(error).strip().splitlines()[-1]))


def convert(model: Any, version: int) -> None:
    """Bring a model (`onnx_ir.Model`) to an opset, in place.

    Raises:
        UnsupportedExportError: no converter can.
    """
    before = model.graph.opset_imports[""]
    if before == version:
        return
    logger, said = logging.getLogger("onnxscript.version_converter"), _Said()
    propagates, level = logger.propagate, logger.level
    logger.addHandler(said)
    logger.propagate = False
    logger.setLevel(logging.WARNING)  # whatever is set above
    try:
        convert_version(model, version, fallback=True)
    except Exception as error:  # it has several kinds, of no common class
        said.reasons.append(str(error).strip() or type(error).__name__)
    finally:
        logger.removeHandler(said)
        logger.propagate = propagates
        logger.setLevel(level)
    if said.reasons or model.graph.opset_imports[""] != version:
        cause = UnsupportedExportError.cause(
            f"some operators of the program do not exist in opset {version}",
            why=f"ONNX's converter from opset {before}: {said.reasons[-1] if said.reasons else 'it cannot'}",
            hint=f"pass opset_version={before}, or your own translation (custom_translation_table)",
        )
        raise UnsupportedExportError("ONNX", [cause])
