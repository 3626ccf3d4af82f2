"""The report of a comparison: report.md, report.html and the pictures, from its raw figures alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepspeed_amsp.compare import charts, tables
from deepspeed_amsp.compare.analysis import NOISY, State, Table, analyse
from deepspeed_amsp.compare.document import (
    Block,
    Bullets,
    Cell,
    Grid,
    Heading,
    Image,
    Listing,
    Paragraph,
    to_html,
    to_markdown,
)
from deepspeed_amsp.compare.results import DDP, FSDP2, HSDP, LIMIT, MICS, ZERO1, ZERO3, Results, Setup
from deepspeed_amsp.compare.verdicts import Outcome, ablation, verdicts

TITLE = "Comparison of data-parallel strategies"
HEADLINE = (ZERO1, ZERO3, MICS, HSDP, FSDP2, DDP, LIMIT)
"""Baselines that the first paragraph names."""


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write report.md, report.html and the charts into ``folder``, which is made if need be; the files written.

    Without matplotlib the report has no charts, and says so.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = analyse(results)
    drawn = [charts.draw(table, results.setup, folder) if charts.available() else {} for table in found]
    blocks = list(_blocks(results, found, drawn))
    markdown, page = folder / "report.md", folder / "report.html"
    markdown.write_text(to_markdown(blocks), encoding="utf-8")
    page.write_text(to_html(TITLE, blocks), encoding="utf-8")
    return [markdown, page, *(path for pictures in drawn for path in pictures.values())]


def _blocks(results: Results, found: Sequence[Table], drawn: Sequence[dict[str, Path]]) -> Iterator[Block]:
    setup = results.setup
    yield Heading(TITLE, 1)
    yield Paragraph(f"{setup.date}, {setup.host}. {charts.compute_note(setup).capitalize()}.")
    yield from _summary(found)
    if not charts.available():
        yield Paragraph("No charts: they need matplotlib (pip install 'deepspeed_amsp[demo]').", "warning")
    for table, pictures in zip(found, drawn, strict=True):
        yield from _setting(table, pictures, setup)
    yield from _targets(found, setup)
    yield from _comparability(setup)
    yield from _setup(setup)
    yield from _failures(found)


# ---- what was found ---------------------------------------------------------------------------------------------


def _summary(found: Sequence[Table]) -> Iterator[Block]:
    if not found:
        yield Paragraph("No strategy has been measured.", "warning")
    for table in found:
        yield Paragraph(_headline(table))
        yield from (Paragraph(text, "warning") for text in _warnings(table))


def _headline(table: Table) -> str:
    best = table.best_plan
    if best is None:
        return f"{table.setting}: no plan of AMSP is part of the ranking."
    words = [
        f"{ratio.median:.2f}x that of {other.title}"
        for name in HEADLINE
        if (ratio := best.ratios.get(name)) is not None and (other := table.row(name)) is not None
    ]
    against = f" Its throughput is {'; '.join(words)}." if words else ""
    return f"{table.setting}: the quickest plan of AMSP is {best.title}, {best.step_s.median:.3f} s a step.{against}"


def _warnings(table: Table) -> Iterator[str]:
    if table.noisy:
        row, baseline, ratio = table.noisy[0]
        other = table.row(baseline)
        yield (
            f"{table.setting}: the machine was too noisy. {len(table.noisy)} paired ratios spread by {NOISY:.0%} or "
            f"more, the worst is {row.title} against {other.title if other else baseline}: "
            f"{ratio.low:.2f}x to {ratio.high:.2f}x."
        )
    if table.ranked and all(ratio.spread is None for row in table.ranked for ratio in row.ratios.values()):
        yield f"{table.setting}: measured in one round only, so nobody knows how far its ratios spread."
    said = {
        State.WRONG: "is WRONG: its losses are not those of DDP, so it is not ranked",
        State.FAILED: "failed; its first traceback stands at the end",
    }
    yield from (f"{table.setting}: {row.title} {said[row.state]}." for row in table.rows if row.state in said)
    if any(row.state is State.UNCHECKED for row in table.rows):
        yield f"{table.setting}: no run of DDP to hold the losses against, so nobody knows whether they are right."
    if not table.losses_tell:
        yield (
            f"{table.setting}: the losses say little: even the limit, which does not communicate, differs from DDP by "
            "no more than the tolerance. Train more steps, or lower loss_tolerance."
        )
    for row in table.rows:
        if row.bytes_agree is False and row.sent_bytes is not None and row.theory_bytes is not None:
            yield (
                f"{table.setting}: {row.title} sent {row.sent_bytes / charts.MB:.2f} MB a node and step, theory says "
                f"{row.theory_bytes / charts.MB:.2f} MB."
            )


def _setting(table: Table, pictures: dict[str, Path], setup: Setup) -> Iterator[Block]:
    yield Heading(str(table.setting))
    if "throughput" in pictures:
        yield Image(pictures["throughput"], f"Throughput of each strategy, {table.setting}")
    yield tables.speed(table, setup)
    yield tables.ratios(table, setup)
    if (ablated := ablation(table)) is not None:
        yield tables.three_way(ablated, table, setup)
    if "timeline" in pictures:
        yield Image(pictures["timeline"], f"One step of each strategy, {table.setting}")
    yield tables.communication(table, setup)
    if "memory" in pictures:
        yield Image(pictures["memory"], f"Memory and throughput of each strategy, {table.setting}")
    yield tables.memory(table, setup)


def _targets(found: Sequence[Table], setup: Setup) -> Iterator[Block]:
    held = verdicts(found, setup)
    if not held:
        return
    counts = {outcome: sum(verdict.outcome is outcome for verdict in held) for outcome in Outcome}
    yield Heading("Targets")
    yield Paragraph(", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count) + ".")
    yield tables.targets(held, found)


# ---- how it was found -------------------------------------------------------------------------------------------


def _comparability(setup: Setup) -> Iterator[Block]:
    yield Heading("What was emulated, and what is not comparable")
    if setup.device != "cpu":
        yield Paragraph(
            "Nothing was emulated: real accelerators and the cluster's own network. Ratios hold for this model, this "
            "cluster and these versions; a strategy that suits another network may lose here."
        )
        return
    network = (
        "The cluster was emulated on one machine: a node is a network namespace whose link is held to the given rate, "
        "so collectives, bytes and their waiting times are real."
        if setup.emulated
        else "All ranks talked over the loopback interface of one machine, without any limit: ratios say nothing about "
        "slow links."
    )
    yield Paragraph(
        f"{network} Compute time was emulated: each block of the model sleeps in forward and backward as long as an "
        "accelerator would compute, on top of a real small training step; losses, optimizer and communication are "
        "real. Step times are not those of any GPU; only ratios within one table mean something. Peaks of memory are "
        "those of CPU processes."
    )
    yield Paragraph(
        "A lead over DeepSpeed or FSDP2 has two parts. One is bytes: what crosses nodes. The other is overlap that "
        "they have on GPUs and not on a CPU, which knows no streams: there the reductions of ZeRO-1 and ZeRO-2, the "
        "reduce-scatter of ZeRO-3 and MiCS, and all collectives of FSDP2 block the computation. So the tables also "
        "show torch DDP, which overlaps on CPUs, our own engine with overlaps switched off, and our engine with the "
        "factors of ZeRO-1, ZeRO-3 and MiCS. Against a ZeRO-1 that overlaps as on GPUs the lead would be smaller: "
        "computed for 2 nodes x 2 ranks at 500 Mbit/s at most about 1.45x, and about 1.15x against one that hides all"
        " that can be hidden. Updates are real and run on the cores that all ranks share: who updates everything on "
        "every rank, as DDP does, pays more for it than on GPUs; the phases of a step say how much."
    )
    yield Paragraph(
        "The limit trains each rank alone: its losses are not those of the others, it is no strategy, and nothing "
        "can be quicker."
    )


def _setup(setup: Setup) -> Iterator[Block]:
    yield Heading("Set-up")
    facts = {"date": setup.date, "host": setup.host, "device": setup.device, **setup.versions}
    facts["cluster"] = f"{setup.nodes} nodes x {setup.ranks_per_node} ranks"
    if setup.peak_flops is not None:
        facts["peak of one accelerator"] = f"{setup.peak_flops / 1e12:g} TFLOP/s"
    facts["loss tolerance"] = f"{setup.loss_tolerance:g} from DDP in any step"
    yield Grid("Where it ran", ["what", "value"], [[Cell(name), Cell(value)] for name, value in facts.items()], 2)
    yield Paragraph("What was done so that the comparison is fair:")
    yield Bullets(
        [
            *setup.fairness,
            "ratios are taken between neighbours in time: runs of the same round; the spread is their range over "
            "their median",
        ]
    )
    yield Listing(json.dumps(setup.config, indent=2), fold="The whole configuration")


def _failures(found: Sequence[Table]) -> Iterator[Block]:
    failed = [(table, row) for table in found for row in table.rows if row.errors]
    if not failed:
        return
    yield Heading("Failures")
    for table, row in failed:
        yield Listing(row.errors[0].strip(), fold=f"{row.title}, {table.setting}: the first traceback")
