"""Checks that a graph has no mutations, and no views if asked for, except for its write-backs.

Invariant: the graph is only read. Limits: ATen (and custom) operators are judged by their table rows, so the graph must
come from `make_fx`, `torch.export` or the like, not from `torch.fx.symbolic_trace`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from functionalize._torch import HigherOrderOperator, OpOverload
from functionalize.call_stack import line_in
from functionalize.errors import NotFunctionalError, check_remove
from functionalize.ops import tables
from functionalize.ops.collectives import refused
from functionalize.ops.tables import Kind

# Modules whose functions handle sizes and tuples, never tensor memory.
_SCALAR_MODULES = frozenset({"_operator", "operator", "math", "builtins", "torch.fx.experimental.sym_node"})
_WRITING_BUILTINS = frozenset({operator.setitem, operator.delitem, setattr, delattr})
_IN_PLACE_OPERATORS = {name for name in dir(operator) if name[0] == "i" and hasattr(operator, f"__{name[1:]}__")}
_NO_LINE = "not recorded (make_fx records the lines of a `forward`, with record_stack_traces=True)"


def source_line(node: Node) -> str | None:
    """The innermost source line of the user for a node, `file:line in function: code`, if tracing recorded it."""
    return line_in(node.meta.get("stack_trace"))


def assert_functional(gm: GraphModule, remove: str = "mutations") -> None:
    """Raise unless a graph is free of mutations (and optionally of views), except for its write-backs.

    Write-backs are `copy_` (and `resize_`, `resize_as_sparse_`, `as_strided_`, `set_`) onto placeholders or lifted
    attributes at the end of the graph. Graphs of higher-order operators are checked too, and may not write back.

    Args:
        gm: a graph of ATen operators, for example from `make_fx`.
        remove: "mutations", or "mutations_and_views" to forbid view operators too.

    Raises:
        NotFunctionalError: the graph contains such nodes; the message lists each with the user's source line.
        ValueError: `remove` is neither of the two.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from functionalize.verify import assert_functional
        >>> assert_functional(make_fx(lambda x: x.add(1))(torch.zeros(2)))
    """
    check_remove(remove)
    offences = list(_offences(gm, "", remove, may_write_back=True))
    if offences:
        aim = remove.replace("_", " ")
        listed = "\n".join(f"  {offence}" for offence in offences)
        raise NotFunctionalError(f"{len(offences)} node(s) of the graph are not free of {aim}:\n{listed}")


def _offences(gm: GraphModule, name: str, remove: str, *, may_write_back: bool) -> Iterator[str]:
    """The nodes that the graph must not contain, in words: where each is, and the rule that it breaks."""
    tail = _epilogue(gm, remove) if may_write_back else []
    in_tail = {node for node in tail if _is_write_back(node)}
    yield from (_offence(node, name, reason) for node, reason in _late_reads(tail))
    for node in gm.graph.nodes:
        if node in in_tail:
            continue
        reason = _judge(node, remove)
        if reason:
            yield _offence(node, name, reason)
        if node.op == "get_attr":  # a graph that a higher-order operator will run, or a plain attribute
            child: Any = gm
            for part in str(node.target).split("."):
                child = getattr(child, part, None)
            if isinstance(child, GraphModule):
                yield from _offences(child, f"{name}.{node.target}".lstrip("."), remove, may_write_back=False)


def _offence(node: Node, graph: str, reason: str) -> str:
    within = f" [in {graph}]" if graph else ""
    return f"{node.format_node()}{within}\n    why  {reason}\n    at   {source_line(node) or _NO_LINE}"


def _epilogue(gm: GraphModule, remove: str) -> list[Node]:
    """The trailing nodes that are write-backs; between them sizes, and views (re-aliased outputs) if allowed."""
    tail: list[Node] = []
    for node in reversed(list(gm.graph.nodes)[:-1]):
        re_aliases = remove == "mutations" and node.op == "call_function" and _views(node.target)
        is_size = isinstance(node.meta.get("val"), (torch.SymInt, int))
        if not (_is_write_back(node) or re_aliases or is_size or node.op == "get_attr"):
            break
        tail.append(node)
    return tail[::-1]


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _is_write_back(node: Node) -> bool:
    if node.op != "call_function" or _packet(node) not in tables.WRITE_BACKS or not node.args:
        return False
    target = node.args[0]
    while isinstance(target, Node) and _is_write_back(target):
        target = target.args[0]  # `as_strided_(copy_(x, ...), ...)`: a write-back returns its input
    return isinstance(target, Node) and target.op in ("placeholder", "get_attr")


def _views(op: Any) -> bool:
    return isinstance(op, OpOverload) and tables.views(op)


def _late_reads(tail: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """Write-backs whose source is an input that an earlier write-back has overwritten.

    `set_` reads no data: it makes an input share the memory of another, whatever that holds by then.
    """
    written: set[Node] = set()
    for node in filter(_is_write_back, tail):
        for source in () if _packet(node) is torch.ops.aten.set_ else node.args[1:]:
            while isinstance(source, Node) and _views(source.target) and source.args:
                source = source.args[0]
            if isinstance(source, Node) and source in written and source is not node.args[0]:
                yield node, f"reads `{source.name}` after its write-back"
        written.add(node.args[0])  # type: ignore[arg-type]


def _judge(node: Node, remove: str) -> str | None:
    """Why a functional graph may not contain a node, or None."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    if node.op != "call_function":
        return f"{node.op} nodes cannot be checked; trace the function to ATen operators with make_fx first"
    if isinstance(node.target, OpOverload):
        return _judge_operator(node, node.target, remove)
    if isinstance(node.target, HigherOrderOperator):
        return _judge_higher_order(node, node.target, remove)
    return _judge_python(node.target)


