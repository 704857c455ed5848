"""Gradients of a call: to autograd, the graph of a call is one operator.

Forward and backward were captured together, and a partition function of torch's has split them. The tensors that the
backward needs are saved by ``save_for_backward``, so that autograd checks that they have not been written since.

Note [Derivatives of derivatives]: with ``create_graph``, a backward returns gradients that autograd records as results
of the inputs and tangents that they were computed from. Their backward calls the joint graph of the next order. Its
forward computes these gradients once more, its backward their derivatives. That graph is recorded when it is first
needed, by running the program again: the graph of the previous order does not contain what autograd knew (functions
with a backward of their own, ``no_grad``).

Invariant: each input that required a gradient gets that of the captured program. Limits: a backward that draws random
numbers is differentiable once.
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
from functionalize._torch.subclasses.wrappers import is_wrapper_class
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import has_strides, tensor_at
from functionalize.refusals.calls import BACKWARD_TWICE, BATCHED_TWICE, SHARED_GRADIENT_WRITTEN, VALUE_NOT_KEPT
from functionalize.runtime.autograd.joint import ForwardCall, Orders, called, tangent_name
from functionalize.runtime.guards.sizes import Sizes
from functionalize.runtime.random_state import RandomState

_TENSOR = object()  # in the place of a tensor that autograd saves


@dataclass(frozen=True, eq=False)
class Derivation:
    """The data that one call of a program, or of a derivative of it, keeps for derivatives of its gradients."""

    orders: Orders
    order: int
    call: ForwardCall
    random: RandomState
    sizes: Sizes  # of the inputs when the program was called, if they may differ
    copies: dict[int, Any]  # of inputs that the call will write or detach, with the autograd history of the inputs
    held: dict[int, Any] = field(default_factory=dict)  # inputs as autograd saves them, by position
    weak: dict[int, Any] = field(default_factory=dict)  # weak references to other inputs, each with its version

    def hold(self, inputs: Sequence[Any]) -> None:
        """Keep the inputs that gradients are computed from; autograd checks that none was written before its use."""
        for number in self.call.sources:
            value = self.copies.get(number, inputs[number])
            if isinstance(value, torch.Tensor):
                value = make_saved_tensor(value, False) if number in self.call.read else value.detach()
            self.held[number] = value
        for number, value in enumerate(inputs):
            if not isinstance(value, torch.Tensor):
                self.held[number] = value
            elif number not in self.held and not value.is_inference():
                self.weak[number] = weakref.ref(value), value._version

    def inputs(self) -> list[Any]:
        """The inputs as they were; None for inputs that no gradient is computed from.

        Raises:
            RuntimeError: an input was written since.
        """
        values = [self.held.get(number) for number in range(len(self.call.joint.names))]
        return [value.unpack() if isinstance(value, SavedTensor) else value for value in values]

    def differentiable(self, gradients: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The gradients of this call, recorded as results of the inputs and tangents that they were computed from."""
        try:
            values = [*self.inputs(), *tangents]
        except RuntimeError as error:
            held = [value.data for value in self.held.values() if isinstance(value, SavedTensor)]
            return Undifferentiable.apply(error, len(gradients), *gradients, *held, *tangents)  # type: ignore[no-untyped-call,no-any-return]
        required = [isinstance(value, torch.Tensor) and value.requires_grad for value in values]
        requiring = (self._required_by_next if self.call.joint.hides_writes else self.call.may_require_grad)(required)
        if not any(requiring):
            return gradients
        if any(map(is_batch_of_gradients, tangents)):
            raise BATCHED_TWICE.error()
        return _Gradients.apply(self, gradients, requiring, *values)  # type: ignore[no-untyped-call,no-any-return]

    def _required_by_next(self, required: Sequence[bool]) -> list[bool]:
        """For each gradient, whether the next order computes it from inputs and tangents that require gradients.

        Without a next order, each gradient may; a use of it raises the reason.
        """
        count = len(self.call.differentiated)
        try:
            joint = self.orders.call(self.order + 1, self.sizes).joint
        except RuntimeError:
            return [True] * count
        wanted = {name for name, requires in zip(self._names(), required, strict=True) if requires}
        pairs = zip(joint.names, joint.gradients.of_inputs, strict=True)
        read = [joint.sources.flowing[n] for name, n in pairs if n is not None and name in wanted]
        tangents = {result: len(joint.names) + number for number, result in enumerate(joint.tangents)}
        return [n in tangents and any(bits >> tangents[n] & 1 for bits in read) for n in range(count)]

    def _names(self) -> list[str]:
        """The names of inputs and tangents of this order in the next one."""
        joint = self.call.joint
        return [*joint.names, *(tangent_name(self.order, number) for number in range(len(joint.tangents)))]

    def _still_alive(self, number: int) -> torch.Tensor:
        """An input that only gradients of the next order are computed from, which must still be alive and unwritten."""
        reference, version = self.weak[number]
        tensor = reference()
        if tensor is None or tensor._version != version or tensor.requires_grad:
            raise VALUE_NOT_KEPT.error(order=self.order + 1, name=self.call.joint.names[number])
        return tensor.detach()  # type: ignore[no-any-return]

    def next_results(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The gradients of this call, computed by the next order from its inputs and tangents."""
        own, call = self.call.joint, self.orders.call(self.order + 1, self.sizes)
        by_name = dict(zip(self._names(), values, strict=True))
        for number, name in enumerate(own.names):
            if number in self.weak and name in call.joint.names:
                by_name[name] = self._still_alive(number)
        inputs = [by_name[name] for name in call.joint.names]
        derivation = Derivation(self.orders, self.order + 1, call, self.random, self.sizes, {})
        with torch.enable_grad():
            return CapturedFunction.apply(derivation, *inputs)  # type: ignore[no-untyped-call,no-any-return]


def differentiable_call(
    orders: Orders, inputs: Sequence[Any], sizes: Sizes, differentiated: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """The results of a program's forward, then those that are wrappers, recorded by autograd.

    ``sizes``: of all inputs of the program; ``differentiated``: inputs that are wrappers, or get such gradients.
    """
    call = orders.first
    with torch.enable_grad():
        copy = _with_storage if call.joint.reads_storages else torch.clone
        copies = {n: copy(inputs[n]) for n in call.copied if isinstance(inputs[n], torch.Tensor)}
        for number in call.joint.detached.difference(copies):  # autograd saves no tensor that is detached later
            value = inputs[number]
            copies[number] = value.detach() if number in call.without_gradient else _alias_of(value)
        random, draws = RandomState(), call.joint.draws
        if draws:
            random = RandomState.now(draws, dict(zip(call.joint.names, inputs, strict=True)))
        derivation = Derivation(orders, 1, call, random, sizes, copies)
        followed = list(inputs)
        for number in call.without_gradient:
            followed[number] = HiddenFromAutograd(inputs[number])
        return CapturedFunction.apply(derivation, *followed, *differentiated)  # type: ignore[no-untyped-call,no-any-return]


class HiddenFromAutograd(NamedTuple):
    """An input that gets no gradient: if autograd saw the tensor, it would run the hooks on its gradient."""

    value: Any


def _with_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in a copy of its storage, at the same offset, which autograd records."""
    storage = tensor.untyped_storage()
    if tensor.layout is not torch.strided or storage.nbytes() == tensor.numel() * tensor.itemsize:
        return tensor.clone()
    copied: torch.Tensor = InMemory.apply(tensor, tensor_at(storage.clone(), Layout.of(tensor)))  # type: ignore[no-untyped-call]
    return copied


class CapturedFunction(torch.autograd.Function):
    """A call of the forward, whose derivative is the backward.

    Behind the forward's inputs come those that are wrappers, behind its results the results that are wrappers.
    """

    @staticmethod
    def forward(ctx: Any, derivation: Derivation, *followed: Any) -> tuple[Any, ...]:
        call = derivation.call
        followed = followed[: len(call.joint.names)]
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
        wrapped = call.joint.gradients.wrapper_results
        parts = {position for wrapper in wrapped for position in wrapper.positions}
        plain = [n for n in range(len(outputs)) if n in parts or n not in call.joint.tangents]
        ctx.mark_non_differentiable(*[outputs[n] for n in plain if isinstance(outputs[n], torch.Tensor)])
        ctx.set_materialize_grads(False)
        return (*outputs, *(wrapper.made(inputs, outputs) for wrapper in wrapped))

    @staticmethod
    @hidden_from_dynamo
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        call: ForwardCall = ctx.call
        joint = call.joint
        incoming = joint.gradients.opened(
            joint.tangents, tangents[: len(joint.layouts)], tangents[len(joint.layouts) :]
        )
        unreached = call.unreached(incoming)  # these get None as in eager: to optimizers, zeros are not the same
        if call.backward is None or len(unreached) == len(call.differentiated):  # the saved tensors may be freed
            return (None,) * (1 + len(joint.names) + len(joint.gradients.of_wrappers))
        saved = iter(_saved_by(ctx))
        values = [next(saved) if value is _TENSOR else value for value in ctx.plain]
        received = [spec.applied_to(tangent) for tangent, spec in zip(incoming, ctx.tangent_specs, strict=True)]
        with torch.no_grad():
            results = called(call.backward, [*values, *received])
        gradients = [None if position is None else results[position] for position in call.gradients]
        if torch.is_grad_enabled():
            joint.gradients.refuse_derivative()
            differentiated = [gradients[n] for n in call.differentiated]
            differentiable = ctx.derivation.differentiable(differentiated, received)
            for number, gradient in zip(call.differentiated, differentiable, strict=True):
                gradients[number] = gradient
        for number in unreached:
            gradients[number] = None
        _write_to(incoming, call.written, results)
        if not keeps_graph():
            ctx.derivation = None
        if not joint.gradients.of_wrappers:
            return None, *gradients
        count = len(joint.names)
        parts_of_gradients = iter(gradients[count:])
        made = [
            wrapper.made(list(itertools.islice(parts_of_gradients, len(wrapper.positions))))
            for wrapper in joint.gradients.of_wrappers
        ]
        return None, *gradients[:count], *made


def _write_to(
    tangents: Sequence[torch.Tensor | None], written: Sequence[int | None], results: Sequence[torch.Tensor]
) -> None:
    """Write to the incoming gradients what the program's own backwards write to them."""
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
        if "second time" in str(error):  # otherwise a saved tensor was written
            raise BACKWARD_TWICE.error() from error
        raise


class _Gradients(torch.autograd.Function):
    """Makes gradients results, to autograd, of the inputs and tangents that they were computed from."""

    @staticmethod
    def forward(
        ctx: Any, derivation: Derivation, gradients: Sequence[torch.Tensor], requiring: Sequence[bool], *values: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.derivation = derivation
        ctx.plain = [_TENSOR if isinstance(value, torch.Tensor) else value for value in values]
        ctx.save_for_backward(*[value for value in values if isinstance(value, torch.Tensor)])
        results = [gradient.detach() for gradient in gradients]
        ctx.mark_non_differentiable(*[r for r, requires in zip(results, requiring, strict=True) if not requires])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @hidden_from_dynamo
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if value is _TENSOR else value for value in ctx.plain]
        required = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad]
        with torch.enable_grad():  # of aliases: autograd must stop here, and not enter the history of the values
            aliases = {number: _alias_of(values[number]) for number in required}
        results = ctx.derivation.next_results([aliases.get(number, value) for number, value in enumerate(values)])
        pairs = [(r, t) for r, t in zip(results, tangents, strict=True) if t is not None and r.requires_grad]
        gradients: list[Any] = [None] * len(values)
        if pairs:
            outs, grad_outs = zip(*pairs, strict=True)
            inputs, create = list(aliases.values()), torch.is_grad_enabled()
            computed = torch.autograd.grad(outs, inputs, grad_outs, allow_unused=True, create_graph=create)
            for number, gradient in zip(required, computed, strict=True):
                gradients[number] = gradient
        return None, None, None, *gradients


