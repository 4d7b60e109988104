from tests.support.fixtures import (
    nobody_left_behind,
    pytest_collection_modifyitems,
    pytest_runtest_logreport,
)

__all__ = [
    "nobody_left_behind",
    "pytest_collection_modifyitems",
    "pytest_runtest_logreport",
]
