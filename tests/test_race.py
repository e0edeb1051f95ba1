"""The page that shows plain and drafted decoding side by side: its text, its headers, and how it runs in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from service import BEAM, PATIENCE, Reference, ask, server_of, until, with_toys

from mlx_redrafter import load_demo, stream_generate
from mlx_redrafter.serving import answers, race
from mlx_redrafter.serving.command import Server, checked, serving
from mlx_redrafter.serving.flags import read_flags
from mlx_redrafter.serving.race import RaceHandler, make_race_parser, page, policy, source

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
ROOT = Path(__file__).parent.parent
CHROME = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
DRIVER = shutil.which("chromedriver")
in_browser = pytest.mark.skipif(not (CHROME and DRIVER), reason="Chromium and chromedriver are not installed")
NASTY = "<img src=x onerror=\"document.title='hit'\"></textarea><script>document.title='hit'</script>&amp;"
ABOUT = {"model": "m", "drafters": ["d"], "chat": False, "plan": "as started: auto", "demo": False, "free": True}


@contextmanager
def racing(*flags: str) -> Iterator[Server]:
    """A race's server in this process."""
    with serving(checked(read_flags(["--port", "0", *flags], make_race_parser())), RaceHandler) as server:
        yield server


@pytest.fixture(scope="module")
def toys(root: Path) -> Iterator[Server]:
    with racing(*with_toys(root), *BEAM) as server:
        yield server


# Without a browser.


def test_the_page_names_nothing_outside_itself() -> None:
    address = r"https?://[^\s\"'<>)]+|(?:src|href|action)=\"[^\"]*\"|url\([^)]*\)|@import|import\("
    icon, *others = re.findall(address, source())
    # The icon is in its own address; the name of SVG is no address, and nothing fetches it.
    assert icon.startswith('href="data:image/svg+xml,') and others == ["http://www.w3.org/2000/svg"]
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", source())
    assert not re.search(r"\son\w+=|\sstyle=", source().split("<body>")[1].split("<script>")[0])


def test_the_header_allows_its_own_script_and_this_server_alone(toys: Server) -> None:
    reply = ask(toys, "GET", "/?prompt=x&go=1")
    assert reply.status == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    told = reply.headers["content-security-policy"]
    assert told == policy() and told.startswith("default-src 'none'; ") and "connect-src 'self'" in told
    assert "unsafe" not in told and len(re.findall(r"'sha256-[\w+/]{43}='", told)) == 2
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert int(reply.headers["content-length"]) == len(reply.body)


def test_what_the_page_is_told_is_data(toys: Server) -> None:
    def about(text: str) -> Any:
        return json.loads(html.unescape(re.search(r'data-about="([^"]*)"', text).group(1)))  # type: ignore[union-attr]

    told = about(ask(toys, "GET", "/").body.decode())
    assert told == {
        "model": "target",
        "demo": False,
        "drafters": ["one", "second"],
        "chat": True,
        "plan": "as started: beam width 2, draft depth 2",
        "free": False,
    }
    nasty = ABOUT | {"model": NASTY + "\"'>"}
    assert about(page(nasty)) == nasty
    # What the header allows is what it was: nothing of it is in the script.
    assert page(nasty).split("<style>")[1] == source().split("<style>")[1]


def test_the_page_is_on_a_races_server_alone(root: Path, toys: Server) -> None:
    with server_of(*with_toys(root), *BEAM) as plain:
        assert ask(plain, "GET", "/").status == ask(plain, "GET", "/?go=1").status == 404
    assert ask(toys, "GET", "/race.html").status == 404
    assert ask(toys, "GET", "/health").json["drafters"] == ["one", "second"]
    assert ask(toys, "POST", "/", {"prompt": "x"}).status == 404


def test_with_a_key_the_page_is_open_and_what_it_asks_is_not(root: Path) -> None:
    with racing(*with_toys(root), *BEAM, "--api-key", "secret") as server:
        assert ask(server, "GET", "/").status == 200 and b"secret" not in ask(server, "GET", "/").body
        assert ask(server, "POST", "/v1/completions", {"prompt": "x"}).status == 401


