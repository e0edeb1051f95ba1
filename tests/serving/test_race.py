"""The race page (plain and drafted decoding side by side): its text, its headers, and a run in a
browser.
"""

import html
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from helpers.servers import (
    Running,
    Scripted,
    ask,
    events_of,
    parse_flags,
    start_scripted,
    start_server,
    until,
)
from mlx_redrafter import stream_generate
from mlx_redrafter.cli import race
from mlx_redrafter.cli.race import make_race_parser
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.serving.http.process import load_service
from mlx_redrafter.serving.race import PAGE, make_race_app

CHROME = next(
    filter(
        None,
        map(
            shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        ),
    ),
    None,
)
DRIVER = shutil.which("chromedriver")
in_browser = pytest.mark.skipif(
    not (CHROME and DRIVER), reason="Chromium and chromedriver are not installed"
)
NASTY = (
    "<img src=x onerror=\"document.title='hit'\"></textarea>"
    "<script>document.title='hit'</script>&amp;"
)
TEXT = "/v1/completions"


@contextmanager
def start_race(*flags: str) -> Iterator[Running]:
    """A race of the demo."""
    with start_server(
        load_service(parse_flags(*flags, make=make_race_parser)), make_race_app
    ) as server:
        yield server


@pytest.fixture(scope="module")
def page_server(chat_tokenizer) -> Iterator[Scripted]:
    """A race over a scripted engine."""
    with start_scripted(
        chat_tokenizer, "--allowed-origins", "http://a.example", make=make_race_app
    ) as both:
        yield both


def read_about(text: str):
    """The page's data about the models."""
    found = re.search(r'data-about="([^"]*)"', text)
    return json.loads(html.unescape(found.group(1)))


def test_the_page_loads_nothing_external():
    address = r"https?://[^\s\"'<>)]+|(?:src|href|action)=\"[^\"]*\"|url\([^)]*\)|@import|import\("
    icon, *others = re.findall(address, PAGE)
    # The icon is a data URL; the SVG namespace is never fetched.
    assert icon.startswith('href="data:image/svg+xml,')
    assert others == ["http://www.w3.org/2000/svg"]
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", PAGE
    )
    assert not re.search(r"\son\w+=|\sstyle=", PAGE.split("<body>")[1].split("<script>")[0])


def compute_luminance(color: str) -> float:
    """WCAG's relative luminance of a color such as #fff or #1d1c1a."""
    digits = color.removeprefix("#")
    size = len(digits) // 3
    parts = [int(digits[at : at + size] * (3 - size), 16) / 255 for at in range(0, 3 * size, size)]
    red, green, blue = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_can_be_read_in_light_and_dark_mode():
    blocks = re.findall(r":root \{([^}]*)\}", PAGE)
    light, dark = [dict(re.findall(r"--([\w-]+): (#\w+);", block)) for block in blocks]
    assert light.keys() == dark.keys() == set(re.findall(r"var\(--([\w-]+)\)", PAGE))
    inks = [("draft-ink", "draft"), ("copied-ink", "copied"), ("ink", "page"), ("ink", "card")]
    inks += [("soft", "page"), ("soft", "card"), ("bad", "card")]
    for colors in (light, dark):
        for ink, ground in inks:
            luminances = [compute_luminance(colors[name]) for name in (ink, ground)]
            contrast = (max(luminances) + 0.05) / (min(luminances) + 0.05)
            assert contrast >= 4.5, (ink, colors[ink], ground, colors[ground])  # WCAG AA


def test_model_names_on_the_page_are_escaped(page_server, chat_tokenizer):
    reply = ask(page_server[0], "/?prompt=x&go=1")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    expected = {
        "model": "demo",
        "demo": True,
        "drafter": "demo",
        "chat": True,
        "plan": "plan auto",
    }
    expected["example"] = demo_prompts("edits")[0]
    assert read_about(reply.body.decode()) == expected
    with start_scripted(chat_tokenizer, make=make_race_app, model_name=NASTY) as (server, _):
        told = ask(server, "/").body.decode()
    assert read_about(told)["model"] == NASTY
    assert told.split("<style>")[1] == PAGE.split("<style>")[1]


def test_only_a_race_serves_the_page(scripted, chat_tokenizer):
    assert ask(scripted[0], "/").status == 404
    with start_scripted(chat_tokenizer, "--api-key", "secret", make=make_race_app) as (server, _):
        assert ask(server, "/").status == 200
        assert ask(server, TEXT, {"prompt": "x"}).status == 401


