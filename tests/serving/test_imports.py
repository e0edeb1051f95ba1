"""What the server uses of mlx-lm: only public names, all listed here."""

from __future__ import annotations

import ast
from pathlib import Path

SERVING = Path(__file__).parent.parent.parent / "mlx_redrafter" / "serving"
EXPECTED = {
    "mlx_lm.generate.BatchGenerator",
    "mlx_lm.generate.TextStateMachine",
    "mlx_lm.generate.make_text_state_machine",
    "mlx_lm.models.cache",
    "mlx_lm.models.cache.can_trim_prompt_cache",
    "mlx_lm.models.cache.load_prompt_cache",
    "mlx_lm.models.cache.make_prompt_cache",
    "mlx_lm.models.cache.save_prompt_cache",
    "mlx_lm.models.cache.trim_prompt_cache",
    "mlx_lm.sample_utils.make_logits_processors",
    "mlx_lm.server.convert_chat",
    "mlx_lm.tokenizer_utils.TokenizerWrapper",
}


def test_imports_from_mlx_lm_are_listed() -> None:
    found = set()
    for file in SERVING.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_lm":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "mlx_lm"}
    assert found == EXPECTED and not [name for name in found if "._" in name]


def test_no_private_members_are_used() -> None:
    found = []
    for file in SERVING.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                found += [] if owner in ("self", "super()") else [f"{file.name}: {owner}.{node.attr}"]
    assert found == []
