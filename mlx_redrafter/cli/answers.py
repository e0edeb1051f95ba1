"""`answers`: lists or clears a folder of past answers."""

from __future__ import annotations

from ..answer_folder import clear_folder, decode_texts, find_folder, list_files
from ..errors import Parser


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    args = make_parser().parse_args()
    folder = find_folder(args.folder)
    if args.clear and clear_folder(folder):
        print("removed all answers")
        return 0
    for path in list_files(folder):
        texts, damaged = decode_texts(path.read_bytes())
        tokens, size = sum(len(text.ids) for text in texts), path.stat().st_size
        line = f"{path.name}: {len(texts):,} texts, {tokens:,} tokens, {size:,} bytes"
        print(line + (f", {damaged:,} of them damaged" if damaged else ""))
    if not list_files(folder):
        print("the folder has no answers")
    return 0


def make_parser() -> Parser:
    """The argument parser."""
    parser = Parser(
        prog="mlx_redrafter.answers", description="List a folder of past answers, one line per tokenizer, or clear it."
    )
    parser.add_argument("folder", metavar="DIR", help="the folder given to --answers")
    parser.add_argument("--clear", action="store_true", help="remove all answers, but not the folder")
    return parser
