from tests.lifecycle.fixtures import incubated, stage

__all__ = ["incubated", "stage"]
