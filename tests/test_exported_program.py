"""Captured programs as ``torch.export.ExportedProgram``: held against eager over three calls, after save and load."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.export import Dim

from functionalize import capture

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


def saved_and_loaded(exported: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.nn.Buffer(torch.zeros(3))
        self.linear, self.norm = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.count.add_(1)
        self.count[0] += 2
        x[0].mul_(2)
        y = self.norm(self.linear(x)) + self.count + more["z"]
        return {"y": y, "count": self.count, "x": x, "view": more["z"].t(), "constant": 3}


@pytest.mark.parametrize("as_run", ["module", "loaded", "decomposed"])
def test_state_arguments_and_nesting(as_run: str) -> None:
    model = Counter()
    twin = copy.deepcopy(model)
    batch = Dim("batch", min=2, max=100)
    shapes = {"x": {0: batch}, "more": {"z": None}}
    example = (torch.randn(4, 3),), {"more": {"z": torch.randn(1, 3)}}
    exported: Any = capture(model, *example, dynamic_shapes=shapes).to_exported_program()
    if as_run == "loaded":
        exported = saved_and_loaded(exported)
    if as_run == "decomposed":
        exported = exported.run_decompositions({})
    module = exported.module()
    for rows in (2, 5, 7):
        x, z = torch.randn(rows, 3), torch.randn(1, 3)
        mine = x.clone()
        expected, found = twin(x, more={"z": z}), module(mine, more={"z": z})
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(mine, x)
        assert found["x"] is mine
        assert found["count"] is module.count
        assert found["view"].data_ptr() == z.data_ptr()
    torch.testing.assert_close(dict(module.state_dict()), dict(twin.state_dict()))
    torch.testing.assert_close(dict(model.named_buffers()), dict(Counter().named_buffers()))  # is left as it was
    with pytest.raises(AssertionError, match="<= 100"):
        module(torch.randn(200, 3), more={"z": z})
