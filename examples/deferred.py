"""A model that is too large for this machine: constructed in no time, and one layer of it run.

The weights are those of eager construction: `torch.manual_seed` decides, not what is made real, or in which order.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from functionalize import deferred_init, materialize_module, materialize_tensor


class Layer(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.trunc_normal_(self.norm.bias, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def model(width: int, layers: int) -> nn.Sequential:
    """Layers, one after another."""
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def main() -> None:
    torch.manual_seed(0)
    start = time.perf_counter()
    large = deferred_init(model, 8192, 100)
    last = large[99].get_parameter("down.weight")
    parameters = sum(parameter.numel() for parameter in large.parameters())
    print(f"{parameters / 1e9:.0f} billion parameters, constructed in {time.perf_counter() - start:.1f} s")

    shard = materialize_tensor(last, shard=(0, 3, 64))
    print(f"rank 3 of 64 holds {tuple(shard.shape)} of the last matrix, {tuple(last.shape)}")

    torch.manual_seed(1)
    eager = model(64, 3)
    torch.manual_seed(1)
    small = deferred_init(model, 64, 3)
    for layer in reversed(small):
        materialize_module(layer)
    same = all(torch.equal(one, two) for one, two in zip(eager.parameters(), small.parameters(), strict=True))
    print("Made real from the last layer to the first, equal to eager:", same)


if __name__ == "__main__":
    main()
