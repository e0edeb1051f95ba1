"""Edits of functions and JSON documents, made by program.

An edit is an instruction, the source, and the edited source.
An edit is left out where it would not be clear what to change: for example where a variable's name
is also a word in a string of the function.
"""

from __future__ import annotations

import ast
import io
import json
import keyword
import re
import textwrap
import tokenize
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
CAMEL_CASE = re.compile(r"[a-z][a-z0-9]*(?:[A-Z][a-z0-9]+)+")
LINES = range(3, 60)
CHARACTERS = 1400
PROMPT_WEIGHT = 0.05
CHANGED_WEIGHT = 3.0
OPEN_SEQUENCES = 24
NEW_NAME = re.compile(r"[a-z][a-z_0-9]{1,15}")


@dataclass(frozen=True)
class Edit:
    """An instruction, the source, and the source after it."""

    kind: str
    instruction: str
    before: str
    after: str

    @property
    def prompt(self) -> str:
        """What the model reads; its answer, ended by the end-of-text token, should be `after`."""
        return f"# Edit: {self.instruction}\n{self.before}\n# Result:\n"


@dataclass(frozen=True)
class Function:
    """A function's source without indentation, its tokens, and its node."""

    source: str
    tokens: list[tokenize.TokenInfo]
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def names(self) -> set[str]:
        """Every name in it, keywords included."""
        return {token.string for token in self.tokens if token.type == tokenize.NAME}

    @property
    def words_in_text(self) -> set[str]:
        """The words of its strings and comments."""
        texts = [
            token.string
            for token in self.tokens
            if token.type in (tokenize.STRING, tokenize.COMMENT)
        ]
        return {word for text in texts for word in WORD.findall(text)}

    def replace(self, replacement: Callable[[int], str | None]) -> str:
        """Its source with other text for the tokens for which `replacement` returns one.

        Args:
            replacement: index of a token -> its new text; None to leave it.
        """
        lines = self.source.splitlines(keepends=True)
        for i in reversed(range(len(self.tokens))):
            text = replacement(i)
            if text is not None:
                number, start = self.tokens[i].start
                _, end = self.tokens[i].end
                line = lines[number - 1]
                lines[number - 1] = line[:start] + text + line[end:]
        return "".join(lines)

    def rename(self, old: str, new: str, attribute: bool = False) -> str:
        """Its source with a name replaced: behind dots if `attribute`, elsewhere if not."""

        def replacement(i: int) -> str | None:
            behind_dot = i > 0 and self.tokens[i - 1].string == "."
            return new if self.tokens[i].string == old and behind_dot == attribute else None

        return self.replace(replacement)


