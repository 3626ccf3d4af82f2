"""``amsp plan``: which sharding factors a job should use on a cluster, and why. Needs neither GPUs nor torch.

Exit codes: 0, a plan fits; 1, wrong input, in one line; 2, nothing fits, with what would.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from deepspeed_amsp.cli.options import fail

if TYPE_CHECKING:
    from deepspeed_amsp.cli.plan_inputs import FromConfig
    from deepspeed_amsp.plan.api import Request
    from deepspeed_amsp.plan.factors import ShardFactor, Sharding
    from deepspeed_amsp.plan.report import Table
    from deepspeed_amsp.plan.solver import Problem, Search
    from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec

BAD_INPUT, NOTHING_FITS = 1, 2

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Click's, wherever this version of typer keeps it."""


class OneLine(TyperCommand):
    """A command that reports an unknown option in one line and with its own exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, or end."""
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            fail("plan", error.format_message(), BAD_INPUT)


def _option(metavar: str, help_text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help_text, show_default=False)


Text = str | None
MODEL_HELP = "llama-7b, -13b, -30b, -65b; the path of a Hugging Face config.json; or module:factory."
BATCH_HELP = "Tokens of a step on all GPUs; one micro-batch a GPU by default."
PROFILE_HELP = "What collectives take: a800-hdr, a100-hdr, h100-ndr, or a file [a800-hdr]."
PROBE_HELP = "Measure a config.json's activations on fake tensors (torch, transformers)."
OBJECTIVE_HELP = "step-time, overlap included, or comm-time, the paper's T_comm [step-time]."
EXTRAPOLATE_HELP = "Let a measured profile answer for groups that it did not measure, such as more nodes."
CONFIG_HELP = "A ds_config: batch, optimizer, buffers and block are taken from it."


