"""Run a training script as ``python`` would, with the plugin installed: for scripts that nobody may edit.

    deepspeed --num_gpus 8 --module deepspeed_amsp.launch train.py ...
    accelerate launch -m deepspeed_amsp.launch train.py ...
    torchrun --nproc-per-node 8 -m deepspeed_amsp.launch train.py ...
    ... deepspeed_amsp.launch -m package.train ...               a module instead of a script

It stands behind the launcher, in every worker. A ds_config that the command line names is checked before the script
starts, and who asked for a block and got none is told so at the end. `amsp launch` puts it there by itself.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_amsp.config_preflight import ConfigError, is_off
from deepspeed_amsp.install import engines_made

CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed", "--ds_config", "--deepspeed-config")
"""Options by which scripts take a ds_config: DeepSpeed's own, the Trainer's and what many call theirs."""

CONFIG_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""Set by ``accelerate launch``, "none" without a file."""

_LAUNCHERS = ("accelerate.commands.launch", "deepspeed.launcher.runner", "deepspeed.launcher.launch",
              "torch.distributed.run", "torch.distributed.launch")  # fmt: skip


class LaunchError(ValueError):
    """A command line that cannot be run; one line that says what to do."""


@dataclass(frozen=True)
class Command:
    """What to run: the path of a script or the dotted name of a module, and what it finds in ``sys.argv[1:]``."""

    target: str
    arguments: tuple[str, ...]
    module: bool = False

    def __post_init__(self) -> None:
        name = self.target if self.module else Path(self.target).name
        if name in _LAUNCHERS or (not self.module and name in ("deepspeed", "accelerate", "torchrun")):
            raise LaunchError(
                f"{name} starts workers, which would not have the plugin: write the launcher first, as in "
                f"'deepspeed --module deepspeed_amsp.launch train.py' or 'accelerate launch -m deepspeed_amsp.launch "
                f"train.py'"
            )
        if not self.module and not Path(self.target).is_file():
            raise LaunchError(f"no such script: {Path(self.target).absolute()}")

    def run(self) -> None:
        """Run it as ``__main__``."""
        sys.argv = [self.target, *self.arguments]
        safe_path = getattr(sys.flags, "safe_path", False)
        if self.module:
            if not safe_path:
                sys.path[0] = os.getcwd()
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        if not safe_path:
            sys.path[0] = str(Path(self.target).parent.absolute())
        runpy.run_path(self.target, run_name="__main__")


def parse(arguments: Sequence[str]) -> Command:
    """The command of ``deepspeed_amsp.launch ARGUMENTS``.

    DeepSpeed's launcher puts --local_rank=N before the script; it goes behind it, where the script expects it.

    Raises:
        LaunchError: there is no script, it does not exist, or it is a launcher.
    """
    rest = list(arguments)
    launcher = [rest.pop(0)] if rest and rest[0].startswith(("--local_rank=", "--local-rank=")) else []
    module = bool(rest) and rest[0] in ("-m", "--module")
    if module:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        found = f", not {rest[0]}" if rest else ""
        raise LaunchError(f"a script or '-m MODULE' must come first{found}; options of the script stand behind it")
    return Command(rest[0], (*launcher, *rest[1:]), module)


def config_file(arguments: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The ds_config that a script's arguments or the launcher's environment name; None if they name none."""
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option in CONFIG_OPTIONS:
            following = arguments[index + 1] if not equals and index + 1 < len(arguments) else value
            if following and not following.startswith(("-", "{")):  # the Trainer takes JSON itself, too
                return following
    named = env.get(CONFIG_VARIABLE, "none")
    return None if named == "none" else named


def has_block(ds_config: str) -> bool:
    """Whether a ds_config, a path or base64, holds an enabled block; it and what stands beside it are checked.

    Raises:
        LaunchError: there is no such file, or it is no ds_config.
        ConfigError: the block is wrong, or cannot stand beside what stands there. An "auto" outside the block may
            still be filled in.
    """
    from deepspeed_amsp.config import load_config, preflight, read_block

    try:
        config = load_config(ds_config)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise LaunchError(f"the ds_config cannot be read: {' '.join(str(error).split())}") from error
    block = config.get("amsp")
    if isinstance(block, Mapping) and is_off(block):
        return False
    unfilled = {key: value for key, value in config.items() if value != "auto"}
    preflight(unfilled, filled=False)
    return read_block(config) is not None


def afterword(file: str | None, block: bool) -> str | None:
    """What to say when the script has ended; None if it trained as its ds_config says."""
    if engines_made["AMSPEngine"]:
        return None
    if not engines_made:
        return (
            "the script made no DeepSpeed engine in this process; if it starts workers of its own, start them as "
            "'python -m deepspeed_amsp.launch SCRIPT'"
        )
    if block:
        return f"{file} has an amsp block, but the script gave deepspeed.initialize another config: put the block there"
    return 'no ds_config had an enabled "amsp" block, so this was plain DeepSpeed; add the block, see amsp plan --help'


def main(arguments: Sequence[str]) -> None:
    """Check, run, and say what was amiss, on the first rank.

    Raises:
        SystemExit: 2 for what is wrong with the command or the ds_config, else the script's.
    """
    file, block = None, False
    try:
        command = parse(arguments)
        file = config_file(command.arguments, os.environ)
        block = file is not None and has_block(file)
    except (LaunchError, ConfigError) as error:
        _say(str(error))
        raise SystemExit(2) from None
    command.run()
    word = afterword(file, block)
    if word:
        _say(word)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"deepspeed_amsp.launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
