"""While a drafter learns: what it knows and is worth so far, what is kept of it, and when it is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import mlx.nn as nn
from mlx_lm.tuner.callbacks import get_reporting_callbacks

from ..checkpoints import save_drafter
from ..drafters.recurrent import Drafter
from ..errors import RedrafterError
from .data import Text
from .evaluation import Manner, decoded, examined
from .record import Record
from .settings import Settings, plain

Say = Callable[[str], None]


class Ground(NamedTuple):
    """What a run stands on.

    Attributes:
        model, tokenizer: the target.
        training, validation: texts.
        prompts: for validation by real decoding.
        drafter: as it begins.
    """

    model: nn.Module
    tokenizer: Any
    training: list[Text]
    validation: list[Text]
    prompts: list[list[int]]
    drafter: Drafter


def manner_of(settings: Settings, ground: Ground) -> Manner:
    """How validation decodes."""
    return Manner(settings.val_tokens, settings.temp[-1], settings.seed, set(ground.tokenizer.eos_token_ids))


def validated(settings: Settings, ground: Ground, done: int, say: Say) -> dict[str, Any]:
    """One validation, told and as an entry of the record."""
    known = examined(ground.model, ground.drafter, ground.validation, settings.recipe, settings.batch_size)
    shape = 1, settings.draft_depth
    trial = decoded(ground.model, ground.drafter, ground.prompts, shape, manner_of(settings, ground))
    first = " ".join(f"{row[0]:.2f}" for row in known.acceptance)
    say(
        f"iteration {done}: validation loss {known.loss:.3f}, right at depth 1, 2, ...: {first}; "
        f"{trial.stats.tokens_per_round:.2f} tokens per round at 1 x {settings.draft_depth}, "
        f"temperature {settings.temp[-1]}"
    )
    if trial.stats.rounds and trial.stats.accepted == 0 and done >= settings.iters // 2:
        say("warning: not one drafted token was accepted: too few iterations, or too low or high a learning rate")
    return {
        "iteration": done,
        "loss": known.loss,
        "acceptance": [list(row) for row in known.acceptance],
        "tokens_per_round": trial.stats.tokens_per_round,
    }


def keep_best(settings: Settings, drafter: Drafter, record: Record) -> None:
    """Saves the drafter when it has just made the most tokens per round of this run; only early stopping needs it."""
    scores = [entry["tokens_per_round"] for entry in record.validations]
    if settings.patience and scores[-1] > max(scores[:-1], default=0):
        save_drafter(settings.work / "best", drafter)


def stale(record: Record, patience: int) -> bool:
    """Whether the last `patience` validations brought nothing."""
    scores = [entry["tokens_per_round"] for entry in record.validations]
    return bool(patience) and len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])


def get_callbacks(settings: Settings) -> Any:
    """mlx-lm's reporting callbacks, or None."""
    if not settings.report_to:
        return None
    try:
        return get_reporting_callbacks(
            settings.report_to,
            project_name=settings.project_name,
            log_dir=str(settings.work),
            config=cast(Any, plain(settings)),
        )
    except (ImportError, ValueError) as error:
        raise RedrafterError(f"cannot report to {settings.report_to}: {error}") from error
