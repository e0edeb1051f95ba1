"""The packaged demo: a small target and drafter, for trying the package offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model

from ..checkpoints import evaluate, load, load_drafter
from ..drafters.protocol import Drafter

DIRECTORY = Path(__file__).parent


def load_demo(drafter: str | Path | None = None) -> tuple[nn.Module, Any, Drafter]:
    """(model, tokenizer, drafter) of the packaged demo, a llama of 25 million parameters for Python source.

    Stored in 8 bits, the drafter in 16, and decoded in float32, in which a CPU is fastest.

    Args:
        drafter: another drafter for the demo's target, a local directory or a hub id; it decodes in float32, too.

    Raises:
        CheckpointError: the package was installed without it, or that drafter does not fit this target.
    """
    model, tokenizer = load(DIRECTORY / "target")
    dequantize_model(model)
    loaded = load_drafter(DIRECTORY / "drafter" if drafter is None else drafter, model)
    for module in (model, loaded):
        module.set_dtype(mx.float32)
    evaluate(model, loaded)
    return model, tokenizer, loaded


def demo_prompts(*kinds: str) -> list[str]:
    """Prompts from source files that neither model was trained on.

    Args:
        kinds: "edits" (an instruction above a function or a JSON document) and "code" (the beginning of a function);
            both if none is given.
    """
    files = [DIRECTORY / f"{kind}.json" for kind in kinds or ("edits", "code")]
    return [prompt["text"] for file in files for prompt in json.loads(file.read_text(encoding="utf-8"))]
