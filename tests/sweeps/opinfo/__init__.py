"""A sweep over torch's operator database: every op, mutating in every way, against eager."""
