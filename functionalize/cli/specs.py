"""Inputs in words: ``f32[2,16]`` is a tensor of random numbers.

    SPEC     = TENSOR | "=" LITERAL, then for a keyword argument "@" NAME
    TENSOR   = DTYPE "[" SIZES "]", then for integers below a limit "<" LIMIT
    SIZE     = NUMBER, or for one that may differ from call to call NAME "=" NUMBER

Invariant: a spec prints as it was written, and gives the same numbers for the same seed. Limits: strided CPU tensors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
}
LIMIT = 10  # of integers that say none
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[\w=, ]*)\](?:<(?P<limit>\d+))?")
_SIZE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<size>\d+)")
_KEYWORD = re.compile(r"(?P<value>.*)@(?P<keyword>[A-Za-z_]\w*)", re.DOTALL)


class SpecError(ValueError):
    """An input that cannot be read; the message says which, why, and what can."""


@dataclass(frozen=True)
class Spec:
    """One input: a tensor of random numbers, or a value."""

    dtype: str | None = None  # of a tensor
    sizes: tuple[int, ...] = ()
    names: tuple[str | None, ...] = ()  # of the sizes that may differ
    limit: int | None = None  # of its integers
    value: Any = None  # of an input that is no tensor
    keyword: str | None = None

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read a spec. Raises SpecError where it is none.

        Example:
            >>> Spec.parse("i64[2,5]<1000@tokens")
            Spec(dtype='i64', sizes=(2, 5), names=(None, None), limit=1000, value=None, keyword='tokens')
        """
        keyword = None
        if named := _KEYWORD.fullmatch(text):
            text, keyword = named["value"], named["keyword"]
        if text.startswith("="):
            return cls(value=_literal(text), keyword=keyword)
        found = _TENSOR.fullmatch(text)
        sizes = [] if found is None else list(map(_SIZE.fullmatch, found["sizes"].replace(",", " ").split()))
        if found is None or found["dtype"] not in DTYPES or None in sizes:
            raise SpecError(
                f"cannot read the input {text!r}: a tensor is written as f32[2,16] or f32[batch=2,16], a value as =3 "
                f"(dtypes: {' '.join(DTYPES)})"
            )
        known = [(int(size["size"]), size["name"]) for size in sizes if size is not None]
        limit = None if found["limit"] is None else _limit(text, found["dtype"], int(found["limit"]))
        numbers, names = tuple(size for size, _ in known), tuple(name for _, name in known)
        return cls(found["dtype"], numbers, names, limit, keyword=keyword)

    def __str__(self) -> str:
        tail = "" if self.keyword is None else f"@{self.keyword}"
        if self.dtype is None:
            return f"={self.value!r}{tail}"
        limit = "" if self.limit is None else f"<{self.limit}"
        named = zip(self.sizes, self.names, strict=True)
        sizes = ",".join(str(size) if name is None else f"{name}={size}" for size, name in named)
        return f"{self.dtype}[{sizes}]{limit}{tail}"

    def make(self, generator: torch.Generator, sizes: Mapping[str, int] | None = None) -> Any:
        """The input, with random numbers of a generator; ``sizes``: others, by name."""
        if self.dtype is None:
            return self.value
        import torch

        dtype = getattr(torch, DTYPES[self.dtype])
        named = zip(self.names, self.sizes, strict=True)
        shape = [(sizes or {}).get(name or "", size) for name, size in named]
        if dtype.is_floating_point or dtype.is_complex:
            wide = dtype if dtype in (torch.float64, torch.complex64) else torch.float32
            return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
        limit = 2 if dtype is torch.bool else self.limit or LIMIT
        return torch.randint(0, limit, shape, generator=generator).to(dtype)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text[1:])
    except (ValueError, SyntaxError) as error:
        message = f"cannot read the value {text!r}: write a Python literal after =, such as 3 or None"
        raise SpecError(message) from error


def _limit(text: str, dtype: str, limit: int) -> int:
    if not dtype.startswith(("i", "u")):
        raise SpecError(f"cannot read the input {text!r}: only integers can have a limit")
    most = 2 ** (int(dtype[1:]) - (dtype[0] == "i"))
    if not 0 < limit <= most:
        raise SpecError(f"cannot read the input {text!r}: a limit for {dtype} must be above 0 and at most {most}")
    return limit


def make_inputs(
    specs: Sequence[Spec], seed: int, sizes: Mapping[str, int] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for some specs; ``sizes``: others than they say, by name."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        value = spec.make(generator, sizes)
        if spec.keyword is None:
            args.append(value)
        elif spec.keyword in kwargs:
            raise SpecError(f"the keyword argument {spec.keyword!r} is given twice")
        else:
            kwargs[spec.keyword] = value
    return tuple(args), kwargs
