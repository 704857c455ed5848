"""Checks for users and tests: is a graph free of mutations, does a transformed function equal the eager one?

Invariant: both functions only read what they are given; `assert_equivalent` runs everything on copies.
Limits: `assert_functional` judges ATen (and custom) operators by their table rows, so the graph must come
from `make_fx`, `torch.export` or the like, not from `torch.fx.symbolic_trace`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from functionalize._torch import HigherOrderOperator, OpOverload
from functionalize.errors import NotEquivalentError, NotFunctionalError
from functionalize.ops import tables
from functionalize.ops.tables import Kind, ViewKind
from functionalize.transform.api import functionalize
from functionalize.verify.observation import clone_inputs, differences, observe

__all__ = ["assert_equivalent", "assert_functional", "clone_inputs", "source_line"]

_REMOVE = ("mutations", "mutations_and_views")
_aten = torch.ops.aten

# What an epilogue may call on an input: data first, then the metadata that eager would have left.
_WRITE_BACKS = frozenset({_aten.copy_, _aten.resize_, _aten.resize_as_sparse_, _aten.as_strided_, _aten.set_})

# Modules whose functions handle sizes and tuples, never tensor memory.
_SCALAR_MODULES = frozenset({"_operator", "operator", "math", "builtins", "torch.fx.experimental.sym_node"})
_WRITING_BUILTINS = frozenset({operator.setitem, operator.delitem, setattr, delattr})
_IN_PLACE_OPERATORS = frozenset({"iconcat", "imatmul", "ipow"}) | frozenset(
    f"i{name}" for name in ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "rshift", "sub", "truediv", "xor")
)
_NO_LINE = "not recorded (make_fx records the lines of a `forward`, with record_stack_traces=True)"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>\S+)\n\s*(?P<code>[^\n]*)')


@dataclass(frozen=True)
class Offence:
    """One node that should not be there: where it stands, and the rule that it breaks."""

    graph: str
    node: Node
    reason: str

    def __str__(self) -> str:
        place = f" [in {self.graph}]" if self.graph else ""
        line = (
            source_line(self.node)
            or "not recorded (make_fx records the lines of a `forward`, with record_stack_traces=True)"
        )
        return f"{self.node.format_node()}{place}\n    why  {self.reason}\n    at   {line}"


def source_line(node: Node) -> str | None:
    """The user's innermost source line of a node, `file:line in function: code`, if tracing recorded it."""
    trace = node.meta.get("stack_trace") or ""
    frames = list(_FRAME.finditer(trace))
    users = [frame for frame in frames if "/torch/" not in frame["file"]] or frames
    if not users:
        return None
    frame = users[-1]
    return f"{frame['file']}:{frame['line']} in {frame['where']}: {frame['code'].strip()}"


def assert_functional(gm: GraphModule, remove: str = "mutations") -> None:
    """Raise unless the graph is free of mutations (and, if asked, of views), but for its write-backs.

    Write-backs are `copy_` (and `resize_`, `resize_as_sparse_`, `as_strided_`, `set_`) onto placeholders or lifted
    attributes at the very end of the graph. Graphs of higher-order operators are judged too, and may not write back.

    Args:
        gm: a graph of ATen operators, as from `make_fx`.
        remove: "mutations", or "mutations_and_views" to forbid view operators too.

    Raises:
        NotFunctionalError: lists every offending node with the user's source line.
        ValueError: `remove` is neither of the two.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from functionalize.verify import assert_functional
        >>> assert_functional(make_fx(lambda x: x.add(1))(torch.zeros(2)))
    """
    if remove not in _REMOVE:
        raise ValueError(f"remove must be one of {_REMOVE}, got {remove!r}")
    offences = list(_offences(gm, "", remove, may_write_back=True))
    if offences:
        aim = remove.replace("_", " ")
        listed = "\n".join(f"  {offence}" for offence in offences)
        raise NotFunctionalError(f"{len(offences)} node(s) of the graph are not free of {aim}:\n{listed}")


