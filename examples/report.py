"""Reports of two real programs: a KV-cache decode step of Llama and a training step of ResNet.

Captures the programs of `demo.py` and writes a page for each into the folder that is named on the command line, or
into the working directory. The pages need nothing else: open them in a browser, or send them to someone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.demo import llama_decode, resnet_training
from functionalize import capture


def main(folder: Path) -> int:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (("decode", llama_decode), ("training", resnet_training)):
        program = make()
        captured = capture(program.step, *program.inputs)
        page = captured.report(folder / f"{name}.html", title=program.title)
        print(f"{page}: {len(captured.mutations)} writes to inputs and state")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
