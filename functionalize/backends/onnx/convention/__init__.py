"""What who writes an ONNX file and who runs it agree on: names, sizes, shared memory, first state, in its metadata.

Invariant: what is written is read back equal. Limits: nothing here writes a graph or runs one.
"""
