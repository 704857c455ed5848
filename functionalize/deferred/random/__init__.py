"""Random numbers of deferred tensors."""
