"""Questions of a trace about data-dependent symbols, which a decider may answer.

Loads sympy: imported only where a program is captured.

Invariant: each expression is answered once, and the trace goes on as if the answer held. Limits: of an answer about
floats the trace learns no more than the answer: NaN is neither above nor below another number. Written against torch
2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch.fx import Node, Proxy
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from functionalize._torch.symbols.traced_symbols import symbol_node_of

Symbol = TypeVar("Symbol", torch.SymFloat, torch.SymInt, torch.SymBool)
Answer = bool | int | float | complex

_interpreted: Any = sympy_interp
sympy: Any = symbolic_shapes.sympy  # type: ignore[attr-defined]  # what symbols are made of


class Decider(Protocol):
    """Answers data-dependent questions."""

    @property
    def is_open(self) -> bool:
        """Whether new questions are answered."""

    def number(self, expression: Any, asked: Any) -> Answer | None:
        """The value of an expression, which is that of the number ``asked``, if given; None: refused."""

    def result(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer | None:
        """The result of an op; None: refused."""


class NotBoolError(RuntimeError):
    """While answers were tried, an operator asked for something else than a bool of sizes of inputs."""


class DecidingShapeEnv(ShapeEnv):
    """Symbols of one trace. It asks ``decider``, if it has one, data-dependent questions."""

    decider: Decider | None = None
    on_data_symbol: Callable[[], None] | None = None  # is called before a data-dependent number is made
    _asked: Any = None  # the number that is evaluated
    _learnt: int = 0  # the number of answers
    _later: list[Any] | None = None  # gets the numbers that become guards later, not at once
    _tried: tuple[dict[Any, bool], Mapping[Any, bool]] | None = None  # gets questions; answers to some
    _current_line: Callable[[], Any] | None = None  # gives the line that the program is at

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lines = dict[Any, Any]()  # of the program, by the conditions that the trace assumed there, if noted
        self._open_questions = set[tuple[Any, ...]]()  # to which torch has no answer; its error takes long to make
        self.dims = dict[Any, str]()  # the names of sizes that callers have named, by symbol

    @property
    def is_answered(self) -> bool:
        """Whether data-dependent questions are answered."""
        return self.decider is not None and self.decider.is_open

    def create_unbacked_symfloat(self) -> torch.SymFloat:
        """A data-dependent float."""
        return self._announced(super().create_unbacked_symfloat)

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> torch.SymInt:
        """A data-dependent integer."""
        return self._announced(partial(super().create_unbacked_symint, *args, **kwargs))

    def create_unbacked_symbool(self) -> torch.SymBool:
        """A data-dependent bool."""
        return self._announced(super().create_unbacked_symbool)

    def _announced(self, create: Callable[[], Symbol]) -> Symbol:
        if self.on_data_symbol is not None:
            self.on_data_symbol()
        return create()

    def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
        """The value of a number, which the trace assumes from then on."""
        if self._later is not None and sym_node.pytype is int and sym_node.hint is not None:
            self._later.append(torch.SymInt(sym_node))
            return sym_node.hint
        self._asked = sym_node
        try:
            return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        finally:
            self._asked = None

    @contextlib.contextmanager
    def noting_lines(self, current_line: Callable[[], Any]) -> Iterator[None]:
        """Note in ``lines``, for each new condition, the line that the program is at."""
        self._current_line = current_line
        try:
            yield
        finally:
            self._current_line = None

    @contextlib.contextmanager
    def later(self, asked: list[Any]) -> Iterator[None]:
        """Add to ``asked`` the whole numbers that are evaluated, instead of guards."""
        before, self._later = self._later, asked
        try:
            yield
        finally:
            self._later = before

    def _of_data(self, expression: Any) -> bool:
        symbols = getattr(expression, "free_symbols", ())
        return any(symbol not in self.backed_var_to_val for symbol in symbols)

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of an expression, which the trace assumes from then on."""
        if self._tried is not None:
            return self._answer(orig_expr, *self._tried)
        asked, self._asked = self._asked, None
        static_value = self._maybe_evaluate_static(orig_expr) if self._learnt or self._of_data(orig_expr) else None
        if static_value is not None:
            return static_value  # torch caches the fallback that it used before an answer or a check
        before = len(self.guards)
        question = (orig_expr, self._learnt, *args, *kwargs.values())
        answer = self._decided(orig_expr, asked) if question in self._open_questions else None
        try:
            if answer is None:
                return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            self._open_questions.add(question)
            answer = self._decided(orig_expr, asked)
            if answer is None:
                raise
        finally:
            if self._current_line is not None and len(self.guards) > before:
                line = self._current_line()
                self.lines = {guard.expr: line for guard in self.guards[before:]} | self.lines
        if isinstance(answer, float):
            return answer
        self._learn(orig_expr, answer)
        return sympy.sympify(answer)

    def _decided(self, expression: Any, asked: Any) -> Answer | None:
        return None if self.decider is None else self.decider.number(expression, asked)

    @contextlib.contextmanager
    def trying(self, path: dict[Any, bool], answers: Mapping[Any, bool]) -> Iterator[None]:
        """Try answers, and assume nothing. ``path`` gets all questions with their answers.

        The example answers the questions that ``answers`` lacks.
        """
        self._tried = path, answers
        try:
            yield
        finally:
            self._tried = None

    def _answer(self, question: Any, path: dict[Any, bool], answers: Mapping[Any, bool]) -> Any:
        static_value = self._maybe_evaluate_static(question)
        if static_value is not None:
            return static_value
        example = question.xreplace(self.backed_var_to_val)
        if example not in (sympy.true, sympy.false):
            raise NotBoolError(str(question))
        return sympy.sympify(path.setdefault(question, answers.get(question, bool(example))))

    def _learn(self, expression: Any, answer: Answer) -> None:
        """Use from now on what an answer implies."""
        if any(symbol.is_integer is not True for symbol in expression.free_symbols):
            return
        if answer is not False:  # perhaps that a size is one: kernels that take sizes for larger would get it wrong
            self.size_like.difference_update(expression.free_symbols)
        fact = sympy.Eq(expression, answer) if type(answer) is int else expression if answer else sympy.Not(expression)
        self._maybe_guard_rel(fact)
        self.axioms.update(dict(self.get_implications(self.simplify(fact))))
        self._learnt += 1
        self._update_version_counter()

    def _get_key(self) -> Any:
        """The key of torch's caches of answers, which would not see what was learnt since."""
        return (*super()._get_key(), self._learnt)