def _offences(gm: GraphModule, name: str, remove: str, *, may_write_back: bool) -> Iterator[Offence]:
    tail = _epilogue(gm, remove) if may_write_back else []
    yield from (Offence(name, node, reason) for node, reason in _late_reads(tail))
    in_tail = {node for node in tail if _is_write_back(node)}
    for node in gm.graph.nodes:
        if node in in_tail:
            continue
        reason = _judge(node, remove)
        if reason:
            yield Offence(name, node, reason)
        yield from _offences_below(gm, node, name, remove)


def _offences_below(gm: GraphModule, node: Node, name: str, remove: str) -> Iterator[Offence]:
    """Offences in a graph that a higher-order operator will run; plain attributes have none."""
    if node.op != "get_attr":
        return
    child: Any = gm
    for part in str(node.target).split("."):
        child = getattr(child, part, None)
    if isinstance(child, GraphModule):
        path = f"{name}.{node.target}" if name else str(node.target)
        yield from _offences(child, path, remove, may_write_back=False)


def _epilogue(gm: GraphModule, remove: str) -> list[Node]:
    """The trailing nodes that are write-backs; between them sizes, and views (re-aliased outputs) if they may stay."""
    tail: list[Node] = []
    for node in reversed(list(gm.graph.nodes)[:-1]):
        re_aliases = remove == "mutations" and node.op == "call_function" and _is_view(node)
        is_size = isinstance(node.meta.get("val"), (torch.SymInt, int))
        if not (_is_write_back(node) or re_aliases or is_size or node.op == "get_attr"):
            break
        tail.append(node)
    return tail[::-1]


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _is_write_back(node: Node) -> bool:
    if node.op != "call_function" or _packet(node) not in _WRITE_BACKS or not node.args:
        return False
    target = node.args[0]
    while isinstance(target, Node) and _is_write_back(target):
        target = target.args[0]  # `as_strided_(copy_(x, ...), ...)`: a write-back returns its input
    return isinstance(target, Node) and target.op in ("placeholder", "get_attr")


