"""Recording ops as graph nodes on fake tensors."""