def test_the_page_gets_every_draft(demo_models):
    model, tokenizer, _ = demo_models
    prompt = "class Stack:\n    def __init__(self):\n"
    text = "".join(each.text for each in stream_generate(model, tokenizer, prompt, max_tokens=30))
    with start_race("--draft-depth", "3") as server:
        body = {
            "prompt": prompt,
            "max_tokens": 30,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        *pieces, usage = events_of(ask(server, TEXT, body))
    drafts = [each["redrafter"] for each in pieces]
    tokens = [token for each in drafts for token in each["tokens"]]
    assert "".join(each["text"] for each in tokens) == text
    assert len(tokens) == 30
    assert usage["usage"]["accepted"] >= sum(each["from_draft"] for each in tokens) > 0
    assert any("tree" in each for each in drafts)
    for at, each in enumerate(drafts):
        if "tree" in each:  # its path is what follows
            tree = each["tree"]
            path = each["tree"]["path"]
            assert path[0] == 0
            assert [tree["parents"][node] for node in path[1:]] == path[:-1]
            following = "".join(token["text"] for later in drafts[at:] for token in later["tokens"])
            assert following.startswith(
                "".join([*(tree["tokens"][node] for node in path[1:]), tree["next"]])
            )
    assert drafts[-1]["drafted"] == usage["usage"]["drafted"]
    assert drafts[-1]["seconds"] > 0


def test_the_page_opens_if_there_is_a_screen(monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(race.webbrowser, "open", lambda url: opened.append(url) or "8" in url)
    monkeypatch.setattr(race.sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for port, display, said in (
        (8, ":0", ""),
        (9, ":0", "open http://127.0.0.1:9 in a browser\n"),
        (8, "", "open"),
    ):
        monkeypatch.setenv("DISPLAY", display)
        race.show_page(f"http://127.0.0.1:{port}")
        assert capsys.readouterr().err.startswith(said)
    assert opened == ["http://127.0.0.1:8", "http://127.0.0.1:9"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    """Headless Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROME or ""
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "window-size=1200,1000",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def finish(browser: webdriver.Chrome) -> str:
    """Waits for the end of a race; returns its outcome."""
    until(lambda: bool(browser.execute_script("return document.body.dataset.done")), 120)
    return str(browser.execute_script("return document.body.dataset.done"))


def read_side(browser: webdriver.Chrome, side: str) -> str:
    """A column's text after the prompt."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('')"
    return str(browser.execute_script(script, f"#{side} pre span:not(.asked)"))


@in_browser
def test_the_demo_starts_by_itself(browser, demo_models):
    model, tokenizer, _ = demo_models
    prompt = "class Stack:\n    def push(self, item):\n"
    steps = stream_generate(model, tokenizer, prompt, max_tokens=60, temp=0.8, seed=3)
    expected = "".join(response.text for response in steps)
    with start_race("--draft-depth", "3", "--beam-width", "2") as server:
        browser.get(f"{server.url}/?go=1&max=60&seed=3&temp=0.8&prompt={quote(prompt)}")
        assert finish(browser) == "same"
        assert read_side(browser, "plain") == read_side(browser, "drafted") == expected
        kept = browser.find_elements(By.CSS_SELECTOR, "#drafted pre .kept")
        assert 0 < len(kept) < 60 and not browser.find_elements(By.CSS_SELECTOR, "#plain pre .kept")
        assert browser.find_elements(By.CSS_SELECTOR, "#drawing .node")
        assert (
            "Same text, to the character: 60 tokens." in browser.find_element(By.ID, "result").text
        )
        browser.find_element(By.ID, "replay").click()
        until(lambda: browser.find_element(By.ID, "replay").is_enabled())
        assert read_side(browser, "plain") == read_side(browser, "drafted") == expected
        assert browser.get_log("browser") == []


@in_browser
def test_a_wrong_field_is_an_error(browser, page_server):
    browser.get(f"{page_server[0].url}/?go=1&max=abc")
    assert finish(browser) == "error"


@in_browser
def test_html_in_answers_is_escaped(browser, page_server):
    server, engine = page_server
    engine.texts = [[NASTY]]
    browser.get(f"{server.url}/?prompt={quote(NASTY)}&max=999")
    browser.find_element(By.ID, "chat").click()
    title = browser.title
    browser.find_element(By.ID, "start").click()
    assert finish(browser) == "same"
    assert browser.title == title
    assert read_side(browser, "plain") == NASTY
    assert not browser.find_elements(By.CSS_SELECTOR, "pre img, pre script, main img, main script")
