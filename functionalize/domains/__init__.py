"""Where values live: the tensors domain computes them, other domains record them."""