def test_the_page_is_opened_where_there_is_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(race.webbrowser, "open", lambda url: opened.append(url) or "8" in url)
    monkeypatch.setattr(race.sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", ":0")
    race.show("http://127.0.0.1:8")
    assert opened == ["http://127.0.0.1:8"] and capsys.readouterr().err == ""
    race.show("http://127.0.0.1:9")  # it could not be opened
    assert len(opened) == 2 and capsys.readouterr().err == "open http://127.0.0.1:9 in a browser\n"
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    race.show("http://127.0.0.1:8")
    assert len(opened) == 2 and capsys.readouterr().err == "open http://127.0.0.1:8 in a browser\n"


def test_the_flags_are_the_servers_and_one_more() -> None:
    args = vars(read_flags(["--no-browser", "--port", "7"], make_race_parser()))
    assert args.pop("no_browser") is True and args["allowed_origins"] == []
    assert args == vars(read_flags(["--port", "7"])) | {"allowed_origins": []}


def test_in_a_browser_only_its_own_page_may_ask(toys: Server) -> None:
    where = urlsplit(toys.url).netloc
    body = {"prompt": "x", "max_tokens": 1}
    for origin in (f"http://{where}", f"https://{where}", None):
        reply = ask(toys, "POST", "/v1/completions", body, {"Origin": origin} if origin else {})
        assert reply.status == 200 and "access-control-allow-origin" not in reply.headers
    for origin in ("http://evil.example", "null", "", f"http://{where}.evil.example", "http://[", "http://127.0.0.1:1"):
        for method, path in (("POST", "/v1/completions"), ("GET", "/"), ("GET", "/health"), ("OPTIONS", "/health")):
            reply = ask(toys, method, path, body if method == "POST" else None, {"Origin": origin})
            assert reply.status == 403 and "access-control-allow-origin" not in reply.headers
            assert reply.error == f"pages of the Origin {origin!r} are not among --allowed-origins"


def test_a_page_that_is_named_may_ask_a_race_too(root: Path) -> None:
    with racing(*with_toys(root), *BEAM, "--allowed-origins", "http://a.example,http://b.example") as server:
        reply = ask(server, "GET", "/health", headers={"Origin": "http://b.example"})
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "http://b.example"
        assert ask(server, "GET", "/health", headers={"Origin": "http://c.example"}).status == 403
    with racing(*with_toys(root), *BEAM, "--allowed-origins", "*") as server:
        assert ask(server, "GET", "/health", headers={"Origin": "http://c.example"}).status == 200


def test_the_command_serves_the_page_and_ends_with_a_signal(root: Path) -> None:
    given = [*with_toys(root), *BEAM, "--port", "0", "--log-level", "ERROR", "--no-browser"]
    command = [sys.executable, "-m", "mlx_redrafter", "race", *given]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            line = running.stderr.readline()
            assert line.startswith("serving on http://127.0.0.1:"), line
            where = urlsplit(line.split()[-1])
            with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert connection.recv(64).startswith(b"HTTP/1.0 200")
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE) == 0 and running.stderr.read() == ""
        finally:
            running.kill()


