"""Results become tables; the tables in the documentation come from the committed results."""

import pytest

from benchmarks.records import Results
from benchmarks.report import TABLES, compute_limit, place_tables
from benchmarks.tables import describe_setting, format_cell, format_markdown, format_text
from helpers.bench_records import MACHINE, make_costs, make_line, make_speed
from mlx_redrafter.errors import RedrafterError

PLAIN = make_line(make_speed("plain", "off", 1.0))


def make_place(name: str, inside: str = "") -> str:
    return f"<!-- results: {name} -->\n{inside}<!-- results: end -->\n"


def test_lines_are_shown_as_text_and_markdown():
    lines = [
        {"name": "a|b", "gap": 0.00123, "plan": [4, 3]},
        {"name": None, "gap": 0.0, "plan": [1, 2]},
    ]
    cells = [format_cell(value) for value in (1.0, 0.1, -0.0126, 3, "x")]
    assert cells == ["1.00", "0.10", "-0.013", "3", "x"]
    assert format_text(lines).splitlines() == [
        "name     gap   plan",
        " a|b  0.0012  4 x 3",
        "        0.00  1 x 2",
    ]
    assert format_markdown(lines).splitlines()[2:] == [
        "| a\\|b | 0.0012 | 4 x 3 |",
        "|  | 0.00 | 1 x 2 |",
    ]


def test_lines_where_drafting_loses_are_kept():
    records = [
        make_line(make_costs()),
        PLAIN,
        make_line(make_speed()),
        make_line(make_speed(plan=(4, 3, 13), ratio=0.4)),
    ]
    results = Results({"demo-edits": records, "smollm2-medusa": records}, [])
    table = TABLES["demo"](results)
    assert table.startswith("edits, greedy:\n\n")
    assert "| 1 x 3 | 1.98 | 150.00 | 1.50 (1.50 to 1.50) | 1 of 1 |" in table
    assert "| 4 x 3 | 1.98 | 40.00 | 0.40 (0.40 to 0.40) | 1 of 1 |" in table
    assert "Some Chip" in table
    assert "mlx 0.32.4" in table
    assert "| medusa | 1.98 (1.50) | 1.98 (0.40) |" in TABLES["drafters"](results)


def test_the_limit_counts_only_verify_forwards():
    # A verify forward of four nodes (plan 1 x 3) takes 14 ms, a plain step 10 ms.
    assert compute_limit(make_costs(), make_speed(ratio=1.0)) == pytest.approx(127 / 64 / 1.4)
    assert compute_limit(make_costs(), make_speed(plan=(4, 3, 13))) is None, "not measured"
    assert compute_limit(make_costs(), make_speed(plan="auto")) is None
    assert compute_limit(None, make_speed()) is None
    slow = make_costs()["costs"] | {"verify": [[11.0, 12.0, 13.0, 99.0, 15.0, 16.0, 17.0]]}
    limit = compute_limit(make_costs(costs=slow), make_speed(ratio=1.0))
    assert limit == pytest.approx(127 / 64 / 1.5)

    # From 64 to 264 tokens a plain step grows from 10 to 20 ms, a forward of N nodes from 10 + N to
    # 30 + N ms.
    verify = [[start + n for n in range(1, 8)] for start in (10.0, 30.0)]
    table = make_costs()["costs"] | {"contexts": [64, 264], "plain": [10.0, 20.0], "verify": verify}
    for prompt, tokens, plain, forward in ((32, 64, 10, 14), (64, 200, 15, 24), (164, 200, 20, 34)):
        record = make_speed(prompt_tokens=prompt, tokens=tokens, rounds=50, ratio=0.1)
        limit = compute_limit(make_costs(costs=table), record)
        assert limit == pytest.approx((tokens - 1) / 50 * plain / forward)


def test_contributions_name_their_contributor():
    machine = {**MACHINE, "gpu_cores": 10, "power": "AC Power"}
    differing = make_speed(prompt="code/two", ratio=0.8, same_tokens=False, first_difference=3)
    suite = {
        "contributor": "Ada | Co",
        "machine": machine,
        "records": [make_costs(), make_speed(ratio=0.8), differing],
    }
    table = TABLES["contributed"](Results({}, [suite]))
    assert "| Ada \\| Co | Some Chip, 10 GPU cores, 16 GB, AC Power |" in table
    assert "0.80" in table
    assert table.splitlines()[2].endswith("| 1 of 2 | 128 x 3 |")
    unknown = suite | {"machine": {**MACHINE, "memory_gb": None}}
    assert "| Some Chip |" in TABLES["contributed"](Results({}, [unknown]))


def test_inserting_tables_twice_changes_nothing():
    results = Results({"demo-edits": [make_line(make_speed())]}, [])
    demo = make_place("demo", "old\n")
    text = f"# Title\n\n{demo}\nbetween\n\n{make_place('contributed')}end\n"
    once = place_tables(text, results)
    assert "old" not in once
    assert "| 1 x 3 |" in once
    assert "None yet." in once
    assert once.startswith("# Title\n") and "\nbetween\n" in once and once.endswith("end\n")
    assert place_tables(once, results) == once
    with pytest.raises(RedrafterError, match="no table is called 'nope': there are chat, "):
        place_tables(make_place("nope"), results)


def test_every_machine_of_a_table_is_named():
    records = [make_line(make_speed()), make_line(make_speed(), chip="Another Chip")]
    line = describe_setting(records)
    assert line.startswith("Some Chip, 4 cores, ")
    assert " and Another Chip, 4 cores, " in line
    assert describe_setting(records[:1] * 2).count("cores") == 1
