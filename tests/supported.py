"""Writes the model list in docs/models.md from `supported_models.py`:

`python tests/supported.py`.
"""

from itertools import groupby
from pathlib import Path

from helpers.families import modules
from helpers.tables import replace_between
from mlx_redrafter.target.supported_models import CHAINS, REFUSED, REPLAYED, TREES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN = "<!-- models: made by tests/supported.py -->\n"
END = "<!-- models: end -->\n"

REPLAY_NOTE = (
    "its states cannot be rolled back: accepted tokens are replayed after a rejection, at most 8"
)
METAL_ONLY = ("bitnet", "muse_spark")
"""Modules that run only on Metal, so they are untested; they verify chains."""

SEPARATE_NAMES = """
    afm7 baichuan_m1 bailing_hybrid bailing_moe_v3 deepseek_v3 deepseek_v32 deepseek_v41 gear gemma2
    gemma3n glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode internlm2 internlm3 jamba kimi_k25 kimi_k3
    kimi_linear kimi_vl llama4 longcat_flash longcat_flash_ngram mamba minimax_m3_vl mistral4
    nanbeige phi phixtral plamo rwkv7 stablelm
"""
SEPARATE = SEPARATE_NAMES.split()
"""Modules whose texts cannot share a forward, see `joint_check.py`."""

METAL_NOTE = "untested: runs on Metal kernels only"
NEW_NOTE = "untested: new in mlx-lm"


def rows() -> list[tuple[str, str, str]]:
    """(module, mode, note) of every module in the installed mlx-lm."""
    known = {
        **dict.fromkeys(TREES, ("trees", "")),
        **{name: ("chains", note) for name, note in CHAINS.items()},
        **dict.fromkeys(REPLAYED, ("chains", REPLAY_NOTE)),
        **dict.fromkeys(METAL_ONLY, ("chains", METAL_NOTE)),
        **{name: ("refused", note) for name, note in REFUSED.items()},
    }
    return [(name, *known.get(name, ("chains", NEW_NOTE))) for name in modules()]


def table() -> str:
    """The Markdown table; one row per mode and note."""
    order = ["trees", "chains", "refused"]
    found = sorted(
        rows(), key=lambda row: (order.index(row[1]), row[2] != REPLAY_NOTE, row[2], row[0].lower())
    )
    lines = ["| model | mode | note |", "|---|---|---|"]
    for (mode, note), group in groupby(found, key=lambda row: row[1:]):
        names = [name for name, _, _ in group]
        count = f" ({len(names)})" if len(names) > 1 else ""
        lines.append(f"| {', '.join(names)} | {mode}{count} | {note} |")
    names = ", ".join(SEPARATE)
    separate = f"Texts that are decoded together share a forward, except with {names}."
    return "\n".join([*lines, "", separate, ""])


def insert_table(text: str) -> str:
    """Inserts the table into the page."""
    return replace_between(text, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
