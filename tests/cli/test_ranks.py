"""`generate` and `chat` on several processes that share one model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.launch import PATIENCE, TESTS, start_ranks, wait_for_ranks

FLAGS = ["--max-tokens", "24", "--draft-depth", "2", "--context"]

FAILING = """
import sys
from mlx_redrafter.machine import ranks
from mlx_redrafter.cli.main import main
from mlx_redrafter.drafters.protocol import StepwiseSource

def fail(*arguments, **options):
    raise RuntimeError("no memory left")

if ranks.get_rank() == 1:
    StepwiseSource.propose = fail
main("generate")
"""

LOADING = """
import sys, time
from mlx_lm import utils
from mlx_redrafter.machine import ranks
from mlx_redrafter.cli.main import main

def load(*arguments, **options):
    print("loading", file=sys.__stdout__, flush=True)
    time.sleep(600)

if str(ranks.get_rank()) in sys.argv.pop(1):
    utils.sharded_load = load
main(sys.argv.pop(1))
"""


@pytest.fixture
def flags(pair) -> list[str]:
    """Flags for a target and its drafter."""
    return ["--model", pair[0], "--drafter", pair[1], *FLAGS]


def test_mlx_launch_generates_what_one_process_does(run, flags, tmp_path):
    flags = [
        *flags,
        "--prompt",
        "abc abc abc",
        "--ignore-chat-template",
        "--json",
        "--temp",
        "0.7",
        "--seed",
        "3",
    ]
    status, out, _ = run("generate", *flags)
    port = 20_000 + os.getpid() % 10_000  # and the next port, both below the ephemeral range
    launch = [str(Path(sys.executable).with_name("mlx.launch")), "-n", "2", "--backend", "ring"]
    command = [
        *launch,
        "--starting-port",
        str(port),
        "--",
        sys.executable,
        "-m",
        "mlx_redrafter.generate",
        *flags,
    ]
    env = os.environ | {"PYTHONPATH": str(TESTS.parent), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert len(done.stdout.splitlines()) == 1, done
    alone = json.loads(out)
    together = json.loads(done.stdout)
    assert status == 0
    assert together["tokens"] == alone["tokens"]
    assert together["text"] == alone["text"]
    assert together["drafted"] == alone["drafted"] > 0


def test_ranks_find_the_same_drafter(pair, tmp_path):
    """In the bundle that they load."""
    shutil.copytree(pair[0], tmp_path / "bundle" / "target")
    shutil.copytree(pair[1], tmp_path / "bundle" / "assistant")
    flags = ["--model", str(tmp_path / "bundle"), "--drafter", "auto", *FLAGS, "--prompt", "abc"]
    command = ["-m", "mlx_redrafter.generate", *flags, "--json"]
    first, second = wait_for_ranks(start_ranks(2, *command, XDG_CACHE_HOME=str(tmp_path)))
    assert (first.status, second.status) == (0, 0), (first, second)
    record = json.loads(first.out)
    assert record["settings"]["drafter"] == str(tmp_path / "bundle" / "assistant")
    assert record["drafted"] > 0
    assert "note: drafter: the assistant beside the model" in first.err


def test_rank_0_reads_the_input_for_all_ranks(run, flags, chat_target):
    flags[1] = chat_target
    typed = "hello hello\nr\n\nagain, again\n"
    alone = run("chat", *flags, stdin=typed.encode())
    first, second = wait_for_ranks(start_ranks(2, "-m", "mlx_redrafter.chat", *flags), typed)
    assert (first.status, second.status) == (alone[0], 0) == (0, 0), (first, second)
    assert (second.out, second.err) == ("", "")

    def strip_speeds(out):
        return [line for line in out.splitlines() if "tok/s" not in line]

    assert strip_speeds(first.out) == strip_speeds(alone[1])


def test_a_drafter_that_fails_on_one_rank_ends_all_ranks(flags):
    first, second = wait_for_ranks(start_ranks(2, "-c", FAILING, *flags, "--prompt", "abc"))
    assert second.err.splitlines()[-1] == "error on rank 1: RuntimeError: no memory left"
    assert first.status == second.status == 1
    assert "error on rank 0: RuntimeError: " in first.err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_rank_that_ends_ends_the_others(flags, chat_target, sent):
    """Either Ctrl-C on rank 0 or a killed rank, while decoding."""
    flags[1] = chat_target
    ranks = start_ranks(2, "-m", "mlx_redrafter.chat", *flags, "--max-tokens", "-1")
    ranks[0].stdin.write("hello\n")
    ranks[0].stdin.flush()
    assert ranks[0].stdout.read(1)  # decoding has started
    ranks[0 if sent == signal.SIGINT else 1].send_signal(sent)
    first, second = wait_for_ranks(ranks)
    statuses = (-sent, 1) if sent == signal.SIGINT else (1, -sent)
    assert (first.status, second.status) == statuses, (first, second)


def test_ctrl_c_ends_all_while_models_are_loaded(flags):
    ranks = start_ranks(2, "-c", LOADING, "0 and 1", "generate", *flags)
    for each in ranks:
        assert each.stdout.readline() == "loading\n"
    for each in ranks:
        each.send_signal(signal.SIGINT)
    ended = wait_for_ranks(ranks)
    assert ended == [(-signal.SIGINT, "", "")] * 2


def test_a_rank_that_is_lost_while_models_are_loaded_is_named(flags):
    ranks = start_ranks(2, "-c", LOADING, "1", "generate", *flags)
    assert ranks[1].stdout.readline() == "loading\n"
    ranks[1].kill()
    first, _ = wait_for_ranks(ranks)
    error = (
        f"error on rank 0: RuntimeError: another rank ended while {flags[1]} was loaded: [ring] "
    )
    assert first.status == 1
    assert first.err.splitlines()[-1].startswith(error), first


@pytest.mark.parametrize(
    ("each", "error"),
    [
        (
            [["--temp", "0.5"], ["--temp", "0.7"]],
            "expected the same flags .* --temp 0.5 on rank 0 and 0.7 on rank 1",
        ),
        ([["--adapter-path", "x"]] * 2, "--adapter-path needs a single process, got 2 ranks"),
    ],
)
def test_unsupported_flags_are_refused_on_all_ranks(each, error, flags):
    ended = wait_for_ranks(
        start_ranks(2, "-m", "mlx_redrafter.generate", *flags, "--prompt", "a", each=each)
    )
    for rank, (status, out, err) in enumerate(ended):
        assert (status, out) == (1, "")
        assert re.search(f"^error on rank {rank}: .*{error}$", err, re.MULTILINE), ended


def test_heads_must_be_divisible_by_the_number_of_ranks(flags, tmp_path):
    config = json.loads((Path(flags[1]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    flags[1] = str(tmp_path)
    for rank, ended in enumerate(
        wait_for_ranks(start_ranks(2, "-m", "mlx_redrafter.generate", *flags))
    ):
        assert ended.status == 1
        assert ended.out == ""
        assert f"error on rank {rank}: cannot load" in ended.err
        assert "expected num_key_value_heads" in ended.err, ended


def test_paths_may_differ_between_machines(flags, tmp_path):
    (tmp_path / "copy").symlink_to(flags[3])
    each = [
        ["--drafter", flags[3], "--prompt", "abc"],
        ["--drafter", str(tmp_path / "copy"), "--prompt", "x"],
    ]
    first, second = wait_for_ranks(
        start_ranks(2, "-m", "mlx_redrafter.generate", *flags[:2], *flags[4:], each=each)
    )
    assert first.status == second.status == 0
    assert first.out
    assert not second.out, (first, second)
