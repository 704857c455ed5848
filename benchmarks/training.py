"""Training through a captured program and through Dynamo: bytes kept for the backward, and time, beside `aot_eager`.

Four ways to compute one loss and its gradients: the module itself (`eager`), `torch.compile(backend="aot_eager")`,
a call of `capture(module, (), batch)` (`call`), and `torch.compile(backend="functionalize")` (`dynamo`). All see the
same weights and batch, in training mode without dropout, and give the same gradients, which is checked. The compiled
ones are compiled as one graph each, or not at all (`fullgraph=True`).

Kept for the backward: what a forward leaves behind, in bytes of storages, each counted once, without those of
parameters, buffers and the batch. Two ways to see them are joined: `saved_tensors_hooks` around the forward show what
operators and `ctx.save_for_backward` keep, as long as the loss holds it; and the attributes of the nodes of the
autograd graph show what a function puts on its `ctx` itself. Beside it stands a count that knows nothing of autograd:
the bytes that the process allocates in a forward and does not free while the loss lives.

Time: forward, backward, and gradients set to None, in one interleaved run.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.profiler_legacy import profile  # the other one logs each use to stderr
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from benchmarks.measure import environment, interleaved, table
from functionalize import capture

Batch = dict[str, Tensor]
Forward = Callable[[], Tensor]

SYSTEMS = ("eager", "aot_eager", "call", "dynamo")
OURS = ("call", "dynamo")
ROWS, TOKENS, WORDS, WIDTH, LAYERS = 4, 128, 512, 128, 4


class Loss(torch.nn.Module):
    """A model of transformers as a function of a batch that returns the loss alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


# Models


def _text(*, mask: bool = False) -> Batch:
    ids = torch.randint(0, WORDS, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if mask:  # by position: transformers would inspect the values of any other mask, or of none
        batch["attention_mask"] = torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    return batch


def _bert() -> tuple[torch.nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 4 * WIDTH}
    sizes |= {"vocab_size": WORDS, "num_attention_heads": 4, "max_position_embeddings": TOKENS}
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **dropout)), _text(mask=True)


def _gpt2() -> tuple[torch.nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": WORDS, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": LAYERS}
    sizes |= {"n_head": 4, "bos_token_id": None, "eos_token_id": None}
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False))
    model.loss_type = "ForCausalLM"  # else it looks for one at the first call, and says so
    return model, _text(mask=True)


def _resnet() -> tuple[torch.nn.Module, Batch]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], layer_type="basic")
    labels = torch.randint(0, 2, (ROWS,))
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(ROWS, 3, 96, 96), "labels": labels}


def _llama_checkpointed() -> tuple[torch.nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 4 * WIDTH}
    sizes |= {"vocab_size": WORDS, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=TOKENS, use_cache=False))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, _text()


MODELS: Mapping[str, Callable[[], tuple[torch.nn.Module, Batch]]] = {
    "bert": _bert,
    "resnet": _resnet,
    "gpt2": _gpt2,
    "llama-checkpointed": _llama_checkpointed,
}


# Systems


@dataclass(frozen=True)
class Trained:
    """A model, its batch, and the ways to compute its loss."""

    module: torch.nn.Module
    batch: Batch
    forwards: Mapping[str, Forward]

    @classmethod
    def of(cls, name: str, remove: str) -> Trained:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        module = Loss(model).train()
        torch._dynamo.reset()
        calls: dict[str, Callable[..., Any]] = {
            "eager": module,
            "aot_eager": torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False),
            "call": capture(module, (), batch, remove=remove),
            "dynamo": torch.compile(
                module, backend="functionalize", options={"remove": remove}, fullgraph=True, dynamic=False
            ),
        }
        return cls(module, batch, {system: partial(call, **batch) for system, call in calls.items()})

    def step(self, system: str) -> None:
        """Forward and backward, and no gradients left."""
        self.forwards[system]().backward()
        self.module.zero_grad(set_to_none=True)

    def gradients(self, system: str) -> list[Tensor]:
        """The loss and the gradients of all parameters."""
        parameters = list(self.module.parameters())
        return list(_loss_and_gradients(self.forwards[system](), parameters))

    def given(self) -> set[int]:
        """The storages that are there before a forward."""
        tensors = [*self.module.parameters(), *self.module.buffers(), *self.batch.values()]
        return set(map(_storage, tensors))


