"""Writes nodes of an exported graph: each with what its value looks like.

Invariant: every node has a value in its meta, of one fake mode; what depends on numbers alone that are known is no node
but the number. Limits: operators that have a meta kernel.
"""

from __future__ import annotations

import contextlib
import keyword
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from functionalize._torch import OpOverload, pytree
from functionalize._torch.exporting import ExportFakes, copying
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.view_rules import VIEW_RULES, OpCall
from functionalize.backends.decompositions.families.interpolation import counting

aten = torch.ops.aten
_KEPT = ("nn_module_stack", "stack_trace", "custom", "unbacked_bindings", "source_fn_stack", "torch_fn")
# Positions of arguments that torch refuses if they have gradients: weights that the operator takes by themselves, too.
_DETACHED = {
    aten._cudnn_rnn.default: (3,),
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: (1, 2),
    aten.fake_quantize_per_tensor_affine.tensor_qparams: (1, 2),
    aten.fake_quantize_per_channel_affine_cachemask.default: (1, 2),
    aten.fake_quantize_per_channel_affine.default: (1, 2),
}


class Emitter:
    """One graph that is being written, at its end."""

    def __init__(self, fakes: ExportFakes, *, copies: bool) -> None:
        """``copies``: whether views are to be copied."""
        self.graph, self.fakes, self._copies = Graph(), fakes, copies
        self._origin: dict[str, Any] = {}

    def placeholder(self, name: str, value: Any) -> Node:
        """An input; ``value``: what it looks like."""
        node = self.graph.placeholder(name)
        node.name = name
        node.meta["val"] = value
        return node

    def copy(self, node: Node, known: dict[Node, Any]) -> Any:
        """A node of another graph, written here; or the number that it comes to."""
        args, kwargs = pytree.tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
        if node.op == "call_function" and not isinstance(node.target, OpOverload) and _of_numbers(node, args, kwargs):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.target in _DIFFERENTIABLE and node.meta["val"].is_complex():
            self.at(node)
            meta = {key: node.meta[key] for key in ("unbacked_bindings",) if node.meta.get(key)}
            meta["val"] = self.fakes.value(node.meta["val"])
            made = _DIFFERENTIABLE[node.target](self, meta, *args, **kwargs)
            self.at(None)
            return made
        args = counting(node.target, args, lambda arg: arg.meta["val"] if isinstance(arg, Node) else arg)
        args = self._without_gradients(node.target, _loadable(node.target, args, kwargs))
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        made.meta["stack_trace"] = str(node.meta.get("stack_trace") or "")
        made.meta["nn_module_stack"] = dict(node.meta.get("nn_module_stack") or {})
        if "val" in node.meta:
            made.meta["val"] = self.fakes.value(node.meta["val"])
        if made.meta.get("unbacked_bindings"):
            made.meta["unbacked_bindings"] = self.fakes.settled_bindings(made)
        return made

    def _without_gradients(self, op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments, detached those of which an operator takes no gradients, and refuses such as have some."""
        taken = enumerate(args)
        detached = {n: self.detached(arg) for n, arg in taken if n in _DETACHED.get(op, ()) and isinstance(arg, Node)}
        return tuple(detached.get(n, arg) for n, arg in enumerate(args))

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node, after what is written so far."""
        if self._copies:
            op = copying(op)
        values = pytree.tree_map_only(Node, lambda node: node.meta["val"], (args, kwargs))
        with self.fakes.running():
            value = op(*values[0], **values[1])
        if op in _DIFFERENTIABLE and value.is_complex():
            return _DIFFERENTIABLE[op](self, {"val": value}, *args, **kwargs)
        return self.known(op, {"val": value}, *args, **kwargs)

    def known(self, op: Any, meta: dict[str, Any], *args: Any, **kwargs: Any) -> Node:
        """The same, of which is known what it gives, in ``val``, and which symbols it introduces."""
        node = self.graph.call_function(op, _loadable(op, args, kwargs), kwargs)
        node.meta = {"stack_trace": "", "nn_module_stack": {}} | self._origin | meta
        if meta.get("unbacked_bindings"):
            node.meta["unbacked_bindings"] = self.fakes.settled_bindings(node)
        return node

    def detached(self, node: Node) -> Node:
        """A tensor through which no gradients flow; also where views are copied, as a copy would have some."""
        made = self.graph.call_function(aten.detach.default, (node,))
        made.meta = dict(node.meta)
        return made

    def at(self, node: Node | None) -> None:
        """What is written from now on comes from where another node does."""
        given = {} if node is None else node.meta
        self._origin = {key: given[key] for key in ("stack_trace", "nn_module_stack") if key in given}

    @contextlib.contextmanager
    def behind(self, node: Node) -> Iterator[None]:
        """While nodes are written behind one that is there, and come from where it does."""
        following = node.next
        while following.op == "placeholder":
            following = following.next
        self.at(node)
        with self.graph.inserting_before(following):
            yield
        self.at(None)

    def written(self, base: Node, path: Sequence[OpCall], value: Node) -> Node:
        """A tensor of which a part, that a path of views leads to, is another one."""

        def view(steps: int) -> Node:
            """The view that so many steps lead to, written when it is asked for."""
            if not steps:
                return base
            op, args = path[steps - 1]
            return self.call(op, view(steps - 1), *args)

        look, inverses = base.meta["val"], list[Any]()
        for op, args in path:
            before = Layout.of(look)
            with self.fakes.mode:
                look = op(look, *args)
            inverses.append(VIEW_RULES[op](before, Layout.of(look), *args).inverse)
        if value.meta["val"].dtype != look.dtype:
            value = self.call(aten._to_copy.default, value, dtype=look.dtype)
        for steps, inverse in reversed(list(enumerate(inverses))):
            value = inverse(self.call, partial(view, steps), value)
        return value


def _as_complex(emitter: Emitter, meta: dict[str, Any], x: Node) -> Node:
    real, imaginary = (emitter.call(aten.select.int, x, -1, part) for part in range(2))
    return emitter.call(aten.complex.default, real, imaginary)


def _by_parts(op: Any, tensors: int) -> Callable[..., Node]:
    """An operator along a dimension, on real and imaginary parts; ``tensors``: how many arguments are, the first."""

    def emitted(emitter: Emitter, meta: dict[str, Any], *args: Any, dim: int = 0, **kwargs: Any) -> Node:
        given, rest = args[:tensors], args[tensors:]
        at, rest = (rest[0], rest[1:]) if rest else (dim, ())
        parts = [emitter.call(aten.view_as_real_copy.default, _resolved(emitter, one)) for one in given]
        look = meta["val"]
        with emitter.fakes.mode:
            both = torch.empty((*look.size(), 2), dtype=look.dtype.to_real(), device=look.device)
        at %= given[0].meta["val"].dim()
        return _as_complex(emitter, meta, emitter.known(op, meta | {"val": both}, *parts, at, *rest, **kwargs))

    return emitted


def _resolved(emitter: Emitter, x: Node) -> Node:
    """A tensor that is not lazily conjugated."""
    for _ in range(2 if x.meta["val"].is_conj() else 0):
        x = emitter.call(aten.conj_physical.default, x)
    return x


# Operators on complex numbers through which torch takes no gradients.
_DIFFERENTIABLE: dict[Any, Callable[..., Node]] = {
    **{op: _by_parts(op, 1) for op in (aten.slice_copy.Tensor, aten.select_copy.int)},
    **{op: _by_parts(op, 2) for op in (aten.slice_scatter.default, aten.select_scatter.default)},
    aten.lift_fresh_copy.default: lambda emitter, meta, x: emitter.call(aten.clone.default, x),
    aten._neg_view_copy.default: lambda emitter, meta, x: emitter.call(aten.neg.default, x),
    aten.view_as_complex_copy.default: _as_complex,
    aten._conj_copy.default: lambda emitter, meta, x: emitter.call(aten.conj_physical.default, x),
}


def _loadable(op: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
    """Arguments with the defaults up to one that a keyword of Python names: a file without it does not load.

    It is saved by its name, and given by its position: `from` of `uniform`.
    """
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    named = (n for n, one in enumerate(arguments, 1) if keyword.iskeyword(one.name) and one.name not in kwargs)
    last = max(named, default=0)
    return (*args, *(one.default_value for one in arguments[len(args) : last]))


def _of_numbers(node: Node, args: Any, kwargs: Any) -> bool:
    """Whether a node computes with numbers that are known."""
    if node.target is operator.getitem:
        return False
    leaves = pytree.tree_leaves((args, kwargs))
    return bool(leaves) and all(isinstance(leaf, (int, float, bool)) for leaf in leaves)
