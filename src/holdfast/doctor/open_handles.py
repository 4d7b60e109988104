"""Open files, sockets, archives and databases that forked workers would share.

A fork copies the descriptor, not the open file: position, protocol and locks are common to all
workers, which then read each other's bytes. Libraries that keep a handle in C have no file among
their attributes; they are recognised by their modules and classes.
"""

from __future__ import annotations

import io
import logging
import mmap
import socket
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from types import FunctionType, ModuleType
from typing import Any

from holdfast.code_origin import module_of
from holdfast.introspection.attributes import is_a
from holdfast.introspection.dataset_parts import parts

_TYPES: tuple[tuple[type, str], ...] = (
    (socket.socket, "a socket"),
    (sqlite3.Connection, "a database connection"),
    (sqlite3.Cursor, "a database cursor"),
    (zipfile.ZipFile, "an open zip archive"),
    (tarfile.TarFile, "an open tar archive"),
    (subprocess.Popen, "a running process"),
    (io.IOBase, "an open file"),
)
_MODULES = {
    "h5py": "an open HDF5 file",
    "tables": "an open HDF5 file",
    "netCDF4": "an open HDF5 file",
    "lmdb": "an open LMDB environment",
    "zarr": "an open Zarr store",
    "rasterio": "an open raster file",
    "psycopg": "a database connection",
    "psycopg2": "a database connection",
    "pymysql": "a database connection",
    "mysql": "a database connection",
    "duckdb": "a database connection",
    "sqlalchemy": "a database connection",
    "pymongo": "a database connection",
    "redis": "a connection",
    "requests": "a connection",
    "httpx": "a connection",
    "boto3": "a connection",
    "botocore": "a connection",
    "grpc": "a connection",
    "av": "an open video",
    "decord": "an open video",
}
_IN_C = ("lmdb", "_lmdb")  # modules whose classes have `__module__` "builtins"
_IN_MEMORY = (io.BytesIO, io.StringIO)
_CARRIED_OVER = (logging.Logger, logging.Handler)  # several processes may append to one log file


def open_handles(dataset: Any) -> list[tuple[str, str]]:
    """Path and kind of each; of nested ones only the outermost."""
    found: dict[str, str] = {}
    spared: list[str] = []
    for path, value in parts(dataset, named=True):
        if any(path.startswith((f"{above}.", f"{above}[")) for above in (*found, *spared)):
            continue
        if is_a(value, _CARRIED_OVER):
            spared.append(path)
        elif what := _kind(value):
            found[path] = what
    return list(found.items())


def _kind(value: Any) -> str:
    kind = type(value)
    if is_a(value, _IN_MEMORY) or is_a(value, (type, ModuleType, BaseException, mmap.mmap)):
        return ""
    for known, what in _TYPES:
        if is_a(value, known):
            return what if _is_open(value) else ""
    for name in _IN_C:
        module = sys.modules.get(name)
        if module is not None and kind in vars(module).values():
            return _MODULES["lmdb"]
    what = _MODULES.get(module_of(kind).partition(".")[0], "")
    return what if what and not is_a(value, FunctionType) and _is_open(value) else ""


def _is_open(value: Any) -> bool:
    if is_a(value, io.IOBase):
        return not value.closed and _descriptor(value) > 2  # standard streams may be shared
    if is_a(value, socket.socket):
        return bool(value.fileno() != -1)
    if is_a(value, zipfile.ZipFile):
        return value.fp is not None and _kind(value.fp) != ""
    if is_a(value, tarfile.TarFile):
        return not value.closed
    if is_a(value, subprocess.Popen):
        return bool(value.returncode is None)
    kind = type(value)
    if module_of(kind).partition(".")[0] == "h5py":  # h5py.h5p and the like: settings, not files
        return ".h5" not in module_of(kind) and bool(value)  # false once its file is closed
    return not getattr(value, "closed", False)


def _descriptor(file: Any) -> int:
    """A file's descriptor; 3, as good as any, for a file object that has none itself."""
    try:
        return int(file.fileno())
    except (OSError, ValueError, AttributeError):
        return 3
