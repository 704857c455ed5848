"""Deferred initialization under the names of torchdistx, for code that looks for that package, such as torch's FSDP.

Torch looks when ``torch.distributed.fsdp`` is imported: put the module under that name before.

>>> import sys
>>> import functionalize.torchdistx
>>> sys.modules["torchdistx"] = functionalize.torchdistx

Invariant: names and signatures are torchdistx's. Limits: those of :mod:`functionalize.deferred`.
"""

from functionalize.torchdistx import deferred_init, fake

__all__ = ["deferred_init", "fake"]
