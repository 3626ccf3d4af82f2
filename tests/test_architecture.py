"""The layout is true: data flows one way, and the "only file that" rules hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "deepspeed_amsp"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS: list[tuple[str, ...]] = [
    ("config_preflight",),
    ("config",),
    ("config_zero",),
    ("plan",),
    ("simulate",),
    ("topology",),
    ("leaf_table",),
    ("about",),
    ("placement",),
    ("data_parallel",),
    ("mesh",),
    ("trace",),
    ("comm",),
    ("model_parallel",),
    ("profiler",),
    ("partition",),
    ("module_spec",),
    ("probe",),
    ("schedule",),
    ("update",),
    ("verify",),
    ("state_access",),
    ("settings",),
    ("skips",),
    ("log",),
    ("optimizer_surface",),
    ("optimizer",),
    ("runtime",),
    ("checkpoint",),
    ("model_checks",),
    ("compat",),
    ("autoplan",),
    ("engine",),
    ("install",),
    ("launch",),
    ("compare",),
    ("cli",),
]
"""Rooms from left to right; a room imports itself and what stands before it. A tuple is one step."""

LARGEST_FILE = 430


def room(path: Path) -> str:
    """First part of the path below the package: a file's stem or a folder's name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rank(name: str) -> int:
    for index, names in enumerate(LAYERS):
        if name in names:
            return index
    raise AssertionError(f"{name} has no place in LAYERS: decide where it belongs")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted module, only for type checking) of every import in a file, wherever it stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            guarded |= {id(inner) for body in node.body for inner in ast.walk(body)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, id(node) in guarded
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) in guarded


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_to_the_left(path: Path) -> None:
    if room(path) == "__init__":
        return
    for module, types_only in imports(path):
        if module.startswith("deepspeed_amsp.") and not types_only:
            target = module.split(".")[1]
            assert rank(target) <= rank(room(path)), f"{path.name} imports {module}, which stands to its right"


def users_of(pattern: str) -> set[str]:
    """Files whose code (comments and docstrings left out) matches ``pattern``."""
    found = set()
    for path in FILES:
        code = ast.unparse(_without_docstrings(ast.parse(path.read_text(encoding="utf-8"))))
        if re.search(pattern, code):
            found.add(str(path.relative_to(PACKAGE)))
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


@pytest.mark.parametrize(
    ("what", "pattern", "allowed"),
    [
        (
            "creates process groups",
            r"\bnew_group\(|init_device_mesh|new_subgroups",
            {"mesh.py", "compare/strategies/fsdp2.py"},
        ),
        (
            "calls tensor collectives",
            r"dist\.(all_reduce|reduce|broadcast|all_to_all|reduce_scatter|all_gather|gather|scatter|barrier)\w*\("
            r"|dist\.(i?send|i?recv|batch_isend_irecv)\b|\b(group|handle)\.(send|recv)\b",
            {"comm.py"},
        ),
        (
            "registers hooks",
            r"\bregister_(forward|full_backward|module|post_accumulate|state_dict|load_state)\w*\("
            r"|\.register_hook\(|_parameters = ",
            {"schedule/hooks.py", "trace/modules.py", "probe.py"},
        ),
        (
            "knows the engine's internals",
            r"DeepSpeedEngine\b",
            {"engine.py", "checkpoint/engine.py", "compat.py", "install.py"},
        ),
        ("coalesces collectives, which gloo does not know (case I4)", r"_coalescing_manager", set()),
        ("builds an op when it is first used (case H7)", r"op_builder|cpp_extension|load_inline", set()),
        ("talks to torch.cuda", r"torch\.cuda", set()),
        (
            "synchronises the host in the hot path",
            r"\.synchronize\(|record_stream",
            {"trace/clock.py", "schedule/agreement.py", "compare/measure.py"},
        ),
        ("reads a tensor on the host", r"\.item\(\)", {"optimizer.py"}),
        ("reads the ds_config", r"_param_dict", {"engine.py", "install.py"}),
        ("swallows exceptions", r"except[^:]*:\s*pass", set()),
    ],
)
def test_only_this_file(what: str, pattern: str, allowed: set[str]) -> None:
    assert users_of(pattern) <= allowed, f"only {allowed or 'nobody'} {what}"


def test_the_plan_is_pure() -> None:
    """plan/ imports neither torch nor deepspeed: it runs where there is no GPU and starts at once."""
    for path in PACKAGE.joinpath("plan").rglob("*.py"):
        for module, _ in imports(path):
            assert module.split(".")[0] not in ("torch", "deepspeed"), f"{path.name} imports {module}"


def test_planning_starts_at_once() -> None:
    """Nothing that takes long to import is imported with plan/: no torch, no DeepSpeed, no pydantic, no plots."""
    modules = ", ".join(f"deepspeed_amsp.plan.{path.stem}" for path in PACKAGE.joinpath("plan").glob("[a-z]*.py"))
    heavy = "{'torch', 'deepspeed', 'pydantic', 'numpy', 'matplotlib', 'rich', 'typer'}"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_stay_readable() -> None:
    for path in FILES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= LARGEST_FILE, f"{path.relative_to(PACKAGE)} has {lines} lines; give part of it a room"


def test_every_scheduled_action_has_a_profiler_label() -> None:
    text = PACKAGE.joinpath("comm.py").read_text(encoding="utf-8")
    issued = len(re.findall(r"async_op=True", text))
    assert issued >= 5 and "record_function" in text


@pytest.mark.parametrize("tool", [["ruff", "check", "."], ["ruff", "format", "--check", "."]], ids=" ".join)
def test_linters_are_clean(tool: list[str]) -> None:
    """mypy, which takes a minute where it has no cache, is in `make lint`."""
    done = subprocess.run(
        [sys.executable, "-m", *tool],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