def _loss_and_gradients(loss: Tensor, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    yield loss.detach()
    yield from torch.autograd.grad(loss, parameters)


def graphs_and_check(model: Trained) -> dict[str, int]:
    """Check that all gradients are those of eager; the graphs that Dynamo makes in this and in what is measured."""
    expected = model.gradients("eager")
    graphs = {}
    for system in SYSTEMS:
        counters.clear()
        torch.testing.assert_close(model.gradients(system), expected, rtol=1e-3, atol=1e-5)
        model.step(system)
        kept_bytes(model, system)
        graphs[system] = counters["stats"]["unique_graphs"]
    return {system: graphs[system] for system in ("aot_eager", "dynamo")}


# Bytes


class _Saved:
    """A tensor that autograd has saved, alive as long as autograd holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def kept_bytes(model: Trained, system: str) -> int:
    """Bytes of what a forward keeps for its backward."""
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        packed = _Saved(tensor)
        saved.append(weakref.ref(packed))
        return packed

    def unpack(packed: _Saved) -> Tensor:
        return packed.tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model.forwards[system]()
    gc.collect()
    alive = [packed.tensor for packed in (reference() for reference in saved) if packed is not None]
    alive += [tensor for node in _nodes(loss) for tensor in _held(vars(node) if hasattr(node, "__dict__") else ())]
    storages = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in alive}
    given = model.given()
    return sum(size for storage, size in storages.items() if storage not in given)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nodes(loss: Tensor) -> Iterator[Any]:
    """The nodes of the autograd graph of a loss."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def _held(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: in containers, and in the fields of dataclasses."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _held(list(vars(leaf).values()))


def allocated_bytes(model: Trained, system: str) -> int:
    """Bytes that the process has more, at the end of a forward whose loss is held, than at its beginning."""
    gc.collect()
    gc.disable()
    with profile(profile_memory=True) as recorded:
        loss = model.forwards[system]()
    gc.enable()
    del loss
    return sum(event.self_cpu_memory_usage for event in recorded.key_averages())


# Tables


def figures(name: str, remove: str, rounds: int) -> tuple[list[list[str]], dict[str, list[float]]]:
    """The rows of one model, bytes and time, and the ratios of ours to aot_eager."""
    model = Trained.of(name, remove)
    graphs = graphs_and_check(model)
    if any(count != 1 for count in graphs.values()):
        print(f"{name}: not one graph each, so that they do not compare alike: {graphs}")
    kept = {system: float(kept_bytes(model, system)) for system in SYSTEMS}
    allocated = {system: float(allocated_bytes(model, system)) for system in SYSTEMS}
    timings = interleaved({system: partial(model.step, system) for system in SYSTEMS}, rounds)
    seconds = {system: timing.median for system, timing in timings.items()}
    rows, ratios = [], {}
    for measured, scale, form in ((kept, 1024, ",.0f"), (allocated, 1024, ",.0f"), (seconds, 1e-3, ",.1f")):
        against = [measured[system] / measured["aot_eager"] for system in OURS]
        values = [f"{measured[system] / scale:{form}}" for system in SYSTEMS]
        rows.append([name, *values, *(f"{ratio:.2f}" for ratio in against)])
        ratios[len(rows)] = against
    return rows, {"bytes": ratios[1], "time": ratios[3]}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--remove",
        choices=("mutations", "mutations_and_views"),
        default="mutations",
        help="aot_eager keeps views; with the second, ours run copies in their place",
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    sizes = f"{ROWS} x {TOKENS} tokens, {LAYERS} layers of {WIDTH}"
    print(f"{environment()}; {sizes}; remove={options.remove!r}; medians of {options.rounds} rounds")
    rows, ratios = zip(*(figures(name, options.remove, options.rounds) for name in options.models), strict=True)
    titles = ("KiB kept for backward", "KiB allocated and not freed", "ms forward + backward")
    for title, lines in zip(titles, zip(*rows, strict=True), strict=True):
        print(f"\n{table([title, *SYSTEMS, *(f'{ours}/aot_eager' for ours in OURS)], lines)}")
    worst = {key: [max(column) for column in zip(*(r[key] for r in ratios), strict=True)] for key in ("bytes", "time")}
    print(
        f"\nworst of ours / aot_eager: bytes {worst['bytes'][0]:.2f} (call), {worst['bytes'][1]:.2f} (dynamo); "
        f"time {worst['time'][0]:.2f} (call), {worst['time'][1]:.2f} (dynamo)"
    )


if __name__ == "__main__":
    main()
