"""Constructions that are recorded on fake tensors and run later: as a whole, in part, or one rank's shard."""
