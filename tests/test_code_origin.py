"""Whose code is it: wherever Python, its libraries, we and the user are installed."""

from __future__ import annotations

import email
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import code_origin

PYTHONS = ("/usr/lib/python3.12/",)
OURS = "/home/me/src/holdfast/"


@pytest.mark.parametrize(
    ("file", "author"),
    [
        ("/usr/lib/python3.12/queue.py", "python"),
        ("/usr/lib/python3.12/lib-dynload/_queue.cpython-312-x86_64-linux-gnu.so", "python"),
        ("<frozen importlib._bootstrap>", "python"),
        ("<string>", "python"),
        ("/usr/lib/python3.12/site-packages/cv2/__init__.py", "library"),
        ("/usr/lib/python3/dist-packages/PIL/_imaging.cpython-312-x86_64-linux-gnu.so", "library"),
        ("/home/me/.local/lib/python3.12/site-packages/h5py/h5d.py", "library"),
        ("/home/me/venv/lib64/python3.12/site-packages/six.py", "library"),
        ("/home/me/src/holdfast/loader.py", "holdfast"),
        ("/home/me/src/holdfast_x/loader.py", "user"),
        ("/home/me/src/train.py", "user"),
        ("/home/me/site-packages.py", "user"),
        ("/usr/lib/python3.12-mine/train.py", "user"),
        ("train.py", "user"),
        ("./train.py", "user"),
    ],
)
def test_a_file_by_its_place(file: str, author: str) -> None:
    assert code_origin.of_file(file, PYTHONS, OURS) == author


def test_we_installed_among_the_libraries_are_still_ourselves() -> None:
    ours = "/venv/lib/python3.12/site-packages/holdfast/"
    assert code_origin.of_file(f"{ours}engine/worker.py", PYTHONS, ours) == "holdfast"
    assert code_origin.of_file(ours.replace("holdfast", "holdfast_x") + "a.py", PYTHONS, ours) == (
        "library"
    )


def test_the_files_of_this_very_process() -> None:
    assert code_origin.of_file(email.__file__) == "python"
    assert code_origin.of_file(tempfile.__file__) == "python"
    assert code_origin.of_file(str(Path(sysconfig.get_paths()["stdlib"]).resolve() / "a.py")) == (
        "python"
    )
    assert code_origin.of_file(np.__file__) == code_origin.of_file(torch.__file__) == "library"
    assert code_origin.of_file(holdfast.__file__) == "holdfast"
    assert code_origin.of_file(__file__) == "user"


@pytest.mark.parametrize("name", ["builtins", "collections.abc", "torch.nn", "numpy", "holdfast"])
def test_well_known_modules(name: str) -> None:
    assert code_origin.well_known(name)


@pytest.mark.parametrize("name", ["__main__", "torchvision.datasets", "holdfast_x", "mine.data"])
def test_all_others_may_be_the_users(name: str) -> None:
    assert not code_origin.well_known(name)


def test_a_class_without_the_name_of_a_module_is_nobodys() -> None:
    odd = type("Odd", (), {"__module__": property(lambda self: "builtins")})
    assert code_origin.module_of(odd) == ""
    assert code_origin.module_of(dict) == "builtins"
    assert code_origin.module_of(torch.nn.Linear) == "torch.nn.modules.linear"
