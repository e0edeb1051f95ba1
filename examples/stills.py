"""Makes the pictures of the race page, in headless Chromium, and of the chat.

    python -m examples.stills
    python -m examples.stills --model mlx-community/SmolLM2-135M-Instruct --drafter smollm2 \\
        --prompt "Name three ..."

The race needs the `dev` and `server` extras, and Debian's `chromium` and `chromium-driver` or
Chrome; `--only chat` needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

WIDTH = 1180
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PORT = 8097
RACE_SECONDS = 120.0
RACE_HEIGHT = 900
CHAT_COLUMNS = 100
CHAT_SECONDS = 60.0
CHAT_LINE = "def read_lines(path, encoding=None):"
CHAT_PROMPT = "\u203a"
MAX_TOKENS = 112


def open_browser(height: int) -> webdriver.Chrome:
    """Opens a headless browser with a window of WIDTH x `height` pixels."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        raise SystemExit(f"expected a browser, one of {', '.join(BROWSERS)}, found none")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{height}",
    ):
        options.add_argument(flag)
    driver = shutil.which("chromedriver")
    return webdriver.Chrome(options, Service(driver) if driver else None)


def save_page(browser: webdriver.Chrome, output: Path) -> None:
    """Saves a picture of the whole page."""
    height = browser.get_window_size()["height"]
    browser.set_window_size(
        WIDTH, height + browser.execute_script("return document.body.scrollHeight - innerHeight")
    )
    browser.save_screenshot(str(output))


def picture_race(output: Path, models: list[str], prompt: str | None) -> None:
    """Saves the race page after both sides have decoded a prompt greedily.

    Args:
        models: the flags that name the models.
        prompt: None for the page's own.
    """
    command = [
        sys.executable,
        "-m",
        "mlx_redrafter.race",
        "--no-browser",
        "--port",
        str(PORT),
        *models,
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    browser = open_browser(RACE_HEIGHT)
    try:
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
        asked = {"temp": 0, "go": 1} | ({"prompt": prompt, "max": MAX_TOKENS} if prompt else {})
        browser.get(f"{url}?{urlencode(asked)}")
        WebDriverWait(browser, RACE_SECONDS).until(
            lambda _: browser.execute_script("return document.body.dataset.done")
        )
        save_page(browser, output)
    finally:
        browser.quit()
        server.terminate()
        server.wait()


def picture_chat(output: Path, models: list[str], line: str) -> None:
    """Saves a turn of the chat, with accepted tokens colored by source.

    Args:
        models: the flags that name the models.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        screen = Console(record=True, width=CHAT_COLUMNS, file=nowhere, force_terminal=True)
        screen.print(Text.from_ansi(run_chat(models, line)))
        screen.save_svg(str(output), title="mlx_redrafter chat", theme=SVG_EXPORT_THEME)


def run_chat(models: list[str], line: str) -> str:
    """The chat's terminal output, including control sequences."""
    flags = ["--show-accepted", "--max-tokens", str(MAX_TOKENS), "--temp", "0", *models]
    main, side = pty.openpty()
    variables = os.environ | {
        "TERM": "xterm-256color",
        "COLUMNS": str(CHAT_COLUMNS),
        "COLORTERM": "truecolor",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_redrafter.chat", *flags],
        stdin=side,
        stdout=side,
        stderr=side,
        env=variables,
        close_fds=True,
    )
    os.close(side)
    text = ""
    deadline = time.monotonic() + CHAT_SECONDS
    asked = False
    while time.monotonic() < deadline and "tokens per round" not in text:
        if select.select([main], [], [], 1.0)[0]:
            text += os.read(main, 4096).decode("utf-8", errors="replace")
        if not asked and CHAT_PROMPT in text:
            os.write(main, f"{line}\n".encode())
            asked = True
    process.kill()
    process.wait()
    os.close(main)
    text = re.sub(r"[\r\x01\x02]|\x1b\[\?\d+[hl]", "", text)
    text = re.sub(r"(tokens per round[^\n]*\n).*", r"\1", text, flags=re.DOTALL)
    # What was typed stands between the two rules: the cursor moves up before it.
    return re.sub(r"\n(\n[^\n]*)\n\x1b\[2A([^\n]*)\n", r"\n\2\1", text)


def main() -> None:
    """Writes race.png and chat.svg."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("docs/stills"), help="a folder (default: %(default)s)"
    )
    parser.add_argument("--model", help="the target (default: the packaged demo)")
    parser.add_argument("--drafter", help="its drafter")
    parser.add_argument("--prompt", help="the prompt (default: the demo's own)")
    parser.add_argument("--only", choices=("race", "chat"), help="one picture (default: both)")
    args = parser.parse_args()
    output = args.output
    given = {"--model": args.model, "--drafter": args.drafter}
    models = [part for flag, name in given.items() if name for part in (flag, name)]
    output.mkdir(parents=True, exist_ok=True)
    if args.only != "chat":
        picture_race(output / "race.png", models, args.prompt)
    if args.only != "race":
        picture_chat(output / "chat.svg", models, args.prompt or CHAT_LINE)


if __name__ == "__main__":
    main()
