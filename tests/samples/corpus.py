"""A corpus of really damaged files: twelve formats, each broken in every way we could think of.

Every file is read by the library people read it with. Which of them are bad is not written down
here but found out: each is loaded once in a process of its own, and what happens to that process is
what the loader has to report.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import random
import signal
import struct
import wave
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from holdfast.samples.bad_sample import error_name
from tests.support.optional import optional

h5py = optional("h5py")

LENGTHS = (1, 4, 11, 30, 0.25, 0.5, 0.75, 0.98)  # bytes, or parts of the whole
GOOD = 6  # of each format


# -- making files -------------------------------------------------------------------------


def _image(kind: str) -> Callable[[np.random.Generator], bytes]:
    def make(dice: np.random.Generator) -> bytes:
        pixels = dice.integers(0, 256, (24, 24, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind)
        return file.getvalue()

    return make


def _npy(dice: np.random.Generator) -> bytes:
    file = io.BytesIO()
    np.save(file, dice.random((8, 8)))
    return file.getvalue()


def _npz(dice: np.random.Generator) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, a=dice.random((8, 8)))
    return file.getvalue()


def _hdf5(dice: np.random.Generator) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        h5.create_dataset("a", data=dice.random((16, 16)), compression="gzip", fletcher32=True)
    return file.getvalue()


def _csv(dice: np.random.Generator) -> bytes:
    return "".join(f"{a},{b}\n" for a, b in dice.random((20, 2))).encode()


def _json(dice: np.random.Generator) -> bytes:
    return json.dumps({"values": dice.random(20).tolist()}).encode()


def _wav(dice: np.random.Generator) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(dice.integers(-999, 999, 200, np.int16).tobytes())
    return file.getvalue()


def _zip(dice: np.random.Generator) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a", dice.bytes(300))
        out.writestr("b", b"b" * 300)
    return file.getvalue()


MAKERS: dict[str, Callable[[np.random.Generator], bytes]] = {
    "jpg": _image("JPEG"),
    "png": _image("PNG"),
    "gif": _image("GIF"),
    "tiff": _image("TIFF"),
    "webp": _image("WEBP"),
    "npy": _npy,
    "npz": _npz,
    "h5": _hdf5,
    "csv": _csv,
    "json": _json,
    "wav": _wav,
    "zip": _zip,
}


def _png_bomb() -> bytes:
    """A few bytes that say they are ten thousand million pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + checksum

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _npy_bomb() -> bytes:
    """A header that asks for more memory than there is."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
    )
    return file.getvalue()


BOMBS = {
    "bomb.png": _png_bomb,
    "bomb.npy": _npy_bomb,
    "bomb.json": lambda: b"[" * 200_000 + b"]" * 200_000,
}


def make(folder: Path, seed: int = 7) -> list[Path]:
    """The whole corpus; the same for the same seed."""
    dice = np.random.default_rng(seed)
    paths: list[Path] = []

    def write(name: str, content: bytes) -> None:
        paths.append(folder / name)
        paths[-1].write_bytes(content)

    contents = {}
    for kind, maker in MAKERS.items():
        for number in range(GOOD):
            contents[kind] = maker(dice)
            write(f"good-{number}.{kind}", contents[kind])
    kinds = list(MAKERS)
    for place, (kind, whole) in enumerate(contents.items()):
        for length in LENGTHS:
            size = length if isinstance(length, int) else int(len(whole) * length)
            write(f"cut-{length}.{kind}", whole[:size])
        for number in range(6):
            flipped = bytearray(whole)
            flipped[int(dice.integers(len(whole)))] ^= 1 << int(dice.integers(8))
            write(f"flipped-{number}.{kind}", bytes(flipped))
        half = len(whole) // 2
        write(f"zeros.{kind}", bytes(len(whole)))
        write(f"hole.{kind}", whole[:half] + bytes(len(whole) - half))
        write(f"empty.{kind}", b"")
        write(f"misnamed.{kind}", contents[kinds[place - 3]])
        paths.append(folder / f"folder.{kind}")
        paths[-1].mkdir()
        paths.append(folder / f"dangling.{kind}")
        paths[-1].symlink_to(folder / "nowhere")
        paths.append(folder / f"circle.{kind}")
        paths[-1].symlink_to(paths[-1])
        write(f"forbidden.{kind}", whole)
        paths[-1].chmod(0)
        write(f"vanishing.{kind}", whole)
    for name, bomb in BOMBS.items():
        write(name, bomb())
    random.Random(seed).shuffle(paths)
    return paths


# -- reading them -------------------------------------------------------------------------


def _read_csv(path: Path) -> Any:
    with path.open(newline="") as file:
        return np.array([[float(cell) for cell in row] for row in csv.reader(file)]).reshape(20, 2)


def _read_json(path: Path) -> Any:
    return np.array(json.loads(path.read_text())["values"], float)


def _read_wav(path: Path) -> Any:
    with wave.open(str(path)) as file:
        frames = file.readframes(file.getnframes())
        if len(frames) != file.getnframes() * file.getsampwidth():
            raise EOFError(f"{path} ends early")
        return np.frombuffer(frames, np.int16)


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as file:
        return np.frombuffer(b"".join(file.read(name) for name in ("a", "b")), np.uint8)


def _read_h5(path: Path) -> Any:
    with h5py.File(path, "r") as file:
        return file["a"][:]


def _read_image(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


READERS: dict[str, Callable[[Path], Any]] = {
    "npy": lambda path: np.load(path, allow_pickle=False),
    "npz": lambda path: np.load(path, allow_pickle=False)["a"],
    "h5": _read_h5,
    "csv": _read_csv,
    "json": _read_json,
    "wav": _read_wav,
    "zip": _read_zip,
}


def read(path: Path) -> int:
    """A checksum of what is in the file."""
    if path.name.startswith("vanishing"):
        path.unlink(missing_ok=True)  # between the listing of the folder and the reading
    content = np.ascontiguousarray(READERS.get(path.suffix[1:], _read_image)(path))
    return zlib.crc32(content.tobytes()) + content.size


class Files(Dataset[Any]):
    """A folder of files, as people have it."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def sample_name(self, index: int) -> str:
        return str(self.paths[index])

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, read(self.paths[index])])


# -- the truth ----------------------------------------------------------------------------


def truths(paths: list[Path]) -> list[tuple[str, Any]]:
    """For each ("good", checksum), ("raised", error) or ("killed", signal): found out by doing it
    in a child process, and in another one after it has died."""
    found: list[tuple[str, Any]] = []
    while len(found) < len(paths):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _tell(paths[len(found) :], writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            while True:
                try:
                    found.append(pickle.load(file))
                except EOFError:
                    break
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            found.append(("killed", signal.Signals(-status).name))
    return found


def _tell(paths: list[Path], writing: int) -> None:
    """In the child: load them all, say of each what happened, and leave."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for path in paths:
        try:
            one: tuple[str, Any] = ("good", read(path))
        except BaseException as error:
            one = ("raised", error_name(error))
        os.write(writing, pickle.dumps(one))
    os._exit(0)