# In a browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROME or ""
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync", "window-size=1200,1000",
        f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page of a server, opened anew."""

    def __init__(self, browser: webdriver.Chrome, server: Server, query: str = "") -> None:
        self.browser, self.server = browser, server
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(f"{server.url}/{query}")

    def run(self, script: str, *given: Any) -> Any:
        """What a script returns."""
        return self.browser.execute_script(f"return {script}", *given)

    def find(self, where: str) -> Any:
        """The first element of that kind."""
        return self.browser.find_element(By.CSS_SELECTOR, where)

    def fill(self, **fields: Any) -> None:
        """Puts values into the form."""
        for name, value in fields.items():
            self.run("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))

    def done(self) -> str:
        """How it ended, once it did."""
        until(lambda: bool(self.run("document.body.dataset.done")), 120)
        return str(self.run("document.body.dataset.done"))

    def text(self, side: str) -> str:
        """What a column says behind the prompt."""
        return str(self.run("[...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('')",
                            f"#{side} pre span:not(.asked)"))  # fmt: skip

    def number(self, where: str) -> float:
        """A number that is shown."""
        return float(self.find(where).text)

    def asked(self) -> list[str]:
        """Every address that was asked for since the page was opened."""
        entries = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        sent = [
            entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent if not url.startswith("data:")]

    def check(self) -> None:
        """That it was content, and asked its own server only."""
        assert self.browser.get_log("browser") == []
        own = urlsplit(self.server.url).netloc
        asked = self.asked()
        assert asked and {urlsplit(url).netloc for url in asked} == {own}, asked


@in_browser
def test_the_demo_starts_by_itself_and_says_what_the_library_says(browser: webdriver.Chrome) -> None:
    prompt = "class Stack:\n    def push(self, item):\n"
    model, tokenizer, _ = load_demo()
    said = stream_generate(model, tokenizer, prompt, max_tokens=60, temp=0.8, seed=3)
    expected = "".join(response.text for response in said)
    with racing("--plan", "off") as server:  # measures nothing; the page asks for a tree
        page = Page(browser, server, f"?go=1&max=60&seed=3&temp=0.8&plan=[2,3]&prompt={quote(prompt)}")
        assert page.done() == "same"
        assert page.text("plain") == page.text("drafted") == expected
        assert page.run("document.querySelector('#plain pre .asked').textContent") == prompt
        kept = page.run("document.querySelectorAll('#drafted pre .kept').length")
        assert 0 < kept < 60 == page.number("#drafted .count") == page.number("#plain .count")
        assert page.run("document.querySelectorAll('#plain pre .kept').length") == 0
        assert 1 < page.number("#drafted .rate") <= 4 and page.number("#plain .rate") == 1
        assert page.number("#drafted .speed") > 0 and page.number("#plain .speed") > 0
        # A root, six drafted nodes, and the model's own token.
        assert page.run("document.querySelectorAll('#drawing .node').length") == 8
        assert page.run("document.querySelectorAll('#drawing path').length") == 7
        assert "6 drafted tokens checked" in page.find("#told").text
        rounds = int(page.find("#round").get_attribute("max"))
        assert page.find("#tree-name").text == f"Draft tree of round {rounds}, the last one"
        page.find("#round").send_keys(Keys.HOME)
        assert page.find("#tree-name").text == f"Draft tree of round 1 of {rounds}"
        # The first root is the first token of the text.
        first = page.run("document.querySelector('.root text').textContent")
        assert expected.startswith(first.replace("·", " ").replace("⏎", "\n"))
        assert re.search(r"^Drafted: (\d+\.\d\d times as fast|as fast as|slower here)", page.find("#result").text)
        assert "Same text, to the character: 60 tokens." in page.find("#result").text
        page.check()
        page = Page(browser, server, "?go=1&max=8&plan=")  # as the server was started: plainly
        assert page.done() == "same" and page.find("#result b").text == "Nothing was drafted."
        assert page.find("#told").text == "Nothing has been drafted yet." and not page.find("#round").is_displayed()
        page.check()


@in_browser
def test_it_is_filled_in_and_started_by_hand_and_can_be_seen_again(
    browser: webdriver.Chrome, toys: Server, root: Path
) -> None:
    page = Page(browser, toys)
    assert page.find("#plan option").text == "as started: beam width 2, draft depth 2"
    page.find("#chat").click()
    page.fill(prompt="hello", max=40, temp=0.9, seed=4)
    page.find("#start").click()
    assert page.done() == "same"
    expected = Reference(root).text("hello", max_tokens=40, temp=0.9, seed=4)
    assert page.text("plain") == page.text("drafted") == expected
    # In one script: it may be over before the next one.
    begun = page.run(
        "(document.getElementById('replay').click(), [document.getElementById('stop').disabled, "
        "document.querySelectorAll('#plain pre span:not(.asked)').length])"
    )
    assert begun == [False, 0]
    until(lambda: page.find("#replay").is_enabled())
    assert page.text("plain") == page.text("drafted") == expected
    page.check()


@in_browser
def test_a_message_goes_through_the_chat_template(browser: webdriver.Chrome, toys: Server, root: Path) -> None:
    page = Page(browser, toys, "?go=1&prompt=hello&max=20&temp=0")
    assert page.done() == "same"
    assert page.text("drafted") == Reference(root).text("UhellozA", max_tokens=20)
    assert page.run("document.querySelector('#plain pre .asked').textContent") == ""
    page.check()


@in_browser
def test_stop_ends_both_sides_here_and_on_the_server(
    browser: webdriver.Chrome, toys: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = type(toys.responder)._told

    def slowly(job: Any, args: Any, response: Any) -> Any:
        time.sleep(0.05)  # so that the answer, which may be short, does not end before
        return told(toys.responder, job, args, response)

    monkeypatch.setattr(toys.responder, "_told", slowly)
    monkeypatch.setattr(answers, "TURN", 0.05)
    monkeypatch.setattr(answers, "LEAST", 1)
    page = Page(browser, toys)
    page.fill(prompt="hello", max=100000, temp=0)
    left = toys.responder.meters.left._value.get()
    page.find("#start").click()
    until(lambda: len(page.text("plain")) > 1 and len(page.text("drafted")) > 1)
    assert not page.find("#start").is_enabled()
    page.find("#stop").click()
    assert page.done() == "stopped"
    assert page.find("#result").text == "Stopped." and page.find("#start").is_enabled()
    until(lambda: toys.responder.running == 0)
    assert toys.responder.meters.left._value.get() == left + 2
    page.check()


@in_browser
def test_what_looks_like_html_is_text(browser: webdriver.Chrome, toys: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    told = type(toys.responder)._told

    def nasty(job: Any, args: Any, response: Any) -> Any:
        response.text = NASTY  # as if the model had said it
        return told(toys.responder, job, args, response)

    monkeypatch.setattr(toys.responder, "_told", nasty)
    page = Page(browser, toys, f"?prompt={quote(NASTY)}&max=2")
    page.find("#chat").click()
    assert page.run("document.getElementById('prompt').value") == NASTY
    title = page.run("document.title")
    page.find("#start").click()
    assert page.done() == "same"
    assert page.text("plain").startswith(NASTY) and page.run("document.querySelector('.asked').textContent") == NASTY
    assert page.run("document.title") == title
    assert page.run("document.querySelectorAll('pre img, pre script, main img, main script').length") == 0
    page.check()


@in_browser
def test_what_the_form_does_not_take_is_not_sent(browser: webdriver.Chrome, toys: Server) -> None:
    page = Page(browser, toys)
    for fields in ({"max": 0}, {"temp": -1}, {"seed": 1.5}, {"prompt": ""}):
        page.browser.refresh()
        page.fill(**{"prompt": "hello", **fields})
        page.find("#start").click()
        assert page.find("#result b").text == "Ready." and page.find("#start").is_enabled()
    assert not [url for url in page.asked() if "completions" in url]


@in_browser
def test_errors_are_one_line(browser: webdriver.Chrome, root: Path) -> None:
    with racing(*with_toys(root), *BEAM, "--max-completion-tokens", "5", "--api-key", "secret") as server:
        page = Page(browser, server, "?go=1&prompt=hello&max=5")
        assert page.done() == "error" and "expected the header Authorization" in page.find("#result").text
        page.find("#key").send_keys("secret")
        page.find("#start").click()
        until(lambda: page.run("document.body.dataset.done") == "same")
        page.fill(max=6)
        page.find("#start").click()
        until(lambda: page.run("document.body.dataset.done") == "error")
        assert page.find("#result").text == "max_tokens must be at most 5, got 6"
        server.responder.drain()
        page.fill(max=5)
        page.find("#start").click()
        until(lambda: "busy" in page.find("#result").text)
        assert re.fullmatch(r"The server is busy \(.*\)\. Try again in \d+ s\.", page.find("#result").text)
    page.find("#start").click()
    until(lambda: page.find("#result").text == "There is no connection to the server.")
    assert page.run("document.body.dataset.done") == "error" and page.find("#start").is_enabled()
