"""ONNX files as another engine sees them: opened by ONNX Runtime alone, by the names that their metadata document.

Invariant: nothing of the package that wrote a file is used, and none of its state is kept for the caller but here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import onnxruntime


class PlainFile:
    """A file, with the state of the program, which each call passes and takes back."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        entries = self.session.get_modelmeta().custom_metadata_map
        self.convention = json.loads(entries["functionalize"])
        self.state: dict[str, Any] = {}
        for state in self.convention["state"]:
            value = numpy.zeros(state["shape"], state["dtype"])
            if state["initial"] is not None:
                raw = base64.b64decode(entries[state["initial"]])
                value = numpy.frombuffer(raw, state["dtype"]).reshape(state["shape"])
            self.state[state["input"]] = value

    @property
    def inputs(self) -> dict[str, list[Any]]:
        """The shapes of inputs, by name."""
        return {value.name: value.shape for value in self.session.get_inputs()}

    @property
    def outputs(self) -> dict[str, list[Any]]:
        """The shapes of outputs, by name."""
        return {value.name: value.shape for value in self.session.get_outputs()}

    def run(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All outputs by name; the new state is that of the next call. ``arguments``: tensors, by name."""
        given = {name: value.detach().numpy() for name, value in arguments.items()}
        names = list(self.outputs)
        found = dict(zip(names, self.session.run(names, {**given, **self.state}), strict=True))
        assert all(found[check["output"]] for check in self.convention["checks"])
        self.state = {state["input"]: found[state["output"]] for state in self.convention["state"]}
        return found

    def results(self, *leaves: Any) -> list[Any]:
        """What a call with these leaves of arguments returns: the leaves of its results."""
        named = {
            argument["name"]: leaf
            for argument, leaf in zip(self.convention["arguments"], leaves, strict=True)
            if not argument["constant"]
        }
        found = self.run(named)
        return [
            result["value"] if result["name"] is None else found[result["name"]]
            for result in self.convention["results"]
        ]
