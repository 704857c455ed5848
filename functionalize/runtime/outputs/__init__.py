"""The changes that a call makes to Python objects, as the program made them to the objects of the capture."""
