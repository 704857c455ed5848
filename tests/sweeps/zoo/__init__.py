"""Models that nobody here wrote, of transformers, timm, diffusers and torchvision, captured and held against eager.

`python -m tests.sweeps zoo --help`. Invariant: nothing is downloaded; weights are random, configurations the libraries'
own ones made small by general rules.
"""
