"""mlx-lm's model provider, with drafters in place of draft models. Only the generation thread calls it."""

from __future__ import annotations

import argparse
import gc
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.server import ModelProvider

from ..checkpoints import WEIGHTS, check_directory, check_tokenizer, find_model, load_drafter, read_object
from ..demo import DIRECTORY
from ..drafters.protocol import Drafter
from ..engine.request_checks import check_request
from ..engine.supported_models import check_draftable
from ..errors import CheckpointError, one_line
from ..options import AUTO, default_depth
from ..planning.costs import load_costs
from ..session.memory import free_memory
from .asking import beam_of, check_beam, check_flags
from .bodies import Refusal
from .jobs import DEFAULT

PLAIN = "none"
"""A drafter's name that asks for none, for clients that cannot send null."""

OF_TARGET = ("model_key", "model", "tokenizer", "processor", "is_batchable", "drafters", "vocab_size")
"""What a provider holds of the target that is loaded."""


class Provider(ModelProvider):
    """One target at a time, as mlx-lm has it, and all drafters of the one that the command line names.

    Args:
        cli_args: mlx-lm's flags and ours; see `flags`.

    Attributes:
        loaded: done when the first target and its drafters are; holds what went wrong.
        drafters: by name, the default one first; for `home` only.
        home: the key of the target that they are for.
        vocab_size: of the target.
    """

    model: Any
    tokenizer: Any

    def __init__(self, cli_args: argparse.Namespace) -> None:
        super().__init__(cli_args)
        self.loaded: Future[None] = Future()
        self.drafters: dict[str, Drafter] = {}
        self.home: Any = None
        self.vocab_size = 0

    def load_default(self) -> None:
        """Loads what the command line names; `loaded` says how it went.

        Nothing is raised: mlx-lm would log it with a traceback, where whoever waits for `loaded` tells it in one line.
        """
        try:
            super().load_default()
        except BaseException as error:
            self.loaded.set_exception(error)
        else:
            self.loaded.set_result(None)

    def key(self, model_path: str, adapter_path: str | None) -> tuple[str, str | None, None]:
        """What `model_key` is once these are loaded: one key for a directory, however it is written."""
        name = self._model_map.get(model_path, model_path)
        return local(name), self._adapter_map.get(model_path, adapter_path), None

    def load(self, model_path: str, adapter_path: str | None = None, draft_model_path: Any = None) -> Any:
        """As mlx-lm's; a request's drafter is no part of it, so that naming another one reloads nothing.

        The target that is loaded goes once the next one is there, so that nobody unloads it with one that fails; but
        before, as mlx-lm's does, where there is no room for both.

        Raises:
            CheckpointError: there is no such model, or it cannot be loaded.
        """
        key = self.key(model_path, adapter_path)
        if key != self.model_key:
            kept: dict[str, Any] = {}
            try:
                path = find_model(key[0])
                check_directory(path)
                if key[1] is not None:
                    read_object(Path(key[1], "adapter_config.json"))
                kept |= {name: getattr(self, name) for name in OF_TARGET} if has_room(path) else {}
                self._load(*key)
            except Exception as error:
                vars(self).update(kept)
                if not self.loaded.done():
                    raise
                # A client is not told which files there are on this machine.
                logging.error(f"Cannot load {key[0]!r:.500}: {one_line(error):.1000}")
                raise CheckpointError(f"the model {model_path!r:.100} is not here, or cannot be loaded") from error
            if kept:
                kept.clear()
                gc.collect()
                mx.clear_cache()
        return self.model, self.tokenizer

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: Any = None) -> None:
        """As mlx-lm's, with what this package needs of a target; of `home` with its drafters."""
        self.drafters = {}
        super()._load(model_path, adapter_path, None)
        self.is_batchable = False  # every answer is decoded by this package's engine, one at a time
        try:
            self._check(model_path)
        except BaseException:
            self.reset()
            raise

    def _check(self, model_path: str) -> None:
        """Looks at what was loaded, and readies it.

        Raises:
            RedrafterError: it has no tokenizer; or it is `home`, and the command line does not go with it.
        """
        model = self.model
        check_tokenizer(self.tokenizer, model_path)
        if model_path == local(DIRECTORY / "target"):
            set_float32(model)
        self.vocab_size = model(mx.zeros((1, 1), mx.int32)).shape[-1]  # built, not computed
        self.home = self.home or self.model_key
        if self.model_key == self.home:
            flags = check_flags(self.cli_args, self.vocab_size)
            check_request(model, mx.zeros((1,), mx.int32), None, flags.quantization)
            self.drafters = self.load_drafters(model)

    def load_drafters(self, model: nn.Module) -> dict[str, Drafter]:
        """The drafters of the command line, checked against their target, and measured where `plan` is "auto".

        Raises:
            RedrafterError: one cannot be loaded, or does not fit.
        """
        found: dict[str, Drafter] = {}
        for name, path in self.cli_args.drafters.items():
            drafter = load_drafter(path, model)
            if local(path) == local(DIRECTORY / "drafter"):
                set_float32(drafter)
            check_flags(self.cli_args, self.vocab_size, drafter)
            found[name] = drafter
        if found:
            check_draftable(model, tree=False)
        for drafter in found.values():
            self.measure(model, drafter)
        return found

    def measure(self, model: nn.Module, drafter: Drafter) -> None:
        """What `plan="auto"` would else measure while the first client waits."""
        args = self.cli_args
        beam = (args.beam_width, args.draft_depth, args.tree_size)
        if args.plan != AUTO or beam != (None, None, None):
            return
        load_costs(model, drafter, trees=check_draftable(model, tree=True) is None)

    def drafter(self, name: str | None) -> Drafter | None:
        """The drafter of a request; None for plain decoding.

        Args:
            name: as the request has it: a drafter's name, `DEFAULT`, `PLAIN` or None.

        Raises:
            Refusal: there is none of that name for the target that is loaded.
        """
        if name is None or name == PLAIN:
            return None
        if name == DEFAULT:
            return next(iter(self.drafters.values()), None)
        if name not in self.drafters:
            known = ", ".join([*self.drafters, PLAIN])
            raise Refusal(f"there is no drafter {name!r:.100} for this model; there are {known}")
        return self.drafters[name]

    def beam(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The beam of a request, else that of the command line.

        Args:
            asked: see `check_beam`.

        Raises:
            Refusal: the request's is too large.
            RedrafterError: it is none.
        """
        args = self.cli_args
        if asked and self.drafters:
            depth = max(map(default_depth, self.drafters.values()))
            check_beam(asked, depth, args.max_tree_size, self.vocab_size)
        return asked or beam_of(args)


def local(name: str | Path) -> str:
    """A directory's own name, where there is one of that name; else the name, of a model on the hub."""
    try:
        path = Path(name).expanduser()
        return str(path.resolve()) if path.exists() else str(name)
    except (OSError, RuntimeError, ValueError):  # no path on this system, or nobody's home
        return str(name)


def has_room(path: Path) -> bool:
    """Whether a model's weights fit twice, as loading may copy them, beside what is loaded; not where nobody knows."""
    room = free_memory()
    return room is not None and 2 * sum(file.stat().st_size for file in path.glob(WEIGHTS)) < room


def set_float32(module: nn.Module) -> None:
    """As `load_demo`: stored in 16 bits, decoded in 32."""
    module.set_dtype(mx.float32)
    mx.eval(module.parameters())
