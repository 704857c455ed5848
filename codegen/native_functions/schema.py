"""One operator schema as data.

Invariant: a `Schema` prints back to the very text it was parsed from, so nothing of the text is lost.
Limits: the dialect of native_functions.yaml, where alias annotations stand on tensors only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_SCHEMA = re.compile(r"(?P<name>[^(\s]+)\((?P<parameters>.*)\) -> (?P<returns>.+)")
_OP_NAME = re.compile(r"(?P<base>\w+)(\.(?P<overload>\w+))?")
_TYPE = re.compile(r"(?P<base>[A-Za-z_][\w.]*)(\((?P<alias>[^)]*)\))?(?P<suffix>(\?|\[\d*\])*)")
_SET = r"\*|[a-z](?:\|[a-z])*"
_ALIAS = re.compile(rf"(?P<before>{_SET})(?P<write>!?)( -> (?P<after>{_SET}))?")
_INPLACE_DUNDER = re.compile(r"__i(?P<root>add|sub|mul|div|mod|pow|lshift|rshift|and|xor|or)__")


class SchemaError(ValueError):
    """A text that is no schema.

    Attributes:
        rule: what the text had to be.
        text: the part of the schema that broke it.
    """

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text!r}")
        self.rule = rule
        self.text = text


@dataclass(frozen=True, slots=True)
class OpName:
    """A name and its overload: `add_.Tensor`; the default overload prints without a dot."""

    base: str
    overload: str = ""

    @staticmethod
    def parse(text: str) -> OpName:
        match = _OP_NAME.fullmatch(text)
        if match is None:
            raise SchemaError("an op is named `base` or `base.overload`", text)
        return OpName(match["base"], match["overload"] or "")

    def __str__(self) -> str:
        return f"{self.base}.{self.overload}" if self.overload else self.base

    @property
    def inplace(self) -> bool:
        """True for `add_` and `__iadd__`."""
        if self.base.startswith("__"):
            return _INPLACE_DUNDER.fullmatch(self.base) is not None
        return self.base.endswith("_")

    @property
    def root(self) -> str:
        """Without the marks of a variant: `add_`, `__iadd__`, `x_functional` give `add`, `__add__`, `x`."""
        if dunder := _INPLACE_DUNDER.fullmatch(self.base):
            return f"__{dunder['root']}__"
        if self.inplace:
            return self.base.removesuffix("_")
        return self.base.removesuffix("_functional")


@dataclass(frozen=True, slots=True)
class Alias:
    """An alias annotation: `a`, `a!`, `a -> *`. `before` and `after` are sets before and after the call."""

    before: str
    write: bool = False
    after: str = ""

    @staticmethod
    def parse(text: str) -> Alias:
        match = _ALIAS.fullmatch(text)
        if match is None:
            raise SchemaError("an alias annotation is `a`, `a!`, `a|b`, `a -> *` or `a! -> a|b`", text)
        alias = Alias(match["before"], bool(match["write"]), match["after"] or "")
        if alias.write and len(alias.before) > 1:
            raise SchemaError("an alias annotation that is written names one alias set", text)
        return alias

    def __str__(self) -> str:
        arrow = f" -> {self.after}" if self.after else ""
        return f"{self.before}{'!' if self.write else ''}{arrow}"


@dataclass(frozen=True, slots=True)
class Type:
    """A type: its base (`Tensor`, `SymInt`, ...) and what follows, `?`, `[]` or `[2]`, innermost first."""

    base: str
    suffix: str = ""
    alias: Alias | None = None

    @staticmethod
    def parse(text: str) -> Type:
        match = _TYPE.fullmatch(text)
        if match is None:
            raise SchemaError("a type is a name with an optional alias annotation, then `?`, `[]` or `[n]`", text)
        if match["alias"] is None:
            return Type(match["base"], match["suffix"])
        if match["base"] != "Tensor":
            raise SchemaError("an alias annotation stands on a Tensor", text)
        return Type(match["base"], match["suffix"], Alias.parse(match["alias"]))

    def __str__(self) -> str:
        return f"{self.base}{f'({self.alias})' if self.alias else ''}{self.suffix}"

    @property
    def tensor_like(self) -> bool:
        return self.base == "Tensor"

    @property
    def is_list(self) -> bool:
        return "[" in self.suffix

    @property
    def written(self) -> bool:
        return self.alias is not None and self.alias.write

    def plain(self) -> Type:
        """The same type without its alias annotation."""
        return replace(self, alias=None)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an op. `default` is the text after `=`, None where there is none."""

    type: Type
    name: str
    default: str | None = None
    kwarg_only: bool = False

    @staticmethod
    def parse(text: str, kwarg_only: bool) -> Parameter:
        declaration, equals, default = text.partition("=")
        type_text, space, name = declaration.rpartition(" ")
        if not space or not name.isidentifier():
            raise SchemaError("a parameter is `Type name` or `Type name=default`", text)
        return Parameter(Type.parse(type_text), name, default if equals else None, kwarg_only)

    def __str__(self) -> str:
        return f"{self.type} {self.name}" + ("" if self.default is None else f"={self.default}")

    @property
    def is_out(self) -> bool:
        """Whether this is an `out=` parameter: keyword-only and written."""
        return self.kwarg_only and self.type.written


