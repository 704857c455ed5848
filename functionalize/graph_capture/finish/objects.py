"""The objects that a program returns or leaves: which of them a call must rebuild, and how.

A call rebuilds objects that hold a tensor or a number of the program. It also rebuilds objects that only the results
and the objects that the program changed refer to: the program made them. Any other object was there before, or is kept
elsewhere (by a cache, say), and is handed out as it is. The garbage collector knows which objects refer to which.

Invariant: an object that is met twice has one reconstruction. Limits: an object made inside that only hidden state of
its class describes is refused; classes that are made inside are those of the capture.
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
from functionalize._torch.subclasses.wrappers import Wrapping, is_wrapper_class
from functionalize._torch.symbols.tracing import SYMBOLS, tracked_node
from functionalize.call_stack import Location, Origin
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.refusals import iterators
from functionalize.graph_capture.trace.numbers.texts import MARK, Texts
from functionalize.graph_capture.trace.patched_type_checks import of_python
from functionalize.python_state.decompose import Part, attributes_of, decompose, key_name
from functionalize.python_state.reconstruct import NumberRef, ObjectRef, Reconstruction, TensorRef
from functionalize.python_state.refused_objects import is_opened
from functionalize.python_state.traversal_rules import OPAQUE, SCALARS, behind, key_behind
from functionalize.refusals.python_objects import OBJECT_MADE
from functionalize.refusals.values import TEXT_OF_TENSOR

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# Entered: functions have variables, sizes have symbols, and a class may be made inside.
_ENTERED = frozenset({*_FUNCTIONS, torch.Size, torch.SymInt, torch.Generator, type})
# Never entered, and handed out as they are.
_WHOLE = (
    *(cls for cls in OPAQUE if cls not in _ENTERED),
    *(types.CodeType, types.FrameType, types.TracebackType),
)
# The containers of pytrees, by exact type.
_TREES = frozenset({tuple, list, dict, OrderedDict, defaultdict, deque})
TEXT = "FakeTensor(..."  # how torch writes a tensor of a capture
_REAL = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
LEAF = pytree.tree_structure(0)  # of a result that is rebuilt as a whole
_ARGUMENTS = 1  # the number of their walk
Roots = Sequence[tuple[Any, Collection[int]]]


class ObjectGraph:
    """The objects that can be reached from what a program returns and leaves."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self.handles: list[torch.Tensor] = []  # what the caller will get
        self._numbers: dict[int, int] = {}  # of these, by identity
        self.wrappers: dict[int, tuple[int, ...]] = {}  # handles that are wrappers: the numbers of their parts
        self.only_parts: set[int] = set()  # the numbers of tensors that the caller gets only in wrappers
        self.symbols: list[Any] = []  # symbols of the graph in objects
        self._walked: Mapping[int, tuple[int, int]] = {}
        self._analyzed = False
        self._rebuilt: dict[int, bool] = {}  # of analyzed objects, whether a call rebuilds them
        self._before: set[int] = set()  # what the changed containers held before
        self._towards: dict[int, Any] = {}  # of objects that lead to a tensor: the next one
        self._reconstructions: dict[int, Reconstruction] = {}
        self._kept: list[Any] = []  # so that no identity is used again
        self._pending: list[tuple[list[Any], Sequence[Part], str]] = []
        self.texts: Texts | None = None  # texts that the program keeps in logs

    def analyze(self, walked: Mapping[int, tuple[int, int]], substitutes: Collection[int], roots: Roots) -> None:
        """Find the objects that a call rebuilds.

        ``walked``: objects that were walked before the program ran, by identity: the numbers of walk and object.
        ``substitutes``: the identities of tensors that are in the places of tensors of the program's state.
        ``roots``: containers in which the program left something, each with the identities of what it held before.
        Nothing else in this package may refer to what it left.
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
        """Whether an object can be reached from what the program returns, or from what it newly left."""
        return id(value) in self._rebuilt or id(value) in self._reconstructions

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that the caller will get, the next one for a new tensor."""
        tensor = unwrap_functorch(tensor)
        number = self._numbers.setdefault(id(tensor), len(self.handles))
        if number == len(self.handles):
            opened = is_opened(tensor, "a tensor that the program returns or keeps")
            self.handles.append(tensor)
            if opened:
                self.wrappers[number] = self._parts(tensor)
        self.only_parts.discard(number)
        return number

    def _parts(self, wrapper: torch.Tensor) -> tuple[int, ...]:
        numbers = list[int]()
        for part in Wrapping.of(wrapper).parts_of(wrapper):
            is_only_part = self._numbers.get(id(part)) in (None, *self.only_parts)
            numbers.append(self.number(part))
            if is_only_part:
                self.only_parts.add(numbers[-1])
        return tuple(numbers)

    def plain_parts(self, number: int) -> Sequence[int]:
        """The numbers of the parts of a wrapper; of another tensor, its own."""
        return self.wrappers.get(number, (number,))

    @property
    def plain_handles(self) -> list[torch.Tensor]:
        """The handles without the wrappers."""
        if not self.wrappers:
            return self.handles
        return [handle for number, handle in enumerate(self.handles) if number not in self.wrappers]

    def leaves(self, value: Any) -> tuple[list[Any], Any]:
        """The leaves of a return value, and the spec by which pytree rebuilds it."""
        try:
            return pytree.tree_flatten(value)
        except RecursionError:  # it holds itself
            return [value], LEAF

    def reference(self, leaf: Any) -> Any:
        """The description of a leaf of the returned pytree; None for an object that is rebuilt."""
        if isinstance(leaf, torch.Tensor):
            return TensorRef(self.number(leaf))
        if not isinstance(leaf, Node):  # a node is rebuilt, and so refused with its path
            self._refuse_part(leaf, "the result")
        return of_python(leaf) if isinstance(leaf, SYMBOLS) or not self._is_rebuilt(leaf) else None

    def is_tree(self, value: Any) -> bool:
        """Whether pytree rebuilds a value as it is: containers, each once, of tensors and plain values."""
        met: set[int] = set()
        return self._is_tree(value, met)

    def _is_tree(self, value: Any, met: set[int]) -> bool:
        cls = type(value)
        if not (cls in _TREES or _is_record(cls)):
            return _is_tensor_or_number(value) or not (id(value) in self._walked or self._is_rebuilt(value))
        interned = cls is tuple and not value  # there is one empty tuple
        if not interned and self._is_one_object(value, met):
            return False
        if cls is defaultdict and self._is_rebuilt(value.default_factory):
            return False
        if issubclass(cls, dict):
            for key in value:
                _refuse_text(key, "the result")
            return not any(map(self._is_rebuilt, value)) and all(self._is_tree(item, met) for item in value.values())
        return all(self._is_tree(item, met) for item in value)

    def _is_one_object(self, value: Any, met: set[int]) -> bool:
        """Whether a container must be one particular object: it was there, is left somewhere, or was met already."""
        key = id(value)
        again = key in met or key in self._reconstructions
        met.add(key)
        return again or not (isinstance(value, tuple) or (key not in self._walked and self._rebuilt.get(key, True)))

    def reconstruction(self, value: Any, path: str) -> Any:
        """How a call makes a value; the value itself where a call hands it out. ``path``: its name in messages.

        Raises:
            UnsupportedProgramError: the program made it, and a call cannot rebuild it.
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
            return self.texts.reconstruction(value, lambda number: self._part(number, path))
        number = self._walked.get(id(value))
        if number is not None:
            return ObjectRef(*number)
        value = of_python(value)
        if id(value) in self._reconstructions:
            return self._reconstructions[id(value)]
        self._refuse_part(value, path)
        if not self._is_rebuilt(value):
            return value
        cls = value if isinstance(value, type) else type(value)
        if id(cls) in self._towards:
            raise self._refusal(cls, path if cls is value else f"the class of {path}")
        if cls is value:
            return value
        parts = decompose(value)
        if parts is None:
            raise self._refusal(value, path)
        self._kept.append(value)
        made = self._reconstructions[id(value)] = Reconstruction(parts.new, parts.fill)
        self._pending += [(made.rest, parts.rest, path), (made.first, parts.first, path)]
        return made

    def _refuse_part(self, value: Any, path: str) -> None:
        """Raise where a value belongs to the capture: autograd's node, a storage, an iterator, a text of a tensor."""
        if isinstance(value, Node) or (isinstance(value, torch.UntypedStorage) and value.device.type == "meta"):
            raise self._refusal(value, path)
        if type(value) is iterators.Substitute:
            raise value.refused_as(path)
        _refuse_text(value, path)

    def _is_rebuilt(self, value: Any) -> bool:
        """Whether a call rebuilds a value; what was not analyzed was there before, or is a part of a reconstruction."""
        if id(value) in self._before and id(value) not in self._rebuilt:
            return self._is_of_capture(value)
        return self._rebuilt.get(id(value), self._analyzed and not (_is_whole(value) or _is_old_class(value)))

    def _is_of_capture(self, value: Any) -> bool:
        """Whether calls have another value here: this one holds substitutes, or objects of the program's state."""
        value = key_behind(value)
        if isinstance(value, (tuple, list, frozenset)) and id(value) not in self._walked:
            return any(map(self._is_of_capture, value))
        return isinstance(value, SYMBOLS) or _is_fake(value) or id(value) in self._walked

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
        class_name = value.__qualname__ if isinstance(value, type) else f"of class {type(value).__qualname__}"
        holds = ", and holds a tensor of the program" if id(value) in self._towards else ""
        holds += f" ({path}{way})" if way else ""
        return OBJECT_MADE.error(
            self._line_of(holder) or _line_of_generator(value), path=path, kind=class_name, holds=holds
        )

    def _line_of(self, value: Any) -> Any:
        """The line that computed a tensor, if it is known."""
        node = tracked_node(self._tracer, value) if isinstance(value, torch.Tensor) else None
        origin = None if node is None else node.meta.get("stack_trace")
        return origin.location if isinstance(origin, Origin) else None