def _judge_operator(node: Node, op: OpOverload, remove: str) -> str | None:
    reason = refused(op)
    if reason is not None:
        return f"{op.name()}: {reason}"
    written = _written_by(node, op)
    if written:
        return f"{op.name()} writes into {', '.join(f'`{name}`' for name in written)}"
    if remove == "mutations_and_views" and _views(op):
        return f"{op.name()} is a view ({tables.row(op).view.value.replace('_', ' ')})"
    return None


def _written_by(node: Node, op: OpOverload) -> list[str]:
    """The arguments that this call writes. A schema that declares a write is trusted.

    `native_batch_norm` and its variants write their running statistics although their schema does not declare it,
    but only in training and only if they get some.
    """
    row = tables.row(op)
    if row.kind is Kind.FUNCTIONAL:
        return []
    if op._schema.is_mutable:
        return [written.name for written in row.written] or ["its arguments"]
    names = [argument.name for argument in op._schema.arguments]
    arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return [
        written.name
        for written in row.written
        if arguments.get(written.name) is not None and (written.when is None or arguments.get(written.when, True))
    ]


def _judge_higher_order(node: Node, op: HigherOrderOperator, remove: str) -> str | None:
    if op.name().startswith("auto_functionalized"):
        return None  # it names the mutating op that it wraps, but runs it on copies
    if op.name() == "triton_kernel_wrapper_mutation":
        return "triton_kernel_wrapper_mutation writes into the kernel's arguments"
    wrapped = [arg for arg in node.args if isinstance(arg, OpOverload)]
    names = ", ".join(inner.name() for inner in wrapped)
    if any(tables.row(inner).kind is not Kind.FUNCTIONAL for inner in wrapped):
        return f"{op.name()} runs a mutating operator: {names}"
    if remove == "mutations_and_views" and any(map(_views, wrapped)):
        return f"{op.name()} runs a view operator: {names}"
    return None


def _judge_python(target: Any) -> str | None:
    name = getattr(target, "__name__", repr(target))
    module = getattr(target, "__module__", "") or ""
    if target in _WRITING_BUILTINS or (module == "_operator" and name in _IN_PLACE_OPERATORS):
        return f"operator.{name} writes into its first argument"
    if module in _SCALAR_MODULES or name.startswith(("sym_", "_sym_", "_check")):
        return None
    return f"{module}.{name} is not an ATen operator and cannot be checked; trace the function with make_fx first"
