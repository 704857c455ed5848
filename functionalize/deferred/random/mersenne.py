"""The generator of the CPU, moved on by any number of draws: in a tenth of a second, however many these are.

Its state is linear in its bits: a step is a matrix, whose characteristic polynomial makes of ``n`` steps a sum of
less than 19,937 (Haramoto et al., "Efficient jump ahead for F2-linear random number generators", 2008). Polynomials
over two elements are integers here, a bit for each coefficient.

Invariant: what is skipped to is, bit for bit, the state that draws would have left. Limits: the layout of the state is
torch's; where it is not as known here, numbers are drawn.
"""

from __future__ import annotations

import struct
from functools import cache, lru_cache

import torch

_WORDS, _MIDDLE, _LOWER = 624, 397, 31  # after Matsumoto and Nishimura, 1998
_DEGREE = _WORDS * 32 - _LOWER
_TWIST, _HIGH, _LOW = 0x9908B0DF, 0x80000000, 0x7FFFFFFF
HEADER = struct.Struct("<QiiQ")  # the seed, how many are left of this block and one, whether seeded, the next one
_BLOCK = struct.Struct(f"<{_WORDS}Q")
_BYTES = 5056
_CHUNK = 1 << 20
JUMP_FROM = 20_000_000  # draws take longer from here on

State = torch.Tensor  # as `torch.Generator.get_state` gives it


def skipped(state: State, count: int) -> State:
    """The state after ``count`` draws of 32 bits."""
    if count < JUMP_FROM or not _is_as_known():
        return drawn(state, count)
    return jumped(state, count)


def drawn_from_start(state: State) -> int | None:
    """How many numbers were drawn since the generator was seeded, of at most 624; None where it keeps another one."""
    data = bytes(state.tolist())
    *_, following = HEADER.unpack_from(data)
    return None if any(data[HEADER.size + _BLOCK.size :]) else following


def drawn(state: State, count: int) -> State:
    """The same, by drawing."""
    generator = torch.Generator()
    generator.set_state(state)
    room = torch.empty(min(count, _CHUNK), dtype=torch.int32)
    for start in range(0, count, _CHUNK):
        room[: min(_CHUNK, count - start)].random_(generator=generator)
    return generator.get_state()


def jumped(state: State, count: int) -> State:
    """The same, where the blocks that are left behind are skipped together."""
    data = bytearray(state.tolist())
    seed, left, seeded, following = HEADER.unpack_from(data)
    words = list(_BLOCK.unpack_from(data, HEADER.size))
    used = _WORDS if left == 1 else following
    blocks, inside = divmod(used + count - 1, _WORDS)
    if blocks:
        words = _later_block(words, blocks)
    HEADER.pack_into(data, 0, seed, _WORDS - inside, seeded, inside + 1)
    _BLOCK.pack_into(data, HEADER.size, *words)
    return torch.tensor(list(data), dtype=torch.uint8)


def _later_block(words: list[int], blocks: int) -> list[int]:
    """The block so many after one. Of the first word one bit matters: the sum is of words from the second on."""
    sequence = list(words)
    while len(sequence) < _DEGREE + _WORDS + 1:
        sequence += _next_block(sequence[-_WORDS:])
    data = struct.pack(f"<{len(sequence)}I", *sequence)
    terms, total = _power(blocks * _WORDS - 1), 0
    for index, bit in enumerate(reversed(f"{terms:b}")):
        if bit == "1":
            start = 4 * (index + 1)
            total ^= int.from_bytes(data[start : start + 4 * _WORDS], "little")
    return list(struct.unpack(f"<{_WORDS}I", total.to_bytes(4 * _WORDS, "little")))


def _next_block(words: list[int]) -> list[int]:
    following = list(words)
    for index in range(_WORDS):
        after = following[(index + 1) % _WORDS]
        mixed = (following[index] & _HIGH) | (after & _LOW)
        following[index] = following[(index + _MIDDLE) % _WORDS] ^ (mixed >> 1) ^ (_TWIST if after & 1 else 0)
    return following


@lru_cache(maxsize=256)
def _power(exponent: int) -> int:
    """``t ** exponent``, reduced: layers of one model are often as far apart."""
    result = 1
    for bit in f"{exponent:b}":
        spread = "0".join(f"{result:b}")  # a square has the coefficients at every other place
        result = _reduced(int(spread, 2) << (bit == "1"))
    return result


def _reduced(polynomial: int) -> int:
    lower = _lower_terms()
    while high := polynomial >> _DEGREE:
        polynomial ^= high << _DEGREE
        for term in lower:
            polynomial ^= high << term
    return polynomial


@cache
def _lower_terms() -> list[int]:
    """The exponents of the characteristic polynomial, but for its degree; after Matsumoto and Nishimura, 1998."""
    whole, part = (1 << _WORDS) | (1 << _MIDDLE), (1 << (_WORDS - 1)) | (1 << (_MIDDLE - 1))
    bits = [_TWIST >> index & 1 for index in range(32)]
    polynomial = _product([whole] * (32 - _LOWER) + [part] * _LOWER)
    for index in range(_LOWER):
        if bits[index]:
            polynomial ^= _product([whole] * (32 - _LOWER) + [part] * (_LOWER - 1 - index))
    if bits[_LOWER]:
        polynomial ^= 1
    return [index for index in range(_DEGREE) if polynomial >> index & 1]


def _product(factors: list[int]) -> int:
    result = 1
    for factor in factors:
        total = 0
        for index in range(factor.bit_length()):
            if factor >> index & 1:
                total ^= result << index
        result = total
    return result


@cache
def _is_as_known() -> bool:
    """Whether a jump gives what draws give here."""
    generator = torch.Generator()
    generator.manual_seed(1)
    state = generator.get_state()
    if state.numel() != _BYTES:
        return False
    counts = (5, 624, 40_000)
    return all(torch.equal(jumped(state, count), drawn(state, count)) for count in counts)
