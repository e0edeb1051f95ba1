"""`python -m mlx_redrafter.convert`: a trained drafter, wherever it comes from, as a directory that MLX loads.

    sources   which files a path or hub id means, and which are refused
    tensors   what is stored in a file, read one tensor at a time, no code executed
    names     one mapping from every known style of names to Apple's
    pack      dtype and quantisation, layer by layer
    report    what the conversion cost
    conversion   all of it, in order; `command` is its flags

Only a door: importing it imports nothing else.
"""

from __future__ import annotations

from ..doors import guarded


def main() -> None:
    """Runs the command on `sys.argv`; exits with 1 and one line on bad input."""
    guarded("mlx_redrafter.convert.command")
