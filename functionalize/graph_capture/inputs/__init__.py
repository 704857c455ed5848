"""The inputs of a capture: arguments, state, hyperparameters, sizes."""
