from tests.support.fixtures import (
    holdfast_class,
    loader_class,
    nobody_left_behind,
    pytest_collection_modifyitems,
    pytest_runtest_logreport,
    which,
    which_script,
)

__all__ = [
    "holdfast_class",
    "loader_class",
    "nobody_left_behind",
    "pytest_collection_modifyitems",
    "pytest_runtest_logreport",
    "which",
    "which_script",
]
