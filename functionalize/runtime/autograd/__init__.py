"""Gradients of a captured program: its joint graph, partitioned, behind one autograd node."""
