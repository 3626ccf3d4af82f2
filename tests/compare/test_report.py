"""The report of made-up results, with a strategy that failed, one that is wrong and one that is noisy."""

from __future__ import annotations

import re
import struct
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deepspeed_amsp.compare import charts
from deepspeed_amsp.compare.charts import MOST_LEVELS, _apart, _levels
from deepspeed_amsp.compare.document import Bullets, Cell, Grid, Listing, Paragraph, to_html, to_markdown
from deepspeed_amsp.compare.report import write_report
from deepspeed_amsp.compare.results import Results, Slice
from tests.compare.figures import mixed, rounds, run, setup

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("comparison") / "new" / "folder"
    files = write_report(mixed(), made)
    assert sorted(made.iterdir()) == sorted(files)
    return made


@pytest.fixture(scope="module")
def markdown(folder: Path) -> str:
    return (folder / "report.md").read_text(encoding="utf-8")


def rows(markdown: str, title: str) -> list[list[str]]:
    """Cells of all table rows whose first cell is ``title``."""
    lines = [line for line in markdown.splitlines() if line.startswith(f"| {title} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_tables_hold_the_values_of_the_analysis(markdown: str) -> None:
    speed, ratio, sent, memory = rows(markdown, "**AMSP (1,1,2x1)**")
    assert speed[1:] == ["1.000", "1.000-1.000", "256", "5.0000", "0.0000", "right"]
    # Against DDP, HSDP (noisy), ZeRO-1 and the limit; ZeRO-3 is wrong, MiCS failed.
    assert ratio[1:] == ["1.21x (2%)", "**2.00x (40%)**", "2.00x (0%)", "0.90x (0%)"]
    assert sent[1:] == ["41.70", "41.50", "+0.5%", "0", "30", "50", "300", "600", "100"]
    assert memory[1:] == ["27.0", "27.0", "166.0", "220.0", "400.0"]
    assert rows(markdown, "ZERO1")[2][1:4] == ["70.00", "62.00", "**+12.9%**"]
    assert rows(markdown, "LIMIT")[1][1:4] == ["0.01", "0.00", "+0.01 MB"]


def test_the_first_lines_say_what_was_found_and_what_is_wrong(markdown: str) -> None:
    start = markdown[: markdown.index("![Throughput")]
    assert "the quickest plan of AMSP is AMSP (1,1,2x1), 1.000 s a step. Its throughput is 2.00x that of ZERO1" in start
    assert "the machine was too noisy. 6 paired ratios spread by 10% or more" in start
    assert "ZERO3 is WRONG: its losses are not those of DDP, so it is not ranked" in start
    assert "MICS failed" in start and "one round only" not in start
    assert "ZERO1 sent 70.00 MB a node and step, theory says 62.00 MB" in start


def test_the_wrong_and_the_failed_are_not_ranked(markdown: str) -> None:
    (wrong,) = [cells for cells in rows(markdown, "ZERO3") if "WRONG" in cells[-1]]
    assert wrong[1] == "0.500" and wrong[-2:] == ["**0.1000**", "**WRONG**"]
    assert rows(markdown, "MICS") == [["MICS", "-", "-", "-", "-", "-", "**failed**"]]
    assert "vs ZERO3" not in markdown and "vs MICS" not in markdown
    assert "boom <here>" in markdown, "the traceback, as it is"


def test_targets_stand_in_a_table(markdown: str) -> None:
    (zero1,) = [line for line in markdown.splitlines() if line.startswith("| the best AMSP plan against ZERO1")]
    assert [cell.strip() for cell in zero1.strip("|").split("|")][1:] == [
        "AMSP (1,1,2x1)", "500", "1.90x", "2.000x (0%)", "met",
    ]  # fmt: skip
    assert "| the best AMSP plan against HSDP | AMSP (1,1,2x1) | 500 | 1.50x | **2.000x (40%)** | met |" in markdown
    assert "| the best AMSP plan against MICS | AMSP (1,1,2x1) | 500 | 1.50x | - | not measured |" in markdown


def test_it_says_what_was_emulated_and_each_measure(markdown: str) -> None:
    assert "What was emulated, and what is not comparable" in markdown
    tables = [line for line in markdown.splitlines() if line.startswith("*") and line.endswith("*")]
    assert len(tables) >= 5
    assert all("compute time is emulated" in line for line in tables if "Where it ran" not in line)
    assert "- gradients are clipped at 1 by every strategy\n- one \\<reduce-scatter> for all\n" in markdown
    assert "| deepspeed | 0.19.8 |" in markdown and '"dim": 448' in markdown


class Links(HTMLParser):
    """Collects everything that a page would load, and checks that tags are closed in order."""

    void = ("meta", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_beside_it(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.open == []
    assert len(links.loaded) == 3 and all(one.startswith("data:image/png;base64,iVBOR") for one in links.loaded)
    assert "://" not in page and "@import" not in page and "url(" not in page
    assert "boom &lt;here&gt;" in page and "one &lt;reduce-scatter&gt; for all" in page
    assert '<td class="text ours">AMSP (1,1,2x1)</td>' in page and '<td class="bad">WRONG</td>' in page


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(PNG)
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_charts_are_pictures_with_something_on_them(folder: Path) -> None:
    from matplotlib.image import imread

    pictures = sorted(folder.glob("*.png"))
    assert [path.name for path in pictures] == [
        f"{kind}-m1-500mbit.png" for kind in ("memory", "throughput", "timeline")
    ]
    for path in pictures:
        assert min(size(path)) > 300
        image = imread(path)[..., :3]
        for name in (charts.OURS, charts.THEIRS):  # bars, points and names of both families
            colour = [int(name[start : start + 2], 16) / 255 for start in (1, 3, 5)]
            assert (abs(image - colour).max(axis=-1) < 0.02).sum() > 50


def test_every_setting_has_its_own_pictures(tmp_path: Path) -> None:
    """Results of a machine without emulation, a counter, timelines and memory, as a foreign harness might give."""
    bare: dict[str, Any] = {"sent_bytes_per_node": None, "memory": None, "timeline": None, "phases_s": None}
    gpus = setup(device="H200", emulated=False, flops_per_token=6e9, peak_flops=1e12)
    runs = [run("zero1", 1.0, nic_mbit=None, micro_batches=m, **bare) for m in (1, 4)]
    runs.append(run("amsp", 1.0, nic_mbit=None, title="$_$ <b>", **bare))
    files = write_report(Results(gpus, runs), tmp_path)
    assert [path.name for path in files] == ["report.md", "report.html", "throughput-m1.png", "throughput-m4.png"]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| ZERO1 | 1.000 | 1.000-1.000 | 256 | 64 | 38.4% | 5.0000 | - | unchecked |" in text
    assert "measured in one round only" in text
    assert "Nothing was emulated" in text and "Targets" not in text
    assert "no run of DDP to hold the losses against" in text


def test_nothing_measured_and_no_matplotlib_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(Results(setup(), []), tmp_path)
    assert "No strategy has been measured" in (tmp_path / "report.md").read_text(encoding="utf-8")
    monkeypatch.setattr(charts, "available", lambda: False)
    files = write_report(Results(setup(), rounds("ddp", 1.0)), tmp_path)
    assert [path.name for path in files] == ["report.md", "report.html"]
    assert "No charts: they need matplotlib" in files[0].read_text(encoding="utf-8")


def test_text_is_never_markup() -> None:
    nasty = "a|b *c* <script>x</script> `d`\n```\n# e"
    blocks = [Grid("t", ["h"], [[Cell(nasty)]]), Bullets([nasty]), Listing(nasty), Paragraph(nasty, "warning")]
    assert "<script" not in to_html("<t>", blocks)
    text = to_markdown(blocks)
    assert re.search(r"^\| a\\\|b \\\*c\\\* \\<script>x", text, re.MULTILINE)
    assert "\n````\n" in text, "a fence longer than what stands in it"
    with pytest.raises(ValueError, match="2 cells under 1 columns"):
        Grid("t", ["h"], [[Cell("1"), Cell("2")]])


def test_names_of_neighbours_are_moved_apart() -> None:
    moved = _apart([0.1, 0.11, 0.5, 0.96, 0.97], 0.1)
    assert moved[0] == 0.1 and moved[2] == 0.5
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(moved)) and moved[-1] <= 0.97


def test_what_is_in_flight_together_is_drawn_side_by_side() -> None:
    one, two, three = Slice("reduce", "1", 0, 2), Slice("reduce", "2", 1, 3), Slice("reduce", "3", 2, 4)
    assert _levels([three, two, one]) == [[one, three], [two]]
    many = [Slice("gather", str(number), 0, 1 + number) for number in range(40)]
    assert len(_levels(many)) == MOST_LEVELS and sum(map(len, _levels(many))) == 40
