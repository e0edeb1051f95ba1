"""The flags of `convert`, named as in mlx-lm, and its report."""

from __future__ import annotations

import logging
import sys

from ..convert.conversion import Conversion, convert
from ..drafters.checkpoint import MODES
from ..loading.checkpoints import DTYPE_NAMES
from ..target.model_parts import AFTER_NORM, BEFORE_NORM
from .parser import Parser

ABOUT = (
    "Convert a drafter to MLX, and quantize it: ReDrafter, Medusa, EAGLE, DFlash or DSpark heads, "
    "multi-token-prediction layers."
)


def make_parser() -> Parser:
    """The argument parser; each flag is a parameter of `convert`."""
    parser = Parser(
        prog="mlx_redrafter.convert",
        description=ABOUT,
    )
    add = parser.add_argument
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument(
        "--hf-path", "--model", help="the drafter: a directory, a file or a Hugging Face repo"
    )
    origin.add_argument(
        "--from-base", help="a model; only its multi-token-prediction layer is read"
    )
    add("--mlx-path", default="mlx_model", help="the directory to write (default: %(default)s)")
    add("-q", "--quantize", action="store_true", help="quantize the drafter")
    add("--q-group-size", type=int, help="group size for quantization")
    add("--q-bits", type=int, help="bits per weight for quantization")
    add(
        "--q-mode",
        default="affine",
        choices=list(MODES),
        help="quantization mode (default: %(default)s)",
    )
    parts = {"head": "output matrix", "blocks": "blocks and input projection", "rnn": "cell"}
    for part, means in parts.items():
        about = f"bits for the {means} (default: --q-bits); 0 for none"
        add(f"--{part}-bits", type=int, metavar="BITS", help=about)
    add("--dtype", choices=DTYPE_NAMES, help="dtype of unquantized weights; as stored if not given")
    add("-d", "--dequantize", action="store_true", help="dequantize a quantized drafter")
    add(
        "--base-model",
        help="the drafter's target; recorded, and measures tokens per round before and after",
    )
    add("--draft-depth", type=int, help="default number of drafted tokens; recorded")
    add(
        "--hidden-state",
        choices=(AFTER_NORM, BEFORE_NORM),
        help="which hidden state the drafter reads; recorded",
    )
    add(
        "--draft-vocab-size",
        type=int,
        help="keep only the N most frequent tokens of --token-counts",
    )
    add(
        "--token-counts",
        help="JSON file: token ids, most frequent first, or an object from ids to counts",
    )
    add("--revision", help="branch, tag or commit of the Hugging Face repo")
    add("--upload-repo", help="Hugging Face repo to upload the result to")
    return parser


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    args = make_parser().parse_args()
    # Otherwise it logs every attempt to reach the hub.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    done = convert(**vars(args))
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    print(describe_conversion(done))
    return 0


def describe_conversion(done: Conversion) -> str:
    """The report to print."""
    args = done.args
    difference, largest = done.difference
    lines = [
        f"{done.path}: {args.model_type}, hidden size {args.hidden_size}, vocabulary "
        f"{args.vocab_size}, {args.describe_sizes()}; reads {args.describe_states()}",
        f"size: {done.bytes_before / 1e6:.2f} MB before, {done.bytes_after / 1e6:.2f} MB after, "
        f"{done.bits_per_weight:.3f} bits per weight",
        f"outputs: differ by at most {difference:.3g} (largest logit {largest:.3g}) on random "
        "inputs",
    ]
    if done.tokens_per_round:
        before, after = done.tokens_per_round
        lines.append(
            f"tokens per round: {before:.2f} before, {after:.2f} after, greedy, {args.base_model}"
        )
    return "\n".join(lines)