def _line_of_generator(value: Any) -> Location | None:
    """Where the code of a generator, or of a generator expression, begins."""
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
        self._ours: dict[int, Any] = {}  # values that each call has its own of
        self._of_state: dict[int, Any] = {}  # objects of its state, which a call may find replaced

    def follow(self, roots: Roots) -> None:
        """Enter all objects that can be reached from what is new in some containers."""
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
        """Whether each call has its own: a tensor, a number, or an object of the arguments."""
        if isinstance(value, SYMBOLS) or _is_fake(value):
            return True
        number = self._walked.get(id(value))
        return number is not None and number[0] == _ARGUMENTS

    def held(self) -> set[int]:
        """The nodes that something outside refers to, and those that can be reached from them."""
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
        """The nodes from which the program's values can be reached, each with the next object on the way.

        Objects that are ``held`` held state and arguments before: the substitutes there leave with the capture. Tuples
        are different: a tuple that holds a substitute was made for the capture, and a tuple that holds an object of the
        program's state is another tuple in a call that finds another object.
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


def _is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor, or a wrapper of fake tensors."""
    if not isinstance(value, torch.Tensor) or type(value) in _REAL:
        return False
    if isinstance(value, FakeTensor):
        return True
    return is_wrapper_class(type(value)) and any(map(_is_fake, Wrapping.of(value).parts_of(value)))


