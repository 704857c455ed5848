"""Skips any number of draws of the CPU's generator, a Mersenne twister, in a tenth of a second.

A step is linear in the bits of the state: a matrix. Its characteristic polynomial reduces ``n`` steps to a sum of less
than 19,937 (Haramoto et al., "Efficient jump ahead for F2-linear random number generators", 2008). Polynomials over
two elements are integers here, a bit for each coefficient.

Invariant: a skip gives, bit for bit, the state that draws would have left. Limits: the layout of the state is torch's;
if it differs from the one that this module expects, numbers are drawn.
"""

from __future__ import annotations

import struct
from functools import cache, lru_cache

import torch

_WORDS, _MIDDLE, _LOWER = 624, 397, 31  # after Matsumoto and Nishimura, 1998
_DEGREE = _WORDS * 32 - _LOWER
_TWIST, _HIGH, _LOW = 0x9908B0DF, 0x80000000, 0x7FFFFFFF
HEADER = struct.Struct("<QiiQ")  # seed, numbers left of the block plus one, whether seeded, next index
_BLOCK = struct.Struct(f"<{_WORDS}Q")
_BYTES = 5056
_CHUNK = 1 << 20
JUMP_FROM = 20_000_000  # for fewer draws, drawing is faster

State = torch.Tensor  # as `torch.Generator.get_state` returns it


def skipped(state: State, count: int) -> State:
    """The state after ``count`` draws of 32 bits."""
    if count < JUMP_FROM or not _jumps_are_right():
        return drawn(state, count)
    return jumped(state, count)


def drawn_from_start(state: State) -> int | None:
    """How many numbers were drawn since the seed, if at most 624; None if the state keeps a number for later."""
    data = bytes(state.tolist())
    *_, following = HEADER.unpack_from(data)
    return None if any(data[HEADER.size + _BLOCK.size :]) else following


def drawn(state: State, count: int) -> State:
    """The same as :func:`skipped`, by drawing."""
    generator = torch.Generator()
    generator.set_state(state)
    room = torch.empty(min(count, _CHUNK), dtype=torch.int32)
    for start in range(0, count, _CHUNK):
        room[: min(_CHUNK, count - start)].random_(generator=generator)
    return generator.get_state()


def jumped(state: State, count: int) -> State:
    """The same as :func:`skipped`, with all whole blocks skipped at once."""
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
    """The block ``blocks`` later. Only one bit of the first word matters: the sum is of words from the second on."""
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
    """``t ** exponent``, reduced; cached, as layers of one model often draw equally many numbers."""
    result = 1
    for bit in f"{exponent:b}":
        spread = "0".join(f"{result:b}")  # squaring moves each coefficient to twice its exponent
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
def _jumps_are_right() -> bool:
    """Whether a jump gives the same state as draws in this torch."""
    generator = torch.Generator()
    generator.manual_seed(1)
    state = generator.get_state()
    if state.numel() != _BYTES:
        return False
    counts = (5, 624, 40_000)
    return all(torch.equal(jumped(state, count), drawn(state, count)) for count in counts)
