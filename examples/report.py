"""Reports of two real programs: a KV-cache decode step of Llama and a training step of ResNet.

Writes a page for each into the folder that is named on the command line, or into the working directory. The pages need
nothing else: open them in a browser, or send them to someone. The models are those of transformers at toy size with
random weights; nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    StaticCache,
)

from functionalize import capture

Program = tuple[Callable[..., Any], tuple[Any, ...]]


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
    cache = StaticCache(config=config, max_cache_len=16)

    def decode(token: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(token, past_key_values=cache).logits
        return logits

    decode(torch.tensor([[1, 2, 3]]), cache)  # a prompt; it allocates the cache as well
    return decode, (torch.tensor([[7]]), cache)


def resnet_training() -> Program:
    """Forward, backward and SGD with momentum: parameters, momenta and BatchNorm's statistics are written."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model = ResNetForImageClassification(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(images).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(2, 3, 32, 32), torch.tensor([1, 0]))
    train(*batch)  # the first step allocates the momenta
    return train, batch


PROGRAMS = {
    "decode": ("Llama, one decoding step with a static KV cache", llama_decode),
    "training": ("ResNet, one training step with BatchNorm and momentum", resnet_training),
}


def main(folder: Path) -> int:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, make) in PROGRAMS.items():
        func, inputs = make()
        program = capture(func, inputs)
        page = program.report(folder / f"{name}.html", title=title)
        print(f"{page}: {len(program.mutations)} writes to inputs and state")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
