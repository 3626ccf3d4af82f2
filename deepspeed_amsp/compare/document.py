"""A report as a list of blocks, and its two forms: Markdown, and one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True)
class Cell:
    """Of a table. tone: "good", "bad", "ours", "quiet", or "" for a plain one."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Heading:
    """level: 1 is the title of the whole."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """tone "warning" sets it apart."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table. caption: stands above it. texts: so many columns, from the first, are text; the others numbers."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)
    texts: int = 1

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"table {self.caption!r}: {len(row)} cells under {len(self.head)} columns")


@dataclass(frozen=True)
class Image:
    """A PNG file, which stands beside the Markdown and inside the HTML."""

    path: Path
    alt: str


@dataclass(frozen=True)
class Listing:
    """Text as it is. fold: the HTML shows only this line until somebody opens it."""

    text: str
    fold: str = ""


Block: TypeAlias = "Heading | Paragraph | Bullets | Grid | Image | Listing"


# ---- Markdown ---------------------------------------------------------------------------------------------------


def to_markdown(blocks: Sequence[Block]) -> str:
    """Pictures are named by their file names: they must lie in the folder of the Markdown."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}"
        case Paragraph():
            return f"> **{_safe(block.text)}**" if block.tone == "warning" else _safe(block.text)
        case Bullets():
            return "\n".join(f"- {_safe(item)}" for item in block.items)
        case Image():
            return f"![{block.alt}]({block.path.name})"
        case Listing():
            title = f"{_safe(block.fold)}\n\n" if block.fold else ""
            fence = "```"
            while fence in block.text:
                fence += "`"
            return f"{title}{fence}\n{block.text}\n{fence}"
        case Grid():
            head = _markdown_row([Cell(text) for text in block.head])
            rule = "|" + "---|" * block.texts + "---:|" * (len(block.head) - block.texts)
            return "\n".join([f"*{_safe(block.caption)}*", "", head, rule, *map(_markdown_row, block.rows)])


def _markdown_row(cells: Sequence[Cell]) -> str:
    texts = []
    for cell in cells:
        text = _safe(cell.text).replace("|", "\\|")
        texts.append(f"**{text}**" if text and cell.tone in ("bad", "ours") else text)
    return f"| {' | '.join(texts)} |"


def _safe(text: str) -> str:
    """Text in which nothing is markup; on one line."""
    for character in ("\\", "*", "_", "`", "<"):
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


# ---- HTML -------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1.5rem; }
h1 { font-size: 1.7rem; } h2 { margin-top: 2.4rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
p, li { max-width: 56rem; }
.warning { background: #fff4e5; border-left: 4px solid #d55e00; padding: .6rem .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .4rem 0 1.2rem; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; color: #555; padding: .3rem 0; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
.text { text-align: left; } th { border-bottom: 2px solid #bbb; }
.good { color: #00704a; } .bad { color: #b00020; font-weight: 600; } .ours { color: #b34a00; font-weight: 600; }
.quiet { color: #888; }
img { max-width: 100%; height: auto; display: block; margin: .8rem 0; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .82rem; line-height: 1.4; }
summary { cursor: pointer; }
"""


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One file: styles and pictures are inside, nothing is loaded."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
        case Paragraph():
            return f"<p{_class(block.tone)}>{html.escape(block.text)}</p>"
        case Bullets():
            return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in block.items) + "</ul>"
        case Image():
            data = base64.b64encode(block.path.read_bytes()).decode("ascii")
            return f'<img alt="{html.escape(block.alt)}" src="data:image/png;base64,{data}">'
        case Listing():
            text = f"<pre>{html.escape(block.text)}</pre>"
            return f"<details><summary>{html.escape(block.fold)}</summary>{text}</details>" if block.fold else text
        case Grid():
            head = _html_row("th", [Cell(text) for text in block.head], block.texts)
            rows = "".join(_html_row("td", row, block.texts) for row in block.rows)
            caption = f"<caption>{html.escape(block.caption)}</caption>"
            return f'<div class="scroll"><table>{caption}\n{head}{rows}</table></div>'


def _html_row(tag: str, cells: Sequence[Cell], texts: int) -> str:
    made = [
        f"<{tag}{_class('text' if column < texts else '', cell.tone)}>{html.escape(cell.text)}</{tag}>"
        for column, cell in enumerate(cells)
    ]
    return f"<tr>{''.join(made)}</tr>\n"


def _class(*names: str) -> str:
    text = " ".join(filter(None, names))
    return f' class="{text}"' if text else ""
