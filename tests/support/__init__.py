"""Datasets and instruments for the tests that hold holdfast against stock torch.

Everything here lives in real modules, at module level, so that spawned and forkserver workers can
import it as `tests.support.…` too.
"""
