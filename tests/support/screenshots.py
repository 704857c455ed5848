"""Takes the pictures of the page on reports: `python -m tests.support.screenshots` writes two reports first.

Invariant: what is shown is what `examples/report.py` writes. Limits: Chromium on PATH; fonts are those of the machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from examples.report import main as write_reports
from tests.support.browser import Browser, installed

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
WIDTH, HEIGHT = 1400, 940


def height_until(selector: str) -> str:
    """An expression: how far down the page an element ends."""
    return f"Math.ceil(document.querySelector({selector!r}).getBoundingClientRect().bottom + scrollY + 18)"


def take(folder: Path, browser: Browser) -> None:
    for name in ("decode", "training"):
        browser.open(folder / f"{name}.html")
        bottom = browser.run(height_until(".cluster[open]"))
        browser.screenshot(
            DOCS / f"report-{name}.png", whole=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": bottom}
        )
        browser.click(".row.write .src")
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=4, y=4)  # nothing is under the pointer
        browser.run("scrollTo(0, document.querySelector('#code').getBoundingClientRect().top + scrollY - 78)")
        browser.until(f"document.querySelector('#code').getBoundingClientRect().top < {HEIGHT / 2}")
        browser.screenshot(DOCS / f"report-{name}-code.png")


def main() -> int:
    program = installed()
    if program is None:
        print("no Chromium on PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, Browser(program, WIDTH, HEIGHT) as browser:
        write_reports(Path(folder))
        take(Path(folder), browser)
    return 0


if __name__ == "__main__":
    sys.exit(main())
