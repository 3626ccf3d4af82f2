"""Checks that are run by hand."""
