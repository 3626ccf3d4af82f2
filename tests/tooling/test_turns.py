"""Tests of several pytest processes share the machine, or have it alone."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from threading import Event, Thread

from tests.support.turns import turn


class Test(Thread):
    """Stands for another process: what excludes is the open file, and each turn opens its own."""

    __test__ = False

    def __init__(self, name: str, folder: Path, said: list[str], alone: bool = False) -> None:
        super().__init__(name=name, daemon=True)
        self.folder, self.said, self.alone = folder, said, alone
        self.entered, self.leave = Event(), Event()
        self.start()

    def run(self) -> None:
        with turn(self.folder, self.alone):
            self.said.append(f"{self.name} begins")
            self.entered.set()
            assert self.leave.wait(30)
            self.said.append(f"{self.name} ends")

    def end(self) -> None:
        assert self.entered.wait(30)
        self.leave.set()
        self.join(30)


def wait_for_somebody_at_the_gate(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with (folder / "gate").open("w") as gate:
            try:
                fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        time.sleep(0.01)
    raise AssertionError("nobody came")


def test_one_that_measures_waits_for_the_others_and_they_for_it(tmp_path: Path) -> None:
    said: list[str] = []
    one, two = Test("one", tmp_path, said), Test("two", tmp_path, said)
    assert one.entered.wait(30) and two.entered.wait(30), "tests run beside each other"
    alone = Test("alone", tmp_path, said, alone=True)
    wait_for_somebody_at_the_gate(tmp_path)
    late = Test("late", tmp_path, said)
    for test in (one, two, alone, late):
        test.end()
    assert said[-4:] == ["alone begins", "alone ends", "late begins", "late ends"]
