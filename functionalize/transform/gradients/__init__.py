"""Notes that autograd needs beyond the graph."""
