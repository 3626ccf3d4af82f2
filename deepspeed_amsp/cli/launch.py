"""``amsp launch``: DeepSpeed's launcher with the plugin in every worker, and a look at its files first."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from deepspeed_amsp.cli.options import fail
from deepspeed_amsp.config_preflight import ConfigError
from deepspeed_amsp.launch import Command, LaunchError, config_file, has_block

CONTEXT = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""Every option is DeepSpeed's or the script's, --help too."""


def launch(ctx: typer.Context) -> None:
    """Run `deepspeed` with the options behind it, and the plugin in every worker: [OPTIONS] SCRIPT [ARGUMENTS].

    For scripts that do not import deepspeed_amsp. The same by hand: deepspeed --module deepspeed_amsp.launch SCRIPT.
    """
    from deepspeed.launcher import runner

    words = list(ctx.args)
    if not words:
        fail("launch", "a script must follow, as in 'amsp launch --num_gpus 8 train.py'")
    try:
        options = runner.parse_args(words)
    except SystemExit as stop:
        if stop.code in (None, 0):  # --help
            raise
        fail("launch", "a script must follow DeepSpeed's options, as in 'amsp launch --num_gpus 8 train.py'")
    if options.hostfile != runner.DLTS_HOSTFILE and not Path(options.hostfile).is_file():
        # DeepSpeed only warns, and trains on this host alone.
        fail("launch", f"no such hostfile: {Path(options.hostfile).absolute()}; for this host alone, say --num_gpus")
    try:
        command = Command(options.user_script, tuple(options.user_args), options.module)
        file = config_file(command.arguments, os.environ)
        if file is not None:
            has_block(file)
    except (LaunchError, ConfigError) as error:
        fail("launch", str(error))
    own = words[: len(words) - len(options.user_args) - 1]
    by_name = ["-m"] if options.module else []
    flags = [word for word in own if word != "--module"]
    runner.main([*flags, "--module", "deepspeed_amsp.launch", *by_name, options.user_script, *options.user_args])
