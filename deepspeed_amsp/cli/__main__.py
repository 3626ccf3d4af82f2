"""``python -m deepspeed_amsp.cli`` is ``amsp``."""

from deepspeed_amsp.cli.app import main

main()