def _is_view(node: Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and tables.row(op).view is not ViewKind.NONE


def _late_reads(tail: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """Write-backs whose source is an input that an earlier write-back has overwritten.

    `set_` reads no data: it has an input share the memory of another, whatever that holds by then.
    """
    written: set[Node] = set()
    for node in filter(_is_write_back, tail):
        for source in () if _packet(node) is _aten.set_ else node.args[1:]:
            while isinstance(source, Node) and _is_view(source) and source.args:
                source = source.args[0]
            if isinstance(source, Node) and source in written and source is not node.args[0]:
                yield node, f"reads `{source.name}` after its write-back"
        written.add(node.args[0])  # type: ignore[arg-type]


def _judge(node: Node, remove: str) -> str | None:
    """Why a node may not stand in a functional graph, or None."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    if node.op != "call_function":
        return f"{node.op} cannot be judged; trace the function to ATen operators with make_fx first"
    if isinstance(node.target, OpOverload):
        return _judge_operator(node, node.target, remove)
    if isinstance(node.target, HigherOrderOperator):
        return _judge_higher_order(node, node.target, remove)
    return _judge_python(node.target)


def _judge_operator(node: Node, op: OpOverload, remove: str) -> str | None:
    row = tables.row(op)
    written = _written_by(node, op)
    if written:
        return f"{op.name()} writes into {', '.join(f'`{name}`' for name in written)}"
    if remove == "mutations_and_views" and row.view is not ViewKind.NONE:
        return f"{op.name()} is a view ({row.view.value.replace('_', ' ')})"
    return None


def _written_by(node: Node, op: OpOverload) -> list[str]:
    """The arguments that this very call writes. A schema that admits to write is believed.

    `native_batch_norm` and its kin write their running statistics although their schema denies it, and do so
    only in training and only when they are given some.
    """
    row = tables.row(op)
    if row.kind is Kind.FUNCTIONAL:
        return []
    if op._schema.is_mutable:
        return [written.name for written in row.written] or ["its arguments"]
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return [
        written.name
        for written in row.written
        if given.get(written.name) is not None and (written.when is None or given.get(written.when, True))
    ]


def _judge_higher_order(node: Node, op: HigherOrderOperator, remove: str) -> str | None:
    if op.name().startswith("auto_functionalized"):
        return None  # it names the mutating op that it wraps, but runs it on copies
    if op.name() == "triton_kernel_wrapper_mutation":
        return "triton_kernel_wrapper_mutation writes into the kernel's arguments"
    wrapped = [arg for arg in node.args if isinstance(arg, OpOverload)]
    kinds = [tables.row(inner) for inner in wrapped]
    if any(row.kind is not Kind.FUNCTIONAL for row in kinds):
        return f"{op.name()} runs a mutating operator: {', '.join(inner.name() for inner in wrapped)}"
    if remove == "mutations_and_views" and any(row.view is not ViewKind.NONE for row in kinds):
        return f"{op.name()} runs a view operator: {', '.join(inner.name() for inner in wrapped)}"
    return None


def _judge_python(target: Any) -> str | None:
    name = getattr(target, "__name__", repr(target))
    module = getattr(target, "__module__", "") or ""
    if target in _WRITING_BUILTINS or (module == "_operator" and name in _IN_PLACE_OPERATORS):
        return f"operator.{name} writes into its first argument"
    if module in _SCALAR_MODULES or name.startswith(("sym_", "_sym_", "_check")):
        return None
    return f"{module}.{name} is no ATen operator and cannot be judged; trace the function with make_fx first"


def assert_equivalent(
    func: Callable[..., Any],
    *inputs: Any,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    remove: str = "mutations",
    tracing_mode: Literal["real", "fake", "symbolic"] | None = None,
    strides: bool = False,
    aliasing: bool | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> GraphModule | None:
    """Raise unless a transformed function does for the caller what the eager one does.

    Both run on copies of the inputs that share storage as the inputs do, under the same random seed. Compared
    are values, dtypes and shapes of outputs; values, shapes, strides and gradients of the inputs after the
    call; which outputs and inputs share storage or are one object; and the type of an exception.

    Args:
        func: the eager function; its arguments and results are any pytree.
        *inputs: its arguments.
        transform: what to hold against eager; `functionalize(func, remove=remove)` unless given.
        remove: for the default transform, and for `assert_functional` on the graph.
        tracing_mode: None to call the transformed function directly; "real", "fake" or "symbolic" to trace
            it with `make_fx` on one copy, judge the graph with `assert_functional`, and run it on another.
        strides: compare strides of outputs as well.
        aliasing: compare aliasing; by default only in direct use: a graph without views returns no aliases.
        seed: the random seed of every run.
        rtol: as in `torch.testing.assert_close`.
        atol: as in `torch.testing.assert_close`.

    Returns:
        The graph, where one was traced.

    Raises:
        NotEquivalentError: says what differs.
        NotFunctionalError: the traced graph is not pure.

    Example:
        >>> import torch
        >>> from functionalize.verify import assert_equivalent
        >>> def bump(x):
        ...     x[0].add_(1)
        ...     return x.sum()
        >>> graph = assert_equivalent(bump, torch.zeros(3), tracing_mode="fake")
    """
    transformed = (transform or _default_transform(remove))(func)
    expected = observe(func, clone_inputs(inputs), seed)
    graph: GraphModule | None = None
    if tracing_mode is not None and expected.error is None:
        torch.manual_seed(seed)
        graph = _trace(transformed, clone_inputs(inputs), tracing_mode)
        assert_functional(graph, remove)
        transformed = torch.no_grad()(graph)  # gradients are nodes of it; it writes back to leaves
    actual = observe(transformed, clone_inputs(inputs), seed)
    if aliasing is None:
        aliasing = graph is None
    found = list(differences(expected, actual, strides=strides, aliasing=aliasing, rtol=rtol, atol=atol))
    if found:
        name = getattr(func, "__name__", repr(func))
        listed = "\n".join(f"  {line}" for line in found)
        raise NotEquivalentError(f"`{name}` and its transform differ:\n{listed}") from actual.error
    return graph


def _default_transform(remove: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda func: functionalize(func, remove=remove)


def _trace(func: Callable[..., Any], inputs: Sequence[Any], tracing_mode: Any) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(func, tracing_mode=tracing_mode)(*inputs)
