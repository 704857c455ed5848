"""Gradients of a call: autograd goes through its graph as through one operator.

Forward and backward were captured together, and a partition function of torch's cut them in two. What the backward
needs is saved by ``save_for_backward``, so that autograd checks that nobody has written to it since.

Note [Derivatives of derivatives]: a backward that is to be differentiated in its turn gives gradients that know from
which inputs and tangents they were computed. Their backward calls the joint graph of the next order, whose forward
gives these gradients once more, and whose backward their derivatives. That graph is recorded when it is first asked
for, by running the program again: what autograd knew (functions with a backward of their own, ``no_grad``) is not in
the graph of the order before.

Invariant: the gradients are those of the captured program, of each input that required one. Limits: a backward that
draws random numbers is differentiable once.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from functionalize._torch import storage_key
from functionalize._torch.autograd import (
    SavedTensor,
    hidden_from_dynamo,
    is_batch_of_gradients,
    keeps_graph,
    make_saved_tensor,
)
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import has_strides, tensor_at
from functionalize.refusals.calls import BACKWARD_TWICE, BATCHED_TWICE, SHARED_GRADIENT_WRITTEN, VALUE_NOT_KEPT
from functionalize.runtime.autograd.joint import ForwardCall, Orders, called, tangent_name
from functionalize.runtime.guards.sizes import Sizes
from functionalize.runtime.random_state import RandomState

_TENSOR = object()  # stands for a tensor that autograd keeps


@dataclass(frozen=True, eq=False)
class Derivation:
    """What one call of a program, or of a derivative of it, keeps for derivatives of its gradients."""

    orders: Orders
    order: int
    call: ForwardCall
    random: RandomState
    sizes: Sizes  # of the inputs when the program was called, where they may differ
    copies: dict[int, Any]  # of inputs that the call is about to write or detach: known to autograd as the inputs were
    held: dict[int, Any] = field(default_factory=dict)  # inputs as autograd saves them, by position
    known: dict[int, Any] = field(default_factory=dict)  # the others, as long as they live: each with its version

    def hold(self, inputs: Sequence[Any]) -> None:
        """Keep what gradients are computed from; autograd checks, when it is asked for, that it was not written."""
        for number in self.call.sources:
            value = self.copies.get(number, inputs[number])
            if isinstance(value, torch.Tensor):
                value = make_saved_tensor(value, False) if number in self.call.read else value.detach()
            self.held[number] = value
        for number, value in enumerate(inputs):
            if not isinstance(value, torch.Tensor):
                self.held[number] = value
            elif number not in self.held and not value.is_inference():
                self.known[number] = weakref.ref(value), value._version

    def inputs(self) -> list[Any]:
        """The inputs as they were; None for those that no gradient is computed from.

        Raises:
            RuntimeError: one was written since.
        """
        values = [self.held.get(number) for number in range(len(self.call.joint.names))]
        return [value.unpack() if isinstance(value, SavedTensor) else value for value in values]

    def differentiable(self, gradients: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The gradients of this call as results of what they were computed from."""
        try:
            values = [*self.inputs(), *tangents]
        except RuntimeError as error:
            held = [value.data for value in self.held.values() if isinstance(value, SavedTensor)]
            return Undifferentiable.apply(error, len(gradients), *gradients, *held, *tangents)  # type: ignore[no-untyped-call,no-any-return]
        required = [isinstance(value, torch.Tensor) and value.requires_grad for value in values]
        known = (self._known_to_next if self.call.joint.hides_writes else self.call.may_require_grad)(required)
        if not any(known):
            return gradients
        if any(map(is_batch_of_gradients, tangents)):
            raise BATCHED_TWICE.error()
        return _Gradients.apply(self, gradients, known, *values)  # type: ignore[no-untyped-call,no-any-return]

    def _known_to_next(self, required: Sequence[bool]) -> list[bool]:
        """Of each gradient whether it depends on what requires gradients, inputs and tangents, in the next order.

        All may, where there is none: it is asked again.
        """
        count = len(self.call.differentiated)
        try:
            joint = self.orders.call(self.order + 1, self.sizes).joint
        except RuntimeError:
            return [True] * count
        wanted = {name for name, one in zip(self._names(), required, strict=True) if one}
        pairs = zip(joint.names, joint.gradients, strict=True)
        read = [joint.sources.flowing[n] for name, n in pairs if n is not None and name in wanted]
        tangents = {result: len(joint.names) + number for number, result in enumerate(joint.tangents)}
        return [n in tangents and any(one >> tangents[n] & 1 for one in read) for n in range(count)]

    def _names(self) -> list[str]:
        """What the next order calls inputs and tangents of this one."""
        joint = self.call.joint
        return [*joint.names, *(tangent_name(self.order, number) for number in range(len(joint.tangents)))]

    def _still_there(self, number: int) -> torch.Tensor:
        """An input that no gradient of this order is computed from, but one of the next is: as long as it lives."""
        known, version = self.known[number]
        tensor = known()
        if tensor is None or tensor._version != version or tensor.requires_grad:
            raise VALUE_NOT_KEPT.error(order=self.order + 1, name=self.call.joint.names[number])
        return tensor.detach()  # type: ignore[no-any-return]

    def next_results(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The gradients of this call, computed by the next order from its inputs and tangents."""
        own, call = self.call.joint, self.orders.call(self.order + 1, self.sizes)
        known = dict(zip(self._names(), values, strict=True))
        for number, name in enumerate(own.names):
            if number in self.known and name in call.joint.names:
                known[name] = self._still_there(number)
        inputs = [known[name] for name in call.joint.names]
        derivation = Derivation(self.orders, self.order + 1, call, self.random, self.sizes, {})
        with torch.enable_grad():
            return CapturedFunction.apply(derivation, *inputs)  # type: ignore[no-untyped-call,no-any-return]


def differentiable_call(orders: Orders, inputs: Sequence[Any], sizes: Sizes) -> tuple[Any, ...]:
    """What the forward of a program gives, known to autograd; ``sizes``: of all inputs of the program."""
    call = orders.first
    with torch.enable_grad():
        copy = _with_storage if call.joint.reads_storages else torch.clone
        copies = {n: copy(inputs[n]) for n in call.copied if isinstance(inputs[n], torch.Tensor)}
        for number in call.joint.detached.difference(copies):  # autograd saves nothing of what is detached afterwards
            value = inputs[number]
            copies[number] = value.detach() if number in call.without_gradient else _alias_of(value)
        random, draws = RandomState(), call.joint.draws
        if draws:
            random = RandomState.now(draws, dict(zip(call.joint.names, inputs, strict=True)))
        derivation = Derivation(orders, 1, call, random, sizes, copies)
        followed = list(inputs)
        for number in call.without_gradient:
            followed[number] = HiddenFromAutograd(inputs[number])
        return CapturedFunction.apply(derivation, *followed)  # type: ignore[no-untyped-call,no-any-return]


class HiddenFromAutograd(NamedTuple):
    """An input without a gradient: autograd would run the hooks on one."""

    value: Any


def _with_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor at the same place of a copy of its storage, known to autograd."""
    storage = tensor.untyped_storage()
    if tensor.layout is not torch.strided or storage.nbytes() == tensor.numel() * tensor.itemsize:
        return tensor.clone()
    copied: torch.Tensor = InMemory.apply(tensor, tensor_at(storage.clone(), Layout.of(tensor)))  # type: ignore[no-untyped-call]
    return copied


class CapturedFunction(torch.autograd.Function):
    """A call of the forward, whose derivative is the backward."""

    @staticmethod
    def forward(ctx: Any, derivation: Derivation, *followed: Any) -> tuple[Any, ...]:
        call = derivation.call
        inputs = [value.value if type(value) is HiddenFromAutograd else value for value in followed]
        with derivation.random.again() if derivation.order > 1 else contextlib.nullcontext():
            results = call.run(inputs)
        values = [*(derivation.copies.get(number, value) for number, value in enumerate(inputs)), *results]
        saved = call.safe([values[position] for position in call.saved], inputs)
        ctx.call, ctx.plain = call, [_TENSOR if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.save_for_backward(*[value for value in saved if isinstance(value, torch.Tensor)], *call.watched(values))
        derivation.hold(inputs)
        ctx.derivation = derivation
        outputs = results[: len(call.joint.layouts)]
        expected = itertools.zip_longest(call.joint.tangents, call.strides)
        ctx.tangent_specs = [TangentSpec.of(outputs[position], strides) for position, strides in expected]
        others = [r for n, r in enumerate(outputs) if n not in call.joint.tangents and isinstance(r, torch.Tensor)]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @hidden_from_dynamo
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        call: ForwardCall = ctx.call
        unreached = call.unreached(tangents)  # get none, where eager has none: optimizers tell it from zeros
        if call.backward is None or len(unreached) == len(call.differentiated):  # what was saved may be gone
            return (None,) * (1 + len(call.gradients))
        saved = iter(_saved_by(ctx))
        values = [next(saved) if value is _TENSOR else value for value in ctx.plain]
        laid_out = [spec.given_to(tangents[n]) for n, spec in zip(call.joint.tangents, ctx.tangent_specs, strict=True)]
        with torch.no_grad():
            results = called(call.backward, [*values, *laid_out])
        gradients = [None if position is None else results[position] for position in call.gradients]
        if torch.is_grad_enabled():
            differentiated = [gradients[n] for n in call.differentiated]
            differentiable = ctx.derivation.differentiable(differentiated, laid_out)
            for number, gradient in zip(call.differentiated, differentiable, strict=True):
                gradients[number] = gradient
        for number in unreached:
            gradients[number] = None
        _write_to([tangents[n] for n in call.joint.tangents], call.written, results)
        if not keeps_graph():
            ctx.derivation = None
        return None, *gradients


def _write_to(
    tangents: Sequence[torch.Tensor | None], written: Sequence[int | None], results: Sequence[torch.Tensor]
) -> None:
    """Write to the gradients that arrive what the program's own backwards write there."""
    if all(position is None for position in written):
        return
    keys = [None if tangent is None else storage_key(tangent) for tangent in tangents]
    for tangent, key, position in zip(tangents, keys, written, strict=True):
        if position is not None and tangent is not None:
            if keys.count(key) > 1:
                raise SHARED_GRADIENT_WRITTEN.error()
            with torch.no_grad():
                tangent.copy_(results[position])


def _saved_by(ctx: Any) -> Sequence[torch.Tensor]:
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "second time" in str(error):  # else one was written
            raise BACKWARD_TWICE.error() from error
        raise


class _Gradients(torch.autograd.Function):
    """Gradients as results of the inputs and tangents that they were computed from."""

    @staticmethod
    def forward(
        ctx: Any, derivation: Derivation, gradients: Sequence[torch.Tensor], known: Sequence[bool], *values: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.derivation = derivation
        ctx.plain = [_TENSOR if isinstance(value, torch.Tensor) else value for value in values]
        ctx.save_for_backward(*[value for value in values if isinstance(value, torch.Tensor)])
        results = [gradient.detach() for gradient in gradients]
        ctx.mark_non_differentiable(*[r for r, one in zip(results, known, strict=True) if not one])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @hidden_from_dynamo
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if value is _TENSOR else value for value in ctx.plain]
        required = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad]
        with torch.enable_grad():  # aliases: what autograd knows of the values themselves is not to be gone through
            apart = {number: _alias_of(values[number]) for number in required}
        results = ctx.derivation.next_results([apart.get(number, value) for number, value in enumerate(values)])
        pairs = [(r, t) for r, t in zip(results, tangents, strict=True) if t is not None and r.requires_grad]
        found: list[Any] = [None] * len(values)
        if pairs:
            outs, given = zip(*pairs, strict=True)
            create = torch.is_grad_enabled()
            gradients = torch.autograd.grad(outs, list(apart.values()), given, allow_unused=True, create_graph=create)
            for number, gradient in zip(required, gradients, strict=True):
                found[number] = gradient
        return None, None, None, *found


class Undifferentiable(torch.autograd.Function):
    """Results whose backward was not captured: raises the reason when it is asked for; without one there is none."""

    @staticmethod
    def forward(ctx: Any, reason: Exception | None, count: int, *values: Any) -> tuple[Any, ...]:
        """The first ``count`` values are results, the others what they were computed from."""
        ctx.reason, ctx.arguments = reason, 2 + len(values)
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values[:count])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        if ctx.reason is not None:
            raise ctx.reason
        return (None,) * ctx.arguments


