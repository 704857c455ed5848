"""Doors to private symbols of torch.distributed."""
