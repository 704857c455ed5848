"""Rows that say where elements are: views as copies, reads and writes at indices, and orders."""
