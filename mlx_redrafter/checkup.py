"""What `doctor` does: models, measurements, a page of text or one JSON object on stdout."""

from __future__ import annotations

import argparse
import json
import sys

import mlx.nn as nn

from .checkpoint import load, load_drafter
from .command import warn_of_base
from .demo import load_demo
from .diagnosis import diagnose
from .drafter import Drafter
from .errors import RedrafterError
from .page import page
from .picture import check_plot, encodes, plot


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m mlx_redrafter.doctor`."""
    parser = argparse.ArgumentParser(
        prog="mlx_redrafter.doctor",
        description="Measure what drafting costs and brings on this machine for a model, before a drafter is trained.",
    )
    add = parser.add_argument
    add("--model", help="local directory or Hugging Face repo of the target; the packaged demo when not given")
    add("--drafter", help="its drafter; a random one of the size that training would choose when not given")
    add("--adapter-path", help="path of trained adapter weights and config")
    add("--trust-remote-code", action="store_true", help="trust remote code for the tokenizer and the model")
    add("--quantize-activations", "-qa", action="store_true", help="quantise activations as the layers are")
    add("--refresh", action="store_true", help="measure anew what is kept of an earlier measurement")
    add("--plot", metavar="PNG", help="draw the curve and the outlook to this file, too")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    return parser


def run() -> int:
    """Examines as `sys.argv` says; the exit status."""
    args = make_parser().parse_args()
    if args.model is None and (args.adapter_path or args.quantize_activations):
        flag = "--adapter-path" if args.adapter_path else "--quantize-activations"
        raise RedrafterError(f"{flag} needs --model: the packaged demo is examined as it is")
    picture = check_plot(args.plot)
    model, drafter = read_models(args)
    found = diagnose(model, drafter, refresh=args.refresh, say=lambda text: print(text, file=sys.stderr))
    if args.json:
        settings = vars(args) | {"model": args.model or "demo"}
        settings["drafter"] = args.drafter or (None if args.model else "demo")
        print(json.dumps(found.as_dict() | {"settings": settings}))
    else:
        print("\n".join(page(found, blocks=encodes(getattr(sys.stdout, "encoding", None)))))
    if picture is not None:
        own = found.quality if found.stand_in is None else None
        plot(picture, found.costs, own=own)
        print(f"drawn: {picture}", file=sys.stderr)
    return 0


def read_models(args: argparse.Namespace) -> tuple[nn.Module, Drafter | None]:
    """(model, drafter or None) of the flags."""
    drafter: Drafter | None = None
    if args.model is None:
        model, _, drafter = load_demo()
    else:
        model, _ = load(
            args.model,
            adapter_path=args.adapter_path,
            tokenizer_config={"trust_remote_code": args.trust_remote_code},
            model_config={"quantize_activations": args.quantize_activations},
            trust_remote_code=args.trust_remote_code,
        )
    if args.drafter:
        drafter = load_drafter(args.drafter, model)
        warn_of_base(args.drafter, drafter.args.base_model, args.model)
    return model, drafter
