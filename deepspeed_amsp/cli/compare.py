"""``amsp compare``: the same training by many strategies, one after another, and what each was worth.

    amsp compare --config configs/ab.yaml
    amsp compare --config configs/ab.yaml --only amsp --only zero1 --rounds 5
    amsp compare --from runs/compare/results.jsonl                           draw the report again

Exit code 0: measured, whatever came out; 1: wrong input; 2: nothing could be measured; 130: interrupted.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from deepspeed_amsp.cli.options import fail

if TYPE_CHECKING:
    from rich.progress import Progress

    from deepspeed_amsp.compare.config import CompareConfig
    from deepspeed_amsp.compare.ranks import Order
    from deepspeed_amsp.compare.results import Run

BAD_INPUT, NOTHING, INTERRUPTED = 1, 2, 130
CONFIG_HELP = "What is compared, where: a YAML file such as configs/ab.yaml (docs/compare.md)."


def compare(
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP)] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this strategy; may be given several times.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How often each is measured, instead of the file's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results, instead of the file's.")] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: draw the report of this results.jsonl again.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="On GPUs: DeepSpeed's hostfile; without one, this machine's GPUs.")
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="On GPUs: peak of one in bf16, for MFU; known for common ones.")
    ] = None,
) -> None:
    """Train the same model by many strategies and report throughput, bytes, memory and losses side by side."""
    if saved is not None:
        if config is not None or only or any(given is not None for given in (rounds, hostfile, peak_tflops)):
            fail("compare", "--from draws what was measured, and takes no other option than --out", BAD_INPUT)
        _draw(saved, out or saved.parent)
        return
    if config is None:
        fail("compare", "name what is to be compared: --config FILE, or --from results.jsonl", BAD_INPUT)
    if rounds is not None and rounds < 1:
        fail("compare", f"--rounds must be at least 1, got {rounds}", BAD_INPUT)
    if peak_tflops is not None and not peak_tflops > 0:
        fail("compare", f"--peak-tflops must be above 0, got {peak_tflops:g}", BAD_INPUT)
    _measure(_read(config, only or [], rounds, out), hostfile, peak_tflops)


def _read(path: Path, wanted: list[str], rounds: int | None, out: Path | None) -> CompareConfig:
    from deepspeed_amsp.compare import config as file

    try:
        found = file.load(path)
        if wanted:
            found = file.only(found, wanted)
    except file.CompareConfigError as error:
        fail("compare", str(error), BAD_INPUT)
    changes = {"rounds": rounds, "out": None if out is None else str(out)}
    return found.model_copy(update={name: value for name, value in changes.items() if value is not None})


def _measure(config: CompareConfig, hostfile: Path | None, peak_tflops: float | None) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from deepspeed_amsp.compare.config import CompareConfigError
    from deepspeed_amsp.compare.gpus import GpuHarness, on_gpus
    from deepspeed_amsp.compare.harness import Harness

    accelerated = on_gpus()
    if hostfile is not None and not accelerated:
        fail("compare", "--hostfile is for GPUs, and this machine has none", BAD_INPUT)
    if peak_tflops is not None and not accelerated:
        fail("compare", "--peak-tflops is for GPUs, and this machine has none", BAD_INPUT)
    out = Path(config.out)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as progress:
        shown = _Shown(progress)
        try:
            if accelerated:
                GpuHarness(config, out, shown, hostfile=hostfile, peak_tflops=peak_tflops).run()
            else:
                Harness(config, out, shown).run()
        except CompareConfigError as error:
            fail("compare", str(error), BAD_INPUT)
        except RuntimeError as error:
            if not shown.ended_runs:
                fail("compare", str(error), NOTHING)
            typer.echo(f"amsp compare: ended early: {error}", err=True)
        except KeyboardInterrupt:
            typer.echo("amsp compare: interrupted; ranks and cluster are gone, what was measured is kept", err=True)
            raise typer.Exit(INTERRUPTED) from None
    _draw(out / "results.jsonl", out)


def _draw(path: Path, folder: Path) -> None:
    """Write the report and print its tables."""
    from deepspeed_amsp.compare.report import write_report
    from deepspeed_amsp.compare.results import ResultsError, read

    try:
        results = read(path)
        if not results.runs:
            fail("compare", f"{path}: nothing was measured", NOTHING)
        written = write_report(results, folder)
    except (ResultsError, OSError) as error:
        fail("compare", str(error), BAD_INPUT)
    typer.echo((folder / "report.md").read_text(encoding="utf-8"))
    typer.echo(f"amsp compare: {', '.join(str(file) for file in written)}")


class _Shown:
    """The progress display: a bar, and a line for every run that has ended."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting the ranks", total=None)
        self.ended_runs = 0

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def began(self, order: Order, done: int, total: int) -> None:
        rate = "" if order.nic_mbit is None else f", {order.nic_mbit:g} Mbit/s"
        what = f"round {order.round + 1}, M={order.micro_batches}{rate}: {order.strategy}"
        self._progress.update(self._task, completed=done, total=total, description=what)

    def ended(self, run: Run) -> None:
        self.ended_runs += 1
        took = f"{median(run.step_s):.3f} s a step" if run.error is None else f"FAILED: {_last_line(run.error)}"
        rate = "" if run.nic_mbit is None else f" {run.nic_mbit:g} Mbit/s"
        line = f"round {run.round + 1}{rate} M={run.micro_batches} {run.title:<45} {took}"
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _last_line(text: str) -> str:
    """The error at the end of the first traceback, else the first line."""
    lines = text.strip().splitlines()
    named = [line for line in lines if line and not line[0].isspace() and "Error" in line.partition(":")[0]]
    return (named or lines or [""])[0][:200]
