"""Captures a program: one run on fake tensors, ended as a graph and its metadata."""
