"""Rows of what neural networks are made of: activations, attention, convolutions, pooling and recurrent layers."""
