"""Comparing strategies in one run, on an emulated cluster where there is no real one."""
