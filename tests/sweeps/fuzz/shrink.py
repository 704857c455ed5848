"""A smaller program that fails in the same way: fewer steps, outputs and inputs, simpler inputs.

Invariant: each change is kept only if the failure keeps its signature.
Limits: greedy, so not the smallest there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.sweeps.fuzz.program import NAME, Input, Program, Step, Storage, renamed

TRIALS = 400


def shrink(program: Program, fails: Callable[[Program], bool], trials: int = TRIALS) -> Program:
    """Apply simplifications as long as ``fails`` holds."""
    left = trials
    progress = True
    while progress and left > 0:
        progress = False
        for candidate in _simpler(program):
            left -= 1
            if left <= 0:
                break
            if fails(candidate):
                program, progress = candidate, True
                break
    return program


def _simpler(program: Program) -> Iterator[Program]:
    for index in reversed(range(len(program.steps))):
        yield from _without_step(program, index)
    yield from _fewer_outputs(program)
    yield from _shorter_chains(program)
    yield from _simpler_inputs(program)


def _shorter_chains(program: Program) -> Iterator[Program]:
    """Let steps and outputs read an earlier tensor in place of a later one."""
    for index, step in enumerate(program.steps):
        for name in step.uses:
            for earlier in _known_before(program, index):
                if _age(earlier) < _age(name):
                    yield _with_step(program, index, step.renamed({name: earlier}))


def _simpler_inputs(program: Program) -> Iterator[Program]:
    for entry in program.inputs:
        if not _used(program, entry.name):
            yield _with_inputs(program, tuple(other for other in program.inputs if other is not entry))
    for index, entry in enumerate(program.inputs):
        for simpler in _simpler_input(program, entry):
            yield _with_inputs(program, (*program.inputs[:index], simpler, *program.inputs[index + 1 :]))
    for index, storage in enumerate(program.storages):
        for other in _simpler_storage(storage):
            yield replace(program, storages=(*program.storages[:index], other, *program.storages[index + 1 :]))


def _age(name: str) -> tuple[bool, int]:
    return name[0] == "v", int(name[1:])


def _known_before(program: Program, index: int) -> list[str]:
    names = [entry.name for entry in program.inputs]
    return names + [name for step in program.steps[:index] for name in step.defines]


def _used(program: Program, name: str) -> bool:
    return any(name in step.names for step in program.steps) or name in NAME.findall(program.outputs)


def _with_step(program: Program, index: int, step: Step) -> Program:
    return replace(program, steps=(*program.steps[:index], step, *program.steps[index + 1 :]))


def _without_step(program: Program, index: int) -> Iterator[Program]:
    """Leave a step out; who used what it defines uses what it was made of, or is left out as well."""
    step = program.steps[index]
    rest = (*program.steps[:index], *program.steps[index + 1 :])
    if not step.defines:
        yield replace(program, steps=rest)
        return
    for source in step.uses[:2]:
        names = dict.fromkeys(step.defines, source)
        outputs = renamed(program.outputs, names)
        yield replace(program, steps=tuple(other.renamed(names) for other in rest), outputs=outputs)
    gone, kept = set(step.defines), []
    for other in rest:
        if gone & set(other.uses):
            gone |= set(other.defines)
        else:
            kept.append(other)
    left = [name for name in NAME.findall(program.outputs) if name not in gone]
    yield replace(program, steps=tuple(kept), outputs=f"({', '.join(left)},)" if left else "None")


def _fewer_outputs(program: Program) -> Iterator[Program]:
    names = NAME.findall(program.outputs)
    for index in range(len(names)):
        left = names[:index] + names[index + 1 :]
        yield replace(program, outputs=f"({', '.join(left)},)" if left else "None")
    if len(names) == 1 and program.outputs != names[0]:
        yield replace(program, outputs=names[0])


def _with_inputs(program: Program, inputs: tuple[Input, ...]) -> Program:
    storages = {entry.storage for entry in inputs}
    return replace(
        program,
        inputs=inputs,
        storages=tuple(storage for storage in program.storages if storage.name in storages),
    )


def _simpler_input(program: Program, entry: Input) -> Iterator[Input]:
    storage = next(other for other in program.storages if other.name == entry.storage)
    if entry.same_as:
        yield replace(entry, same_as="")
        return
    if entry.gradient:
        yield replace(entry, gradient="")
    dense = _dense(entry.size)
    if entry.dtype != storage.dtype:
        yield replace(entry, dtype=storage.dtype)
    if entry.offset:
        yield replace(entry, offset=0)
        yield replace(entry, offset=1)
    if entry.stride != dense:
        yield replace(entry, stride=dense)
    for dim, size in enumerate(entry.size):
        for smaller in {1, 2, size - 1}:
            if 0 < smaller < size:
                sizes = (*entry.size[:dim], smaller, *entry.size[dim + 1 :])
                yield replace(entry, size=sizes, stride=_dense(sizes))
                yield replace(entry, size=sizes)
        yield replace(
            entry,
            size=entry.size[:dim] + entry.size[dim + 1 :],
            stride=entry.stride[:dim] + entry.stride[dim + 1 :],
        )


def _dense(size: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _simpler_storage(storage: Storage) -> Iterator[Storage]:
    for numel in (1, 2, storage.numel // 2, storage.numel - 1):
        if 0 < numel < storage.numel:
            yield replace(storage, numel=numel)
