"""Workloads: a target, its drafter, a draft model for mlx-lm's own speculation, and prompts."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import compute_bits_per_weight

from mlx_redrafter import load_demo
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.drafters.checkpoint import count_bytes
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.plan import AUTO
from mlx_redrafter.engine.sampling import Sampler
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.files import expand_path
from mlx_redrafter.loading.checkpoints import load, load_auto_drafter, load_fast_drafter
from mlx_redrafter.measuring.store import digest_tensors, sample_tensors
from mlx_redrafter.text.encoding import encode_chat
from mlx_redrafter.training.prompts import encode_prompts, read_prompts

PROMPTS_FOLDER = Path(__file__).parent / "prompts"
DRAFT_MODEL_FOLDER = Path(__file__).parent / "draft_model"
"""A smaller Llama, trained on the demo's files, for mlx-lm's speculative decoding."""

DEMO = "demo"
DEMO_CATEGORIES = {"demo-edits": "edits", "demo-code": "code"}
"""Category -> kind of the packaged demo's prompts.

They are from source files that its models were not trained on.
"""


class NamedPrompt(NamedTuple):
    """A prompt.

    Attributes:
        name: `category/file`, or the user's file and the prompt's number in it.
        category: the kind of text.
        ids: token ids, with the chat template if the tokenizer has one.
        eos_token_ids: end-of-text tokens.
    """

    name: str
    category: str
    ids: list[int]
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Workload:
    """Models and prompts.

    Attributes:
        name: the model's name in records.
        model: the target.
        drafter: None to measure only plain decoding.
        drafter_name: the drafter's name in records.
        draft_model: for mlx-lm's speculative decoding; None to skip it.
        draft_model_name: the draft model's name in records.
        prompts: the prompts to decode.
        sampler: replaces `temp` and `seed`; None to use these.
    """

    name: str
    model: nn.Module
    drafter: Drafter | None
    drafter_name: str | None
    draft_model: nn.Module | None
    draft_model_name: str | None
    prompts: list[NamedPrompt]
    sampler: Sampler | None = None

    def describe(self) -> dict[str, Any]:
        """The fields of records that describe the models."""
        drafter = self.drafter
        bits = None
        size = None
        if drafter is not None:
            bits = round(compute_bits_per_weight(drafter), 3)
            size = count_bytes(drafter) / 1e9
        return {
            "model": self.name,
            "model_bits": round(compute_bits_per_weight(self.model), 3),
            "model_gb": count_bytes(self.model) / 1e9,
            "drafter": self.drafter_name,
            "drafter_bits": bits,
            "drafter_gb": size,
        }

    def digest_weights(self) -> list[str]:
        """A digest of each model's weights: folders keep their names when they are trained anew."""
        modules: list[Any] = [self.model, self.draft_model]
        modules.append(getattr(self.drafter, "weights", self.drafter))  # of a draft model
        return [digest_sample(module) for module in modules if module is not None]

    def require_drafter(self) -> Drafter:
        """Returns the drafter."""
        if self.drafter is None:
            raise RedrafterError("expected the --drafter that was trained for the model")
        return self.drafter


def digest_sample(module: nn.Module) -> str:
    """A digest of a model's tensor names, shapes, dtypes and first values."""
    return digest_tensors(module) + hashlib.sha256(sample_tensors(module)).hexdigest()[:16]


def count_bytes_read(model: nn.Module) -> int | None:
    """Bytes of weights that a one-token forward reads; None for models with experts.

    An embedding counts only if it is also the head, as otherwise only one token's vector is read.
    """
    modules = [(name.rpartition(".")[2], each) for name, each in model.named_modules()]
    if any(isinstance(each, (SwitchLinear, QuantizedSwitchLinear)) for _, each in modules):
        return None
    size = count_bytes(model)
    if any(name in ("lm_head", "output", "embed_out") for name, _ in modules):
        for _, each in modules:
            if isinstance(each, (nn.Embedding, nn.QuantizedEmbedding)):
                size -= count_bytes(each)
    return size


