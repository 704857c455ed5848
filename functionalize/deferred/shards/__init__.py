"""Parts of deferred tensors, computed without the rest."""
