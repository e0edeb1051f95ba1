"""What is kept in the cache folder is measured again if it is not sound."""

import json
import math
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from helpers.cost_curves import make_costs
from helpers.few_rows import fake_metal
from helpers.small import small_drafter, small_llama
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.recipe import choose_row_counts, get_cache_row_classes
from mlx_redrafter.measuring import store
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.measuring.store import read_hits, save_hits
from mlx_redrafter.planning.acceptance import HitCounts

pytestmark = pytest.mark.filterwarnings("ignore:.* is damaged")

LOADS = {
    "costs": lambda pair: pair.get_or_measure_costs(trees=True),
    "verdicts": lambda pair: pair.get_or_measure_verdicts(),
    "classes": lambda pair: get_cache_row_classes(pair, Options()),
    "choice": lambda pair: choose_row_counts(pair, Options(exact=True)),
    "by_depth": lambda pair: read_hits(pair.model, pair.drafter).by_depth,
}
"""By the name of the value in the file."""

MOMENTS = (5, None, "yesterday", "2026-01-01T00:00:00", ["2026"])
NO_NUMBERS = (None, True, "1.5", math.nan, [1], {})


@pytest.fixture
def start(monkeypatch, tmp_path) -> Callable[[], Pair]:
    """Starts a process in which a pair has everything kept; each measurement is a fake."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake_metal(monkeypatch)
    monkeypatch.setattr(store, "compare_row_counts", lambda *args: ((1,), (2, 3), (4, 6, 8)))
    monkeypatch.setattr(store, "measure_costs", lambda *args, **how: make_costs("gentle"))
    model = small_llama(hidden=96)
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    drafter = small_drafter(hidden=96, vocab=64)
    hits = HitCounts([(3.0, 4.0)])
    hits.n_new = store.MIN_NEW
    save_hits(model, drafter, hits)
    return lambda: Pair(model, drafter)


def walk(value, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers in JSON; without the key."""
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "of":
                yield from walk(each, (*path, key))
    elif type(value) in (int, float):
        yield path


def put(value, path: tuple[Any, ...], new):
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


@pytest.mark.parametrize("name", LOADS)
def test_a_file_with_anything_else_in_place_of_a_number_is_not_used(name, start, tmp_path):
    load = LOADS[name]
    expected = load(start())
    (file,) = [each for each in tmp_path.rglob("*.json") if name in json.loads(each.read_text())]
    sound = file.read_text()
    paths = [*walk(json.loads(sound))]
    assert len(paths) >= 3
    # The verdicts of one matmul are like those of all others.
    changes = list(zip(paths[:40] + paths[-8:], cycle(NO_NUMBERS), strict=False))
    changes += [(path, new) for path in paths[:3] for new in NO_NUMBERS]
    changes += [(("when",), new) for new in MOMENTS]
    changes += [((name,), new) for new in (*NO_NUMBERS, 5, "", [[]])]
    damages = ["[1]", '{"of": {}, ']
    for path, new in changes:
        if path == ("load",) and new is None:  # as on systems that do not tell it
            continue
        damaged = json.loads(sound)
        put(damaged, path, new)
        damages.append(json.dumps(damaged))
    for damage in damages:
        file.write_text(damage)
        found = load(start())
        if name == "by_depth":
            assert found == (), damage
            continue
        assert found == expected, damage
        assert json.loads(file.read_text())[name] == json.loads(sound)[name], damage
