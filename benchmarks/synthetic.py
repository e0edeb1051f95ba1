"""The engine at real sizes, without any download: published shapes, random weights, drafts of a chosen acceptance.

    python -m benchmarks synthetic --quick
    python -m benchmarks synthetic --shape llama-3.1-8b --bits 4 --acceptance 0.7 --plans auto 1,3 2,3

The text is fixed beforehand (benchmarks/oracle.py), so that drafts can be right as often as is asked for; the target
and the drafter compute all they would. `--layers` takes only so many of a shape's layers, where the whole does not fit
or takes too long: the records say so, and nothing is scaled up.
"""

from __future__ import annotations

import argparse
import sys

import mlx.core as mx

from mlx_redrafter.errors import RedrafterError

from .building import DTYPES, build
from .common import positive
from .contest import RunOptions
from .measuring import PLANS, add_options, checked, measured, plan
from .targets import TARGETS, TargetShape, target_of

WHOLE = {"float32": 32, "float16": 16, "bfloat16": 16}
"""Bits of a number that is not quantized."""

QUICK_PLANS = ["auto", (1, 3)]
QUICK_LAYERS = 2
QUICK_TOKENS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--shape", default=TARGETS[0].name, help=f"one of {', '.join(each.name for each in TARGETS)}")
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 5, 6, 8, 16, 32), help="16 and 32: not quantized")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of what is not quantized (default: by the device)")
    parser.add_argument("--layers", type=positive, help="only so many of its layers")
    parser.add_argument("--acceptance", default="0.7", help="chance of the first guess, or of each rank (default: 0.7)")
    parser.add_argument("--drafter-bits", type=int, choices=(2, 3, 4, 5, 6, 8), help="quantizes the drafter, too")
    parser.add_argument("--plans", type=plan, nargs="+", metavar="PLAN", help="auto, W,K or W,K,N (default: several)")
    add_options(parser, f"{QUICK_LAYERS} layers, {QUICK_TOKENS} tokens, plans auto and 1,3, once")
    default = RunOptions()
    parser.set_defaults(random_drafter=False, temp=default.temp, num_draft_tokens=default.num_draft_tokens)


def run(args: argparse.Namespace) -> int:
    """Builds a pair and measures it; the exit status."""
    args.output = args.output and checked(args.output)
    shape, layers, bits, dtype = asked(args)
    if args.quick:
        args.max_tokens = args.max_tokens or QUICK_TOKENS
    print(f"{shape.name}: drawing weights of {layers} layers", file=sys.stderr)
    subject = build(
        shape, bits, dtype, layers=layers, acceptance=args.acceptance, drafter_bits=args.drafter_bits, seed=args.seed
    )
    status, _ = measured(subject, args.plans or (QUICK_PLANS if args.quick else PLANS), args)
    return status


def asked(args: argparse.Namespace) -> tuple[TargetShape, int, int, str]:
    """(shape, layers, bits, dtype) of the flags: on a CPU float32, which it is fast in; on a GPU 4 bits of bfloat16.

    Raises:
        RedrafterError: they contradict each other.
    """
    shape = target_of(args.shape)
    layers = args.layers or (min(QUICK_LAYERS, shape.num_hidden_layers) if args.quick else shape.num_hidden_layers)
    if layers > shape.num_hidden_layers:
        raise RedrafterError(f"{shape.name} has {shape.num_hidden_layers} layers, got --layers {layers}")
    on_cpu = mx.default_device().type == mx.cpu
    dtype = args.dtype or ("float32" if args.bits == 32 or (on_cpu and args.bits != 16) else "bfloat16")
    bits = args.bits or (WHOLE[dtype] if on_cpu else 4)
    if bits in WHOLE.values() and bits != WHOLE[dtype]:
        raise RedrafterError(f"{bits} bits that are not quantized need another --dtype than {dtype}")
    return shape, layers, bits, dtype
