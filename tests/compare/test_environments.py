"""The environment of MiCS is made once, whole or not at all."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from deepspeed_amsp.compare import environments
from deepspeed_amsp.compare.config import CompareConfigError
from deepspeed_amsp.compare.environments import EnvironmentFailed, check_stage3, mics_python, source


def test_it_is_made_once_with_the_same_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    said: list[str] = []
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path))
    monkeypatch.setattr(environments, "_run", ran.append)
    python = mics_python(said.append)
    assert ran[0][:3] == [sys.executable, "-m", "venv"] and python.parents[1] == Path(ran[0][3])
    assert ran[1][0] == str(python) and "deepspeed==0.19.2" in ran[1]
    assert f"torch=={version('torch').partition('+')[0]}" in ran[1]
    assert mics_python(said.append) == python and len(ran) == 2 and len(said) == 1


def test_a_failure_is_one_line_and_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match="exit code 1") as error:
            mics_python(lambda text: None)
        assert "\n" not in str(error.value)


def test_stage_3_of_releases_that_race_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "version", lambda package: "0.19.6")
    check_stage3(["ddp", "zero2"])
    with pytest.raises(CompareConfigError, match=r"zero3 and hpz need DeepSpeed 0.19.8 .*0.19.6"):
        check_stage3(["zero3", "ddp", "hpz"])
    monkeypatch.setattr(environments, "version", lambda package: "0.19.8")
    check_stage3(["zero3", "hpz"])


def test_the_source_folder_holds_this_package_alone(tmp_path: Path) -> None:
    """Beside the package may be another DeepSpeed, as in site-packages."""
    folder = source(source(tmp_path / "source"))
    assert [path.name for path in folder.iterdir()] == ["deepspeed_amsp"]
    assert (folder / "deepspeed_amsp" / "compare" / "ranks.py").is_file()
