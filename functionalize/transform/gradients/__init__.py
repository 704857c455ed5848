"""What autograd needs to know beyond the graph."""
