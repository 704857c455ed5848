"""The objects that a program returns or leaves: which of them a call has to make again, and how.

A call makes again what holds a tensor or a number of the program's, and what nobody but the program's results and the
objects that it changed refers to: that, the program made. Any other object was there before, or is kept elsewhere
(by a cache, say), and is given as it is. Who refers to whom is asked of the garbage collector.

Invariant: an object that is met twice has one reconstruction. Limits: what is made inside and can only be told by its
class's hidden state is refused; classes that are made inside are those of the capture.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from functionalize._torch import FakeTensor, pytree, unwrap_functorch
from functionalize._torch.symbols.tracing import SYMBOLS, tracked_node
from functionalize.call_stack import Location, Origin
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.refusals import iterators
from functionalize.graph_capture.trace.numbers.texts import MARK, Texts
from functionalize.graph_capture.trace.patched_type_checks import of_python
from functionalize.python_state.decompose import Part, attributes_of, decompose, key_name
from functionalize.python_state.reconstruct import NumberRef, ObjectRef, Reconstruction, TensorRef
from functionalize.python_state.refused_objects import refuse_tensor
from functionalize.python_state.traversal_rules import OPAQUE, SCALARS, behind, key_behind
from functionalize.refusals.python_objects import OBJECT_MADE
from functionalize.refusals.values import TEXT_OF_TENSOR

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# Entered: functions have variables, sizes have symbols, and a class may be made inside.
_ENTERED = frozenset({*_FUNCTIONS, torch.Size, torch.SymInt, torch.Generator, type})
# Never looked into, and given as they are.
_WHOLE = (
    *(kind for kind in OPAQUE if kind not in _ENTERED),
    *(types.CodeType, types.FrameType, types.TracebackType),
)
# What pytrees are made of, if they are these very types.
_TREES = frozenset({tuple, list, dict, OrderedDict, defaultdict, deque})
TEXT = "FakeTensor(..."  # how torch writes a tensor of a capture
LEAF = pytree.tree_structure(0)  # of a result that is made as a whole
_ARGUMENTS = 1  # the walk over them
Roots = Sequence[tuple[Any, Collection[int]]]


class ObjectGraph:
    """The objects that can be reached from what a program gives and leaves."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self.handles: list[torch.Tensor] = []  # what the caller will get
        self._numbers: dict[int, int] = {}  # of these, by identity
        self.symbols: list[Any] = []  # of the graph, which objects hold
        self._walked: Mapping[int, tuple[int, int]] = {}
        self._analyzed = False
        self._rebuilt: dict[int, bool] = {}  # of what was analyzed, whether a call makes it again
        self._before: set[int] = set()  # what containers held before, where the program left something
        self._towards: dict[int, Any] = {}  # what leads to a tensor
        self._reconstructions: dict[int, Reconstruction] = {}
        self._kept: list[Any] = []  # so that no identity is used again
        self._pending: list[tuple[list[Any], Sequence[Part], str]] = []
        self.texts: Texts | None = None  # that the program keeps in logs

    def analyze(self, walked: Mapping[int, tuple[int, int]], substitutes: Collection[int], roots: Roots) -> None:
        """Find out what is to be made again.

        ``walked``: by identity, objects that were walked before the program ran: of which walk, which one.
        ``substitutes``: the identities of tensors that stand for those of the program's state, where these are.
        ``roots``: containers in which the program left something, each with the identities of what it held before.
        Nothing else of ours may refer to what it left.
        """
        self._walked, self._analyzed = walked, True
        self._before = set[int]().union(*(before for _, before in roots))
        references = _References(walked)
        references.follow(roots)
        held = references.held()
        towards = references.towards(held, substitutes)
        self._rebuilt = {node: node in towards or node not in held for node in references.nodes}
        self._towards = towards
        self._kept = [*references.nodes.values()]

    def is_reached(self, value: Any) -> bool:
        """Whether an object can be reached from what the program returns, or is left where it was not."""
        return id(value) in self._rebuilt or id(value) in self._reconstructions

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that the caller will get, the next one for a new tensor."""
        tensor = unwrap_functorch(tensor)
        number = self._numbers.setdefault(id(tensor), len(self.handles))
        if number == len(self.handles):
            refuse_tensor(tensor, "a tensor that the program returns or keeps")
            self.handles.append(tensor)
        return number

    def leaves(self, value: Any) -> tuple[list[Any], Any]:
        """The leaves of what a program returned, and how pytree makes it of them."""
        try:
            return pytree.tree_flatten(value)
        except RecursionError:  # it holds itself
            return [value], LEAF

    def reference(self, leaf: Any) -> Any:
        """What stands for a leaf of a pytree among what the graph gives: for an object that is made again nothing."""
        if isinstance(leaf, torch.Tensor):
            return TensorRef(self.number(leaf))
        if not isinstance(leaf, Node):  # which is made again, and so refused by its path
            self._refuse_part(leaf, "the result")
        return of_python(leaf) if isinstance(leaf, SYMBOLS) or not self._is_rebuilt(leaf) else None

    def is_tree(self, value: Any) -> bool:
        """Whether pytree makes it again as it is: containers, each once, of tensors and plain values."""
        met: set[int] = set()
        return self._is_tree(value, met)

    def _is_tree(self, value: Any, met: set[int]) -> bool:
        kind = type(value)
        if not (kind in _TREES or _is_record(kind)):
            return _is_tensor_or_number(value) or not (id(value) in self._walked or self._is_rebuilt(value))
        interned = kind is tuple and not value  # there is one empty tuple
        if not interned and self._is_one_object(value, met):
            return False
        if kind is defaultdict and self._is_rebuilt(value.default_factory):
            return False
        if issubclass(kind, dict):
            for key in value:
                _refuse_text(key, "the result")
            return not any(map(self._is_rebuilt, value)) and all(self._is_tree(item, met) for item in value.values())
        return all(self._is_tree(item, met) for item in value)

    def _is_one_object(self, value: Any, met: set[int]) -> bool:
        """Whether a container has to be a certain object: one that was there, is left somewhere, or was met already."""
        key = id(value)
        again = key in met or key in self._reconstructions
        met.add(key)
        return again or not (isinstance(value, tuple) or (key not in self._walked and self._rebuilt.get(key, True)))

    def reconstruction(self, value: Any, path: str) -> Any:
        """How a call makes a value; the value itself where it gives that. ``path``: what messages call it.

        Raises:
            UnsupportedProgramError: the program made it, and it cannot be made again.
        """
        described = self._part(value, path)
        while self._pending:
            taken, parts, path = self._pending.pop()
            taken.extend([self._part(part, f"{path}{step}") for step, part in parts])
        return described

    def _part(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorRef(self.number(value))
        if isinstance(value, SYMBOLS):
            self.symbols.append(value)
            return NumberRef(len(self.symbols) - 1)
        if isinstance(value, str) and self.texts is not None and MARK.search(value):
            return self.texts.recipe(value, lambda number: self._part(number, path))
        number = self._walked.get(id(value))
        if number is not None:
            return ObjectRef(*number)
        value = of_python(value)
        if id(value) in self._reconstructions:
            return self._reconstructions[id(value)]
        self._refuse_part(value, path)
        if not self._is_rebuilt(value):
            return value
        kind = value if isinstance(value, type) else type(value)
        if id(kind) in self._towards:
            raise self._refusal(kind, path if kind is value else f"the class of {path}")
        if kind is value:
            return value
        parts = decompose(value)
        if parts is None:
            raise self._refusal(value, path)
        self._kept.append(value)
        made = self._reconstructions[id(value)] = Reconstruction(parts.new, parts.fill)
        self._pending += [(made.rest, parts.rest, path), (made.first, parts.first, path)]
        return made

    def _refuse_part(self, value: Any, path: str) -> None:
        """Raise where a value is of the capture's tensors: of autograd's graph, a storage, a text."""
        if isinstance(value, Node) or (isinstance(value, torch.UntypedStorage) and value.device.type == "meta"):
            raise self._refusal(value, path)
        if type(value) is iterators.Substitute:
            raise value.refused_as(path)
        _refuse_text(value, path)

    def _is_rebuilt(self, value: Any) -> bool:
        """Whether a call has to make it; what was not analyzed was there, or is a part of a reconstruction."""
        if id(value) in self._before and id(value) not in self._rebuilt:
            return self._is_of_capture(value)
        return self._rebuilt.get(id(value), self._analyzed and not (_is_whole(value) or _is_old_class(value)))

    def _is_of_capture(self, value: Any) -> bool:
        """Whether what a program found is another thing in a call: made of substitutes, or of objects of its state."""
        value = key_behind(value)
        if isinstance(value, (tuple, list, frozenset)) and id(value) not in self._walked:
            return any(map(self._is_of_capture, value))
        return isinstance(value, (FakeTensor, *SYMBOLS)) or id(value) in self._walked

    def _refusal(self, value: Any, path: str) -> UnsupportedProgramError:
        way, holder = "", value
        while id(holder) in self._towards:
            part = self._towards[id(holder)]
            if isinstance(holder, types.FunctionType) and part is holder.__closure__:
                part = self._towards[id(part)]  # a cell
                index = next(index for index, cell in enumerate(holder.__closure__) if cell is part)
                way += f", its variable `{holder.__code__.co_freevars[index]}`"
            else:
                way += _step(holder, part)
            holder = part
        kind = value.__qualname__ if isinstance(value, type) else f"of class {type(value).__qualname__}"
        holds = ", and holds a tensor of the program" if id(value) in self._towards else ""
        holds += f" ({path}{way})" if way else ""
        return OBJECT_MADE.error(self._line_of(holder) or _line_of_generator(value), path=path, kind=kind, holds=holds)

    def _line_of(self, value: Any) -> Any:
        """Where a tensor was computed, if that is known."""
        node = tracked_node(self._tracer, value) if isinstance(value, torch.Tensor) else None
        origin = None if node is None else node.meta.get("stack_trace")
        return origin.location if isinstance(origin, Origin) else None


def _line_of_generator(value: Any) -> Location | None:
    """Where the code of a generator begins, or of an expression that makes one."""
    code = getattr(value, "gi_code", None)
    return None if code is None else Location(code.co_filename, code.co_firstlineno, code.co_name)


def _refuse_text(value: Any, path: str) -> None:
    """Raise where a text shows a tensor of the program's.

    Raises:
        UnsupportedProgramError: it does.
    """
    if isinstance(value, str) and TEXT in value:
        raise TEXT_OF_TENSOR.error(path=path, text=value[:80])


class _References:
    """Which objects refer to which, as the garbage collector knows it."""

    def __init__(self, walked: Mapping[int, tuple[int, int]]) -> None:
        self._walked = walked
        self.nodes: dict[int, Any] = {}
        self._edges: dict[int, list[int]] = {}
        self._counts: Counter[int] = Counter()  # of references from nodes and roots
        self._ours: dict[int, Any] = {}  # tensors and numbers of the program's, and what stands for them
        self._of_state: dict[int, Any] = {}  # objects of its state, in whose places a call may find others

    def follow(self, roots: Roots) -> None:
        """Enter all that can be reached from what is new in some containers."""
        pending: list[Any] = []
        for root, before in roots:
            self._enter((value for value in _content(root) if id(value) not in before), pending)
        while pending:
            value = pending.pop()
            self._edges[id(value)] = self._enter(_referents(value), pending)

    def _enter(self, values: Iterable[Any], pending: list[Any]) -> list[int]:
        entered = []
        for value in values:
            key = id(value)
            if self._is_ours(value):
                self._ours[key] = value
            elif key in self._walked:
                self._of_state[key] = value
            elif isinstance(value, torch.Tensor) or _is_whole(value) or _is_old_class(value):
                continue
            else:
                self._counts[key] += 1
                if key not in self.nodes:
                    self.nodes[key] = value
                    pending.append(value)
            entered.append(key)
        return entered

    def _is_ours(self, value: Any) -> bool:
        """Whether it is another one in each call."""
        if isinstance(value, (FakeTensor, *SYMBOLS)):
            return True
        number = self._walked.get(id(value))
        return number is not None and number[0] == _ARGUMENTS

    def held(self) -> set[int]:
        """The nodes that something else refers to, or that can be reached from such."""
        self.nodes[0] = object()  # to which nothing else refers
        counts = {key: sys.getrefcount(node) for key, node in self.nodes.items()}
        del self.nodes[0]
        alone = counts.pop(0)
        pending = [key for key, count in counts.items() if count - alone > self._counts[key]]
        held = set(pending)
        while pending:
            new = [key for key in self._edges.get(pending.pop(), ()) if key in self.nodes and key not in held]
            held.update(new)
            pending += new
        return held

    def towards(self, held: Collection[int], substitutes: Collection[int]) -> dict[int, Any]:
        """The nodes from which something of the program's can be reached, each with what leads there.

        What is ``held`` had state and arguments before: what is in the places of these now leaves with the capture. Not
        so tuples: one that holds a substitute was made for the capture, and one that holds an object of the program's
        state is another one where that object is.
        """
        sources = defaultdict(list)
        for key, edges in self._edges.items():
            for other in edges:
                sources[other].append(key)
        standing = {key for key in self._ours if key in self._walked or key in substitutes}
        leading = self._leading([value for key, value in self._ours.items() if key not in standing], sources, {})
        leading = self._leading([self._ours[key] for key in standing], sources, leading, held)
        return self._leading(self._of_state.values(), sources, leading, self.nodes)

    def _leading(
        self, to: Iterable[Any], sources: Mapping[int, list[int]], leading: dict[int, Any], but: Collection[int] = ()
    ) -> dict[int, Any]:
        """``but``: these only if they are tuples."""
        pending = deque(to)
        while pending:
            value = pending.popleft()
            new = [
                key
                for key in sources.get(id(value), ())
                if key not in leading and (key not in but or isinstance(self.nodes[key], tuple))
            ]
            leading |= dict.fromkeys(new, value)
            pending += [self.nodes[key] for key in new]
        return leading


def _content(container: Any) -> list[Any]:
    """What a container holds, which may be a view of something else."""
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    return [*container, *container.values()] if isinstance(container, Mapping) else list(container)


def _referents(value: Any) -> list[Any]:
    """What an object refers to; of a function not its globals."""
    if isinstance(value, types.FunctionType):
        parts = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return [part for part in parts if part]
    referents = gc.get_referents(value)
    if type(value) is weakref.ref or type(value) in weakref.ProxyTypes:
        referents += [shown for shown in [behind(value)] if shown is not None]
    return referents


def _is_whole(value: Any) -> bool:
    """Whether a value is given as it is: no number or text, unless somebody gave it attributes."""
    return isinstance(value, _WHOLE) and (not isinstance(value, SCALARS) or not attributes_of(value))


def _is_old_class(value: Any) -> bool:
    """Whether a value is a class that no function made."""
    return isinstance(value, type) and "<locals>" not in value.__qualname__


def _is_record(kind: type) -> bool:
    """Whether it is the class of a named tuple, or one that an operator gives, without attributes of its own."""
    return (
        issubclass(kind, tuple)
        and hasattr(kind, "_fields" if kind.__flags__ & 512 else "n_fields")
        and "__dict__" not in dir(kind)
    )


def _is_tensor_or_number(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *SYMBOLS))


def _step(holder: Any, part: Any) -> str:
    """What leads from an object to something that it refers to."""
    frame = getattr(holder, "gi_frame", None)
    named = {} if frame is None else dict(frame.f_locals)
    named |= attributes_of(holder) or {}
    if isinstance(holder, dict):
        return next((f"[{key_name(key)}]" for key, item in dict.items(holder) if item is part), "")
    if isinstance(holder, (list, tuple)):
        return next((f"[{index}]" for index, item in enumerate(holder) if item is part), "")
    return next((f".{name}" for name, item in named.items() if item is part), "")
