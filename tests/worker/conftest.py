from tests.support.fixtures import few_modules

__all__ = ["few_modules"]
