"""The main job on two real programs: a KV-cache decode step of Llama and a training step of ResNet.

For each it prints the graph of the program as written, the graph after `functionalize`, which inputs are
written back, and the comparison with eager; it fails if an output or an input after the call differs. The
models are those of transformers at toy size with random weights; nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch.func import functional_call
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    StaticCache,
)

from functionalize import functionalize
from functionalize.verify import assert_functional
from functionalize.verify.observation import clone_inputs

aten = torch.ops.aten
# The schema of this op denies that it writes the running statistics.
HIDDEN_WRITES = (aten.native_batch_norm.default,)


@dataclass(frozen=True)
class Program:
    """A function and the inputs that it is called with; it may write into any tensor of them."""

    title: str
    step: Callable[..., Any]
    inputs: tuple[Any, ...]


def llama_decode() -> Program:
    """One token through Llama: keys, values and the length counter of each layer are written in place."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    slots = 16

    def step(weights: dict[str, Any], token: torch.Tensor, caches: list[dict[str, Any]]) -> torch.Tensor:
        past = StaticCache(config=config, max_cache_len=slots)
        for layer, tensors in zip(past.layers, caches, strict=True):
            vars(layer).update(tensors, is_initialized=True, dtype=torch.float32, device=token.device)
        with torch.no_grad():
            logits: torch.Tensor = functional_call(model, weights, (token,), {"past_key_values": past}).logits
        return logits

    def tokens_so_far() -> torch.Tensor:
        full = torch.zeros(1, 2, slots, 8)
        full[:, :, :5] = torch.randn(1, 2, 5, 8)
        return full

    caches = [
        {"keys": tokens_so_far(), "values": tokens_so_far(), "cumulative_length": torch.tensor(5)}
        for _ in range(config.num_hidden_layers)
    ]
    weights = {**dict(model.named_buffers()), **{n: w.detach() for n, w in model.named_parameters()}}
    return Program("Llama, one decoding step with a static KV cache", step, (weights, torch.tensor([[7]]), caches))


def resnet_training() -> Program:
    """Forward, backward and SGD with momentum: parameters, momenta and BatchNorm's statistics are written."""
    config = ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    )
    model = ResNetForImageClassification(config).train()

    def step(
        weights: dict[str, Any],
        momenta: dict[str, Any],
        statistics: dict[str, Any],
        images: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        logits = functional_call(model, {**weights, **statistics}, (images,)).logits
        loss = torch.nn.functional.cross_entropy(logits, labels)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        optimizer = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)
        for name, gradient in zip(weights, gradients, strict=True):
            weights[name].grad = gradient
            optimizer.state[weights[name]]["momentum_buffer"] = momenta[name]
        optimizer.step()
        return loss.detach()

    weights = {name: weight.detach().requires_grad_() for name, weight in model.named_parameters()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    return Program(
        "ResNet, one training step with BatchNorm and SGD with momentum",
        step,
        (weights, momenta, dict(model.named_buffers()), torch.randn(2, 3, 32, 32), torch.tensor([1, 0])),
    )


def is_op(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def is_write_back(node: Node) -> bool:
    """Whether this is the epilogue's `copy_` onto an input."""
    target = node.args[0] if node.target is aten.copy_.default else None
    return isinstance(target, Node) and target.op == "placeholder"


def mutates(node: Node) -> bool:
    """Whether the node writes into one of its arguments."""
    op: Any = node.target
    return is_op(node) and (op._schema.is_mutable or op in HIDDEN_WRITES)


def is_view(node: Node) -> bool:
    op: Any = node.target
    return bool(op.is_view and not mutates(node))


def count(graph: Graph) -> str:
    nodes = list(filter(is_op, graph.nodes))
    views, back = sum(map(is_view, nodes)), sum(map(is_write_back, nodes))
    return f"{len(nodes)} nodes: {sum(map(mutates, nodes)) - back} write, {views} are views, {back} write back"


def show(graph: Graph, keep: Callable[[Node], bool], ends: int = 4) -> None:
    """Print the first and last few of the nodes that `keep` selects, and how many lie between them."""
    nodes = list(filter(is_op, graph.nodes))
    kept = list(filter(keep, nodes))
    chosen = {*kept[:ends], *kept[-ends:]}
    skipped = 0
    for node in nodes:
        if node not in chosen:
            skipped += 1
            continue
        if skipped:
            print(f"    ... {skipped} more")
        arguments = [str(value) for value in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
        line = f"    {node.name} = {node.target}({', '.join(arguments)})"
        print(line if len(line) <= 110 else line[:107] + "...")
        skipped = 0
    if skipped:
        print(f"    ... {skipped} more")


def show_write_backs(graph: Graph, program: Program) -> set[int]:
    """Print the inputs that are written back; returns their positions among the leaves."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    positions = [placeholders.index(node.args[0]) for node in graph.nodes if is_write_back(node)]
    names = [
        f"{argument}{pytree.keystr(path)} {list(leaf.shape)}"
        for argument, value in zip(signature(program.step).parameters, program.inputs, strict=True)
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
    ]
    for position in positions[:6]:
        print(f"    {names[position]}")
    if len(positions) > 6:
        print(f"    ... {len(positions) - 6} more")
    return set(positions)


def compare(program: Program, graph: Callable[..., Any], written: set[int]) -> bool:
    """Run eager and the graph on copies of the inputs; print and judge outputs and inputs after the call."""
    eager_inputs, graph_inputs = clone_inputs(program.inputs), clone_inputs(program.inputs)
    eager_output = program.step(*eager_inputs)
    with torch.no_grad():  # gradients are nodes of the graph; its write-backs go to leaves that require grad
        graph_output = graph(*graph_inputs)
    before, eager, ours = map(pytree.tree_leaves, (program.inputs, eager_inputs, graph_inputs))
    changed = {i for i, (old, new) in enumerate(zip(before, eager, strict=True)) if not torch.equal(old, new)}
    difference = max(float((a - b).detach().abs().max()) for a, b in zip(eager, ours, strict=True))
    print(f"    output: largest difference {float((eager_output - graph_output).abs().max()):.1e}")
    print(f"    {len(changed)} inputs changed in eager: largest difference {difference:.1e} after the call")
    print(f"    inputs changed in eager but not written back: {len(changed - written)}")
    torch.testing.assert_close(graph_output, eager_output)
    for want, got in zip(eager, ours, strict=True):
        torch.testing.assert_close(got, want)
    return changed <= written


def demonstrate(program: Program) -> bool:
    print(f"\n=== {program.title} ===\n")
    before = make_fx(program.step, tracing_mode="fake")(*clone_inputs(program.inputs))
    print(f"As written: {count(before.graph)}")
    show(before.graph, mutates)

    pure = functionalize(program.step, remove="mutations_and_views")
    after = make_fx(pure, tracing_mode="fake")(*clone_inputs(program.inputs))
    assert_functional(after, remove="mutations_and_views")
    print(f"\nFunctionalized: {count(after.graph)}")
    sources = {node.args[1] for node in after.graph.nodes if is_write_back(node)}
    show(after.graph, lambda node: node in sources or is_write_back(node))

    print("\nWritten back:")
    written = show_write_backs(after.graph, program)
    print("\nBeside eager:")
    return compare(program, after, written)


def main() -> int:
    torch.manual_seed(0)
    equal = [demonstrate(build()) for build in (llama_decode, resnet_training)]
    print("\nBoth graphs are pure and equal to eager." if all(equal) else "\nDIFFERENT FROM EAGER")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