@dataclass(frozen=True, slots=True)
class Return:
    """One return of an op; few have names."""

    type: Type
    name: str | None = None

    @staticmethod
    def parse(text: str) -> Return:
        # An annotation may hold a space (`Tensor(a -> *)`), so a name follows the last closing bracket.
        head, bracket, tail = text.rpartition(")")
        type_tail, space, name = tail.partition(" ")
        if space and not name.isidentifier():
            raise SchemaError("a return is `Type` or `Type name`", text)
        return Return(Type.parse(f"{head}{bracket}{type_tail}"), name if space else None)

    def __str__(self) -> str:
        return f"{self.type}" if self.name is None else f"{self.type} {self.name}"


@dataclass(frozen=True, slots=True)
class Schema:
    """An operator's signature, as `native_functions.yaml` writes it after `func:`.

    Example:
        >>> schema = Schema.parse("add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)")
        >>> [parameter.name for parameter in schema.written]
        ['self']
        >>> str(schema.name)
        'add_.Tensor'
    """

    name: OpName
    parameters: tuple[Parameter, ...]
    returns: tuple[Return, ...]

    @staticmethod
    def parse(text: str) -> Schema:
        """Parse the text after `func:`.

        Raises:
            SchemaError: the text breaks a rule of the dialect.
        """
        match = _SCHEMA.fullmatch(text)
        if match is None:
            raise SchemaError("a schema is `name(parameters) -> returns`", text)
        schema = Schema(OpName.parse(match["name"]), _parameters(match["parameters"]), _returns(match["returns"]))
        if str(schema) != text:
            raise SchemaError(f"a schema prints back to the letter, this one as {str(schema)!r}", text)
        return schema

    def __str__(self) -> str:
        parts = [str(p) for p in self.parameters if not p.kwarg_only]
        keywords = [str(p) for p in self.parameters if p.kwarg_only]
        arguments = ", ".join([*parts, "*", *keywords] if keywords else parts)
        returns = ", ".join(str(r) for r in self.returns)
        return f"{self.name}({arguments}) -> " + (returns if len(self.returns) == 1 else f"({returns})")

    @property
    def written(self) -> tuple[Parameter, ...]:
        """The parameters that the op declares to write, in order."""
        return tuple(p for p in self.parameters if p.type.written)

    def position(self, name: str) -> int | None:
        """Where `name` stands among the positional parameters; None for a keyword-only one."""
        for index, parameter in enumerate(self.parameters):
            if parameter.name == name:
                return None if parameter.kwarg_only else index
        raise SchemaError(f"the op has a parameter {name}", str(self))


def _parameters(text: str) -> tuple[Parameter, ...]:
    found: list[Parameter] = []
    kwarg_only = False
    for part in text.split(", ") if text else ():
        if part == "*" and not kwarg_only:
            kwarg_only = True
            continue
        parameter = Parameter.parse(part, kwarg_only)
        if any(parameter.name == other.name for other in found):
            raise SchemaError("parameters have different names", text)
        found.append(parameter)
    return tuple(found)


def _returns(text: str) -> tuple[Return, ...]:
    if text == "()":
        return ()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return tuple(Return.parse(part) for part in text.split(", "))
