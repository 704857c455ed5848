"""Time per decode step of a model with a key-value cache: our files and functions, beside what torch's exporters make.

The model writes the row of a position into its caches. Ours keeps them as state: bound by ONNX Runtime, donated by JAX.
`torch.onnx.export` has no state, so it gets the model rewritten by hand, with caches as arguments and results; these
are threaded as arrays, and by IO binding. All are checked beside eager first, over five steps.

    python benchmarks/decode.py --slots 2048 --rounds 15

JAX's incumbent is the model written for it by hand: torchax 0.0.13 does not import beside torch 2.13. Limits: CPU, one
thread of ONNX Runtime and of torch; XLA takes what it wants, and CPU time counts.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import environment, interleaved, table
from functionalize import capture

Step = Callable[[Tensor, Tensor], Any]


class Decoder(nn.Module):
    """Attention over a cache, a few layers of it; the caches are written in place."""

    def __init__(self, slots: int, layers: int = 2, heads: int = 8, width: int = 64) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        size = heads * width
        self.maps = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(layers))
        kept = [nn.Parameter(torch.zeros(heads, slots, width), requires_grad=False) for _ in range(2 * layers)]
        self.kept = nn.ParameterList(kept)

    def attend(self, qkv: Tensor, cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], position: Tensor) -> Tensor:
        """One layer, over what ``cache`` gives for a new key and a new value."""
        query, key, value = qkv.view(3, self.heads, 1, self.width).unbind(0)
        keys, values = cache(key, value)
        seen = torch.arange(keys.size(1)) <= position
        scores = (query @ keys.transpose(1, 2) / self.width**0.5).masked_fill(~seen, float("-inf"))
        found: Tensor = (scores.softmax(-1) @ values).reshape(1, -1)
        return found

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer, linear in enumerate(self.maps):

            def cache(key: Tensor, value: Tensor, layer: int = layer) -> tuple[Tensor, Tensor]:
                keys, values = self.kept[2 * layer], self.kept[2 * layer + 1]
                keys[:, position] = key
                values[:, position] = value
                return keys, values

            x = x + self.attend(linear(x), cache, position)
        return x


class ByHand(nn.Module):
    """The same without state: what one writes for an exporter that has none."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, position: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        new = []
        for layer, linear in enumerate(self.model.maps):

            def cache(key: Tensor, value: Tensor, layer: int = layer) -> tuple[Tensor, Tensor]:
                pair = [
                    old.index_copy(1, position, part)
                    for old, part in zip(caches[2 * layer : 2 * layer + 2], (key, value), strict=True)
                ]
                new.extend(pair)
                return pair[0], pair[1]

            x = x + self.model.attend(linear(x), cache, position)
        return x, *new


def ours_onnx(model: Decoder, example: Any, folder: Path) -> Step:
    import onnxruntime

    from functionalize.backends import onnx

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnx.load(capture(model, example).to_onnx(folder / "ours.onnx"), sess_options=options)


def _by_torch(model: Decoder, example: Any, folder: Path) -> Any:
    import onnxruntime

    caches = tuple(one.detach().clone() for one in model.kept)
    path = folder / "torch.onnx"
    torch.onnx.export(ByHand(model).eval(), (*example, *caches), path, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]), caches


def torch_onnx(model: Decoder, example: Any, folder: Path) -> Step:
    """The caches go through `session.run` as arrays."""
    session, caches = _by_torch(model, example, folder)
    names = [one.name for one in session.get_inputs()]
    kept = [one.numpy() for one in caches]

    def step(x: Tensor, position: Tensor) -> Tensor:
        given = dict(zip(names, [x.numpy(), position.numpy(), *kept], strict=True))
        result, *kept[:] = session.run(None, given)
        return torch.from_numpy(result)

    return step


