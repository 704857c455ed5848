"""Which tensors share memory: layouts, views, writes. Independent of tracing and of the transform."""
