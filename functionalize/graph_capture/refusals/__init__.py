"""What a capture refuses, found while the program runs or afterwards."""
