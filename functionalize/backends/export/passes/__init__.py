"""What is done to an exported program as a whole: each module is a pass, and gives a program that computes the same."""
