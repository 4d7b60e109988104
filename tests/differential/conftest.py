from tests.support.fixtures import nobody_left_behind

__all__ = ["nobody_left_behind"]
