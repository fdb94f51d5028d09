"""Recording of `terminal.svg`: what two commands of the README print, line by line as it came.

    python docs/figures/record_terminal.py [COMMAND ...]

Run it in a checkout, with the README's script as `script.py`. Each command runs in a terminal of its own. The picture
shows it being typed, then its lines; pauses are shortened. It plays once, in any browser and without a script; who asks
for less motion sees all lines at once.
"""

from __future__ import annotations

import os
import pty
import re
import sys
import time
from html import escape
from pathlib import Path

COMMANDS = ("make bert", "booster run --nproc-per-node 4 script.py")
COLUMNS, SIZE, LINE = 110, 13, 19  # characters of a line, font size and distance of lines in pixels
LONGEST_PAUSE_S, TYPING_S = 0.8, 1.2
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_STYLE = """
  text { font: %dpx ui-monospace, Menlo, Consolas, monospace; fill: #d8dee9; white-space: pre }
  .command { fill: #8fd18a; font-weight: 600 }
  .line { opacity: 0; animation: show 0.01s forwards }
  @keyframes show { to { opacity: 1 } }
  @media (prefers-reduced-motion: reduce) { .line { animation-delay: 0s !important } }
"""


def record(command: str) -> list[tuple[float, str]]:
    """Run a command in a terminal; return its lines, each with the seconds since the start.

    Raises:
        RuntimeError: the command failed.
    """
    start, pieces = time.monotonic(), list[tuple[float, str]]()

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 65536)
        pieces.append((time.monotonic() - start, data.decode(errors="replace")))
        return data

    status = pty.spawn(["sh", "-c", f"stty rows 40 cols {COLUMNS}; {command}"], read)
    if status:
        raise RuntimeError(f"{command!r} ended with {os.waitstatus_to_exitcode(status)}")
    lines, rest = [], ""
    for seconds, text in pieces:
        *whole, rest = (rest + text).split("\n")
        lines += [(seconds, _last_state(line)) for line in whole]
    return lines


def _last_state(line: str) -> str:
    """Return what a line showed last; a progress bar returns to its start each time, and may end empty."""
    states = _CONTROL.sub("", line).split("\r")
    return next((state for state in reversed(states) if state.strip()), "")


def drawn(recordings: dict[str, list[tuple[float, str]]]) -> str:
    """Return the recordings of all commands as one SVG."""
    rows, clock = [], 0.0
    for command, lines in recordings.items():
        rows.append((clock, "command", f"$ {command}"))
        clock, before = clock + TYPING_S, 0.0
        for seconds, line in lines:
            clock, before = clock + min(seconds - before, LONGEST_PAUSE_S), seconds
            rows.append((clock, "", line[:COLUMNS]))
        rows.append((clock, "", ""))
        clock += TYPING_S
    texts = [
        f'  <text class="line {kind}" x="14" y="{(number + 1) * LINE + 8}" style="animation-delay: {delay:.2f}s">'
        f"{escape(line)}</text>"
        for number, (delay, kind, line) in enumerate(rows)
        if line
    ]
    width, height = round(COLUMNS * SIZE * 0.605) + 28, len(rows) * LINE + 20
    label = escape(" and ".join(recordings))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">',
            f"<style>{_STYLE % SIZE}</style>",
            f'  <rect width="{width}" height="{height}" rx="8" fill="#1f242d"/>',
            *texts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    picture = drawn({command: record(command) for command in sys.argv[1:] or COMMANDS})
    Path(__file__).with_name("terminal.svg").write_text(picture, encoding="utf-8")
