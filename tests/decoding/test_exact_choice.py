"""The row counts that `exact` chose are kept until the user has them chosen again."""

import re
from dataclasses import replace

import mlx.core as mx
import pytest

from helpers.cost_curves import make_costs
from helpers.sessions import make_drafter
from helpers.toys import make_model, make_tokenizer
from mlx_redrafter.cli.doctor import diagnose, format_report
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.recipe import choose_row_counts, get_cache_row_classes, resolve_recipe
from mlx_redrafter.measuring import store
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.planning.costs import CostTable
from mlx_redrafter.target.few_rows import FewRows, Matmul

BUSY = make_costs("every row")
IDLE = make_costs("flat")
DISTURBED = BUSY._replace(plain=(1.0, 0.1))
EXACT = Options(exact=True)


class Machine:
    """A machine with three classes of row counts.

    Attributes:
        costs: of the next measurements, the last one of all further ones.
        classes: of row counts.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.costs = [BUSY]
        self.classes = ((1,), (2, 3, 4, 5), (6, 7, 8))
        patch.setattr(store, "compare_row_counts", lambda *args: self.classes)
        patch.setattr(store, "measure_costs", self.measure)

    def measure(self, *pair, **how) -> CostTable:
        return self.costs.pop(0) if len(self.costs) > 1 else self.costs[0]

    def start(self) -> Pair:
        """A pair as in a new process."""
        model = make_model()
        return Pair(model, make_drafter(model, acceptance=[[0.9]]))


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Machine(monkeypatch)


def test_the_choice_of_a_busy_moment_is_kept_until_refreshed(machine):
    assert choose_row_counts(machine.start(), EXACT) == (1,)
    machine.costs = [IDLE]
    pair = machine.start()
    pair.get_or_measure_costs(trees=True, refresh=True)
    assert choose_row_counts(pair, EXACT) == (1,), "other bits need the user's word"
    with pytest.warns(UserWarning, match="--exact now computes 6 to 8 rows alike, not 1: last"):
        assert choose_row_counts(pair, EXACT, refresh=True) == (6, 7, 8)
    assert choose_row_counts(pair, EXACT) == (6, 7, 8)
    assert choose_row_counts(machine.start(), EXACT) == (6, 7, 8)
    assert choose_row_counts(pair, EXACT, refresh=True) == (6, 7, 8), "and no warning"


def test_the_note_that_nothing_pays_names_the_command(machine):
    pair = machine.start()
    (note,) = resolve_recipe(pair, EXACT, pair.open_source()).notes
    assert note.startswith("nothing drafts: by its costs no padding pays (--exact); ")
    assert note.endswith("mlx_redrafter.doctor --refresh measures again")


def test_doctor_prints_and_renews_the_choice(machine, monkeypatch):
    monkeypatch.setattr("mlx_redrafter.cli.doctor.TRIAL_TOKENS", 4)
    tokenizer = make_tokenizer()

    def examine(*, refresh):
        pair = machine.start()
        report = diagnose(pair.model, tokenizer, pair.drafter, refresh=refresh)
        return [line for line in format_report(report).splitlines() if "Chosen" in line]

    machine.costs = [DISTURBED]
    assert examine(refresh=False) == [], "a choice is kept, so not in a busy moment"
    machine.costs = [BUSY]
    pair = machine.start()
    pair.get_or_measure_costs(trees=True, refresh=True)
    (line,) = examine(refresh=False)
    when = r"0.0 hours ago at load [\d.]+ on \d+ cores; --refresh chooses again"
    assert re.fullmatch(rf"Chosen for --exact: 1 \(nothing drafts\), {when}", line)
    (note,) = resolve_recipe(pair, EXACT, pair.open_source()).notes
    assert note.startswith("nothing drafts: ")
    machine.costs = [IDLE]
    with pytest.warns(UserWarning, match="--exact now computes"):
        (line,) = examine(refresh=True)
    assert line.startswith("Chosen for --exact: 6 to 8, ")
    assert choose_row_counts(machine.start(), EXACT) == (6, 7, 8)
    machine.costs = [DISTURBED]
    (line,) = examine(refresh=True)
    assert line.startswith("Chosen for --exact: 6 to 8, "), "not by times of a busy machine"
    assert line.endswith("; --refresh chooses again when nothing else is running")


def test_a_choice_is_not_made_by_the_first_disturbed_times(machine):
    machine.costs = [DISTURBED, IDLE]
    assert choose_row_counts(machine.start(), EXACT) == (6, 7, 8)


@pytest.mark.parametrize("classes", [((1, 2), (6, 7, 8, 9)), ((1, 2, 6, 7, 8),)])
def test_other_classes_change_the_choice_with_a_warning(machine, classes):
    machine.costs = [IDLE]
    assert choose_row_counts(machine.start(), EXACT) == (6, 7, 8)
    machine.classes = classes
    pair = machine.start()
    get_cache_row_classes(pair, EXACT, refresh=True)
    with pytest.warns(UserWarning, match="--exact now computes .* rows alike, not 6 to 8: last"):
        assert choose_row_counts(pair, EXACT) == classes[-1]
    assert choose_row_counts(machine.start(), EXACT) == classes[-1], "and no warning"


def test_the_class_of_one_stays_chosen_whatever_belongs_to_it(machine):
    assert choose_row_counts(machine.start(), EXACT) == (1,)
    machine.costs = [IDLE]
    machine.classes = ((1, 3), (6, 7, 8))
    pair = machine.start()
    assert get_cache_row_classes(pair, EXACT, refresh=True) == machine.classes
    assert choose_row_counts(pair, EXACT) == (1, 3), "and no warning, as the bits are the same"


def test_other_kernels_change_the_choice_with_a_warning(machine, monkeypatch):
    machine.costs = [IDLE]
    assert choose_row_counts(machine.start(), EXACT) == (6, 7, 8)
    matmul = Matmul(7, 96, 64, 5, 32, mx.bfloat16)
    used = FewRows(frozenset([matmul]))
    monkeypatch.setattr(Pair, "get_or_measure_few_rows", lambda pair: used)
    with pytest.warns(UserWarning, match="now computes 6 to 8 rows alike, by other kernels: last"):
        assert choose_row_counts(machine.start(), EXACT) == (6, 7, 8)
    assert choose_row_counts(machine.start(), EXACT) == (6, 7, 8), "and no warning"


@pytest.mark.parametrize("plan", [(1, 2), "auto", "off"])
def test_costs_that_cannot_be_measured_keep_the_class_of_one(machine, plan):
    """Later texts have the same bits, whether costs can be measured then or not."""
    failures = []
    machine.costs = []  # nothing can be measured
    options = replace(EXACT, plan=plan, on_drafter_failure=failures.append)
    pair = machine.start()
    with pytest.raises(IndexError):
        resolve_recipe(pair, replace(EXACT, plan=plan), pair.open_source())
    assert resolve_recipe(pair, options, pair.open_source()).row_counts == (1,)
    assert [type(error) for error in failures] == [IndexError], "reported once"
    machine.costs = [IDLE]
    for later in (pair, machine.start()):
        assert resolve_recipe(later, options, later.open_source()).row_counts == (1,)
