"""Hooks of the documentation site: links out of `docs`, which work in a checkout, become text; tables get room."""

from __future__ import annotations

import posixpath
import re

from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[(?P<label>[^\]]+)\]\((?P<target>\.\./[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace links to files of the repository that are no pages by the names of these files.

    Pages of results, which are mostly wide tables, get the room of the table of contents.
    """
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("hide", ["toc"])
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def written(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["target"].partition("#")[0]))
        if target.startswith("docs/"):
            return link[0]
        return link["label"] if target in link["label"] else f"{link['label']} (`{target}`)"

    return _LINK.sub(written, markdown)
