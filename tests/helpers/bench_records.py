"""Benchmark records for tests. None of the numbers were measured."""

import argparse
from typing import Any

MACHINE = {
    "device": "Device(gpu, 0)",
    "chip": "Some Chip",
    "platform": "Some-OS-1.0",
    "cores": 4,
    "memory_gb": 16.0,
    "python": "3.11.0",
    "mlx": "0.32.4",
    "mlx-lm": "0.32.2",
    "mlx_redrafter": "0.1.0",
    "blas_threads": 1,
    "when": "2026-01-02T03:04:05+00:00",
}

MODELS = {
    "schema": 1,
    "model": "demo",
    "model_bits": 32.0,
    "model_gb": 0.02,
    "drafter": "demo",
    "drafter_bits": 32.0,
    "drafter_gb": 0.003,
}


def make_speed(
    contestant: str = "drafted", plan=(1, 3, 4), ratio: float = 1.5, **more
) -> dict[str, Any]:
    """A speed record of one contestant on one prompt."""
    rounds = 64 if contestant == "drafted" else 127
    return {
        **MODELS,
        "kind": "speed",
        "draft_model": None,
        "temp": 0.0,
        "seed": 0,
        "max_tokens": 128,
        "repeats": 3,
        "prompt": "code/one",
        "category": "code",
        "prompt_tokens": 30,
        "contestant": contestant,
        "plan": list(plan) if isinstance(plan, tuple) else plan,
        "num_draft_tokens": None,
        "tokens": 128,
        "seconds": [1.27 / ratio] * 3,
        "tokens_per_second": 100.0 * ratio,
        "tokens_per_second_quartiles": [90.0 * ratio, 110.0 * ratio],
        "ratio": ratio,
        "ratio_quartiles": [0.9 * ratio, 1.1 * ratio],
        "rounds": rounds,
        "tokens_per_round": None if contestant == "mlx-lm" else 127 / rounds,
        "plain_steps": 0,
        "acceptance_per_depth": [0.6, 0.3, 0.1] if contestant == "drafted" else None,
        "peak_memory_gb": 0.1,
        "bandwidth_gb_s": 2.0,
        "same_tokens": None if contestant == "plain" else True,
        "first_difference": None,
        **more,
    }


def make_costs(**more) -> dict[str, Any]:
    """A cost record: a forward of N rows takes 10 + N ms, one draft level 1 ms."""
    return {
        **MODELS,
        "kind": "costs",
        "costs": {
            "contexts": [64],
            "counts": [1, 2, 3, 4, 5, 6, 7],
            "verify": [[11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]],
            "plain": [10.0],
            "widths": [1, 2],
            "level": [1.0, 1.0],
            "overhead_ms": [0.0, 0.0],
            "replay_row_ms": 0.0,
        },
        "acceptance": [[0.6, 0.1]],
        "plans": [[1, 3, 4]],
        **more,
    }


def make_line(record: dict[str, Any], **more) -> dict[str, Any]:
    """The record with its machine added, as in a results file."""
    return {**record, "machine": {**MACHINE, **more}}


def parse_flags(module, *words: str) -> argparse.Namespace:
    """Parses command-line flags for one benchmark command."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)
