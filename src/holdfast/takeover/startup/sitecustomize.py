# mypy: ignore-errors
"""Imported by Python itself at its start, in every process below ``holdfast run``.

This folder is the first in PYTHONPATH there, and must contain nothing but this file. Another
``sitecustomize`` that Python would have imported is imported all the same. Any Python may read
this, also one that has no holdfast, or is too old for it: so nothing here may fail or be new.
"""

import os
import sys


def _another_sitecustomize(here):
    """Import the one that this file hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [one for one in sys.path if os.path.realpath(one) != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _Waiting(object):
    """Waits for the import of torch's loader, then leaves."""

    name = "torch.utils.data.dataloader"

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        from importlib.util import find_spec

        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader):
        execute = loader.exec_module

        def exec_module(module):
            del loader.exec_module
            execute(module)
            try:
                from holdfast.takeover import bootstrap
            except ImportError:  # a Python that has torch and no holdfast
                return
            bootstrap.prepare(module)

        loader.exec_module = exec_module


if sys.version_info >= (3, 10):
    sys.meta_path.insert(0, _Waiting())
if sys.version_info >= (3, 5):
    _another_sitecustomize(os.path.dirname(os.path.realpath(__file__)))
