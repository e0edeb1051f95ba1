"""Runs every shell block of the documentation once, with the packaged demo instead of named models.

    python tests/run_documented.py [--seconds 60] [--only TEXT]

Run it before a release, in an environment with the `dev` extra and GNU coreutils. It takes half an
hour. Blocks run unchanged in a copy of the checkout, except for `pip install` lines and the names
in `NAMES`. After `--seconds` a block is interrupted and counts as started. The exit status is 1 if
any block fails.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from helpers.shell_blocks import ROOT, Block, shell_blocks

DEMO = ROOT / "mlx_redrafter" / "demo"
TARGET = "./demo-float32"  # in the copy of the checkout
DRAFTER = str(DEMO / "drafter")
DRAFT_MODEL = str(ROOT / "benchmarks" / "draft_model")
NAMES = {
    r"mlx-community/Qwen3-0\.6B-4bit": DRAFT_MODEL,
    r"mlx-community/[\w.-]+": TARGET,
    r"(?<![$\w])MODEL(?![\w=])": TARGET,
    r"--drafter my-drafter": f"--drafter {DRAFTER}",
    r"(?<!\w)(DRAFTER|CHECKPOINT)(?!\w)": DRAFTER,
    r"--drafter D(?!\w)": f"--drafter {DRAFTER}",
    r"~/": "./",
}
"""Replacements of names that a reader fills in, or that an earlier block creates."""
SKIPPED = {
    "git clone": "needs a published repository; .ci/run installs from a clone",
    "python3 -m venv": ".ci/run runs it",
    "distributed_config": "needs two Macs",
    "hosts.json": "needs two Macs",
    "ANTHROPIC_BASE_URL": "needs Claude Code",
    "--from-base Qwen": "needs the hub",
    "docker run": "needs Docker",
    "examples.demo.recipe": "downloads packages, and trains for hours",
    "examples.smollm2.compare_losses": "needs torch, and trains for half an hour",
    "smollm2-data": "needs SmolLM2-135M-Instruct, and trains for an hour",
    "question.jsonl": "needs Spec-Bench's questions",
    "instructions.jsonl": "needs the prompts of the packaged drafter",
    "held-out.jsonl": "needs SmolLM2-135M-Instruct, and trains for an hour",
}
"""Text of blocks that cannot run here -> the reason."""
STOPPED = re.compile(r"mlx_redrafter\.(server|race)\b")
"""Commands that run until they are stopped."""
TIMED_OUT = 124
"""The exit status of `timeout` after an interrupt."""


def prepare(folder: Path):
    """Creates the files that blocks name."""
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "*.egg-info"), dirs_exist_ok=True
    )
    texts = [f'{{"prompt": "def f_{i}(x):"}}\n' for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(texts), encoding="utf-8")
    given = [
        "--hf-path",
        str(DEMO / "target"),
        "--mlx-path",
        TARGET,
        "--dequantize",
        "--dtype",
        "float32",
    ]
    subprocess.run([sys.executable, "-m", "mlx_lm", "convert", *given], cwd=folder, check=True)


def run(block: Block, folder: Path, seconds: float) -> tuple[str, str]:
    """("passed", "started", "failed" or "skipped", the reason or the last lines of output)."""
    for part, reason in SKIPPED.items():
        if part in block.text:
            return "skipped", reason
    text = re.sub(r"(?m)^pip install .*\n", "", block.text)  # the current environment is used
    for pattern, name in NAMES.items():
        text = re.sub(pattern, name, text)
    variables = {
        "MODEL": TARGET,
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["timeout", "--signal=INT", "--kill-after=30", str(seconds), "bash", "-euc", text],
        cwd=folder,
        env=os.environ | variables | {"PYTHONPATH": str(folder)},
        input="hello\nq\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    has_failed = any(
        "Traceback" in line or line.startswith(("error: ", "usage: ")) for line in lines
    )
    if has_failed or done.returncode not in (0, TIMED_OUT):
        return "failed", "\n".join(lines[-12:])
    ends = done.returncode == 0 or STOPPED.search(block.text)
    return "passed" if ends else "started", lines[-1] if lines else ""


@contextmanager
def start_server(folder: Path) -> Iterator[None]:
    """The demo's server, from when it listens until the context ends."""
    command = [sys.executable, "-m", "mlx_redrafter.server"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None and any(
            line.startswith("serving on") for line in server.stderr
        )
        yield
        server.terminate()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for each block (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="blocks with this text alone")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for block in shell_blocks():
            if args.only not in block.text:
                continue
            started = time.monotonic()
            needs_server = "127.0.0.1:8080" in block.text and "ANTHROPIC" not in block.text
            with start_server(Path(name)) if needs_server else nullcontext():
                status, said = run(block, Path(name), args.seconds)
            results.append(status)
            command = block.text.strip().splitlines()[-1]
            print(
                f"{status:8}{time.monotonic() - started:6.0f} s  {block.place}: {command:.100}",
                flush=True,
            )
            print(
                f"        {said}" if status in ("skipped", "failed") else f"        {said:.150}",
                flush=True,
            )
    print(", ".join(f"{results.count(status)} {status}" for status in sorted(set(results))))
    sys.exit("failed" in results)


if __name__ == "__main__":
    main()