class InMemory(torch.autograd.Function):
    """A value that lies in memory which other tensors have; autograd knows it for a view that such a function made."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same memory; of one without strides a copy."""
    alias: torch.Tensor = torch.ops.aten.alias.default(tensor) if tensor.layout is torch.strided else tensor.clone()
    return alias


class TangentSpec(NamedTuple):
    """What the captured backward expects of a result's tangent: the layout of the result, without holes."""

    size: torch.Size
    stride: tuple[int, ...] | None  # of a strided result
    sparse_dim: int | None  # of one in COO layout
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, result: torch.Tensor, strides: tuple[int, ...] | None) -> TangentSpec:
        """That for a result; ``strides``: those that the backward was captured for, where they are known."""
        stride = None
        if result.layout is torch.strided:
            stride = strides or torch.empty_like(result, device="meta").stride()
        sparse_dim = result.sparse_dim() if result.layout is torch.sparse_coo else None
        return cls(result.size(), stride, sparse_dim, result.dtype, result.device)

    def given_to(self, tangent: torch.Tensor | None) -> torch.Tensor:
        """A tangent laid out so; zeros where there is none. As it comes, but coalesced, where it has no strides."""
        if tangent is None:
            tangent = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        if tangent.layout is not torch.strided:
            return tangent.coalesce() if tangent.layout is torch.sparse_coo else tangent
        if self.stride is None:
            return tangent if self.sparse_dim is None else tangent.to_sparse(self.sparse_dim)
        tangent = tangent.resolve_conj().resolve_neg()
        if has_strides(tangent, self.stride):
            return tangent
        order = sorted(range(len(self.stride)), key=self.stride.__getitem__, reverse=True)
        back = sorted(range(len(order)), key=order.__getitem__)
        return tangent.permute(order).contiguous().permute(back)  # no room is made and written: vmap cannot
