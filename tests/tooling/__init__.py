"""Tests of the test tools themselves."""
