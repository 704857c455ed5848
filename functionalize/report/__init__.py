"""One HTML page that shows what became of a program's writes: data in ``model``, looks in ``page``."""

from __future__ import annotations

from functionalize.report.building import Program as Program
from functionalize.report.building import build as build
from functionalize.report.model import Report as Report
from functionalize.report.page import page as page
from functionalize.report.page import write as write
