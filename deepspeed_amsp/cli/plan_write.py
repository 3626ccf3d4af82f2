"""What ``amsp plan --write`` does to a file."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepspeed_amsp.cli.plan_inputs import STAYING, InputError, understood
from deepspeed_amsp.plan.block import merged, new_config
from deepspeed_amsp.plan.resolve import with_zero_settings
from deepspeed_amsp.plan.solver import Evaluated, Search
from deepspeed_amsp.plan.specs import GRADIENT_BYTES


def write_config(search: Search, existing: dict[str, Any] | None, path: Path) -> None:
    """The best plan into a file in one go: a reader sees the old one or the whole new one.

    Args:
        existing: the ds_config that is there.

    Raises:
        InputError: the file would go on saying something that the plan does not rest on.
        OSError: it cannot be written.
    """
    best = search.best
    assert best is not None
    if existing is None:
        values = new_config(best.plan, best.train)
    else:
        values = merged(existing, best.plan, best.train)
        unlike = list(_unlike(values, best, path))
        if unlike:
            raise InputError(
                f"--write: {path} has {unlike[0]}; change it there, leave out the option, or read it (--config {path})"
            )
    target = path.resolve()  # a link stays one
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(compact(json.dumps(values, indent=2)) + "\n", encoding="utf-8")
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    except OSError as error:
        raise OSError(f"--write: cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _unlike(values: dict[str, Any], best: Evaluated, path: Path) -> Iterator[str]:
    """In which points a ds_config trains otherwise than was planned."""
    read, train = understood(values, path), best.train
    planned = {
        "optimizer": train.optimizer.name,
        "parameter_bytes": train.parameter_bytes,
        "gradient_bytes": train.gradient_bytes,
        "gradient_clipping": train.gradient_clipping,
    }
    said = {name: read.values[name] for name in STAYING if name in read.values}
    said.setdefault("parameter_bytes", 2)
    said["gradient_bytes"] = GRADIENT_BYTES[said.pop("grad_dtype", "bf16")]
    said.setdefault("gradient_clipping", True)
    for name, value in planned.items():
        if said.get(name, value) != value:
            yield f"{name.replace('_', ' ')} {said[name]}, where the plan is for {value}"
    assert read.zero is not None
    engine = with_zero_settings(best.plan, read.zero, train.parameter_bytes)
    for name in ("reduce", "overlap", "prefetch_bytes", "keep_after_forward"):
        if getattr(engine, name) != getattr(best.plan, name):
            yield (
                f"settings under zero_optimization that make {name} {getattr(engine, name)}, where the plan is for "
                f"{getattr(best.plan, name)}"
            )


def compact(text: str) -> str:
    """JSON with pairs of numbers on one line."""
    # With line breaks, which a string cannot have.
    return re.sub(r"\[\n\s*(\d+),\n\s*(\d+)\n\s*\]", r"[\1, \2]", text)
