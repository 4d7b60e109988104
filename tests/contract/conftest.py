from tests.support.fixtures import holdfast_class, loader_class, nobody_left_behind, which

__all__ = ["holdfast_class", "loader_class", "nobody_left_behind", "which"]
