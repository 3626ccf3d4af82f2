"""results.jsonl: what is written is what is read, and every other file is refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from deepspeed_amsp.compare.results import Results, ResultsError, Slice, append, read, start, write
from tests.compare.figures import failed, mixed, run, setup


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    written = mixed()
    write(path, written)
    assert read(path) == written
    kinds = [json.loads(line)["kind"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert kinds == ["setup"] + ["run"] * len(written.runs)


def test_runs_are_appended_as_they_end(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("an older file\n", encoding="utf-8")
    start(path, setup())
    assert read(path) == Results(setup(), [])
    for one in (run("ddp", 1.0), failed("mics")):
        append(path, one)
    assert [one.strategy for one in read(path).runs] == ["ddp", "mics"]


def test_losses_that_are_no_numbers_and_odd_text_survive(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    separators = "line \u2028 separator \x85 and\nnewline"
    write(path, Results(setup(), [run("zero3", 1.0, losses=[5.5, math.nan, -math.inf], error=separators)]))
    for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    (found,) = read(path).runs
    assert math.isnan(found.losses[1]) and found.losses[2] == -math.inf and found.error == separators


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "results.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ResultsError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message.removeprefix(str(path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "good", Results(setup(), [run("ddp", 1.0)]))
    good = (tmp_path / "good").read_text(encoding="utf-8")
    first, second = good.splitlines(keepends=True)
    for text, message in (
        ("", "is empty"),
        ("step,loss\n1,2\n", "line 1: no JSON object"),
        ("[1, 2]\n", "line 1: must be an object of kind 'setup'"),
        (second, "line 1: must be an object of kind 'setup'"),
        (first + first, "line 2: must be an object of kind 'run'"),
        (first.replace('"schema":1', '"schema":2'), "line 1: schema 2; this package reads schema 1"),
        (good[:-40], "line 2: no JSON object; the file was cut off"),
        (first + "\n" + second, "line 2: no JSON object"),
        (good.replace('"host":"testhost",', ""), "line 1: host: Field required"),
        (good.replace('"host"', '"hots"'), "line 1: host: Field required"),
        (good.replace('"round":0', '"round":-1'), "line 2: round: "),
        (good.replace('"step_s":[1.0,', '"step_s":[0.0,'), "line 2: step_s.0: "),
        (good.replace('"step_s":[1.0,1.0,1.0]', '"step_s":[]'), "line 2: Value error, a run without an error has"),
    ):
        assert text != good and message in refused(tmp_path, text)
    with pytest.raises(ResultsError, match="nowhere: no such file"):
        read(tmp_path / "nowhere")


def test_a_slice_ends_after_its_start() -> None:
    with pytest.raises(ValueError, match="ends before it starts"):
        Slice("forward", "x", 1.0, 0.5)
