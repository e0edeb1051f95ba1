"""MLX's Metal kernels as they are shipped: LLVM bitcode in the macOS wheel of `mlx-metal`."""

import hashlib
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from platformdirs import user_cache_path

PLATFORMS = ("macosx_15_0_arm64", "macosx_14_0_arm64", "macosx_26_0_arm64")
MEMBER = "mlx/lib/mlx.metallib"


class NoKernelsError(Exception):
    """The kernels cannot be had here."""


def fetch(version: str, platform: str = PLATFORMS[0]) -> bytes:
    """The file mlx.metallib of a version of MLX. Its wheel (45 MB) is downloaded once."""
    folder = user_cache_path("mlx_redrafter") / "wheels"
    pattern = f"mlx_metal-{version}-*-{platform}.whl"
    if not list(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = f"pip download -q --no-deps --only-binary=:all: --platform {platform} -d"
            done = subprocess.run(
                [sys.executable, "-m", *command.split(), scratch, f"mlx-metal=={version}"],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
                raise NoKernelsError(f"no wheel of mlx-metal {version}: {last}")
            for wheel in Path(scratch).iterdir():
                wheel.rename(folder / wheel.name)
    (wheel,) = folder.glob(pattern)
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(MEMBER)


def read_kernels(metallib: bytes, pattern: str) -> dict[str, bytes]:
    """The LLVM bitcode of the functions whose names match `pattern`, by name.

    The file starts with a header, which says where the list of functions is and where their bitcode
    begins. An entry of the list is its length, then fields (a tag of four letters, a length, a
    value) up to the tag ENDT. The last of three numbers in OFFT is where the function's bitcode is.
    """
    if metallib[:4] != b"MTLB":
        raise NoKernelsError("not a metallib")
    (position,) = struct.unpack_from("<Q", metallib, 24)
    (bitcode_start,) = struct.unpack_from("<Q", metallib, 72)
    (count,) = struct.unpack_from("<I", metallib, position)
    position += 4
    kernels = {}
    for _ in range(count):
        (length,) = struct.unpack_from("<I", metallib, position)
        fields = _read_fields(metallib, position + 4)
        name = fields[b"NAME"].rstrip(b"\0").decode()
        if re.fullmatch(pattern, name):
            start = bitcode_start + struct.unpack("<3Q", fields[b"OFFT"])[2]
            (size,) = struct.unpack("<Q", fields[b"MDSZ"])
            kernels[name] = metallib[start : start + size]
        position += length
    return kernels


def _read_fields(metallib: bytes, position: int) -> dict[bytes, bytes]:
    fields = {}
    while (tag := metallib[position : position + 4]) != b"ENDT":
        (length,) = struct.unpack_from("<H", metallib, position + 4)
        start = position + 6
        fields[tag] = metallib[start : start + length]
        position = start + length
    return fields


def compute_digest(kernels: dict[str, bytes]) -> str:
    """A SHA-256 of kernels and their names."""
    digest = hashlib.sha256()
    for name in sorted(kernels):
        digest.update(name.encode() + b"\0" + hashlib.sha256(kernels[name]).digest())
    return digest.hexdigest()
