"""The Python objects of a program: walked, compared, decomposed, built again."""
