"""Rows of linear algebra: products of matrices, their factors, and what is solved by these."""
