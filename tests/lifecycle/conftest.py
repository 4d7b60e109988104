from tests.lifecycle.fixtures import stage

__all__ = ["stage"]
