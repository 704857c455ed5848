"""Generates the tables of functionalize from PyTorch's native_functions.yaml. Commands: see __main__."""
