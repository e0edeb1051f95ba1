"""The prompts that benchmarks decode: named files in categories, or a person's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from mlx_redrafter.atomic_files import expand_path
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import encode_chat
from mlx_redrafter.training.data import load_prompts

DIRECTORY = Path(__file__).parent / "prompts"

DEMO = "demo"
"""The name of the packaged demo's own prompts, pieces of source files that its models were not trained on."""


class Prompt(NamedTuple):
    """A prompt as a model reads it.

    Attributes:
        name: `category/file`, or a file of somebody's own and the prompt's number in it.
        category: what kind of text it asks for.
        ids: the token ids, through the chat template if the tokenizer has one.
    """

    name: str
    category: str
    ids: list[int]


def texts() -> dict[str, str]:
    """Name -> text, of every prompt that comes with the benchmarks."""
    files = sorted(DIRECTORY.glob("*/*.txt"))
    return {f"{path.parent.name}/{path.stem}": path.read_text(encoding="utf-8").strip() for path in files}


def categories() -> list[str]:
    """The kinds of prompts that come with the benchmarks."""
    return sorted({category_of(name) for name in texts()})


def category_of(name: str) -> str:
    """The part of a name before the slash."""
    return name.partition("/")[0]


def chosen(names: list[str], tokenizer: Any) -> list[Prompt]:
    """The prompts of these names.

    Args:
        names: of prompts or of categories, "all", "demo", or paths of files with a prompt a line (or jsonl).

    Raises:
        RedrafterError: a name that is none of these, with those there are; a file that cannot be read.
    """
    found: list[Prompt] = []
    for name in names:
        found += named(name, tokenizer)
    return list({(prompt.name, *prompt.ids): prompt for prompt in found}.values())


def named(name: str, tokenizer: Any) -> list[Prompt]:
    """The prompts that one name stands for."""
    known = texts()
    here = [each for each in known if name in ("all", each, category_of(each))]
    if here:
        return [Prompt(each, category_of(each), encode_chat(tokenizer, known[each])) for each in here]
    if name == DEMO:
        return [
            Prompt(f"{DEMO}/{number:02d}", DEMO, encode_chat(tokenizer, text))
            for number, text in enumerate(demo_prompts(), start=1)
        ]
    path = expand_path(name)
    if not path.exists():
        kinds = ", ".join([*categories(), DEMO])
        raise RedrafterError(f"no prompt, category or file is called {name!r}: categories are {kinds}")
    rows = load_prompts(path, tokenizer)
    return [Prompt(f"{path.name}:{number}", "own", ids) for number, ids in enumerate(rows, start=1)]


def one_of_each(prompts: list[Prompt]) -> list[Prompt]:
    """The first prompt of each category."""
    return list({prompt.category: prompt for prompt in reversed(prompts)}.values())[::-1]
