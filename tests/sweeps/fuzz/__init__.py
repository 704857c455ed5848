"""Random programs held against eager: generated as data, run in every mode, shrunk when they fail."""
