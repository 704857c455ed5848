"""What MkDocs needs to know of this repository: links to files outside of docs/, and the form of our docstrings.

Invariant: a link is written as GitHub resolves it. On the site, a link to a file outside of docs/ leads to
`repository/PATH`, a page that shows the file. Limits: text files only; a link to a folder is an error of the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# A fenced block, which has no links, or the target of a link to a file.
LINK = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)$|(?P<before>\]\()(?P<target>[^)#\s:]+)(?P<after>(#[^)\s]*)?\))",
    re.MULTILINE | re.DOTALL,
)
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(`[^`]+`)")  # of Sphinx
LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml"}


def path_in_repository(src_uri: str) -> str:
    """Where the source of a page of the site lies, from the repository's root."""
    return src_uri.removeprefix("repository/") if src_uri.startswith("repository/") else f"docs/{src_uri}"


def path_on_site(path: str) -> str:
    """The page or file of the site that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def target_of(link: re.Match[str], path: str) -> str:
    """The file that a link of a page leads to, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link["target"]))


def targets(path: str) -> Iterator[str]:
    if path.endswith(".md"):
        links = LINK.finditer((ROOT / path).read_text())
        yield from (target_of(link, path) for link in links if link["target"])


def content(path: str) -> str:
    """A file of the repository as Markdown."""
    text = (ROOT / path).read_text()
    return text if path.endswith(".md") else f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, '')}\n{text}````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that the nav names or pages link to, and those that these link to."""
    in_nav = re.findall(r"repository/[\w./-]+", Path(config.config_file_path).read_text())
    waiting = [path_in_repository(uri) for uri in (*in_nav, *(file.src_uri for file in files.documentation_pages()))]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        waiting += targets(path)
        if not path.startswith("docs/"):
            uri = path_on_site(path)
            inclusion = InclusionLevel.INCLUDED if uri in in_nav else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, content=content(path), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead each link to the page or file of the site that has its target."""
    path = path_in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri) or "."

    def led(link: re.Match[str]) -> str:
        if not link["target"]:
            return link[0]
        target = path_on_site(target_of(link, path))
        if files.get_file_from_path(target) is None:
            return link[0]  # MkDocs reports it
        return link["before"] + posixpath.relpath(target, folder) + link["after"]

    return LINK.sub(led, markdown)


class Docstrings(griffe.Extension):
    """Docstrings as the site's parser reads them: `Examples:` is a section of code; Sphinx's roles are plain code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object that is loaded."""
        if obj.docstring is not None:
            text = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = ROLE.sub(r"\1", text)
