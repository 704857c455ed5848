"""``python -m functionalize`` and the console script ``functionalize``.

Invariant: without the packages of the extra `cli` the answer is one line that names them. Limits: torch is imported
by the commands that need it, when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    try:
        from functionalize.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("click", "rich"):
            raise
        advice = f"the command line needs the package {missing}: pip install 'functionalize[cli]'"
        print(f"functionalize: {advice}", file=sys.stderr)
        return 1
    return app.run(sys.argv[1:] if arguments is None else arguments)
