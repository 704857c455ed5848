"""Inputs in words: ``f32[2,16]`` is a tensor of random numbers.

    SPEC     = TENSOR | "=" LITERAL, then for a keyword argument "@" NAME
    TENSOR   = DTYPE "[" SIZES "]", then for integers below a limit "<" LIMIT

Invariant: a spec prints as it was written, and gives the same numbers for the same seed. Limits: strided CPU tensors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
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
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[\d, ]*)\](?:<(?P<limit>\d+))?")
_KEYWORD = re.compile(r"(?P<value>.*)@(?P<keyword>[A-Za-z_]\w*)", re.DOTALL)


class SpecError(ValueError):
    """An input that cannot be read; the message says which, why, and what can."""


@dataclass(frozen=True)
class Spec:
    """One input: a tensor of random numbers, or a value."""

    dtype: str | None = None  # of a tensor
    sizes: tuple[int, ...] = ()
    limit: int | None = None  # of its integers
    value: Any = None  # of an input that is no tensor
    keyword: str | None = None

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read a spec. Raises SpecError where it is none.

        Example:
            >>> Spec.parse("i64[2,5]<1000@tokens")
            Spec(dtype='i64', sizes=(2, 5), limit=1000, value=None, keyword='tokens')
        """
        keyword = None
        if named := _KEYWORD.fullmatch(text):
            text, keyword = named["value"], named["keyword"]
        if text.startswith("="):
            return cls(value=_literal(text), keyword=keyword)
        found = _TENSOR.fullmatch(text)
        if found is None or found["dtype"] not in DTYPES:
            raise SpecError(
                f"cannot read the input {text!r}: a tensor is written as f32[2,16], a value as =3 "
                f"(dtypes: {' '.join(DTYPES)})"
            )
        sizes = tuple(map(int, found["sizes"].replace(",", " ").split()))
        limit = None if found["limit"] is None else _limit(text, found["dtype"], int(found["limit"]))
        return cls(found["dtype"], sizes, limit, keyword=keyword)

    def __str__(self) -> str:
        tail = "" if self.keyword is None else f"@{self.keyword}"
        if self.dtype is None:
            return f"={self.value!r}{tail}"
        limit = "" if self.limit is None else f"<{self.limit}"
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]{limit}{tail}"

    def make(self, generator: torch.Generator) -> Any:
        """The input, with random numbers of a generator."""
        if self.dtype is None:
            return self.value
        import torch

        dtype = getattr(torch, DTYPES[self.dtype])
        if dtype.is_floating_point or dtype.is_complex:
            wide = dtype if dtype in (torch.float64, torch.complex64) else torch.float32
            return torch.randn(self.sizes, generator=generator, dtype=wide).to(dtype)
        limit = 2 if dtype is torch.bool else self.limit or LIMIT
        return torch.randint(0, limit, self.sizes, generator=generator).to(dtype)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text[1:])
    except (ValueError, SyntaxError) as error:
        message = f"cannot read the value {text!r}: after = stands a Python literal, such as 3 or None"
        raise SpecError(message) from error


def _limit(text: str, dtype: str, limit: int) -> int:
    if not dtype.startswith(("i", "u")):
        raise SpecError(f"cannot read the input {text!r}: a limit is for integers")
    most = 2 ** (int(dtype[1:]) - (dtype[0] == "i"))
    if not 0 < limit <= most:
        raise SpecError(f"cannot read the input {text!r}: the numbers of {dtype} are below {most}, and a limit above 0")
    return limit


def make_inputs(specs: Sequence[Spec], seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for some specs."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        value = spec.make(generator)
        if spec.keyword is None:
            args.append(value)
        elif spec.keyword in kwargs:
            raise SpecError(f"the keyword argument {spec.keyword!r} is there twice")
        else:
            kwargs[spec.keyword] = value
    return tuple(args), kwargs
