"""The harness: turns, and what it does when a row dies, hangs, or somebody presses Ctrl-C.

The ranks are those of `fake_ranks`, so this is about processes and takes a moment. Real training: test_strategies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from deepspeed_amsp.compare import harness as module
from deepspeed_amsp.compare.config import CompareConfigError, check
from deepspeed_amsp.compare.harness import Harness
from deepspeed_amsp.compare.launch import RankFailed
from deepspeed_amsp.compare.ranks import RESULT, Order
from deepspeed_amsp.compare.results import Results, Run, read

FAKE = "tests.compare.fake_ranks"
OURS = {"name": "amsp", "amsp": {"sharding": "zero1"}}
PAIR = {"nodes": 2, "ranks_per_node": 1, "emulate": "never"}
SQUARE = {"nodes": 2, "ranks_per_node": 2, "emulate": "never"}


class Quiet:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.order: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def began(self, order: Order, done: int, total: int) -> None:
        self.order.append(order.strategy)

    def ended(self, run: Run) -> None:
        return


def config(**changes: Any) -> Any:
    values = {
        "strategies": ["ddp", "zero1", OURS],
        "cluster": PAIR,
        "rounds": 2,
        "row_timeout_s": 30.0,
        **changes,
    }
    return check(values, "test")


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wishes: dict[str, str], **changes: Any) -> Results:
    monkeypatch.setenv("AMSP_FAKE", json.dumps(wishes))
    monkeypatch.setattr(module.environments, "mics_python", lambda note: Path(sys.executable))
    return read(Harness(config(**changes), tmp_path / "out", Quiet(), FAKE).run())


def test_rounds_go_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiCS lives in another environment, and still has its turn between its neighbours."""
    found = measured(tmp_path, monkeypatch, {}, strategies=["ddp", "mics", OURS], cluster=SQUARE)
    assert [(run.strategy, run.round) for run in found.runs] == [
        ("ddp", 0), ("mics", 0), ("amsp", 0), ("amsp", 1), ("mics", 1), ("ddp", 1),
    ]  # fmt: skip
    assert all(run.error is None and run.tokens_per_step == 4 * 64 for run in found.runs)
    assert "deepspeed of MiCS" in found.setup.versions and not found.setup.emulated
    assert any("clipped at 1" in line for line in found.setup.fairness)
    # A block of the default model: 4 * 448^2 of attention, 3 * 448 * 1088 of the MLP, two norms; 1.3 of it stay alive.
    assert any("stage3_max_live_parameters 2,945,779" in line for line in found.setup.fairness)


def test_rows_that_fail_do_not_take_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is reported once, with its first traceback, and not tried again in the next round."""
    wishes = {"zero1": "die", "zero2": "hang"}
    found = measured(tmp_path, monkeypatch, wishes, strategies=["ddp", "zero1", "zero2", OURS], row_timeout_s=4.0)
    failed = {run.strategy: str(run.error) for run in found.runs if run.error is not None}
    assert "Traceback" in failed["zero1"] and "ValueError: zero1 cannot train" in failed["zero1"]
    assert "zero2 was not done after 4 s" in failed["zero2"] and len(failed) == 2
    assert sum(run.error is not None for run in found.runs) == 2
    done = sorted((run.strategy, run.round) for run in found.runs if run.error is None)
    assert done == [("amsp", 0), ("amsp", 1), ("ddp", 0), ("ddp", 1)]


def test_an_environment_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tmp_path, monkeypatch, {"mics": "absent"}, strategies=["ddp", "mics"], rounds=1, cluster=SQUARE)
    by_name = {run.strategy: run.error for run in found.runs}
    assert by_name["ddp"] is None and "no such release" in str(by_name["mics"])


def test_who_is_at_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of MiCS that never get ready, or die while another has its turn, are no failure of that one."""
    monkeypatch.chdir(tmp_path)  # where a launch that does not run writes its orders
    found = Harness(config(strategies=["ddp", "mics"], cluster=SQUARE), tmp_path, Quiet(), FAKE)
    launch = module._Launch(found, deque(found._orders(None)))
    assert launch.at_fault(module.Hung("")) is None, "nobody is ready"
    launch._heard(0, f'{RESULT}{{"ready": "main"}}')
    assert launch.environment is None and launch.at_fault(module.Hung("")) == "mics"
    launch._heard(4, f'{RESULT}{{"ready": "mics"}}')
    assert launch.environment == "main" and launch.at_fault(module.Hung("")) is None
    assert launch.at_fault(RankFailed(4, "")) == "mics" and launch.at_fault(RankFailed(3, "")) == "main"


