"""The paper's Table IV beside the optimum of its own objective, from the smallest scale to 1024 GPUs.

    python -m benchmarks.table_iv

Equations 1-7 with the assumptions of `deepspeed_amsp.plan.paper` on the built-in profile a800-hdr.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deepspeed_amsp.plan.paper import CAPACITY, TABLE_IV, paper_problem, paper_sharding
from deepspeed_amsp.plan.solver import search
from deepspeed_amsp.plan.specs import GB

NODES = (1, 2, 4, 8, 16, 32, 64, 128)


def main() -> None:
    """Print one table."""
    made = Table(title=f"T_comm of Eq. 1 at {CAPACITY / GB:g} GB a GPU")
    for heading in ("model", "GPUs", "optimum", "T_comm s", "GB", "Table IV", "T_comm s", "is slower by"):
        made.add_column(heading, justify="right" if heading in ("GPUs", "T_comm s", "GB", "is slower by") else "left")
    for name in TABLE_IV:
        for nodes in NODES:
            row = [name, str(8 * nodes)]
            found = search(paper_problem(name, nodes))
            if found.best is None:
                made.add_row(*row, f"nothing fits: {found.rejected[0].reason}")
                continue
            row += [
                str(found.best.plan.sharding).split(" of ")[0],
                f"{found.best.objective:.3f}",
                f"{found.best.memory.peak / GB:.1f}",
            ]
            try:
                theirs = paper_sharding(name, nodes)
            except ValueError:
                made.add_row(*row, "needs more nodes")
                continue
            plan = next((plan for plan in found.ranked if plan.plan.sharding == theirs), None)
            if plan is None:
                made.add_row(*row, "does not fit")
                continue
            same = plan is found.best
            made.add_row(
                *row,
                "the optimum" if same else str(theirs).split(" of ")[0],
                f"{plan.objective:.3f}",
                "" if same else f"{100 * found.slower(plan):.1f} %",
            )
    Console(width=150).print(made)


if __name__ == "__main__":
    main()
