"""Parts of deferred tensors, computed alone."""
