"""Expands `autogen:` lines: the ops that PyTorch's own generator derives from an entry.

Invariant: after `expand` every op that the dispatcher registers from the YAML is an entry; one in six comes
from here.
Limits: functional and `out=` variants, the only ones that PyTorch derives.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace

from .schema import Alias, OpName, Parameter, Return, Schema, Type
from .spec import Entry, Spec

# The tags that a derived op takes over from its entry.
_INHERITED_TAGS = frozenset({"nondeterministic_seeded", "view_copy"})


def expand(spec: Spec) -> Spec:
    """The spec with the ops of all `autogen` lines.

    Raises:
        SpecError: a name stands twice, or an op cannot be derived.
    """
    entries = dict(spec.entries)
    for entry in spec.entries.values():
        # PyTorch lets composite ops decompose and derives nothing from them, whatever their line says.
        wanted = () if entry.composite and "core" not in entry.tags else entry.autogen
        for name in wanted:
            derived = _derive(entry, name)
            # Two entries of a group may name the same op, as long as they mean the same.
            if entries.setdefault(derived.name, derived).schema != derived.schema:
                raise entry.error(f"an op stands once; another entry makes {derived.name} too", f"autogen: {name}")
    return Spec(spec.source, entries)


def _derive(entry: Entry, name: OpName) -> Entry:
    is_out = name.overload == "out" or name.overload.endswith("_out")
    schema = out_variant(entry, name) if is_out else functional_variant(entry.schema, name)
    return replace(
        entry,
        schema=schema,
        tags=entry.tags & _INHERITED_TAGS | {"generated"},
        composite=False,
        manual=False,
        autogen=(),
        generated_from=entry.schema.name,
    )


def functional_variant(schema: Schema, name: OpName) -> Schema:
    """What a mutating op computes: `out=` parameters are gone, other written ones plain, and each is returned."""
    parameters = tuple(replace(p, type=p.type.plain()) for p in schema.parameters if not p.is_out)
    return Schema(name, parameters, tuple(functional_returns(schema)))


def functional_returns(schema: Schema) -> Iterator[Return]:
    """The returns of a functional variant: those of the op, then the written parameters not among them."""
    for returned in schema.returns:
        yield Return(returned.type.plain(), returned.name)
    for parameter in unreturned(schema):
        yield Return(parameter.type.plain(), f"{parameter.name}_out")


def unreturned(schema: Schema) -> list[Parameter]:
    """The written parameters that no return stands for, in the order of a functional variant's results.

    PyTorch puts `self` first, then `out=` parameters, then the other positional ones.
    """
    returned = {r.type.alias for r in schema.returns if r.type.alias}
    kept = [p for p in schema.written if p.type.alias not in returned]
    return sorted(kept, key=lambda p: 0 if p.name == "self" else 1 if p.is_out else 2)


def out_variant(entry: Entry, name: OpName) -> Schema:
    """The op that writes what an in-place, mutable or functional op returns into `out=` parameters.

    Raises:
        SpecError: the op has no tensor to write out.
    """
    schema = entry.schema
    if schema.name.inplace:
        outs = [Parameter(p.type, "out", kwarg_only=True) for p in schema.parameters if p.name == "self"]
    else:
        outs = _returned_outs(schema)
    if not outs:
        raise entry.error("an out variant has a tensor to write", f"autogen: {name}")
    # The self of an in-place op is read now. A mutable op goes on writing its own parameters.
    kept = [
        replace(p, type=p.type.plain()) if schema.name.inplace and p.name == "self" else p
        for p in _without_options(schema)
    ]
    if schema.name.inplace:
        returns = schema.returns
    elif all(str(r.type) == "Tensor" for r in schema.returns):
        returns = tuple(Return(out.type) for out in outs)
    else:  # Lists are not returned: PyTorch returns `out=` arguments for method chaining alone.
        returns = tuple(r for r in schema.returns if not r.type.tensor_like)
    return Schema(name, (*kept, *outs), returns)


def _returned_outs(schema: Schema) -> list[Parameter]:
    used = {p.type.alias.before for p in schema.parameters if p.type.alias}
    free = [letter for letter in string.ascii_lowercase if letter not in used]
    return [
        Parameter(
            Type(r.type.base, r.type.suffix, Alias(free[index], write=True)),
            "out" if len(schema.returns) == 1 else f"out{index}",
            kwarg_only=True,
        )
        for index, r in enumerate(schema.returns)
        if r.type.tensor_like
    ]


_TENSOR_OPTIONS = {"dtype": "ScalarType", "layout": "Layout", "device": "Device", "pin_memory": "bool"}


def tensor_options(schema: Schema) -> tuple[str, ...]:
    """The four parameters of a factory, where an op has them in a row as keyword-only ones; else nothing."""
    names = tuple(_TENSOR_OPTIONS)
    keywords = [p for p in schema.parameters if p.kwarg_only]
    for start in range(len(keywords) - len(names) + 1):
        window = keywords[start : start + len(names)]
        if tuple(p.name for p in window) == names and all(
            p.type.base == _TENSOR_OPTIONS[p.name] and p.type.suffix in ("", "?") for p in window
        ):
            return names
    return ()


def _without_options(schema: Schema) -> list[Parameter]:
    """The parameters without tensor options, which an `out=` op takes from its `out`."""
    options = tensor_options(schema)
    return [p for p in schema.parameters if not (p.kwarg_only and p.name in options)]
