"""State as inputs and outputs, for engines that drop what an ExportedProgram writes.

`torch.export`'s signature says which outputs are new values of parameters and buffers. Some engines leave these outputs
out without a word: the first call is right, and later ones begin from the same state. Here the program takes its state
and gives the new one back, so that there is nothing that could be dropped; who calls it threads the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.export import ExportedProgram, default_decompositions

from functionalize import capture

aten = torch.ops.aten


def with_explicit_state(exported: ExportedProgram) -> tuple[ExportedProgram, list[Tensor]]:
    """A program `(*state, *args) -> (*new_state, result)` that writes nothing, and the state that it begins with."""
    module, signature = exported.module(check_guards=False), exported.graph_signature
    state: dict[str, Tensor] = {}
    for name in (*signature.parameters_to_mutate.values(), *signature.buffers_to_mutate.values()):
        place, _, leaf = name.rpartition(".")
        owner = module.get_submodule(place)
        state[name] = getattr(owner, leaf).detach().clone()
        delattr(owner, leaf)  # it is an input from now on, and no constant of the engine's

    def step(*inputs: Any) -> Any:
        new = {name: value.clone() for name, value in zip(state, inputs, strict=False)}
        result = torch.func.functional_call(module, new, inputs[len(state) :])
        return *new.values(), result

    args, _ = exported.example_inputs or ((), {})
    program = capture(step, (*state.values(), *args))
    if program.mutations:
        raise ValueError("the program writes to its arguments\n    try  clone them in the program")
    return for_engines(program.to_core_aten()), list(state.values())


def for_engines(exported: ExportedProgram) -> ExportedProgram:
    """The same by operators that the engines of docs/backends.md have: each of these here is missing in one of them."""
    table = default_decompositions()
    table.update(get_decompositions([aten._native_batch_norm_legit_functional]))
    table.update(
        {
            aten.var_mean.correction: lambda x, dim=None, *, correction=None, keepdim=False: (
                x.var(dim, correction=correction, keepdim=keepdim),
                x.mean(dim, keepdim=keepdim),
            ),
            aten.squeeze.dims: _squeeze,
            aten.add.Tensor: lambda x, y, *, alpha=1: NotImplemented if alpha == 1 else x + y * alpha,
        }
    )
    found: ExportedProgram = exported.run_decompositions(table)
    return found


def _squeeze(x: Tensor, dims: list[int]) -> Tensor:
    gone = {dim % x.dim() for dim in dims}
    return x.reshape([size for dim, size in enumerate(x.shape) if dim not in gone or size != 1])


def main() -> None:
    norm = torch.nn.BatchNorm1d(3)
    exported, state = with_explicit_state(capture(norm, (torch.randn(4, 3),)).to_exported_program())
    call = exported.module()  # here goes the engine's
    for _ in range(3):
        *state, _ = call(*state, torch.randn(4, 3))
    print("Written:", len(exported.graph_signature.buffers_to_mutate), "Calls counted:", int(state[2]))


if __name__ == "__main__":
    main()
