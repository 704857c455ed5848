"""Each view op: it is a view where eager's is one, writes go both ways, and what is a copy stays apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.equality import Check

CUBE = torch.arange(24.0).view(2, 3, 4)
COMPLEX = torch.view_as_complex(torch.arange(48.0).view(2, 3, 4, 2))
Op = Callable[[Tensor], Any]

REAL: dict[str, Op] = {
    "conj of real": lambda x: x.conj(),
    "dtype of the same size": lambda x: x.view(torch.int32),
    "smaller dtype": lambda x: x.view(torch.int16),
    "larger dtype": lambda x: x.view(torch.int64),
    "view_as_complex": lambda x: torch.view_as_complex(x.unflatten(-1, (2, 2))),
    "tensor_split": lambda x: x.tensor_split(3, 2),
    "tensor_split at indices": lambda x: x.tensor_split((1, 3), -1),
    "hsplit": lambda x: x.hsplit(3),
    "vsplit": lambda x: x.vsplit(2),
    "dsplit": lambda x: x.dsplit([1, 2]),
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "linalg.diagonal": lambda x: torch.linalg.diagonal(x),
    "select": lambda x: x.select(2, -1),
    "unbind": lambda x: x.unbind(1),
    "expand of a dimension of one": lambda x: x[:, :1].expand(2, 1, 4),
    "expand_as": lambda x: x.expand_as(torch.ones(2, 3, 4)),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "permute": lambda x: x.permute(-1, 0, 1),
    "transpose": lambda x: x.transpose(0, 2),
    "transpose_": lambda x: x[:].transpose_(0, 1),
    "t": lambda x: x[0].t(),
    "t_": lambda x: x[1].t_(),
    "T": lambda x: x[0].T,
    "mT": lambda x: x.mT,
    "H": lambda x: x[0].H,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "movedim": lambda x: x.movedim((0, 1), (2, 0)),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "unfold": lambda x: x.unfold(2, 2, 2),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze_": lambda x: x[:1, :1].squeeze_(),
    "squeeze of several": lambda x: x[:1, :1].squeeze((0, 1)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze_": lambda x: x[0].unsqueeze_(0),
    "as_strided": lambda x: x.as_strided((3, 2), (5, 2), 1),
    "as_strided_": lambda x: x[:].as_strided_((4,), (6,), 2),
    "view": lambda x: x.view(6, -1),
    "view_as": lambda x: x.view_as(torch.ones(4, 6)),
    "contiguous of contiguous": lambda x: x.contiguous(),
    "reshape that views": lambda x: x.reshape(3, 8),
    "reshape_as": lambda x: x.reshape_as(torch.ones(8, 3)),
    "flatten": lambda x: x.flatten(0, 1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "ravel": lambda x: x.ravel(),
    "slices": lambda x: x[1, ::2, 1:],
    "ellipsis and newaxis": lambda x: x[..., None, -2:],
    "chunk": lambda x: x.chunk(2, 2),
    "split": lambda x: x.split([1, 2], 1),
    "detach": lambda x: x.detach(),
    "to of the same": lambda x: x.to(torch.float32),
    "type_as": lambda x: x.type_as(x),
    "broadcast_to of one": lambda x: x.broadcast_to(2, 3, 4),
    "atleast_3d": lambda x: torch.atleast_3d(x),
    "resolve_conj": lambda x: x.resolve_conj(),
    "positive": lambda x: x.positive(),
    "real of real": lambda x: torch.real(x),
    "meshgrid of one": lambda x: torch.meshgrid(x[0, 0], indexing="ij"),
    "rot90 by a view": lambda x: x.rot90(0),
}
COPIES: dict[str, Op] = {
    "contiguous of a transpose": lambda x: x.transpose(0, 2).contiguous(),
    "contiguous of a slice": lambda x: x[:, 1:].contiguous(),
    "reshape that copies": lambda x: x.transpose(0, 1).reshape(-1),
    "flatten that copies": lambda x: x.permute(2, 0, 1).flatten(),
    "ravel that copies": lambda x: x.mT.ravel(),
    "advanced index": lambda x: x[[0, 1]],
    "advanced and basic index": lambda x: x[:, [0, 1], 1:],
    "mask": lambda x: x[x[:, 0, 0] >= 0],
    "view_copy": lambda x: torch.view_copy(x, (6, 4)),
    "transpose_copy": lambda x: torch.transpose_copy(x, 0, 1),
    "expand that repeats, then contiguous": lambda x: x[:, :1].expand(2, 3, 4).contiguous(),
    "to another dtype": lambda x: x.to(torch.float64),
    "clone": lambda x: x.clone(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(1, 1, 1),
    "take": lambda x: x.take(torch.tensor([0, 1])),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
}
OF_COMPLEX: dict[str, Op] = {
    "conj": lambda x: x.conj(),
    "conj of conj": lambda x: x.conj().conj(),
    "view_as_real": lambda x: torch.view_as_real(x),
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "imag of conj": lambda x: x.conj().imag,
    "view of conj": lambda x: x.conj().view(6, 4),
    "adjoint": lambda x: x.adjoint(),
    "mH": lambda x: x.mH[0],
    "real of a slice": lambda x: x[:, 1:].real.t() if x.dim() == 2 else x[:, 1:].real,
    "dtype": lambda x: x.view(torch.float32),
}


def program(op: Op) -> Callable[[Tensor], Any]:
    """Write through the result and to the source in turn, of an intermediate and of an input; read both each time."""

    def f(x: Tensor) -> Any:
        results = []
        for source in (x * 1, x):
            seen = op(source)
            parts = seen if isinstance(seen, (tuple, list)) else [seen]
            for number, part in enumerate(parts):
                part.mul_(number + 2)
            read = source * 1
            source.mul_(3)
            results.append((read, [part * 1 for part in parts], source[0] + 1))
        return results

    return f


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [*REAL, *COPIES])
def test_writes_go_both_ways(name: str, check: Check) -> None:
    check(program({**REAL, **COPIES}[name]), CUBE)


@pytest.mark.parametrize("name", OF_COMPLEX)
def test_writes_go_both_ways_of_complex_numbers(name: str, check: Check) -> None:
    check(program(OF_COMPLEX[name]), COMPLEX)


@pytest.mark.parametrize("name", [*REAL, *COPIES, *OF_COMPLEX])
def test_a_view_is_a_view_where_eager_has_one(name: str, remove: str) -> None:
    op = {**OF_COMPLEX, **REAL, **COPIES}[name]
    source = COMPLEX if name in OF_COMPLEX and name not in REAL else CUBE
    seen: list[Any] = []

    def f(x: Tensor) -> Any:
        results = op(x)
        parts = results if isinstance(results, (tuple, list)) else [results]
        seen.append([(p._is_view(), p._base is x, p.stride(), p.storage_offset(), p.is_contiguous()) for p in parts])
        return results

    assert_equivalent(f, source, remove=remove, strides=True)
    assert seen[0] == seen[1]


def test_views_of_gapped_and_empty_tensors(check: Check) -> None:
    def f(x: Tensor, empty: Tensor) -> Any:
        part = x[:, ::2, 1:]
        part.transpose(0, 1)[1].add_(1)
        part.unsqueeze(2).squeeze(2).view(2, 2, 3)[0].mul_(2)
        empty.view(3, 0).add_(1)
        empty.reshape(0, 7).t_()
        return part.flatten(), x.sum(), empty.expand(2, 0, 3).shape[0]

    check(f, CUBE, torch.zeros(0, 3))


def test_assignment_by_every_kind_of_index(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x * 1
        y[0] = 1
        y[..., -1] = y[..., 0] * 2
        y[:, [0, 1]] = -1.0
        y[1, :, 1:3] = torch.ones(2)
        y[y > 9] = 9
        y[:, None, 2, ::2][..., 0] = 4
        y[[0, 1], [0, 1]] += 5
        return y

    check(f, CUBE)


def test_real_and_imaginary_parts_are_set(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x * 1
        y.real = y.imag.clone()
        y.imag = torch.ones(2, 3, 4)
        y.conj()[0].imag.mul_(2)
        return torch.view_as_real(y)

    check(f, COMPLEX)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.view(5, 5),
        lambda x: x.transpose(0, 2).view(-1),
        lambda x: x.view(torch.complex128)[0].view(5),
        lambda x: x.select(0, 7),
        lambda x: x.as_strided((40,), (1,)),
        lambda x: x.unfold(0, 9, 1),
        lambda x: x.expand(4, 3, 4),
        lambda x: x.t(),
        lambda x: torch.view_as_real(x),
    ],
)
def test_views_that_cannot_be_are_refused_as_in_eager(wrong: Op, remove: str) -> None:
    assert_equivalent(lambda x: wrong(x.mul_(2)), CUBE, remove=remove)


def test_resize_keeps_the_memory_format_that_is_asked_for(remove: str) -> None:
    def f(x: Tensor) -> Any:
        y = (x * 1).resize_(2, 3, 2, 2, memory_format=torch.channels_last)
        y[0].add_(1)
        return y.stride(), y, torch.empty(0).resize_as_(y)[:0]

    assert_equivalent(f, CUBE, remove=remove, strides=True)


def test_out_of_view_copies(check: Check) -> None:
    def f(x: Tensor) -> Any:
        out = torch.empty(0)
        torch.view_copy(x, (4, 6), out=out)
        out[0].zero_()
        whole = torch.empty(6, 4)
        torch.permute_copy(x[0], (1, 0), out=whole[:4, :3])
        return out, whole[:4, :3], functionalize(lambda y: torch.t_copy(y))(x[1])

    check(f, CUBE)
