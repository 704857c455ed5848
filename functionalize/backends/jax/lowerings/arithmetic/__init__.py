"""Rows that compute with numbers, element by element and over dimensions, with torch's promotion and derivatives.

Other folders of rows compute by these; none of these knows the others.
"""
