"""The rows of the ONNX route, by families of operators, and the operators that are written in ONNX's own.

Invariant: what has no row is left to torch's exporter, and to its decompositions.
"""

# The order counts: of two rows for one operator the first to be imported is asked first, so that whole numbers come
# before `matrices`, and what knows an operator before `types`, which knows its types alone.
from functionalize.backends.onnx.rewrites import convolutions, layouts

# isort: split
from functionalize.backends.onnx.rewrites.arithmetic import elementwise, integers, numbers, reductions, scans, special

# isort: split
from functionalize.backends.onnx.rewrites import matrices, python_numbers, randomness, recurrent, searching, types
from functionalize.backends.onnx.rewrites.registry import BY_TORCH as BY_TORCH
from functionalize.backends.onnx.rewrites.registry import BY_TORCH_IF_WIDE as BY_TORCH_IF_WIDE
from functionalize.backends.onnx.rewrites.registry import FIRST_ALONE as FIRST_ALONE
from functionalize.backends.onnx.rewrites.registry import REWRITES as REWRITES
from functionalize.backends.onnx.rewrites.registry import either as either

TRANSLATIONS = {
    op: translation
    for family in (convolutions, matrices, python_numbers, recurrent, scans)
    for op, translation in family.TRANSLATIONS.items()
}
