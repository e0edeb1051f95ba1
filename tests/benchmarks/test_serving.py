"""The servers compared by the serving benchmark."""

from pathlib import Path

from benchmarks.serving import OUR_SERVER, THEIR_SERVER, start_server
from helpers.refusals import refusal
from helpers.small import save_target


def list_blas_libraries(process: int | str = "self") -> set[str]:
    """File names of the BLAS libraries that a process has loaded."""
    maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
    return {Path(line.split()[-1]).name for line in maps.splitlines() if "blas" in line}


def test_both_servers_have_the_same_blas(tmp_path):
    save_target(tmp_path)
    found = []
    for module in (OUR_SERVER, THEIR_SERVER):
        with start_server(module, ["--model", str(tmp_path), "--log-level", "ERROR"]) as server:
            found.append(list_blas_libraries(server.pid))
    assert found == [list_blas_libraries()] * 2


def test_a_server_that_does_not_start_says_why(capsys):
    message = r"^mlx_lm.server does not start: it exited with status 2$"
    with (
        refusal(message),
        start_server(THEIR_SERVER, ["--no-such-flag"]),
    ):
        pass
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err
