"""Runs examples one after the other in one interpreter, each as ``__main__``: importing the packages takes longest.

``python -m tests.frameworks.run_examples examples/frameworks/h5py_file.py …`` prints the name of each before its output.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path


def main() -> None:
    warnings.simplefilter("ignore")
    for path in map(Path, sys.argv[1:]):
        print(f"== {path.stem}", flush=True)
        runpy.run_path(str(path), run_name="__main__")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
