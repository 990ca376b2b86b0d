"""Check after a build that no page of the site loads anything from another host.

Links that a reader may follow are allowed. Everything that a browser fetches by itself must be part
of the site.
"""

import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# With --strict, mkdocs fails on any warning of its own loggers.
log = logging.getLogger("mkdocs.hooks.offline")

FETCHED = {
    "audio": "src", "embed": "src", "iframe": "src", "image": "href", "img": "src", "input": "src",
    "link": "href", "object": "data", "script": "src", "source": "src", "track": "src",
    "use": "href", "video": "src",
}  # fmt: skip
"""The attribute of each element whose address a browser fetches by itself."""

HARMLESS = {"canonical", "alternate", "next", "prev"}
"""Kinds of `<link>` that browsers do not fetch."""

OUTSIDE = re.compile(r"(?:https?:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", re.IGNORECASE)
BY_SCRIPT = ("mermaid", "arithmatex")
"""Classes for which a script of the theme or of a page fetches a library from another host."""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._style = tag == "style"
        address = values.get(FETCHED.get(tag, ""), "")
        if OUTSIDE.match(address) and not (
            tag == "link" and set(values.get("rel", "").split()) <= HARMLESS
        ):
            self.found.append(f"<{tag}> {address}")
        self.found += [
            f"srcset {part}"
            for part in values.get("srcset", "").split(",")
            if OUTSIDE.match(part.strip())
        ]
        self.found += [f"style {address}" for address in in_style(values.get("style", ""))]
        self.found += [
            f"class {name}" for name in values.get("class", "").split() if name in BY_SCRIPT
        ]
        if "data-md-source" in values or values.get("data-md-component") == "source":
            self.found.append("a repository whose figures the theme would ask for")

    def handle_data(self, data: str) -> None:
        if self._style:
            self.found += [f"style {address}" for address in in_style(data)]

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def in_style(style: str) -> list[str]:
    """Return the addresses of other hosts in a style sheet."""
    return [
        address
        for match in IN_STYLE.findall(style)
        if OUTSIDE.match(address := "".join(match).strip())
    ]


def in_page(page: str) -> list[str]:
    """Return what a browser fetches from other hosts when it opens a page."""
    reader = _Page()
    reader.feed(page)
    return reader.found


def in_site(site: Path) -> list[str]:
    """Return what a browser fetches from other hosts for all files of a site, one line each."""
    found: list[str] = []
    for suffix, look in ((".html", in_page), (".css", in_style), (".svg", in_page)):
        for file in sorted(site.rglob(f"*{suffix}")):
            found += [f"{file.relative_to(site)}: {what}" for what in look(file.read_text("utf-8"))]
    return found


def on_post_build(config: Any) -> None:
    """Check the site; mkdocs calls this after all files are written."""
    for line in in_site(Path(config["site_dir"])):
        log.warning("loaded from another host: %s", line)
