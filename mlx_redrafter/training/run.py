"""A whole training run: what it takes, answers, training, validation, and the finished directory."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..atomic_files import lock_file
from ..checkpoints import find_not_finite, list_weights, load_drafter, save_drafter
from ..command_models import load_target
from ..demo.sources import training_prompts
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..engine.model_checks import check_draftable
from ..engine.model_parts import compute_dtype, model_sizes
from ..engine.stats import Stats
from ..errors import RedrafterError
from ..generate import decode_prompts
from ..model_card import strip_folders
from ..options import Options
from ..planning.sizing import choose_size, n_weights
from .answers import AnswerFile
from .data import (
    Prompt,
    Text,
    check_data,
    digest,
    encode_prompts,
    load_texts,
    make_batches,
    most_frequent,
    n_held_out,
    read_prompts,
    select_prompts,
    split_texts,
)
from .estimate import check_disk, disk_bytes, estimate_run
from .evaluation import (
    add_results,
    compare_shapes,
    format_error,
    format_table,
    make_prompts,
    measure_guesses,
    standard_error,
)
from .run_files import Record, RunFiles, describe, make_command
from .settings import TrainingArgs
from .targets import new_drafter
from .trainer import load_checkpoint, train_drafter

INTERRUPTED = 130
DEMO_PROMPTS = 1024  # pieces of the standard library that the demo's target continues

Say = Callable[[str], None]


@dataclass
class Run:
    """A run and what it works with: the target, the token ids that end its texts, the drafter, and texts."""

    args: TrainingArgs
    files: RunFiles
    record: Record
    say: Say
    model: nn.Module
    ends: set[int]
    drafter: TrainableDrafter
    training: list[Text]
    validation: list[Text]

    def __post_init__(self) -> None:
        if self.args.val_batches > 0:
            self.validation = self.validation[: self.args.val_batches * self.args.batch_size]
        self.prompts = make_prompts(self.validation, self.args.val_prompts)
        self.options = Options(max_tokens=self.args.val_tokens, temp=self.args.temp[-1], seed=self.args.seed)


def train(args: TrainingArgs, *, resume: bool = False, dry_run: bool = False, say: Say = lambda text: None) -> int:
    """Trains a drafter as the settings say, into the directory `args.output`.

    Args:
        resume: continue from the last checkpoint of the run in that directory; the result is the same to the bit.
        dry_run: say what the run would take, and write nothing.
        say: is told what a person should know.

    Returns:
        The exit status: 0, 1 if a token differs from plain decoding, or 130 after Ctrl-C, when the run can be resumed.

    Raises:
        RedrafterError: with the reason; the last checkpoint is complete.
        OSError: a file cannot be written.
    """
    args.check_run()
    files = RunFiles(args)
    record = files.open_record(resume=resume)
    given: list[Prompt] = []
    if args.data:
        check_data(args.data)
    else:
        given += read_prompts(args.prompts) if args.prompts else training_prompts(DEMO_PROMPTS, args.seed)
    model, tokenizer = load_target(args, args.model)
    check_draftable(model, tree=False)
    answers: AnswerFile | None = None
    if args.data:
        texts = split_texts(args, *load_texts(args.data, tokenizer, mask_prompt=args.mask_prompt), say)
        source = digest([[[text.offset, *text.ids.tolist()] for text in part] for part in texts])
        lengths, n_validation, missing = [len(text.ids) for text in texts[0]], len(texts[1]), 0
    else:
        prompts = select_prompts(args, encode_prompts(given, tokenizer), say)
        answers, source = AnswerFile(files.answers, args, prompts), digest(prompts)
        lengths, n_validation = [len(prompt) + args.max_tokens for prompt in prompts], n_held_out(len(prompts))
        missing = len(prompts) - len(answers.read())
    if record.texts not in (None, source):
        where = args.data or args.prompts or "the demo"
        raise RedrafterError(f"cannot resume the run in {files.place}: the texts of {where} have changed")
    sizes = args.kind.from_dict(record.args) if record.args else choose_sizes(args, model, say)
    record.texts, record.args = source, sizes.to_dict()
    done = record.ended or load_checkpoint(files.checkpoint)
    say(f"drafter: {describe(sizes)}, {n_weights(sizes) / 1e6:.2f} M parameters")
    left = 0 if record.ended else args.iters - done
    say(estimate_run(model, sizes, args, lengths, left, val_texts=n_validation, answers=missing))
    check_disk(files.place, disk_bytes(sizes, 0 if args.data else len(lengths) * args.max_tokens))
    if dry_run:
        return 0
    with lock_file(files.lock):
        files.save_record(record)
        try:
            if answers is not None:
                texts = split_texts(args, answers.complete(model, tokenizer), [], say)
            mx.random.seed(args.seed)
            count = sizes.draft_vocab_size
            ids = None if count is None else most_frequent(texts[0], count, sizes.vocab_size)
            drafter = new_drafter(model, sizes, ids)
            mx.eval(drafter.parameters())
            run = Run(args, files, record, say, model, set(tokenizer.eos_token_ids), drafter, *texts)
            if record.ended is None:
                with interruptible() as interrupted:
                    done = fit_drafter(run, interrupted)
                if record.ended is None and done < args.iters:
                    say(f"stopped at iteration {done} of {args.iters}; the same command with --resume continues")
                    return INTERRUPTED
            return 0 if finish(run) else 1
        except KeyboardInterrupt:
            say("stopped; the same command with --resume continues")
            return INTERRUPTED


def choose_sizes(args: TrainingArgs, model: nn.Module, say: Say) -> DrafterArgs:
    """The sizes of the settings, or measured ones."""
    hidden_size, vocab_size = model_sizes(model)
    if args.is_measured:
        choice = choose_size(model, final_dtype(args, model), args.kind, args.draft_depth)
        say(f"size: {choice.reason}")
        return choice.args
    count = args.draft_vocab_size
    if count is not None and count > vocab_size:
        raise RedrafterError(f"draft_vocab_size must be at most the target's vocabulary {vocab_size}, got {count}")
    count = None if count == vocab_size else count
    sizes = {name: getattr(args, name) for name in args.kind.SIZES}
    return args.kind.for_training(hidden_size, vocab_size, depth=args.draft_depth, draft_vocab_size=count, **sizes)


def final_dtype(args: TrainingArgs, model: nn.Module) -> mx.Dtype:
    """The dtype of the finished drafter."""
    return compute_dtype(model) if args.dtype is None else cast(mx.Dtype, getattr(mx, args.dtype))


def fit_drafter(run: Run, interrupted: threading.Event) -> int:
    """Trains, reports, validates and stops early; the iterations done."""
    args, record = run.args, run.record
    started = time.perf_counter()

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        nonlocal started
        if record.ended is not None:
            return True  # only the end of an update is waited for
        record.drop_after(done - 1)  # what a run recorded after its last checkpoint comes again
        if is_report := done % args.steps_per_report == 0:
            record.reports.append({"iteration": done, **shown, "seconds": time.perf_counter() - started})
        if is_validation := done % args.steps_per_eval == 0 or done == args.iters:
            record.validations.append(validate(run, done))
            scores = [entry["tokens_per_round"] for entry in record.validations]
            if args.patience and scores[-1] > max(scores[:-1], default=0):
                save_drafter(run.files.best, run.drafter)
            if len(scores) > args.patience > 0 and max(scores[-args.patience :]) <= max(scores[: -args.patience]):
                run.say(f"stopping early: no more tokens per round for {args.patience} validations")
                record.ended = done
        if is_report or is_validation:
            run.files.save_record(record)
            started = time.perf_counter()
        return interrupted.is_set() or record.ended is not None

    batches, files = make_batches(run.training, args.batch_size, args.seed), run.files
    return train_drafter(run.model, run.drafter, batches, args, checkpoint=files.checkpoint, on_iteration=on_iteration)


def validate(run: Run, done: int) -> dict[str, Any]:
    """One validation, as an entry of the record."""
    args = run.args
    loss, acceptance = measure_guesses(run.model, run.drafter, run.validation, args)
    options = replace(run.options, plan=(1, args.draft_depth))
    each = [decode_prompts(run.model, run.drafter, [prompt], options, run.ends).stats for prompt in run.prompts]
    stats = sum(each, Stats())
    per_round = format_error(stats.tokens_per_round, standard_error(one.tokens_per_round for one in each))
    first = " ".join(f"{shares[0]:.2f}" for shares in acceptance)
    run.say(
        f"iteration {done}: validation loss {loss:.3f}, right at depth 1, 2, ...: {first}; "
        f"{per_round} tokens per round at 1 x {args.draft_depth}, temperature {options.temp}, prompts: {len(each)}"
    )
    if stats.rounds and stats.accepted == 0 and done >= args.iters // 2:
        run.say("warning: not one drafted token was accepted: too few iterations, or too low or high a learning rate")
    return {"iteration": done, "loss": loss, "acceptance": acceptance, "tokens_per_round": stats.tokens_per_round}


def finish(run: Run) -> bool:
    """Measures the finished drafter, with `patience` the best one, and writes its directory; whether it is exact."""
    args, record, drafter, place = run.args, run.record, run.drafter, run.files.place
    if args.patience:
        best = max(record.validations, key=lambda entry: entry["tokens_per_round"])
        drafter.update(load_drafter(run.files.best, run.model).parameters())
        record.drop_after(best["iteration"])
        run.say(f"the drafter of iteration {best['iteration']} is the result")
    dtype = final_dtype(args, run.model)
    drafter.set_dtype(dtype)
    if (name := find_not_finite(list_weights(drafter))) is not None:
        raise RedrafterError(f"{name} does not fit into {dtype}: give another --dtype")
    save_drafter(place, drafter)  # whatever becomes of the rest
    run.say("comparing beam shapes with plain decoding on held-out prompts")
    shapes = [(1, k) for k in range(1, args.draft_depth + 1)] + [(4, args.draft_depth)]
    results = compare_shapes(run.model, drafter, run.prompts, shapes, run.options, run.ends)
    acceptance = record.validations[-1]["acceptance"]
    drafter.args = add_results(drafter.args, args.model and strip_folders(args.model), acceptance, results)
    save_drafter(place, drafter)
    if not run.files.write_report(record, drafter.args, results):
        run.say("no picture of the loss was drawn: pip install matplotlib")
    run.say(f"temperature {run.options.temp}, {len(run.prompts)} held-out prompts\n{format_table(results)}")
    if (ratio := max(result.against_plain for result in results)) <= 1:
        run.say(
            f"note: nothing decodes faster than plain decoding here, the best shape {ratio:.2f} times as fast: "
            "train longer, or a smaller drafter"
        )
    run.say(f"the drafter is in {place}; use it:\n{make_command(args, args.model, str(place))}")
    if not (same := all(result.same_tokens for result in results)):
        run.say("a token differs from plain decoding: docs/exactness.md tells a tie from an error")
    return same


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event that the run looks at; the second one interrupts."""
    event = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        print("\nstopping after this iteration; Ctrl-C again stops at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