def test_a_model_that_cannot_be_built(tmp_path: Path) -> None:
    model = {"factory": "nowhere_at_all:model", "vocab": 2}
    with pytest.raises(CompareConfigError, match=r"nowhere_at_all:model cannot be built .*: ModuleNotFoundError"):
        Harness(config(model=model), tmp_path, Quiet())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    with pytest.raises(CompareConfigError, match=r"out: .* cannot be written"):
        Harness(config(), tmp_path / "out", Quiet(), FAKE).run()


def test_an_environment_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(note: Any) -> Path:
        raise module.environments.EnvironmentFailed("pip ended with exit code 1")

    monkeypatch.setenv("AMSP_FAKE", "{}")
    monkeypatch.setattr(module.environments, "mics_python", fail)
    found = read(Harness(config(strategies=["ddp", "mics"], cluster=SQUARE), tmp_path, Quiet(), FAKE).run())
    assert [(run.strategy, run.error) for run in found.runs] == [
        ("mics", "pip ended with exit code 1"), ("ddp", None), ("ddp", None),
    ]  # fmt: skip


def test_ranks_that_never_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)did not start.*no such release"):
        measured(tmp_path, monkeypatch, {"main": "absent"})


def test_emulation_that_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(spec: Any) -> Any:
        raise module.ClusterUnavailable("emulating a cluster needs root")

    monkeypatch.setattr(module, "emulated_cluster", refuse)
    with pytest.raises(CompareConfigError, match=r"cluster.emulate is always, but .* needs root"):
        Harness(config(cluster={**PAIR, "emulate": "always"}), tmp_path, Quiet())
    watcher = Quiet()
    Harness(config(cluster={**PAIR, "emulate": "auto"}), tmp_path, watcher)
    assert "no slow links" in watcher.notes[0]


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
from tests.compare.test_harness import FAKE, PAIR, Quiet, config
from deepspeed_amsp.compare.harness import Harness
class Loud(Quiet):
    def began(self, order, done, total):
        print(order.strategy, flush=True)
Harness(config(cluster={**PAIR, "emulate": "auto"}, row_timeout_s=600.0), Path(sys.argv[1]), Loud(), FAKE).run()
"""


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while a row hangs: no rank, no namespace; what was measured before is there."""
    env = {**os.environ, "AMSP_FAKE": json.dumps({"zero1": "hang"}), "PYTHONPATH": os.pathsep.join(sys.path)}
    before = _namespaces()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        env=env, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == ["ddp", "zero1"]
    ranks = _descendants(process.pid)
    assert len(ranks) >= 2
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in error and process.returncode != 0
    deadline = time.monotonic() + 5
    while any(Path("/proc", str(pid)).exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in ranks if Path("/proc", str(pid)).exists()]
    assert _namespaces() <= before
    assert [run.strategy for run in read(tmp_path / "results.jsonl").runs] == ["ddp"]


ORPHAN = """
import os, sys
from pathlib import Path
from deepspeed_amsp.compare.ranks import await_line
parent = os.getppid()
print(os.getpid(), flush=True)
await_line(Path(sys.argv[1]), 0, parent)
"""


def test_a_rank_without_anybody_who_gives_orders_ends(tmp_path: Path) -> None:
    """On the plain loopback no later start would find it."""
    (tmp_path / "orders").touch()
    rank = [sys.executable, "-c", ORPHAN, str(tmp_path / "orders")]
    starter = f"import subprocess, time; subprocess.Popen({rank!r}, start_new_session=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    assert process.communicate(timeout=30)[0] == "", f"rank {pid} closed its output"


def _namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {name for name in os.listdir(folder) if name.startswith("amsp-")} if folder.is_dir() else set()


def _descendants(pid: int) -> list[int]:
    children = Path("/proc", str(pid), "task", str(pid), "children").read_text(encoding="ascii").split()
    return [one for child in children for one in (int(child), *_descendants(int(child)))]
