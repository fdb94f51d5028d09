"""Hooks of the documentation site: links out of `docs`, which work in a checkout, become text; tables get room.

Cells of tables of text are given the name of their column, so that a narrow screen shows a row as a paragraph.

Browsers break a line behind each hyphen, in `--option` too; options stay in one piece.
"""

from __future__ import annotations

import posixpath
import re

from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[(?P<label>[^\]]+)\]\((?P<target>\.\./[^)\s]*)\)")
_INLINE_CODE = re.compile(r"(?P<block><pre\b.*?</pre>)|<code>(?P<text>[^<]*-[^<]*)</code>", re.DOTALL)
_TABLE = re.compile(r"<table>(?P<rows>.*?)</table>", re.DOTALL)
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_MOST_COLUMNS, _LEAST_TEXT = 7, 40  # of tables that become paragraphs: columns, characters of the longest cell
_OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")


def on_page_content(html: str, **_: object) -> str:
    """Keep each option of a command line in inline code on one line, and name the columns of cells."""

    def kept(code: re.Match) -> str:
        if code["block"]:
            return code[0]
        text = _OPTION.sub(r'<span class="option">\g<0></span>', code["text"])
        return f"<code>{text}</code>"

    return _TABLE.sub(_with_columns, _INLINE_CODE.sub(kept, html))


def _with_columns(table: re.Match) -> str:
    """Return a table whose cells have the name of their column, unless it has many columns, or short cells alone."""
    names = [_TAG.sub("", name).strip() for name in re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    cells = [_TAG.sub("", cell) for cell in re.findall(r"<td\b[^>]*>(.*?)</td>", table[0], re.DOTALL)]
    if len(names) > _MOST_COLUMNS or all(len(cell) < _LEAST_TEXT for cell in cells):
        return table[0]

    def named(row: re.Match) -> str:
        columns = iter(names)
        return re.sub(r"<td\b", lambda _: _cell(next(columns, "")), row[0])

    return f"<table data-stacked>{_ROW.sub(named, table['rows'])}</table>"


def _cell(column: str) -> str:
    return f'<td data-label="{column.replace(chr(34), "&quot;")}"' if column else "<td"


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
