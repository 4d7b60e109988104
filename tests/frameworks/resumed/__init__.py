"""Trainings that are ended in mid-epoch by SIGKILL and continued by another process."""
