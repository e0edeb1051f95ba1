"""Runs commands in this process; provides a pair of small models on disk."""

import io
import logging
import shutil
import sys
import warnings

import pytest

from helpers.small import make_byte_tokenizer, save_target, small_drafter, small_llama
from mlx_redrafter.cli.main import main
from mlx_redrafter.loading.checkpoints import save_drafter


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(command, *flags, stdin=b"")` returns (exit status, stdout, stderr)."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)

    def call(command, *flags, stdin=b""):
        monkeypatch.setattr(sys, "argv", [command, *flags])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        with pytest.raises(SystemExit) as ended:
            main(command)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[str, str]:
    """Directories of a byte-level target and its drafter."""
    root = tmp_path_factory.mktemp("pair")
    tokenizer = make_byte_tokenizer()
    vocab = len(tokenizer)
    save_target(root / "target", small_llama(vocab=vocab, kv_heads=2), tokenizer, eos_token_id=0)
    save_drafter(root / "drafter", small_drafter(vocab=vocab))
    return str(root / "target"), str(root / "drafter")


@pytest.fixture
def chat_target(pair, tmp_path) -> str:
    """The target with a chat template of roles and contents."""
    target = shutil.copytree(pair[0], tmp_path / "chat_target")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{{ end }}"
    (target / "chat_template.jinja").write_text(template)
    return str(target)
