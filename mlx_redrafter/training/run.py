"""A whole training run: what it takes, answers, training, validation, and the finished directory."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..atomic_files import lock_file, write_text
from ..checkpoints import load_drafter, load_target, save_drafter
from ..drafters.recurrent import Drafter, DrafterArgs
from ..engine.supported_models import check_draftable, compute_dtype, model_sizes
from ..errors import RedrafterError, one_line
from ..planning.sizing import choose_size
from . import results
from .answers import Asking, answered, digest, group_size, read
from .data import PAD_TO, Text, make_batches, most_frequent, split, usable
from .distill import check as check_recipe
from .distill import train_drafter
from .estimate import Estimate, estimated, told
from .evaluation import make_prompts
from .fitting import iterations_in
from .lessons import new_drafter, untrained
from .measuring import compared, table, takes_trees
from .record import Record, open_record
from .settings import Settings, check
from .sources import base_name, read_prompts, read_texts
from .validation import Ground, Say, get_callbacks, keep_best, manner_of, stale, validated

HELD_OUT, MOST_HELD_OUT = 0.05, 256
"""The share of the texts that validation takes when there are no validation texts, and the most of them."""

INTERRUPTED = 130

Parts = tuple[list[Text], list[Text]]
"""(training, validation)."""


def train(settings: Settings, *, resume: bool = False, dry_run: bool = False, say: Say = lambda text: None) -> int:
    """Trains a drafter as the settings say, into the directory `settings.output`.

    Args:
        resume: go on from the last checkpoint of the run in that directory; the result is the same to the bit.
        dry_run: say what the run would take, and write nothing.
        say: is told what a person should know.

    Returns:
        The exit status: 0, or 130 after Ctrl-C, when the run can go on.

    Raises:
        RedrafterError: with the reason; the last checkpoint is whole.
    """
    check(settings)
    check_recipe(settings.recipe, settings.course)
    found = content(settings.record)
    record = open_record(settings, resume=resume)
    callbacks = get_callbacks(settings) if not dry_run else None
    model, tokenizer = load_target(settings, settings.model)
    check_draftable(model, tree=False)
    args = record.drafter_args or chosen_size(settings, model, say)
    record.args = args.to_dict()
    prompts = [] if settings.data else askable(settings, read_prompts(settings, tokenizer), say)
    texts = parted(settings, *read_texts(settings, tokenizer), say) if settings.data else None
    check_same(settings, record, prompts if texts is None else texts)
    done = record.ended or iterations_in(settings.checkpoint)
    if resume and record.reports and not done:
        say("the run has no checkpoint: it begins anew")
    say(told(expected(settings, model, args, prompts, texts, 0 if record.ended else settings.iters - done), args))
    if dry_run:
        return 0
    with lock_file(settings.work / "lock"):
        if content(settings.record) != found:
            raise RedrafterError(f"another process has gone on with the run in {settings.place} meanwhile: start anew")
        record.save_(settings.record)
        try:
            if texts is None:
                answers = answered(model, tokenizer, prompts, asking_of(settings, prompts), settings.answers)
                texts = parted(settings, answers, [], say)
            return trained(settings, prepared(settings, model, tokenizer, args, texts), record, callbacks, say)
        except KeyboardInterrupt:
            say("stopped; the same command with --resume goes on")
            return INTERRUPTED


def content(path: Path) -> bytes:
    """What a file holds; nothing where there is none."""
    return path.read_bytes() if path.exists() else b""


def trained(settings: Settings, ground: Ground, record: Record, callbacks: Any, say: Say) -> int:
    """Trains and finishes; the exit status."""
    done = record.ended
    if done is None:
        with interruptible() as interrupted:
            done = fit(settings, ground, record, callbacks, say, interrupted)
        if interrupted.is_set() and record.ended is None and done < settings.iters:
            say(f"stopped at iteration {done} of {settings.iters}; the same command with --resume goes on")
            return INTERRUPTED
    return 0 if finish(settings, ground, record, done, say) else 1


def askable(settings: Settings, prompts: list[list[int]], say: Say) -> list[list[int]]:
    """The prompts that leave room for an answer.

    Raises:
        RedrafterError: too few for a batch and one to hold out.
    """
    longest = settings.max_seq_length - settings.draft_depth
    once = list({tuple(prompt): prompt for prompt in prompts}.values())  # else one is learned and held out
    if len(once) < len(prompts):
        say(f"{len(prompts) - len(once)} of {len(prompts)} prompts are left out: once is enough")
    short = [prompt for prompt in once if len(prompt) < longest]
    if len(short) < len(once):
        say(f"{len(once) - len(short)} of {len(once)} prompts are left out: longer than --max-seq-length allows")
    held_out = max(1, round(HELD_OUT * len(short)))
    if len(short) < settings.batch_size + held_out:
        raise RedrafterError(
            f"expected at least {settings.batch_size + held_out} prompts, {held_out} of them to hold out, for a batch "
            f"size of {settings.batch_size}, got {len(short)}"
        )
    return short


def parted(settings: Settings, training: list[Text], validation: list[Text], say: Say) -> Parts:
    """(training, validation) texts that can be learned from; without any for validation a share of the others.

    Raises:
        RedrafterError: too few.
    """
    parts = []
    for name, texts in (("training", training), ("validation", validation)):
        part = usable(texts, settings.max_seq_length, settings.draft_depth)
        if len(part) < len(texts):
            say(
                f"{len(texts) - len(part)} of {len(texts)} {name} texts are left out: too short for drafts of "
                f"{settings.draft_depth} tokens"
            )
        parts.append(part)
    training, validation = parts
    if not validation:
        training, validation = split(training, HELD_OUT, MOST_HELD_OUT, settings.seed)
    make_batches(training, settings.batch_size, settings.seed)  # refuses too few
    return training, validation


def check_same(settings: Settings, record: Record, learned: list[list[int]] | Parts) -> None:
    """Refuses to go on with other prompts or texts.

    Raises:
        RedrafterError: they have changed.
    """
    told = digest(
        [[[text.offset, *text.ids.tolist()] for text in part] for part in learned]
        if isinstance(learned, tuple)
        else learned
    )
    if record.texts not in (None, told):
        source = settings.data or settings.prompts or "the demo"
        raise RedrafterError(f"the run in {settings.place} cannot go on: the texts of {source} have changed")
    record.texts = told


def chosen_size(settings: Settings, model: nn.Module, say: Say) -> DrafterArgs:
    """The sizes of the settings, or measured ones."""
    hidden_size, vocab_size = model_sizes(model)
    if settings.exit_dim is None:
        choice = choose_size(model, dtype=final_dtype(settings, model))
        say(f"size: {choice.reason}")
        return choice.args
    count = settings.draft_vocab_size
    if count is not None and count > vocab_size:
        raise RedrafterError(f"draft_vocab_size must be at most the target's vocabulary {vocab_size}, got {count}")
    layers = 1 if settings.num_draft_layers is None else settings.num_draft_layers
    guessed = None if count == vocab_size else count
    return DrafterArgs(hidden_size, vocab_size, settings.exit_dim, layers, draft_vocab_size=guessed)


def final_dtype(settings: Settings, model: nn.Module) -> mx.Dtype:
    """The dtype of the finished drafter."""
    if settings.dtype is not None:
        return cast(mx.Dtype, getattr(mx, settings.dtype))
    return compute_dtype(model)


def expected(
    settings: Settings,
    model: nn.Module,
    args: DrafterArgs,
    prompts: list[list[int]],
    texts: Parts | None,
    left: int,
) -> Estimate:
    """What the `left` iterations will take, and the answers that are not written yet."""
    lengths = [len(prompt) + settings.max_tokens for prompt in prompts]
    if texts is not None:
        lengths = [len(text.ids) for text in texts[0]] or [1]

    def padded(tokens: float) -> int:
        """The length of a batch of such texts, as `data` pads it."""
        shortest = settings.draft_depth + 2
        tokens = max(shortest, min(round(tokens), settings.max_seq_length + 1))
        return 1 + PAD_TO * -(-(tokens - 1) // PAD_TO)

    written = len(read(settings.answers, asking_of(settings, prompts), len(prompts))) if prompts else 0
    return estimated(
        model,
        Drafter(args),
        settings.recipe,
        settings.course,
        iters=left,
        batch_size=settings.batch_size,
        length=padded(sum(lengths) / len(lengths)),
        longest=padded(max(lengths)),
        answers=len(prompts) - written,
        prompt_tokens=max(1, sum(map(len, prompts)) // max(1, len(prompts))),
        answer_tokens=settings.max_tokens,
        at_once=group_size(len(prompts), settings.temp),
    )


def asking_of(settings: Settings, prompts: list[list[int]]) -> Asking:
    """What the answers to these prompts depend on."""
    return Asking(
        model=f"{base_name(settings) or 'demo'} {settings.adapter_path or ''}".strip(),
        prompts=digest(prompts),
        temps=settings.temp,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
    )


def prepared(
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    args: DrafterArgs,
    texts: Parts,
) -> Ground:
    """What the training stands on: its texts, and a drafter that knows nothing yet."""
    training, validation = texts
    mx.random.seed(settings.seed)
    ids = None
    if args.draft_vocab_size is not None:
        ids = most_frequent(training, args.draft_vocab_size, args.vocab_size)
    drafter = new_drafter(model, args, ids) if settings.init_head == "target" else untrained(args, ids)
    mx.eval(drafter.parameters())
    if settings.val_batches > 0:
        validation = validation[: settings.val_batches * settings.batch_size]
    return Ground(model, tokenizer, training, validation, make_prompts(validation, settings.val_prompts), drafter)


def fit(
    settings: Settings, ground: Ground, record: Record, callbacks: Any, say: Say, interrupted: threading.Event
) -> int:
    """Trains, reports, validates and stops early; the iterations done."""
    clock = [time.perf_counter(), 0]

    def after(done: int, shown: dict[str, float]) -> bool:
        """Writes down an iteration; whether it is the last."""
        if record.ended is not None:
            return True  # only the end of an update is waited for
        record.cut_(done - 1)  # what a run wrote down behind its last checkpoint comes again
        clock[1] += 1
        if done % settings.steps_per_report == 0:
            seconds = time.perf_counter() - clock[0]
            entry = {"iteration": done, **shown, "iterations_per_second": clock[1] / seconds}
            clock[:] = [time.perf_counter(), 0]
            record.reports.append(entry)
            if callbacks is not None:
                callbacks.on_train_loss_report({**entry, "train_loss": shown["loss"]})
        stop, last = interrupted.is_set(), done == settings.iters
        if due := done % settings.steps_per_eval == 0 or last:
            entry = validated(settings, ground, done, say)
            record.validations.append(entry)
            keep_best(settings, ground.drafter, record)
            if callbacks is not None:
                callbacks.on_val_loss_report({**entry, "val_loss": entry["loss"]})
            clock[:] = [time.perf_counter(), 0]
            if stale(record, settings.patience):
                say(f"stopping early: no more tokens per round for {settings.patience} validations")
                record.ended, stop = done, True
        if stop or due or settings.course.saves(done):
            record.save_(settings.record)
        return stop

    batches = make_batches(ground.training, settings.batch_size, settings.seed)
    return train_drafter(ground.model, ground.drafter, batches, settings.course, settings.recipe, after=after)


def finish(settings: Settings, ground: Ground, record: Record, done: int, say: Say) -> bool:
    """Measures the finished drafter, with `patience` the best one that was validated, and writes its directory.

    Whether every text it drafted is that of plain decoding.
    """
    drafter = ground.drafter
    if settings.patience:
        best = max(record.validations, key=lambda entry: entry["tokens_per_round"])
        drafter.update(load_drafter(settings.work / "best", ground.model).parameters())
        record.cut_(best["iteration"])
        say(f"the drafter of iteration {best['iteration']} is the result")
    drafter.set_dtype(final_dtype(settings, ground.model))
    weights = cast(dict[str, mx.array], dict(tree_flatten(drafter.parameters())))
    if bad := [name for name, array in weights.items() if not mx.isfinite(array).all().item()]:
        raise RedrafterError(f"{bad[0]} does not fit into {final_dtype(settings, ground.model)}: give another --dtype")
    save_drafter(settings.place, drafter)  # whatever becomes of the rest
    shapes = [(1, k) for k in range(1, settings.draft_depth + 1)] + [(4, settings.draft_depth)]
    shapes = [shape for shape in shapes if shape[0] == 1 or takes_trees(ground.model)]
    rows = compared(ground.model, drafter, ground.prompts, shapes, manner_of(settings, ground))
    base = base_name(settings)
    drafter.args = results.described(drafter.args, base, record.validations[-1]["acceptance"], rows)
    command = results.use(settings, base)
    place = settings.place
    save_drafter(place, drafter)
    try:
        results.write_summary(place / "training.json", record, rows)
        card = results.model_card(drafter.args, base, done, rows, command)
        write_text(place / "README.md", card)
        drawn = results.draw(place / "training.png", record)
    except OSError as error:
        raise RedrafterError(f"the drafter is in {place}, but not all of its report: {one_line(error)}") from error
    say(f"temperature {settings.temp[-1]}, {len(ground.prompts)} held-out prompts\n{table(rows)}")
    if not drawn:
        say("no picture of the loss was drawn: pip install matplotlib")
    say(f"the drafter is in {place}; use it:\n{command}")
    if not (same := all(row.same for row in rows)):
        say("a token differs from plain decoding: docs/exactness.md tells a tie from an error")
    return same


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event that the run looks at; the second one interrupts."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def note(number: int, frame: Any) -> None:
        """What SIGINT does."""
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        print("\nstopping after this iteration; Ctrl-C again stops at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
