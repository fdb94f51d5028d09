"""HTML page that shows the shards of each rank: one row per parameter, one column per rank, one colour per stage."""

from __future__ import annotations

from html import escape
from pathlib import Path

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.inspect.shard_report import ParamShard, RankShards, in_bytes, rows_of

_COLOURS = ("#dbe9f6", "#fde4cc", "#dcefd9", "#eadcf0", "#f8d7da", "#fff3bf", "#d8f1f0", "#e7e1d4")
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; }
th, td { border: 1px solid #ccc; padding: .25em .6em; text-align: left; white-space: nowrap; }
thead th { position: sticky; top: 0; background: #f4f4f4; }
td.none { color: #bbb; text-align: center; }
"""


def write_page(ranks: list[RankShards], title: str, path: Path) -> None:
    """Write the page to a self-contained file.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        path.write_text(page(ranks, title), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); give another path") from error


def page(ranks: list[RankShards], title: str) -> str:
    """Return the page as HTML text."""
    head = "".join(f"<th>rank {each.rank}<br>stage {each.stage}, tp {each.tp_rank}</th>" for each in ranks)
    total = "".join(f"<th>{in_bytes(each.bytes)}</th>" for each in ranks)
    body = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{_shape(full)}</td>{''.join(map(_cell, ranks, pieces))}</tr>"
        for name, full, pieces in rows_of(ranks)
    )
    return (
        f"<!DOCTYPE html>\n<html lang='en'>\n<head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n<table>\n"
        f"<thead><tr><th>parameter</th><th>whole</th>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
        f"<tfoot><tr><th>all of a rank</th><td></td>{total}</tr></tfoot>\n</table>\n</body>\n</html>\n"
    )


def _cell(rank: RankShards, piece: ParamShard | None) -> str:
    if piece is None:
        return "<td class='none'>·</td>"
    cut = "whole" if piece.dim is None else f"dim {piece.dim}"
    colour = _COLOURS[rank.stage % len(_COLOURS)]
    return f"<td style='background:{colour}'>{_shape(piece.shape)} <small>{cut}, {in_bytes(piece.bytes)}</small></td>"


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"
