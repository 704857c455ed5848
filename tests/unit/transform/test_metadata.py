"""What a program can ask its tensors at every step: strides, views, versions, storages. The answers are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES

EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)
FORMATS = (torch.contiguous_format, torch.channels_last)


def looks(tensors: dict[str, Tensor], versions: dict[str, int]) -> list[Any]:
    """All that the tensors of a program tell of themselves and of one another, as plain numbers."""
    found: list[Any] = []
    for name, t in tensors.items():
        numbers = [int(n) for n in (*t.size(), *t.stride(), t.storage_offset())]
        formats = [t.is_contiguous(memory_format=form) for form in FORMATS if t.dim() == 4 or form is FORMATS[0]]
        kinds = [t.dtype, t._is_view(), t.requires_grad, t.is_leaf, t.is_inference(), t.is_conj(), t.is_neg()]
        base = None if t._base is None else [other for other, o in tensors.items() if o is t._base]
        shares = [other for other, o in tensors.items() if o.untyped_storage()._cdata == t.untyped_storage()._cdata]
        nbytes = int(t.untyped_storage().nbytes())
        grown = None if t.is_inference() else t._version - versions.setdefault(name, t._version)
        symbolic = any(isinstance(n, torch.SymInt) for n in (*t.size(), *tensors["x"].size()))
        set_to = None if symbolic else t.is_set_to(tensors["x"])  # torch has no answer for symbols; see eagers_answer
        found.append((name, numbers, formats, kinds, base, shares, nbytes, grown, set_to))
    return found


Look = Callable[..., None]
PROGRAMS: dict[str, Callable[[Tensor, Look], Any]] = {}


def program(func: Callable[[Tensor, Look], Any]) -> Callable[[Tensor, Look], Any]:
    PROGRAMS[func.__name__] = func
    return func


@program
def views_and_writes(x: Tensor, look: Look) -> Any:
    y = x + 1
    t, row = y.t(), y[1]
    look(x=x, y=y, t=t, row=row)
    t.mul_(2)
    flat = t.reshape(-1)
    look(x=x, y=y, t=t, row=row, flat=flat)
    flat.add_(1)
    part = t[1:, ::2]
    part.zero_()
    look(x=x, y=y, t=t, row=row, flat=flat, part=part, c=t.contiguous(), part_c=part.contiguous(), d=y.detach())
    row.copy_(flat[:4])
    x[0].add_(1)
    look(x=x, y=y, t=t, row=row, flat=flat, first=x[0])
    return t, part


@program
def metadata_in_place(x: Tensor, look: Look) -> Any:
    y = x * 1
    y.t_()
    look(x=x, y=y)
    y.unsqueeze_(1)
    z = y.squeeze(1)
    y.mul_(2)
    look(x=x, y=y, z=z)
    y.squeeze_()
    y.transpose_(0, 1)
    z.as_strided_((2, 2), (1, 4), 1)
    z.add_(1)
    look(x=x, y=y, z=z, same=y.view(-1))
    return y, z


@program
def functional_ops_on_skewed_values(x: Tensor, look: Look) -> Any:
    y = x.t().clone()
    y[0].add_(1)
    p = y * 2
    q = torch.relu(y.t())
    look(x=x, y=y, p=p, q=q, e=torch.empty_like(y), s=p.sum(0, keepdim=True), cat=torch.cat([y, p], 1))
    p.t()[0].mul_(3)
    r = p.exp()
    look(x=x, y=y, p=p, r=r, w=torch.where(r > 1, p, y), sorted=r.sort(1)[0], z=torch.zeros_like(p), m=p @ y.t())
    return r


@program
def memory_formats(x: Tensor, look: Look) -> Any:
    image = x.reshape(1, 2, 3, 2).to(memory_format=torch.channels_last)
    image[:, 0].mul_(2)
    kernel = torch.ones(2, 2, 1, 1)
    y = torch.nn.functional.conv2d(image, kernel)
    y.relu_()
    z = torch.nn.functional.interpolate(image, scale_factor=2.0)
    look(x=x, image=image, y=y, z=z, copy=y.clone(), flat=y.clone(memory_format=torch.contiguous_format))
    p = image.permute(0, 2, 3, 1)
    p.add_(1)
    look(x=x, image=image, p=p, pooled=torch.nn.functional.avg_pool2d(image, 2), back=p.contiguous())
    return y, p


@program
def broadcast_and_windows(x: Tensor, look: Look) -> Any:
    y = x + 0
    e = y[0].expand(3, 4)
    u = y.unfold(1, 2, 2)
    d = y.diagonal()
    d.fill_(5)
    look(x=x, y=y, e=e, u=u, d=d, sum=e + 1, twice=u * 2)
    y[0].mul_(2)
    look(x=x, y=y, e=e, c=e.contiguous(), n=e.new_zeros(2), b=y.broadcast_to(2, 3, 4))
    return e, u


@program
def splits(x: Tensor, look: Look) -> Any:
    y = x.clone()
    a, b = y.split(2, dim=1)
    top, *_ = y.unbind(0)
    with torch.no_grad():
        a.add_(b)
    look(x=x, y=y, a=a, b=b, top=top)
    left, right = y.chunk(2, 1)
    y.mul_(2)
    look(x=x, y=y, a=a, left=left, right=right, s=torch.stack([left, right]))
    return a, right


@program
def dtypes_and_bits(x: Tensor, look: Look) -> Any:
    y = x + 0
    i = y.view(torch.int32)
    i.bitwise_and_(-2)
    c = torch.view_as_complex(y.view(3, 2, 2))
    j = c.conj()
    c.mul_(2)
    look(x=x, y=y, i=i, c=c, j=j, real=c.real, im=j.imag, r=torch.view_as_real(c), solved=j.resolve_conj(), h=y.half())
    return c, j


@program
def resized_and_set(x: Tensor, look: Look) -> Any:
    y, z = x + 0, torch.ones(2, 2)
    v = y[0]
    y.resize_(2, 2)
    y.add_(1)
    look(x=x, y=y, v=v)
    torch.ops.aten.set_.source_Tensor(z, y)
    z.mul_(2)
    look(x=x, y=y, v=v, z=z)
    z.data = x.t() * 1
    z.add_(1)
    look(x=x, y=y, z=z)
    return y, z


@program
def leaves_and_gradients(x: Tensor, look: Look) -> Any:
    w = x.detach().clone().requires_grad_()
    y = w * 2
    y[0].mul_(3)
    d = y.detach()
    look(x=x, w=w, y=y, d=d, row=y[0])
    with torch.no_grad():
        w.mul_(2)
        v = w[0]
        v.add_(1)
    (g,) = torch.autograd.grad((y.t() * 2).sum(), w)
    g.t().mul_(2)
    y.detach_()
    look(x=x, w=w, y=y, d=d, g=g)
    return g


@program
def inference_tensors(x: Tensor, look: Look) -> Any:
    with torch.inference_mode():
        y = x * 2
        row = y[0]
        row.add_(1)
        look(x=x, y=y, row=row, t=y.t(), r=y.t().reshape(-1))
        return y.t()


@program
def lists_and_outputs(x: Tensor, look: Look) -> Any:
    y, z = x + 0, torch.zeros(4, 3)
    torch._foreach_add_([y, z], 1)
    torch.add(y, y, out=z.t())
    out = torch.empty(0)
    torch.mul(y, 2, out=out)
    look(x=x, y=y, z=z, out=out)
    y.index_put_((torch.tensor([0, 1]),), x[0])
    y.masked_fill_(y > 2, 0.5)
    look(x=x, y=y, z=z, out=out, picked=y[torch.tensor([0, 2])], taken=y.t()[torch.tensor([1])])
    return z, out


def watched(func: Callable[[Tensor, Look], Any], log: list[Any]) -> Callable[[Tensor], Any]:
    """The program of one tensor; each look goes to the log."""

    def run(x: Tensor) -> Any:
        versions: dict[str, int] = {}
        return func(x, lambda **tensors: log.append(looks(tensors, versions)))

    run.__name__ = getattr(func, "__name__", "run")
    return run


def example() -> Tensor:
    return torch.linspace(-1, 2, 12).view(3, 4)


def eagers_answer(name: str, wanted: list[Any]) -> list[Any]:
    """What plain make_fx saw, with `is_set_to` of real tensors: fake ones answer for the copies that they pass on."""
    real: list[Any] = []
    watched(PROGRAMS[name], real)(example())
    return [
        [(*one[:-1], true[-1]) for one, true in zip(*looks, strict=True)] for looks in zip(wanted, real, strict=True)
    ]


@pytest.mark.every(4)
@WHILE
@EITHER
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_look_is_eager(name: str, mode: Any, remove: str) -> None:
    wanted: list[Any] = []
    found: list[Any] = []
    plain, pure = watched(PROGRAMS[name], wanted), functionalize(watched(PROGRAMS[name], found), remove=remove)
    if mode is None:
        plain(example())
        pure(example())
    else:  # some answers are those of fake tensors, of symbolic sizes: plain make_fx shows what eager shows there
        make_fx(pure, tracing_mode=mode)(example())
        try:
            make_fx(plain, tracing_mode=mode)(example())
        except RuntimeError as error:  # before torch 2.15: there is nothing to compare with
            assert "modify sizes for customized tensor" in str(error) and (mode, name) == (
                "symbolic",
                "resized_and_set",
            )
            return
        wanted = eagers_answer(name, wanted) if mode == "fake" else wanted
    for step, (want, got) in enumerate(zip(wanted, found, strict=True)):
        for one, other in zip(want, got, strict=True):
            assert other == one, f"look {step}"


@WHILE
@EITHER
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_programs_compute(name: str, mode: Any, remove: str) -> None:
    run = watched(PROGRAMS[name], [])
    if mode is not None and name == "resized_and_set":
        run = watched(lambda x, look: PROGRAMS[name](x, look)[0], [])
    assert_equivalent(run, example(), remove=remove, tracing_mode=mode, strides=mode is None)


@WHILE
@EITHER
@pytest.mark.parametrize("training", [False, True])
def test_strides_of_a_norm_that_writes_nothing(training: bool, mode: Any, remove: str) -> None:
    def f(x: Tensor) -> Any:
        image = x.view(2, 4, 4, 3).permute(0, 3, 1, 2)
        mean, variance = (None, None) if training else (torch.zeros(3), torch.ones(3))
        out = torch.nn.functional.batch_norm(image, mean, variance, training=training)
        out.view(-1, 1) if out.is_contiguous() else out.permute(0, 2, 3, 1).view(-1)[::2].mul_(2)
        return out, [int(n) for n in out.stride()], out.is_contiguous()

    assert_equivalent(f, torch.arange(96.0), remove=remove, tracing_mode=mode)
