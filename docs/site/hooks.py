"""Hooks of the documentation site: links out of `docs`, which work in a checkout, become text; tables get room.

Browsers break a line behind each hyphen, in `--option` too; options stay in one piece.
"""

from __future__ import annotations

import posixpath
import re

from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[(?P<label>[^\]]+)\]\((?P<target>\.\./[^)\s]*)\)")
_INLINE_CODE = re.compile(r"(?P<block><pre\b.*?</pre>)|<code>(?P<text>[^<]*-[^<]*)</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")


def on_page_content(html: str, **_: object) -> str:
    """Keep each option of a command line in inline code on one line."""

    def kept(code: re.Match) -> str:
        if code["block"]:
            return code[0]
        text = _OPTION.sub(r'<span class="option">\g<0></span>', code["text"])
        return f"<code>{text}</code>"

    return _INLINE_CODE.sub(kept, html)


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
