"""Checks of the machine and of a dataset, before the run."""
