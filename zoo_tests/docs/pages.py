"""The pages of the documentation, and the scripts in them.

A python block belongs to the script that the last comment `<!-- script: … -->` above it began. The comment says how the
script runs: `4 ranks`, `1 rank`, `python`, or `command` for one that a reader starts by `booster run` as it stands. A
`py` block is another library's code, whose name is its title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
COMMAND, ALONE = "command", "python"
_BEGIN = re.compile(r"<!-- script: (?P<how>command|python|\d ranks?) -->")
_FENCE = re.compile(r"```(?P<language>\w*)")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"#+ (?P<title>.*)")


@dataclass
class Script:
    """The python blocks of a page that follow each other.

    Attributes:
        page: the file.
        line: where the script begins.
        how: a number of ranks, `COMMAND`, or `ALONE` for a process that is no rank.
        lines: line number in the page -> line of code.
    """

    page: Path
    line: int
    how: str
    lines: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def num_ranks(self) -> int:
        return int(self.how.split()[0])

    @property
    def source(self) -> str:
        """The code, each line where it is in the page, so that a traceback names the page's line."""
        return "\n".join(self.lines.get(number, "") for number in range(1, max(self.lines) + 1)) + "\n"


def scripts_of(page: Path) -> list[Script]:
    """The scripts of a page.

    Raises:
        ValueError: a python block comes before any comment that says how to run it.
    """
    scripts: list[Script] = []
    for number, language, line in _numbered(page):
        begin = _BEGIN.fullmatch(line)
        if language is None and begin:
            scripts.append(Script(page, number, begin["how"]))
        elif language == "python":
            if not scripts:
                raise ValueError(f"{page.name}:{number} is python, but no comment says how to run it")
            scripts[-1].lines[number] = line
    return scripts


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language, with its title if it has one, and text of each fenced block of a page."""
    blocks: list[tuple[str, str]] = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if _FENCE.match(line):
            inside = not inside
            blocks += [(line.removeprefix("```").strip(), "")] if inside else []
        elif inside:
            blocks[-1] = (blocks[-1][0], f"{blocks[-1][1]}{line}\n")
    return blocks


def sentences_of(page: Path) -> Iterator[str]:
    """The sentences of the paragraphs and lists of a page; a term in code, and the text of a link, count as words."""
    text = "\n".join(line for _, language, line in _numbered(page) if language is None)
    for block in re.split(r"\n\s*\n", text.partition("\n---\n")[2] if text.startswith("---\n") else text):
        if block.lstrip().startswith(("|", "#", "<", "![")) or block.startswith("    "):
            continue
        block = re.sub(r"^\s*([-*]|\d+\.)\s+", "\0", block, flags=re.MULTILINE)
        block = re.sub(r"`[^`]*`", "Code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block))
        for part in block.split("\0"):
            yield from re.split(r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z])", part)


def links_of(page: Path) -> list[str]:
    """Targets of the links in the text of a page."""
    return [
        link["target"] for _, language, line in _numbered(page) if language is None for link in _LINK.finditer(line)
    ]


def anchors_of(page: Path) -> set[str]:
    """What a link into the page may name: its headings, as GitHub spells them."""
    headings = [_HEADING.fullmatch(line) for _, language, line in _numbered(page) if language is None]
    titles = [heading["title"].lower() for heading in headings if heading]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


def rows_of(page: Path, first_heading: str) -> list[list[str]]:
    """The rows of the table of a page whose first column is headed `first_heading`, without the heading."""
    rows, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == first_heading:
            inside = True
        elif inside and not cells[0].startswith("---"):
            rows.append(cells)
    return rows


def _numbered(page: Path) -> Iterator[tuple[int, str | None, str]]:
    """Line number, language of the fenced block that the line is in (None for text), line. Fences are left out."""
    language = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence:
            language = fence["language"] if language is None else None
        else:
            yield number, language, line
