"""Where strategies run: this environment, and one with the DeepSpeed that still has a working MiCS.

DeepSpeed 0.19.3 to 0.19.6 reduce MiCS over the wrong group and hang with more than one replica group, later ones have
no MiCS, and 0.18 does not train ZeRO-1/2 on torch 2.13. So MiCS runs on 0.19.2, in a virtual environment that is made
once, with the same torch, and used again.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from deepspeed_amsp.compare.config import CompareConfigError
from deepspeed_amsp.compare.launch import RankCommand, RankFailed, run_ranks
from deepspeed_amsp.compare.results import HPZ, ZERO3

MICS_DEEPSPEED = "0.19.2"
STAGE3_DEEPSPEED = "0.19.8"
VARIABLE = "AMSP_COMPARE_ENVIRONMENTS"
"""Environment variable: the folder for environments, instead of the user's cache."""
PACKAGES = ("pydantic", "pyyaml", "hjson", "numpy", "setuptools")
TIMEOUT_S = 1800
_PACKAGE = Path(__file__).resolve().parents[1]


class EnvironmentFailed(RuntimeError):
    """An environment could not be made; the message ends with what pip said."""


def mics_python(note: Callable[[str], None]) -> Path:
    """The interpreter of the environment for MiCS, which is made if there is none.

    Args:
        note: told, in a line, when that takes minutes.

    Raises:
        EnvironmentFailed: no venv, or pip failed.
    """
    torch = version("torch").partition("+")[0]
    folder = _home() / f"mics-{MICS_DEEPSPEED}-torch-{torch}-py{'.'.join(map(str, sys.version_info[:2]))}"
    python, done = folder / "bin" / "python", folder / "complete"
    with _alone(folder):
        if not done.is_file():
            note(f"making the environment of MiCS (DeepSpeed {MICS_DEEPSPEED}) in {folder}; once, it takes minutes")
            _run([sys.executable, "-m", "venv", str(folder)])
            _run([str(python), "-m", "pip", "install", "--quiet", "--retries", "10", "--use-pep517",
                  f"torch=={torch}", f"deepspeed=={MICS_DEEPSPEED}", *PACKAGES])  # fmt: skip
            done.touch()
    return python


def check_stage3(names: Iterable[str]) -> None:
    """Older releases wait for the last all-gather of a fetch only: on gloo they train on what is not there yet.

    Raises:
        CompareConfigError: stage 3 is among ``names``, and the installed release is one of these.
    """
    found = versions(strategies_need_mics=False)["deepspeed"]
    racing = [name for name in names if name in (ZERO3, HPZ)]
    if racing and found != "?" and Version(found) < Version(STAGE3_DEEPSPEED):
        raise CompareConfigError(
            f"strategies: {' and '.join(racing)} need DeepSpeed {STAGE3_DEEPSPEED} or newer on CPUs, where stage 3 of "
            f"{found} does not wait for all of its parameters: install it, or leave them out with --only"
        )


def source(folder: Path) -> Path:
    """A folder to put on PYTHONPATH that holds this package and nothing else: beside it may be another DeepSpeed."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / _PACKAGE.name
    if not link.is_symlink():
        link.symlink_to(_PACKAGE, target_is_directory=True)
    return folder


def search_path(folder: Path) -> str:
    """PYTHONPATH of the ranks: this package from ``folder``, which is made, then where a factory may be."""
    own = source(folder).absolute()
    return os.pathsep.join(filter(None, [str(own), os.getcwd(), os.environ.get("PYTHONPATH")]))


def versions(strategies_need_mics: bool) -> dict[str, str]:
    """Of what takes part, for the set-up."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("torch", "deepspeed", "deepspeed_amsp"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # used from a source folder
            found[package] = _own_version() if package == "deepspeed_amsp" else "?"
    if strategies_need_mics:
        found["deepspeed of MiCS"] = MICS_DEEPSPEED
    return found


def _own_version() -> str:
    import deepspeed_amsp

    return deepspeed_amsp.__version__


def _home() -> Path:
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed_amsp"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time makes an environment."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    """As ranks are run: an interrupt ends pip's own children, too."""
    env = {**os.environ, "DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        run_ranks([RankCommand(command, env)], TIMEOUT_S)
    except (OSError, RankFailed) as error:
        how, *said = str(error).strip().splitlines()
        tail = " ".join([how.removeprefix("rank 0 "), *said[-3:]])
        raise EnvironmentFailed(f"{' '.join(command[:4])} ...: {tail}") from error
