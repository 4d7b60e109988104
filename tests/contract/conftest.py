from tests.support.fixtures import (
    holdfast_class,
    loader_class,
    which,
    which_script,
)

__all__ = [
    "holdfast_class",
    "loader_class",
    "which",
    "which_script",
]
