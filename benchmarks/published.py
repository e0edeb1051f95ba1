"""Apple's published runs of ReDrafter on its own chips, read and checked; see benchmarks/data/README.md.

Numbers that others measured: nothing here is predicted.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mlx_redrafter.errors import RedrafterError

DATA = Path(__file__).parent / "data"
RUNS = DATA / "apple-mlx-2024"
CHIPS = ("m1-max", "m2", "m2-ultra")
DTYPES = ("float16", "bfloat16")

SOURCE = (
    "Apple's published runs, https://github.com/apple/ml-recurrent-drafter, recurrent_drafting/mlx/experiments: "
    "Vicuna-7B in 16 bits, one prompt"
)

PROMPT = 66
TOKENS = 200
"""Every published run: so many tokens read, so many made."""

PLAIN = ("run", "dtype", "comprehension_mlx", "generation_mlx", "comprehension_ours", "generation_ours")
DRAFTED = (
    *("run", "beam_width", "beam_length", "dtype", "nmax_length", "greedy", "steps", "prompt_length"),
    *("prompt_and_generated_length", "comprehension_and_generation_time"),
)
DISTURBED = ("file", "first_line", "last_line", "why")

Shape = tuple[int, int]
"""(W, K): hypotheses, drafted tokens."""

Line = Mapping[str, str]


class Run(NamedTuple):
    """One generation: its rounds, and its milliseconds, prompt included."""

    rounds: float
    ms: float


class Cell(NamedTuple):
    """A shape on a chip in a dtype: `rounds` of `round_ms` milliseconds each, prompt not included."""

    width: int
    depth: int
    rounds: float
    round_ms: float

    @property
    def rows(self) -> int:
        """What a round verified: every hypothesis whole, the root in each."""
        return self.width * (self.depth + 1)

    @property
    def tokens_per_round(self) -> float:
        """How many of the new tokens a round made."""
        return TOKENS / self.rounds

    @property
    def tokens_per_second(self) -> float:
        """New tokens in a second, prompt not included."""
        return 1e3 * self.tokens_per_round / self.round_ms


class Published(NamedTuple):
    """All that was published for a chip and a dtype.

    Attributes:
        plain_ms: a step of plain decoding with Apple's own llama.
        mlx_lm_ms: the same with mlx-lm of that time.
        cells: by shape.
        used: how many greedy runs the cells are made of.
        left_out: how many others are disturbed.
    """

    chip: str
    dtype: str
    plain_ms: float
    mlx_lm_ms: float
    cells: dict[Shape, Cell]
    used: int
    left_out: int

    @property
    def best(self) -> Cell:
        """The fastest as Apple measured it."""
        return max(self.cells.values(), key=lambda cell: cell.tokens_per_second)

    @property
    def plain_per_second(self) -> float:
        """Tokens in a second of plain decoding."""
        return 1e3 / self.plain_ms


def fastest(runs: Sequence[Run]) -> Run:
    """The run that took the least: what disturbs a run makes it slower, never faster."""
    return min(runs, key=lambda run: run.ms)


def mean(runs: Sequence[Run]) -> Run:
    """The mean of rounds and of times."""
    return Run(sum(run.rounds for run in runs) / len(runs), sum(run.ms for run in runs) / len(runs))


def read_all(folder: Path = RUNS) -> list[Published]:
    """Every chip in every dtype."""
    return [each for chip in CHIPS for each in read_chip(chip, folder=folder)]


def read_chip(chip: str, take: Callable[[Sequence[Run]], Run] = fastest, folder: Path = RUNS) -> list[Published]:
    """What was published for a chip, an entry a dtype; of several runs of a shape `take` makes one.

    Raises:
        RedrafterError: a chip that is not there, or a damaged file, named with its line.
    """
    if chip not in CHIPS:
        raise RedrafterError(f"chip must be one of {', '.join(CHIPS)}, got {chip!r}")
    disturbed = left_out_lines(folder / "disturbed.csv")
    plain = read_plain(folder / f"{chip}-autoregression.csv", disturbed)
    runs: dict[tuple[str, Shape], list[Run]] = defaultdict(list)
    left_out: dict[str, int] = defaultdict(int)
    path = folder / f"{chip}-recurrent_drafting.csv"
    for line, row in lines_of(path, DRAFTED):
        dtype, shape, run = read_run(path, line, row)
        if row["greedy"] != "True":
            continue
        if (path.name, line) in disturbed:
            left_out[dtype] += 1
        else:
            runs[dtype, shape].append(run)
    found = []
    for dtype in DTYPES:
        if dtype not in plain:
            raise RedrafterError(f"{folder / chip}-autoregression.csv: expected a run in {dtype}, found none")
        step, mlx_lm, prompt = plain[dtype]
        own = {shape: some for (name, shape), some in runs.items() if name == dtype}
        cells = {}
        for (width, depth), some in own.items():
            rounds, ms = take(some)
            cells[width, depth] = Cell(width, depth, rounds, (ms - prompt) / rounds)
        used = sum(map(len, own.values()))
        found.append(Published(chip, dtype, step, mlx_lm, cells, used, left_out[dtype]))
    return found


def read_plain(path: Path, disturbed: set[tuple[str, int]]) -> dict[str, tuple[float, float, float]]:
    """dtype -> the least milliseconds of (a step with their llama, a step with mlx-lm, their reading of the prompt)."""
    times: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for line, row in lines_of(path, PLAIN):
        dtype = read_dtype(path, line, row)
        ours, mlx_lm = (number(path, line, row, f"generation_{who}") / TOKENS for who in ("ours", "mlx"))
        prompt = number(path, line, row, "comprehension_ours")
        if (path.name, line) not in disturbed:
            times[dtype].append((ours, mlx_lm, prompt))
    return {
        dtype: (min(a for a, _, _ in some), min(b for _, b, _ in some), min(c for _, _, c in some))
        for dtype, some in times.items()
    }


def read_run(path: Path, line: int, row: Line) -> tuple[str, Shape, Run]:
    """(dtype, (W, K), the run) of a line."""
    width, length, steps = (whole(path, line, row, name) for name in ("beam_width", "beam_length", "steps"))
    made = whole(path, line, row, "prompt_and_generated_length") - whole(path, line, row, "prompt_length")
    if length < 2 or made != TOKENS or row["greedy"] not in ("True", "False"):
        raise RedrafterError(
            f"{path}, line {line}: expected beam_length from 2, {TOKENS} new tokens and greedy True or False, "
            f"got {length}, {made} and {row['greedy']!r}"
        )
    ms = number(path, line, row, "comprehension_and_generation_time")
    return read_dtype(path, line, row), (width, length - 1), Run(steps + 1, ms)


def left_out_lines(path: Path) -> set[tuple[str, int]]:
    """(file, line) of what the notes call disturbed."""
    found = set()
    for line, row in lines_of(path, DISTURBED):
        first, last = whole(path, line, row, "first_line"), whole(path, line, row, "last_line")
        found |= {(row["file"], at) for at in range(first, last + 1)}
    return found


def lines_of(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Line]]:
    """(line number, row) of a CSV with exactly these columns."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read {path}: {error}") from error
    rows = csv.reader(text.splitlines())
    head = next(rows, [])
    if head != list(columns):
        raise RedrafterError(f"{path}, line 1: expected the columns {','.join(columns)}, got {','.join(head)!r}")
    for line, row in enumerate(rows, 2):
        if len(row) != len(columns):
            raise RedrafterError(f"{path}, line {line}: expected {len(columns)} fields, got {len(row)}")
        yield line, dict(zip(columns, row, strict=True))


def number(path: Path, line: int, row: Line, name: str) -> float:
    """A positive number."""
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RedrafterError(f"{path}, line {line}: expected a positive number as {name}, got {row[name]!r}")
    return value


def whole(path: Path, line: int, row: Line, name: str) -> int:
    """A positive whole number."""
    value = number(path, line, row, name)
    if value != int(value):
        raise RedrafterError(f"{path}, line {line}: expected a whole number as {name}, got {row[name]!r}")
    return int(value)


def read_dtype(path: Path, line: int, row: Line) -> str:
    """The dtype without the name of its module."""
    dtype = row["dtype"].removeprefix("mlx.core.")
    if dtype not in DTYPES:
        raise RedrafterError(f"{path}, line {line}: expected a dtype of {', '.join(DTYPES)}, got {row['dtype']!r}")
    return dtype