def _content(container: Any) -> list[Any]:
    """The contents of a container, which may be a view of something else."""
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    return [*container, *container.values()] if isinstance(container, Mapping) else list(container)


def _referents(value: Any) -> list[Any]:
    """The objects that an object refers to; for a function without its globals."""
    if isinstance(value, types.FunctionType):
        parts = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return [part for part in parts if part]
    referents = gc.get_referents(value)
    if type(value) is weakref.ref or type(value) in weakref.ProxyTypes:
        referents += [shown for shown in [behind(value)] if shown is not None]
    return referents


def _is_whole(value: Any) -> bool:
    """Whether a value is handed out as it is; a number or text only if nobody gave it attributes."""
    return isinstance(value, _WHOLE) and (not isinstance(value, SCALARS) or not attributes_of(value))


def _is_old_class(value: Any) -> bool:
    """Whether a value is a class that was not defined in a function."""
    return isinstance(value, type) and "<locals>" not in value.__qualname__


def _is_record(cls: type) -> bool:
    """Whether a class is a named tuple, or the tuple of an operator's results, without attributes of its own."""
    return (
        issubclass(cls, tuple)
        and hasattr(cls, "_fields" if cls.__flags__ & 512 else "n_fields")
        and "__dict__" not in dir(cls)
    )


def _is_tensor_or_number(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *SYMBOLS))


def _step(holder: Any, part: Any) -> str:
    """The step from an object to one that it refers to, as text."""
    frame = getattr(holder, "gi_frame", None)
    named = {} if frame is None else dict(frame.f_locals)
    named |= attributes_of(holder) or {}
    if isinstance(holder, dict):
        return next((f"[{key_name(key)}]" for key, item in dict.items(holder) if item is part), "")
    if isinstance(holder, (list, tuple)):
        return next((f"[{index}]" for index, item in enumerate(holder) if item is part), "")
    return next((f".{name}" for name, item in named.items() if item is part), "")
