"""The Python objects of a program: how they are walked, compared, decomposed and rebuilt."""
