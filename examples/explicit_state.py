"""State as inputs and outputs, for engines that drop what an ExportedProgram writes.

`torch.export`'s signature says which outputs are new values of parameters and buffers. Some engines leave these outputs
out without a word: the first call is right, and later ones begin from the same state. Here the program takes its state
and gives the new one back, so that there is nothing that could be dropped; who calls it threads the state.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram

from functionalize import capture

aten = torch.ops.aten


def for_engines(exported: ExportedProgram) -> ExportedProgram:
    """The same, without two operators that an engine of docs/reference/export-details.md lacks."""
    found: ExportedProgram = exported.run_decompositions({aten.squeeze.dims: _squeeze, aten.add.Tensor: _add})
    return found


def _add(x: Tensor, y: Tensor, *, alpha: float = 1) -> Tensor:
    return NotImplemented if alpha == 1 else x + y * alpha


def _squeeze(x: Tensor, dims: list[int]) -> Tensor:
    gone = {dim % x.dim() for dim in dims}
    return x.reshape([size for dim, size in enumerate(x.shape) if dim not in gone or size != 1])


def main() -> None:
    program = capture(torch.nn.BatchNorm1d(3), (torch.randn(4, 3),))
    exported = for_engines(program.to_core_aten(explicit_state=True))
    *state, _ = exported.example_inputs[0]
    call = exported.module()  # here goes the engine's
    for _ in range(3):
        *state, _ = call(*state, torch.randn(4, 3))
    print("Written:", len(exported.graph_signature.buffers_to_mutate), "Calls counted:", int(state[2]))


if __name__ == "__main__":
    main()
