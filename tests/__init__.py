"""Tests of deepspeed_amsp; helpers are imported as ``tests.support...``."""
