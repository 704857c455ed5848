"""PyTorch's operator list, native_functions.yaml, as data: where it is, its entries, and the ops derived from these.

Invariant: all of it is the list's own text; what we make of it stands in the folder above. Limits: no torch.
"""