def torch_onnx_bound(model: Decoder, example: Any, folder: Path) -> Step:
    """The caches stay in the engine's own memory."""
    import onnxruntime

    session, caches = _by_torch(model, example, folder)
    names = [one.name for one in session.get_inputs()]
    outputs = [one.name for one in session.get_outputs()]
    kept = [onnxruntime.OrtValue.ortvalue_from_numpy(one.numpy()) for one in caches]

    def step(x: Tensor, position: Tensor) -> Tensor:
        binding = session.io_binding()
        for name, value in zip(names, (x, position), strict=False):
            binding.bind_cpu_input(name, value.numpy())
        for name, value in zip(names[2:], kept, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        result, *kept[:] = binding.get_outputs()
        return torch.from_numpy(result.numpy())

    return step


def ours_jax(model: Decoder, example: Any, folder: Path, *, donate: bool = True) -> Step:
    from functionalize.backends.jax import from_torch, to_torch

    program = capture(model, example).to_jax()
    state, jitted = [program.initial_state], program.jit(donate=donate)

    def step(x: Tensor, position: Tensor) -> Tensor:
        state[0], result = jitted(state[0], from_torch(x), from_torch(position))
        return to_torch(result)

    return step


def undonated(model: Decoder, example: Any, folder: Path) -> Step:
    return ours_jax(model, example, folder, donate=False)


def by_hand_jax(model: Decoder, example: Any, folder: Path) -> Step:
    """The model as one writes it for JAX, its caches donated."""
    import jax
    import jax.numpy as jnp

    from functionalize.backends.jax import from_torch, to_torch

    weights: Any = [tuple(map(from_torch, linear.parameters())) for linear in model.maps]
    kept = [[from_torch(one) for one in model.kept]]

    def pure(caches: Any, weights: Any, x: Any, position: Any) -> Any:
        new = []
        for layer, (weight, bias) in enumerate(weights):
            query, *parts = (x @ weight.T + bias).reshape(3, model.heads, 1, model.width)
            pairs = zip(caches[2 * layer :], parts, strict=False)
            new += [jax.lax.dynamic_update_slice_in_dim(old, part, position[0], axis=1) for old, part in pairs]
            keys, values = new[-2:]
            scores = query @ keys.transpose(0, 2, 1) / model.width**0.5
            scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -jnp.inf)
            x = x + (jax.nn.softmax(scores, axis=-1) @ values).reshape(1, -1)
        return new, x

    jitted = jax.jit(pure, donate_argnums=0)

    def step(x: Tensor, position: Tensor) -> Tensor:
        kept[0], result = jitted(kept[0], weights, from_torch(x), from_torch(position.int()))
        return to_torch(result)

    return step


GROUPS: dict[str, dict[str, Callable[[Decoder, Any, Path], Step]]] = {
    "onnxruntime": {
        "functionalize, state bound in place": ours_onnx,
        "torch.onnx, rewritten by hand, arrays": torch_onnx,
        "torch.onnx, rewritten by hand, bound": torch_onnx_bound,
    },
    "jax": {
        "functionalize, state donated": ours_jax,
        "functionalize, not donated": undonated,
        "jax.numpy, written by hand, donated": by_hand_jax,
    },
}


def differs(step: Step, model: Decoder, slots: int) -> bool:
    """Whether five steps are not those of eager."""
    for position in range(5):
        x, at = torch.randn(1, model.heads * model.width), torch.tensor([position * 7 % slots])
        if not torch.allclose(step(x, at), model(x, at), rtol=1e-3, atol=1e-4):
            return True
    return False


def main() -> int:
    """Print a table; 1 where a system is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=2048, help="of the caches")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{environment()}; 4 caches of {options.slots * 8 * 64 * 4 / 2**20:.0f} MiB")
    wrong = 0
    for engine, systems in GROUPS.items():
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            torch.manual_seed(0)
            model = Decoder(options.slots).eval()
            example = torch.randn(1, model.heads * model.width), torch.tensor([1])
            calls: dict[str, Step] = {}
            for name, make in systems.items():
                with contextlib.redirect_stdout(io.StringIO()):
                    step = make(copy.deepcopy(model), example, Path(folder))
                if differs(step, copy.deepcopy(model), options.slots):
                    print(f"{name} is not eager's")
                    wrong = 1
                calls[name] = step
            calls["eager torch"] = copy.deepcopy(model)
            timed = {name: functools.partial(step, *example) for name, step in calls.items()}
            times = interleaved(timed, options.rounds, in_a_row=4)
        first = next(iter(systems))
        rows = [[name, f"{t.median * 1e3:.2f}", f"{t.median / times[first].median:.2f}"] for name, t in times.items()]
        print(table([engine, "ms a step", "ratio"], rows), end="\n\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