def add_workload(
    parser: argparse.ArgumentParser, *, draft_model: bool = True, prompts: Sequence[str] = ("all",)
) -> None:
    """Adds the flags of a workload.

    Args:
        draft_model: whether to add `--draft-model`.
        prompts: the default of `--prompts`; () not to add it.
    """
    parser.set_defaults(prompts=list(prompts))
    add = parser.add_argument
    add("--model", help="a directory or hub id; the packaged demo if not given")
    add("--drafter", help="the drafter that was trained for the model; 'auto' finds one")
    if draft_model:
        add(
            "--draft-model",
            help="a smaller model with the same tokenizer, for mlx-lm's own speculation and ours",
        )
    if prompts:
        default = " ".join(prompts)
        add(
            "--prompts",
            nargs="+",
            metavar="NAME",
            help=f"prompt names or categories, 'all', 'demo', or files (default: {default})",
        )


def open_workload(args: argparse.Namespace) -> Workload:
    """Loads the models and prompts given by the flags of `add_workload`.

    With `--quick` one prompt per category.
    """
    workload, tokenizer = load_workload(args)
    prompts = load_prompts(args.prompts, tokenizer)
    if getattr(args, "quick", False):
        first = {prompt.category: prompt for prompt in reversed(prompts)}
        prompts = list(first.values())[::-1]
    return replace(workload, prompts=prompts)


def load_workload(args: argparse.Namespace) -> tuple[Workload, Any]:
    """Loads (a workload without prompts, the target's tokenizer).

    Args:
        args: has the flags of `add_workload`.
    """
    if args.model:
        model, tokenizer = load(args.model)
        drafter = None
        if args.drafter == AUTO:
            drafter, args.drafter = load_auto_drafter(args.model, model)
        elif args.drafter:
            drafter = load_fast_drafter(args.drafter, model)
    else:
        model, tokenizer, drafter = load_demo(args.drafter)
    draft_model = None
    draft_model_name = None
    if hasattr(args, "draft_model") and (args.draft_model or not args.model):
        draft_model_name = args.draft_model or DEMO
        draft_model, _ = load(args.draft_model or DRAFT_MODEL_FOLDER)
        if not args.model:  # like the demo's own models
            draft_model.set_dtype(mx.float32)
    drafter_name = None if drafter is None else args.drafter or DEMO
    workload = Workload(
        name=args.model or DEMO,
        model=model,
        drafter=drafter,
        drafter_name=drafter_name,
        draft_model=draft_model,
        draft_model_name=draft_model_name,
        prompts=[],
    )
    return workload, tokenizer


def load_prompts(names: Sequence[str], tokenizer: Any) -> list[NamedPrompt]:
    """The prompts with these names, without duplicates.

    Args:
        names: names or categories of prompts, "all" for all in `PROMPTS_FOLDER`, "demo" for both of
            the demo's categories, or files of prompts.
    """
    paths = {
        f"{path.parent.name}/{path.stem}": path for path in sorted(PROMPTS_FOLDER.glob("*/*.txt"))
    }
    texts = {name: path.read_text(encoding="utf-8").strip() for name, path in paths.items()}
    for category, kind in DEMO_CATEGORIES.items():
        for number, text in enumerate(demo_prompts(kind), start=1):
            texts[f"{category}/{number:02d}"] = text
    kinds = dict.fromkeys(name.partition("/")[0] for name in texts)

    tokens: dict[str, list[int]] = {}
    for name in names:
        wanted = set(DEMO_CATEGORIES) if name == DEMO else {name}
        chosen = [each for each in texts if wanted & {each, each.partition("/")[0]}]
        if name == "all":
            chosen = list(paths)
        tokens |= {each: encode_chat(tokenizer, texts[each]) for each in chosen}
        if not chosen:
            file = expand_path(name)
            if not file.exists():
                raise RedrafterError(
                    f"no prompt, category or file is called {name!r}: "
                    f"categories are {', '.join(kinds)}"
                )
            own = encode_prompts(read_prompts(file), tokenizer)
            tokens |= {f"{file.name}:{number}": ids for number, ids in enumerate(own, start=1)}

    ends = frozenset(tokenizer.eos_token_ids)
    return [
        NamedPrompt(name, name.rpartition("/")[0] or "own", ids, ends)
        for name, ids in tokens.items()
    ]
