from tests.support.fixtures import (
    holdfast_class,
    loader_class,
    pytest_collection_modifyitems,
    which,
    which_script,
)

__all__ = [
    "holdfast_class",
    "loader_class",
    "pytest_collection_modifyitems",
    "which",
    "which_script",
]
