"""What docs/ and the README show is true: blocks are legal, Python compiles, messages exist, links lead somewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_amsp.compare.launch import free_port
from deepspeed_amsp.config import check_stage, preflight, read_block
from deepspeed_amsp.plan.resolve import make_plan
from tests.cli.test_trace import run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.joinpath("docs").glob("*.md"))]
GPUS_PER_NODE, NODES = 8, 16
"""The cluster on which factors of the examples must be legal."""

FOREIGN = ("a variable needed for gradient computation", "The size of tensor a (0) must match",
           "stage3_gather_16bit_weights_on_model_save")  # fmt: skip
"""Messages on the page that are not this package's."""


def fences(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the code blocks of a page in ``language``."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(rf"^ *```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield text[: found.start()].count("\n") + 1, textwrap.dedent(found[1])


def examples(language: str) -> list[Any]:
    return [pytest.param(text, id=f"{page.name}:{line}") for page in PAGES for line, text in fences(page, language)]


@pytest.mark.parametrize("text", examples("json"))
def test_blocks_are_legal(text: str) -> None:
    """Whole objects and lines of one, each with whatever stage it names."""
    stripped = text.strip()
    if not stripped.startswith("{") and '"amsp"' not in stripped:
        return  # lines of a block, one by one
    config = json.loads(stripped if stripped.startswith("{") else "{" + stripped.rstrip(",") + "}")
    if "amsp" not in config:
        return
    preflight(config)
    block = read_block(config)
    assert block is not None
    if "zero_optimization" in config and block.sharding != "search":
        gpus = block.topology.gpus_per_node or GPUS_PER_NODE
        sharding = make_plan(block, gpus * NODES, gpus).sharding
        check_stage(config, sharding.stage, sharding.stage_reason)


@pytest.mark.parametrize("text", examples("python"))
def test_python_compiles(text: str) -> None:
    ast.parse(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert page.parent.joinpath(target).exists(), target


def _said() -> str:
    """Everything that the package's strings say, a line each; what is filled in is left out as "…"."""
    said = []
    for path in ROOT.joinpath("deepspeed_amsp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                said.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
            elif isinstance(node, ast.ClassDef):
                said.append(node.name)
    return "\n".join(said)


def test_the_messages_of_the_troubleshooting_page_exist() -> None:
    """By their words; on the page, "…" stands for what differs from run to run."""
    said = _said()
    page = ROOT.joinpath("docs", "troubleshooting.md").read_text(encoding="utf-8")
    messages = [row[1] for row in re.finditer(r"^\| `([^`]+)`", page, re.MULTILINE)]
    assert len(messages) > 15
    longest = [
        max(re.split(r"…|: ", message), key=len).strip() for message in messages if not message.startswith(FOREIGN)
    ]
    assert [words for words in longest if words not in said] == []


def _commands(page: Path) -> list[tuple[str, list[str]]]:
    """Each command of the console blocks with the lines of its output that are shown."""
    commands: list[tuple[str, list[str]]] = []
    for _, text in fences(page, "console"):
        for line in text.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            else:
                commands[-1][1].append(line)
    return commands


@pytest.mark.skipif(os.environ.get("AMSP_NIGHTLY") != "1", reason="takes a minute: AMSP_NIGHTLY=1")
def test_a_newcomers_walk_through_the_tutorial() -> None:
    """Command by command in this folder, but for the installation; step 2 gives step 1's losses."""
    commands = _commands(ROOT / "docs" / "tutorial.md")
    install, walk = commands[:3], commands[3:]
    assert "pip install" in install[1][0] and len(walk) == 9
    runs = ROOT / "runs"
    for command, shown in walk:
        line = re.sub(r"^deepspeed ", f"deepspeed --master_port {free_port()} ", command)
        line = re.sub(r"^amsp ", "python -m deepspeed_amsp.cli ", line)
        done = run(["bash", "-c", line], ROOT, DS_ACCELERATOR="cpu")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        for words in [*shown, *(["exposed"] if "cli.trace" in command else [])]:
            assert words in done.stdout, f"{command}\n{done.stdout}"
    losses = {}
    for name in ("zero3", "amsp"):
        rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row["loss"] for row in rows if "loss" in row]
    assert len(losses["zero3"]) == 6
    assert losses["amsp"] == pytest.approx(losses["zero3"], rel=2e-3)
