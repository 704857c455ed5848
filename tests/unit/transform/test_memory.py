"""Memory that is read and written around the dispatcher, in direct use: NumPy, DLPack, pickle, copy, storages, text."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from functionalize.verify import assert_equivalent
from tests.support.graphs import REMOVES


def read(x: Tensor) -> Any:
    y = x + 1
    row, columns = y[0], y.t()
    y.view(-1).add_(1)
    columns.mul_(2)
    x.add_(5)
    saved = io.BytesIO()
    torch.save(columns, saved)
    saved.seek(0)
    numbers = (
        row.tolist(),
        float(row[0]),
        int(y[0, 0]),
        bool(y[0, 0] > 1),
        x.numpy().sum().item(),
        row.numpy().tobytes(),
    )
    texts = repr(row), str(columns), f"{y[0, 0]:.2f}"
    copies = pickle.loads(pickle.dumps(row)), copy.deepcopy(columns), torch.load(saved), from_dlpack(row).clone()
    return numbers, texts, copies, list(y.untyped_storage()), row.data_ptr() == y.data_ptr()


def written_as_an_array(x: Tensor) -> Any:
    y = x + 1
    array = y.numpy()
    y.mul_(2)
    before = array.tolist()
    array[:] = 3
    z, row = y + 1, y[0]
    array[0] = 10
    return before, z, row + 0, y.sum(), torch.from_numpy(array)


def written_by_dlpack(x: Tensor) -> Any:
    y = x + 1
    row = y[0]
    row.add_(1)
    from_dlpack(row).numpy()[1] = 55
    x.numpy()[0] = 9
    y.add_(1)
    return y * 1, row + 0, x * 2


def copied(x: Tensor) -> Any:
    y = x + 1
    deep = copy.deepcopy(y)
    y.add_(1)
    deep.mul_(2)
    pickled = pickle.loads(pickle.dumps({"all": y, "row": y[0]}))
    pickled["all"].zero_()
    return y, deep, pickled["row"]


def by_the_storage(x: Tensor) -> Any:
    storage = x.untyped_storage()
    x.add_(1)
    y = torch.empty(0).set_(storage, 0, (4,), (1,))
    y.mul_(2)
    z = x * 1
    z[0].add_(1)
    z.untyped_storage().copy_(storage)
    return x * 1, y, z + 1


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("func", [read, written_as_an_array, written_by_dlpack, copied, by_the_storage])
def test_memory_is_current(func: Callable[[Tensor], Any], remove: str) -> None:
    assert_equivalent(func, torch.ones(2, 2), remove=remove)
