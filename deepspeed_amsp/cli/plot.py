"""The picture of a plan: memory against time of everything that fits. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from deepspeed_amsp.plan.explain import factors, pareto
from deepspeed_amsp.plan.solver import Objective, Search
from deepspeed_amsp.plan.specs import GB


class NoMatplotlib(ImportError):
    """It is not installed."""


def plot_pareto(search: Search, path: Path) -> None:
    """Draw plans, those that none beats in both, the chosen one, and what a GPU may use.

    Raises:
        NoMatplotlib: in one line.
        OSError, ValueError: the file cannot be written, or is of a kind that matplotlib does not know.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib("--plot needs matplotlib: pip install 'deepspeed_amsp[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    what = "T_comm" if search.problem.objective is Objective.COMM_TIME else "step time"
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    front = pareto(search)
    axes.scatter(
        [found.memory.peak / GB for found in search.ranked],
        [found.objective for found in search.ranked],
        s=14, color="0.65", label="plans that fit",
    )  # fmt: skip
    axes.step(
        [found.memory.peak / GB for found in front],
        [found.objective for found in front],
        where="pre", marker="o", markersize=4, label="none is better in both",
    )  # fmt: skip
    if search.best is not None:
        best = search.best
        axes.plot(best.memory.peak / GB, best.objective, "*", markersize=16, label=f"chosen: {factors(best.plan)}")
    axes.axvline(search.problem.capacity / GB, linestyle="--", color="tab:red", label="what a plan may take")
    axes.set(xlabel="memory of the fullest rank at its peak, GB", ylabel=f"{what}, s", title=search.problem.model.name)
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
