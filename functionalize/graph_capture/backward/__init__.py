"""The gradients of a capture: the joint graph, and which tensors have gradients."""