def plan(
    model: Annotated[Text, _option("M", MODEL_HELP)] = None,
    nodes: Annotated[Text, _option("N", "Nodes of the cluster.")] = None,
    gpus_per_node: Annotated[Text, _option("R", "GPUs in a node; the profile's by default.")] = None,
    gpu_memory: Annotated[Text, _option("GB", "Memory of a GPU in GB (1e9 bytes); the profile's by default.")] = None,
    seq_len: Annotated[Text, _option("TOKENS", "Tokens of a sequence [4096].")] = None,
    micro_batch: Annotated[Text, _option("B", 'Sequences a GPU takes at a time [1]; "auto" chooses B and M.')] = None,
    global_batch_tokens: Annotated[Text, _option("TOKENS", BATCH_HELP)] = None,
    profile: Annotated[Text, _option("P", PROFILE_HELP)] = None,
    objective: Annotated[Text, _option("WHAT", OBJECTIVE_HELP)] = None,
    optimizer: Annotated[Text, _option("NAME", "adamw, lion, adam8bit, adafactor, muon, sgd [adamw].")] = None,
    probe: Annotated[bool, typer.Option("--probe", help=PROBE_HELP)] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Activations are recomputed in the backward.")] = False,
    grad_dtype: Annotated[Text, _option("DTYPE", "Of resting gradients: bf16, fp16, fp32 [bf16].")] = None,
    tp: Annotated[Text, _option("GPUS", "GPUs of tensor parallelism, within a node [1].")] = None,
    pp: Annotated[Text, _option("STAGES", "Stages of pipeline parallelism, which take whole nodes [1].")] = None,
    margin: Annotated[Text, _option("PART", "Part of a GPU's memory that stays free, 0.1 for 10 % [0].")] = None,
    efficiency: Annotated[Text, _option("PART", "Part of peak FLOP/s that computation reaches [0.62].")] = None,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help=EXTRAPOLATE_HELP)] = False,
    config: Annotated[Path | None, _option("FILE", CONFIG_HELP)] = None,
    hostfile: Annotated[Path | None, _option("FILE", "A DeepSpeed hostfile: nodes and GPUs in each.")] = None,
    sharding: Annotated[Text, _option("S", "Show zero1, or P,G,OS such as 1x1,1x1,8x1, beside the best.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="List all plans, illegal ones too.")] = False,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Under other bandwidths and memory.")] = False,
    crossover: Annotated[bool, typer.Option("--crossover", help="ddp, zero1, zero3, mics on 8 to 16384 GPUs.")] = False,
    plot: Annotated[Path | None, _option("FILE", "Draw memory against time (PNG). Needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: seconds, bytes.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    write: Annotated[Path | None, _option("FILE", "Write the plan into this ds_config; other keys stay.")] = None,
) -> None:  # fmt: skip
    """Find the sharding factors of parameters, gradients and optimizer states for a model on a cluster.

    Exit code 0: a plan fits; 1: wrong input; 2: nothing fits.
    """
    given = {
        name: value
        for name, value in (
            ("model", model), ("nodes", nodes), ("gpus_per_node", gpus_per_node), ("gpu_memory", gpu_memory),
            ("seq_len", seq_len), ("micro_batch", micro_batch), ("global_batch_tokens", global_batch_tokens),
            ("profile", profile), ("objective", objective), ("optimizer", optimizer), ("grad_dtype", grad_dtype),
            ("tp", tp), ("pp", pp), ("margin", margin), ("efficiency", efficiency),
        )
        if value is not None
    }  # fmt: skip
    if as_json and as_markdown:
        fail("plan", "--json and --markdown exclude each other", BAD_INPUT)
    if plot is not None and plot.suffix.lower() != ".png":
        fail("plan", f"--plot writes PNG: name a file that ends in .png, not {plot}", BAD_INPUT)
    switches = {"recompute": recompute, "extrapolate": extrapolate}
    outcome = _checked(lambda: _answer(given, switches, probe, config, hostfile, sharding, write))
    if outcome.search.best is not None:
        if write is not None:
            _checked(lambda: _write(outcome, write))
        if plot is not None:
            _checked(lambda: _draw(outcome.search, plot))
    report = _checked(lambda: _report(outcome, everything, sensitivity, crossover))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have what the locale has not
    if as_json:
        print(json.dumps(report.values, indent=1, allow_nan=False))
    else:
        report.show(as_markdown)
    if outcome.search.best is None:
        raise typer.Exit(NOTHING_FITS)


@dataclass(frozen=True)
class Outcome:
    """An answer, and what it is compared with. existing: the ds_config that is to be written into."""

    search: Search
    named: Sharding | None
    existing: dict[str, Any] | None


@dataclass(frozen=True)
class Report:
    """What is printed."""

    lines: tuple[str, ...]
    tables: tuple[Table, ...]
    values: dict[str, Any]
    block: str

    def show(self, as_markdown: bool) -> None:
        """Print it as Markdown or as text."""
        from deepspeed_amsp.cli.show import show
        from deepspeed_amsp.plan.report import markdown

        if as_markdown:
            print(markdown("amsp plan", self.lines, self.tables, self.block), end="")
            return
        show(self.lines, self.tables)
        if self.block:
            print(f"\nds_config\n{self.block}")


def _checked(action: Callable[[], Any]) -> Any:
    """Run it; what the user got wrong ends the command with one line."""
    from deepspeed_amsp.cli.plan_inputs import InputError
    from deepspeed_amsp.cli.plot import NoMatplotlib
    from deepspeed_amsp.config import ConfigError
    from deepspeed_amsp.plan.api import RequestError
    from deepspeed_amsp.plan.curves import ProfileError
    from deepspeed_amsp.plan.factors import FactorError
    from deepspeed_amsp.plan.specs import SpecError

    try:
        return action()
    except RequestError as error:
        reason = f"--{error.argument.replace('_', '-')}: {error.reason}"
    except SpecError as error:
        reason = str(error).replace("tensor_parallel", "--tp").replace("pipeline_parallel", "--pp")
    except (ProfileError, FactorError, InputError, ConfigError, NoMatplotlib, OSError) as error:
        reason = str(error)
    return fail("plan", " ".join(reason.split()), BAD_INPUT)


def _answer(
    given: dict[str, str],
    switches: dict[str, bool],
    probe: bool,
    config: Path | None,
    hostfile: Path | None,
    named: Text,
    write: Path | None,
) -> Outcome:
    """Read what was given, and search. Files that will be needed later are looked at first."""
    from deepspeed_amsp.cli.plan_inputs import STAYING, FromConfig, from_config, read_existing, uncounted
    from deepspeed_amsp.plan.solver import search

    if write is not None and write.exists() and not write.is_file():
        raise OSError(f"--write: {write} is not a file")
    existing = read_existing(write, exact=True) if write is not None and write.exists() else None
    if write is not None and not write.absolute().parent.is_dir():
        raise OSError(f"--write: no such folder: {write.absolute().parent}")
    read = from_config(config) if config is not None else FromConfig()
    if config is None and existing is not None and write is not None:
        # The file goes on saying how one trains, so that is what is planned for.
        found = from_config(write)
        read = FromConfig({name: found.values[name] for name in STAYING if name in found.values}, zero=found.zero)
    for line in uncounted(read):
        typer.echo(f"amsp plan: warning: {line}", err=True)
    request = _request(given, switches, read, hostfile)
    if probe:
        request = replace(request, model=_measured(str(request.model)))
    problem = request.problem()
    if request.global_batch_tokens is None:
        problem = replace(problem, trainings=(_batch_of(read, given, problem),))
    compared = _named(named, read, problem.data_parallel)
    return Outcome(search(problem), compared, existing)


NUMBERS: dict[str, type] = {
    "nodes": int, "gpus_per_node": int, "seq_len": int, "micro_batch": int, "global_batch_tokens": int,
    "tp": int, "pp": int, "gpu_memory": float, "margin": float, "efficiency": float,
}  # fmt: skip


def _request(given: dict[str, str], switches: dict[str, bool], read: FromConfig, hostfile: Path | None) -> Request:
    """Options go before the ds_config, and that before the hostfile."""
    from deepspeed_amsp.cli.plan_inputs import read_hostfile
    from deepspeed_amsp.plan.api import AUTO, Request, RequestError

    values: dict[str, Any] = {}
    if hostfile is not None:
        values["nodes"], values["gpus_per_node"] = read_hostfile(hostfile)
    values |= read.values
    for name, text in given.items():
        kind = NUMBERS.get(name, str)
        if name == "micro_batch" and text == AUTO:
            values[name] = text
            continue
        try:
            values[name] = kind(text)
        except ValueError as error:
            number = "a whole number" if kind is int else "a number"
            raise RequestError(name, f"must be {number}, not {text!r}.") from error
    if values.get("micro_batch") == AUTO and read.sequences is not None:
        values.setdefault("global_batch_tokens", read.sequences * values.get("seq_len", Request.seq_len))
    for name, example in (("model", "llama-7b"), ("nodes", "16")):
        if name not in values:
            raise RequestError(name, f"is needed, for example --{name} {example}")
    values |= switches
    return Request(**values, modes=read.modes, factory=_probe)


def _batch_of(read: FromConfig, given: dict[str, str], problem: Problem) -> TrainSpec:
    """Micro-batch and M as DeepSpeed has them from the ds_config: two of its three numbers give the third.

    With a micro-batch of the command line, M is what train_batch_size leaves.
    """
    from deepspeed_amsp.plan.api import RequestError

    (train,), replicas = problem.trainings, problem.data_parallel.size
    if read.sequences is None:
        return replace(train, micro_batches=read.accumulation or 1)
    known = "micro_batch" in read.values or "micro_batch" in given
    factor = train.micro_batch if known else read.accumulation or 1
    if read.sequences % (factor * replicas):
        what = f"micro-batches of {factor}" if known else f"gradient_accumulation_steps {factor}"
        raise RequestError(
            "config", f"train_batch_size {read.sequences} is no multiple of {factor * replicas}: {what} on {replicas} "
            f"replicas."
        )  # fmt: skip
    rest = read.sequences // (factor * replicas)
    if not known:
        return replace(train, micro_batch=rest, micro_batches=factor)
    if read.accumulation not in (None, rest) and "micro_batch" not in given:
        raise RequestError(
            "config", f"train_batch_size {read.sequences} is not micro-batch {factor} x gradient_accumulation_steps "
            f"{read.accumulation} x {replicas} replicas."
        )  # fmt: skip
    return replace(train, micro_batches=rest)


def _named(text: Text, read: FromConfig, data_parallel: ShardFactor) -> Sharding | None:
    """The sharding to show beside the best: the option's, else that of the ds_config."""
    from deepspeed_amsp.plan.api import parse_sharding
    from deepspeed_amsp.plan.resolve import resolve_sharding

    if text is not None:
        return parse_sharding(text, data_parallel)
    if read.block is None or read.block.sharding == "search":
        return None
    return resolve_sharding(read.block, data_parallel.size, data_parallel.s0)


def _measured(name: str) -> ModelSpec:
    """What ``--probe`` makes of a model."""
    from deepspeed_amsp.plan.api import RequestError
    from deepspeed_amsp.plan.models import PAPER_MODELS

    if name.lower() in PAPER_MODELS:
        raise RequestError("probe", f"the activations of {name} are measured figures already; leave the option out.")
    if ":" in name and not Path(name).exists():
        return _probe(name)
    from deepspeed_amsp.probe import probe_config

    probed = probe_config(name)
    if probed.warning:
        typer.echo(f"amsp plan: warning: {probed.warning}", err=True)
    return probed.model


def _probe(name: str) -> ModelSpec:
    """A module of the user's, which needs torch; modules of the folder that one is in are found."""
    from deepspeed_amsp.probe import probe_factory

    sys.path.insert(0, str(Path.cwd()))
    probed = probe_factory(name)
    if probed.warning:
        typer.echo(f"amsp plan: warning: {probed.warning}", err=True)
    return probed.model


def _write(outcome: Outcome, path: Path) -> None:
    from deepspeed_amsp.cli.plan_write import write_config

    write_config(outcome.search, outcome.existing, path)


def _draw(search: Search, path: Path) -> None:
    from deepspeed_amsp.cli.plot import plot_pareto

    plot_pareto(search, path)


def _report(outcome: Outcome, everything: bool, sensitive: bool, crossing: bool) -> Report:
    from deepspeed_amsp.cli.plan_write import compact
    from deepspeed_amsp.plan import advice, explain, whatif

    result = outcome.search
    values = explain.as_dict(result)
    lines = [*explain.overview(result), f"answer: {explain.verdict(result)}"]
    tables: list[Table] = []
    block = ""
    if result.best is not None:
        tables += [explain.best_table(result), explain.memory_table(result), explain.time_table(result)]
        block = compact(json.dumps(values["ds_config"], indent=2))
    else:
        found = advice.remedies(result)
        values["would_fit"] = advice.as_list(found)
        tables += [explain.memory_table(result), advice.remedies_table(found)]
    if outcome.named is not None:
        beside = explain.beside(result, outcome.named)
        lines.append(f"asked for: {beside}")
        values["asked_for"] = beside
    tables.append(explain.rejected_table(result, None if everything else 12))
    if everything:
        tables.append(explain.illegal_table(result))
        values["illegal"] = [list(entry) for entry in explain.illegal(result.problem.data_parallel)]
    if sensitive:
        shifts = whatif.sensitivity(result)
        tables.append(whatif.sensitivity_table(shifts))
        values["sensitivity"] = whatif.shifts_as_list(shifts)
    if crossing:
        scales = whatif.crossover(result)
        tables.append(whatif.crossover_table(scales))
        values["crossover"] = whatif.scales_as_list(scales)
    return Report(tuple(lines), tuple(tables), values, block)