@contextlib.contextmanager
def deciding(environment: Any, decider: Decider | None) -> Iterator[None]:
    """Have ``decider`` answer questions about a trace's symbols; does nothing if the trace is not ours."""
    ours = isinstance(environment, DecidingShapeEnv)
    if ours:
        environment.decider = decider
    try:
        yield
    finally:
        if ours:
            environment.decider = None


def kind_of(expression: Any, asked: Any) -> type[Answer]:
    """The Python type of the number that is evaluated."""
    if asked is not None:
        return asked.pytype  # type: ignore[no-any-return]
    if isinstance(expression, sympy.logic.boolalg.Boolean):
        return bool
    return int if expression.is_integer else float


def number_node(tracer: Any, expression: Any, asked: Any) -> Node | None:
    """The node of a number: the node that the program computed, else arithmetic on the nodes of its symbols.

    None if the tracer has not seen one of the symbols yet.
    """
    if asked is not None:
        kinds: dict[Any, Any] = {bool: torch.SymBool, int: torch.SymInt, float: torch.SymFloat}
        thunk = tracer.symnode_tracker.get(kinds[asked.pytype](asked))
        if thunk is not None:
            return thunk.force().node  # type: ignore[no-any-return]
    nodes: dict[Any, Node] = {}
    for symbol in expression.free_symbols:
        node = symbol_node_of(tracer, symbol) or symbol_node_of(tracer, sympy.Eq(symbol, 1))  # the latter of a bool
        if node is None:
            return None
        nodes[symbol] = node
    return _arithmetic(tracer, expression, nodes)


def _arithmetic(tracer: Any, expression: Any, nodes: dict[Any, Node]) -> Node:
    """Nodes that compute an expression, each with its value as a symbol in its meta."""
    last: Node = next(reversed(tracer.graph.nodes))
    plain = {symbol: Proxy(node, tracer) for symbol, node in nodes.items()}
    with torch._C._EnableTorchFunction():  # a proxy intercepts `sym_max` by it
        result: Node = _interpreted(PythonReferenceAnalysis, plain, expression).node
    added = itertools.takewhile(lambda node: node is not last, reversed(tracer.graph.nodes))
    with disable_proxy_modes_tracing():
        for node in reversed(list(added)):
            arguments = [a.meta["val"] if isinstance(a, Node) else a for a in node.args]
            compute: Any = node.target
            node.meta["val"] = compute(*arguments)
    return result