def list_functions(text: str) -> Iterator[Function]:
    """The functions and methods of a file that are short, ASCII, and indented by spaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in the sources
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if (
                source.count("\n") + 1 not in LINES
                or len(source) > CHARACTERS
                or not source.isascii()
            ):
                continue
            try:
                (alone,) = ast.parse(source).body
                tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
            except (SyntaxError, ValueError, tokenize.TokenError):
                continue  # a string in it is indented less than the function
            if isinstance(alone, ast.FunctionDef | ast.AsyncFunctionDef) and "\t" not in source:
                yield Function(source, tokens, alone)


def rename_variable(function: Function, rng: np.random.Generator, names: list[str]) -> Edit | None:
    """A local variable that is no parameter gets another name."""
    stored = {
        n.id
        for n in ast.walk(function.node)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return _rename("variable", function, stored - _parameters(function), rng, names)


def rename_parameter(function: Function, rng: np.random.Generator, names: list[str]) -> Edit | None:
    """A parameter gets another name."""
    return _rename("parameter", function, _parameters(function) - {"self", "cls"}, rng, names)


def rename_function(function: Function, rng: np.random.Generator, names: list[str]) -> Edit | None:
    """The function gets another name."""
    return _rename("function", function, {function.node.name}, rng, names)


def rename_attribute(function: Function, rng: np.random.Generator, names: list[str]) -> Edit | None:
    """An attribute of any object gets another name."""
    attributes = {n.attr for n in ast.walk(function.node) if isinstance(n, ast.Attribute)}
    return _rename("attribute", function, attributes, rng, names)


def change_quotes(function: Function, rng: np.random.Generator, names: list[str]) -> Edit | None:
    """Single quotes around strings become double quotes."""
    single = {i for i, token in enumerate(function.tokens) if _is_single_quoted(token)}
    if not single or any('"' in function.tokens[i].string for i in single):
        return None

    def replacement(i: int) -> str | None:
        return function.tokens[i].string.replace("'", '"') if i in single else None

    return Edit(
        "quotes",
        "change single quotes to double quotes.",
        function.source,
        function.replace(replacement),
    )


def remove_comments(function: Function, rng: np.random.Generator, names: list[str]) -> Edit | None:
    """Comments go, and the lines that hold nothing else."""
    starts = {t.start[0] - 1: t.start[1] for t in function.tokens if t.type == tokenize.COMMENT}
    if not starts:
        return None
    lines = [
        line[: starts[i]].rstrip() if i in starts else line
        for i, line in enumerate(function.source.split("\n"))
    ]
    kept = [line for i, line in enumerate(lines) if line or i not in starts]
    return Edit("comments", "remove the comments.", function.source, "\n".join(kept))


def change_camel_case(
    function: Function, rng: np.random.Generator, names: list[str]
) -> Edit | None:
    """Every camelCase name becomes snake_case."""
    found = {name for name in function.names if CAMEL_CASE.fullmatch(name)}
    if not found or any(
        CAMEL_CASE.search(word) for word in (function.names | function.words_in_text) - found
    ):
        return None

    def replacement(i: int) -> str | None:
        name = function.tokens[i].string
        return _snake_case(name) if name in found else None

    return Edit(
        "snake case",
        "change camelCase names to snake_case.",
        function.source,
        function.replace(replacement),
    )


def rename_dict_key(function: Function, rng: np.random.Generator, names: list[str]) -> Edit | None:
    """A string that is a key of a dict in the function is replaced wherever it stands."""
    dicts = [n for n in ast.walk(function.node) if isinstance(n, ast.Dict)]
    keys = {
        k.value
        for d in dicts
        for k in d.keys
        if isinstance(k, ast.Constant) and isinstance(k.value, str)
    }
    keys = {key for key in keys if WORD.fullmatch(key)}
    if not keys:
        return None
    old = str(rng.choice(sorted(keys)))
    new = _draw(names, rng)
    quoted = {f"{quote}{old}{quote}": f"{quote}{new}{quote}" for quote in "'\""}
    if (
        sum(old in WORD.findall(t.string) for t in function.tokens if t.string not in quoted)
        or new in keys
    ):
        return None
    after = function.replace(lambda i: quoted.get(function.tokens[i].string))
    return Edit("dict key", f"rename the key {old} to {new}.", function.source, after)


def rename_json_key(rng: np.random.Generator, names: list[str]) -> Edit:
    """A key of a JSON document with names and words of the files is replaced wherever it is one."""
    document = _json_object(rng, names, depth=0)
    keys = sorted(_json_keys(document))
    old = str(rng.choice(keys))
    new = _draw(names, rng)

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if isinstance(value, dict):
            return {new if key == old else key: renamed(item) for key, item in value.items()}
        return value

    indent = int(rng.choice([2, 4]))
    before, after = (json.dumps(d, indent=indent) for d in (document, renamed(document)))
    return Edit("JSON key", f"rename the key {old} to {new}.", before, after)


FUNCTION_EDITS: tuple[Callable[[Function, np.random.Generator, list[str]], Edit | None], ...] = (
    rename_variable,
    rename_parameter,
    rename_function,
    rename_attribute,
    change_quotes,
    remove_comments,
    change_camel_case,
    rename_dict_key,
)


def make_edits(texts: list[str], count: int, seed: int = 0) -> list[Edit]:
    """`count` edits, as many of each kind, in a random order.

    Where few functions allow a kind, they serve again.
    """
    rng = np.random.default_rng(seed)
    functions = list({f.source: f for text in texts for f in list_functions(text)}.values())
    found = sorted({name for f in functions for name in f.names})
    names = [name for name in found if NEW_NAME.fullmatch(name) and not keyword.iskeyword(name)]
    share = -(-count // (len(FUNCTION_EDITS) + 1))
    edits = [rename_json_key(rng, names) for _ in range(share)]
    for make in FUNCTION_EDITS:
        made: list[Edit] = []
        for _ in range(share):  # passes
            for i in rng.permutation(len(functions)).tolist():
                edit = make(functions[i], rng, names) if len(made) < share else None
                if edit:
                    made.append(edit)
            if len(made) in (0, share):
                break
        edits += made
    return [edits[i] for i in rng.permutation(len(edits))[:count]]


def make_exercises(texts: list[str], count: int, seed: int = 0) -> list[Edit]:
    """`count` edits of random names, signs and line breaks: only who copies, and replaces what it
    is told to, is right.

    A llama that has learned source files guesses most of a copy without looking at it, and learns
    to look on these much faster than on functions.
    """
    rng = np.random.default_rng(seed)
    words = sorted({word for text in texts for word in WORD.findall(text)})
    camel = [w for w in words if CAMEL_CASE.fullmatch(w)]
    names = [w for w in words if NEW_NAME.fullmatch(w)]
    made: list[Edit] = []
    while len(made) < count:
        kind = EXERCISES[rng.integers(len(EXERCISES))]
        pool = _draw_several(words, rng, 3, 8) + (
            _draw_several(camel, rng, 2, 2) if kind == "snake case" else []
        )
        before = _random_code(pool, int(rng.integers(8, 34)), rng)
        old = _draw(pool, rng)
        new = _draw(names, rng)
        if kind == "quotes":
            edit = Edit(
                kind, "change single quotes to double quotes.", before, before.replace("'", '"')
            )
        elif kind == "snake case":
            after = WORD.sub(
                lambda m: _snake_case(m[0]) if CAMEL_CASE.fullmatch(m[0]) else m[0], before
            )
            edit = Edit(kind, "change camelCase names to snake_case.", before, after)
        elif kind == "comments":
            commented = []
            for line in before.split("\n"):
                comment = "# " + " ".join(_draw_several(words, rng, 1, 5))
                commented += (
                    rng.choice(["", f"{line[: len(line) - len(line.lstrip())]}{comment}\n"]),
                    line,
                )
                commented += rng.choice(["", f"  {comment}"]), "\n"
            edit = Edit(kind, "remove the comments.", "".join(commented)[:-1], before)
        else:
            place = {"attribute": r"(?<=\.){}\b", "key": r"(?<=['\"]){}(?=['\"])"}.get(
                kind, r"(?<![.\w'\"]){}\b(?!['\"])"
            )
            after = re.sub(place.format(re.escape(old)), new, before)
            edit = Edit(kind, f"rename the {kind} {old} to {new}.", before, after)
        if edit.before != edit.after:
            made.append(edit)
    return made


EXERCISES = (
    "variable",
    "parameter",
    "function",
    "attribute",
    "key",
    "quotes",
    "snake case",
    "comments",
)
SIGNS = (
    *"()[]{}=+-*/:,<>%",
    "==",
    "!=",
    "->",
    "(self",
    ")",
    "):",
    "()",
    ", ",
    "if ",
    "return ",
    "for ",
    "in ",
)


def _random_code(pool: list[str], count: int, rng: np.random.Generator) -> str:
    """About `count` names of the pool, attributes, strings, numbers, signs and line breaks."""
    text = ""
    for _ in range(count):
        kind = rng.random()
        quote = str(rng.choice(["'", '"']))
        if kind < 0.42:
            piece = _draw(pool, rng)
        elif kind < 0.52:
            piece = f"{_draw(pool, rng)}.{_draw(pool, rng)}"
        elif kind < 0.58:
            piece = quote + _draw(pool, rng) + quote
        elif kind < 0.62:
            piece = str(rng.integers(500))
        elif kind < 0.74:
            piece = "\n" + "    " * int(rng.integers(4))
        else:
            piece = str(rng.choice(SIGNS))
        glued = text[-1:].isalnum() and piece[0].isalnum()
        text += (" " if glued or (piece[0] != "\n" and rng.random() < 0.4) else "") + piece
    return text.strip()


def pack_edits(
    edits: list[Edit],
    encode: Callable[[str], list[int]],
    end: int,
    length: int,
    prompt_weight: float = PROMPT_WEIGHT,
) -> tuple[np.ndarray, np.ndarray]:
    """((N, length + 1) uint16 ids, (N, length) float32 weights): whole edits side by side.

    Each ends with the token `end`. The weight of a token as the next one: 1 in an answer,
    CHANGED_WEIGHT where that is not what the source says, `prompt_weight` in a prompt, 0 in the
    padding. Edits that are longer than a sequence are left out.
    """
    sequences: list[tuple[list[int], list[float]]] = []
    unfilled: list[tuple[list[int], list[float]]] = []
    for edit in edits:
        prompt = encode(edit.prompt)
        answer = [*encode(edit.after), end]
        size = len(prompt) + len(answer)
        if size > length + 1:
            continue

        weights = [1.0] * len(answer)
        matcher = SequenceMatcher(None, encode(edit.before), answer, autojunk=False)
        for kind, _, _, start, stop in matcher.get_opcodes():
            if kind != "equal":
                stop = min(max(stop, start + 1), len(answer))
                weights[start:stop] = [CHANGED_WEIGHT] * (stop - start)

        with_room = [each for each in unfilled if len(each[0]) + size <= length + 1]
        if with_room:
            sequence = with_room[0]
        else:
            sequence = ([], [])
            sequences.append(sequence)
            unfilled = [*unfilled[-OPEN_SEQUENCES:], sequence]
        sequence[0].extend(prompt + answer)
        sequence[1].extend([prompt_weight] * len(prompt) + weights)

    all_ids = np.full((len(sequences), length + 1), end, np.uint16)
    all_weights = np.zeros((len(sequences), length + 1), np.float32)
    for i, (ids, weights) in enumerate(sequences):
        all_ids[i, : len(ids)] = ids
        all_weights[i, : len(weights)] = weights
    return all_ids, all_weights[:, 1:]


def split_edits(ids: np.ndarray, weights: np.ndarray, end: int) -> list[tuple[np.ndarray, int]]:
    """(ids, length of the prompt) of each edit in the sequences of `pack_edits`."""
    found = []
    for sequence, weight in zip(ids, weights, strict=True):
        in_answer = np.concatenate([[False], weight >= 1])
        start = 0
        for stop in np.flatnonzero(in_answer & (sequence == end)) + 1:
            prompt_length = int(np.argmax(in_answer[start:stop]))
            found.append((sequence[start:stop].astype(np.int32), prompt_length))
            start = stop
    return found


def _snake_case(name: str) -> str:
    return re.sub(r"([A-Z])", r"_\1", name).lower()


def _draw(names: list[str], rng: np.random.Generator) -> str:
    return names[rng.integers(len(names))]


def _draw_several(names: list[str], rng: np.random.Generator, least: int, most: int) -> list[str]:
    return [_draw(names, rng) for _ in range(rng.integers(least, most + 1))]


def _parameters(function: Function) -> set[str]:
    return {node.arg for node in ast.walk(function.node.args) if isinstance(node, ast.arg)}


def _rename(
    kind: str, function: Function, found: set[str], rng: np.random.Generator, names: list[str]
) -> Edit | None:
    """One of the names `found` gets a new one;

    None where each is also a word of a string, a comment or a keyword.
    """
    keywords = {n.arg for n in ast.walk(function.node) if isinstance(n, ast.keyword)}
    clear = sorted(
        name for name in found - keywords - function.words_in_text if not name.startswith("__")
    )
    new = _draw(names, rng)
    if not clear or new in function.names:
        return None
    old = str(rng.choice(clear))
    after = function.rename(old, new, attribute=kind == "attribute")
    return Edit(kind, f"rename the {kind} {old} to {new}.", function.source, after)


def _is_single_quoted(token: tokenize.TokenInfo) -> bool:
    body = token.string.lstrip("rbufRBUF")
    return token.type == tokenize.STRING and body.startswith("'") and not body.startswith("'''")


def _json_object(rng: np.random.Generator, names: list[str], depth: int) -> dict[str, Any]:
    keys = _draw_several(names, rng, 2, 6)
    return {key: _json_value(rng, names, depth + 1) for key in keys}


def _json_value(rng: np.random.Generator, names: list[str], depth: int) -> Any:
    kind = rng.random()
    if kind < 0.12 and depth < 3:
        return _json_object(rng, names, depth)
    if kind < 0.22 and depth < 3:
        keys = _draw_several(names, rng, 2, 3)
        return [
            {key: _json_value(rng, names, 3) for key in keys}
            for _ in range(int(rng.integers(2, 4)))
        ]
    if kind < 0.32:
        return _draw_several(names, rng, 1, 3)
    if kind < 0.5:
        return int(rng.integers(0, 10 ** int(rng.integers(1, 5))))
    if kind < 0.6:
        return [True, False, None][int(rng.integers(3))]
    return " ".join(_draw_several(names, rng, 1, 3))


def _json_keys(value: Any) -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in _json_keys(item)}
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in _json_keys(item)}
    return set()
