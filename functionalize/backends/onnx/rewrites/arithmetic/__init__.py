"""Rows that compute with numbers, element by element or of many at once, where ONNX or its engine loses some.

Invariant: no module here knows another.
"""
