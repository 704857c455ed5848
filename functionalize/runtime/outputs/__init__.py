"""What a call leaves and returns: the same in its own objects as the program left in those of the capture."""
