"""Published heads, from the golden files."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

Arrays = dict[str, mx.array]

GOLDEN = {
    file.stem: file
    for file in sorted((Path(__file__).parents[1] / "golden").glob("*/*.safetensors"))
}


def list_golden(*patterns: str) -> tuple[str, ...]:
    """Names of golden files that match the patterns; each pattern begins with a folder."""
    return tuple(
        name for name, file in GOLDEN.items() if any(file.match(pattern) for pattern in patterns)
    )


def read_golden(name: str) -> tuple[Arrays, Arrays, dict[str, Any], str]:
    """Returns (tensors under their published names, the original's results, the config, the file's
    name).
    """
    arrays, metadata = mx.load(str(GOLDEN[name]), return_metadata=True)
    weights, golden = (
        {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        for prefix in ("weights.", "golden.")
    )
    return weights, golden, json.loads(metadata["config"]), metadata["file"]


def publish(name: str, directory: Path, *, arrays: Arrays | None = None, **config) -> Path:
    """Writes a head as its authors publish it.

    Args:
        arrays: replaces the golden file's tensors.
        config: replaces config values; None removes a key.
    """
    weights, _, said, file = read_golden(name)
    directory.mkdir(parents=True)
    mx.save_safetensors(
        str(directory / file), weights if arrays is None else arrays, {"format": "pt"}
    )
    said |= config
    (directory / "config.json").write_text(
        json.dumps({k: v for k, v in said.items() if v is not None})
    )
    return directory
