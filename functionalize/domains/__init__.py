"""Where the values of a program live. The tensors domain computes them through the modes below ours."""
