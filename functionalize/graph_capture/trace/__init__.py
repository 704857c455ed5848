"""What a capture needs while the program runs on fake tensors."""
