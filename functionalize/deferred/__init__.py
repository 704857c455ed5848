"""Construction recorded on fake tensors, and run later: the whole of it, a part, or one rank's shard."""
