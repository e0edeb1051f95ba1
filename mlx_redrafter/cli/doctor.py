"""What `doctor` does: models, measurements, a page of text or one JSON object on stdout."""

from __future__ import annotations

import argparse
import json
import sys

from ..checkpoints import load_pair
from ..flags import add_pair
from .diagnosis import diagnose
from .page import page
from .picture import check_plot, encodes, plot


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m mlx_redrafter.doctor`."""
    parser = argparse.ArgumentParser(
        prog="mlx_redrafter.doctor",
        description="Measure what drafting costs and brings on this machine for a model, before a drafter is trained.",
    )
    add = parser.add_argument
    add_pair(parser, "a random one of the size that training would choose", plain=False)
    add("--refresh", action="store_true", help="measure anew what is kept of an earlier measurement")
    add("--plot", metavar="PNG", help="draw the curve and the outlook to this file, too")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    return parser


def run() -> int:
    """Examines as `sys.argv` says; the exit status."""
    args = make_parser().parse_args()
    picture = check_plot(args.plot)
    model, _, drafter = load_pair(args, args.model, args.drafter)
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