class Undifferentiable(torch.autograd.Function):
    """Results whose backward was not captured: it raises the reason or, without a reason, gives no gradients."""

    @staticmethod
    def forward(ctx: Any, reason: Exception | None, count: int, *values: Any) -> tuple[Any, ...]:
        """The first ``count`` values are results, the others the tensors that they were computed from."""
        ctx.reason, ctx.arguments = reason, 2 + len(values)
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values[:count])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        if ctx.reason is not None:
            raise ctx.reason
        return (None,) * ctx.arguments


class InMemory(torch.autograd.Function):
    """A value in the memory of other tensors; to autograd, it is a view that a custom function returned."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        # Autograd makes a view of an argument, with strides of its own in dimensions of one position. What is plain
        # gets its own back by `with_strides`, which knows no wrappers.
        made: torch.Tensor = torch.ops.aten.alias.default(memory) if is_wrapper_class(type(memory)) else memory
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of a tensor; a copy if it is not strided."""
    alias: torch.Tensor = torch.ops.aten.alias.default(tensor) if tensor.layout is torch.strided else tensor.clone()
    return alias


class TangentSpec(NamedTuple):
    """The tangent that the captured backward expects for a result: its layout is the result's, without holes."""

    size: torch.Size
    stride: tuple[int, ...] | None  # None if the result is not strided
    sparse_dim: int | None  # of a result in COO layout
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, result: torch.Tensor, strides: tuple[int, ...] | None) -> TangentSpec:
        """The spec for a result; ``strides``: those that the backward was captured for, if known."""
        stride = None
        if result.layout is torch.strided:
            stride = strides or torch.empty_like(result, device="meta").stride()
        sparse_dim = result.sparse_dim() if result.layout is torch.sparse_coo else None
        return cls(result.size(), stride, sparse_dim, result.dtype, result.device)

    def applied_to(self, tangent: torch.Tensor | None) -> torch.Tensor:
        """A tangent with this layout; zeros for None. A tangent without strides is only coalesced."""
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
        return tangent.permute(order).contiguous().permute(back)  # vmap cannot write to an empty tensor
