from tests.support.fixtures import holdfast_class, loader_class, which

__all__ = ["holdfast_class", "loader_class", "which"]
