"""``python -m functionalize``: the command line. Invariant: the same as the console script."""

import sys

from functionalize.cli import main

if __name__ == "__main__":
    sys.exit(main())
