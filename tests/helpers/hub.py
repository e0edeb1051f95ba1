"""A small Hugging Face hub on this machine, for the real client."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, urlsplit

from huggingface_hub import close_session, constants
from huggingface_hub.utils import _http, disable_progress_bars, enable_progress_bars

PAGES = re.compile(
    r"/(?:api/models/)?(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?P<what>revision|tree|resolve)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?"
)
"""The paths of the API and of files."""


class Hub(ThreadingHTTPServer):
    """Serves repositories, which are folders `owner/name` below a root, or `owner/name@revision`.

    Weights are redirected to another host, as the hub redirects large files.

    Attributes:
        gated: repositories whose files need an accepted licence.
        moved: old names of repositories -> new names.
        cut: (repository, file) -> after how many bytes its next downloads break off.
        failure: "silent" to answer nothing, "error" or "page" to answer everything with a server
            error or a web page; None to work.
        requests: method and path of each request.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.gated = set()
        self.moved = {}
        self.cut = {}
        self.failure = None
        self.is_closed = threading.Event()
        self.requests = []

    @property
    def url(self) -> str:
        """The value for `HF_ENDPOINT`."""
        return f"http://localhost:{self.server_port}"

    @property
    def storage_url(self) -> str:
        """The host of large files."""
        return f"http://127.0.0.1:{self.server_port}/storage"

    def list_downloads(self) -> list[str]:
        """`owner/name/file` of every file whose content was sent."""
        found = []
        for request in self.requests:
            if re.match("GET /(storage|.*/resolve)/", request):
                found.append(re.sub("GET /(storage/)?|/resolve/[^/]+", "", request))
        return found

    def get_folder(self, repo: str, revision: str) -> Path | None:
        """The folder of a branch or commit of a repository; None without one."""
        for folder in self.root.glob(f"{repo}*"):
            names = (folder.name.partition("@")[2] or "main", get_commit(folder))
            if revision in names and folder.is_dir():
                return folder
        return None

    def handle_error(self, request, client_address):
        """Says nothing when a client closes its connection."""


def list_files(folder: Path) -> dict[str, bytes]:
    """Name -> content of the files in a folder and below."""
    paths = sorted(each for each in folder.rglob("*") if each.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def get_commit(folder: Path) -> str:
    """A hash of all names and contents."""
    return hashlib.sha1(repr(list_files(folder)).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args):
        """Prints nothing."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server
        url = urlsplit(self.path)
        hub.requests.append(f"{self.command} {url.path}")
        if hub.failure is not None:
            self.fail(hub.failure)
            return
        if url.path.startswith("/storage/"):
            self.send_file(*url.path.removeprefix("/storage/").split("/", 1))
            return
        found = PAGES.fullmatch(url.path)
        repo = found["repo"] if found else ""
        if repo in hub.moved:
            self.reply(307, Location=self.path.replace(repo, hub.moved[repo]))
        elif found is None or not list(hub.root.glob(f"{repo}*")):
            self.refuse(401, "RepoNotFound", "Invalid username or password.")
        elif (folder := hub.get_folder(repo, found["revision"] or "main")) is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {found['revision']}")
        elif found["file"]:
            self.resolve(repo, folder, found["file"])
        elif found["what"] == "tree":
            self.send_json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                    for name, content in list_files(folder).items()
                ]
            )
        else:
            self.describe(repo, folder, with_sizes="blobs" in parse_qs(url.query))

    def fail(self, failure: str):
        if failure == "silent":
            self.server.is_closed.wait()
        else:
            self.reply(200 if failure == "page" else 503, b"<html></html>")

    def describe(self, repo: str, folder: Path, *, with_sizes: bool):
        """Sends what the API says about a repository."""
        siblings = []
        for name, content in list_files(folder).items():
            siblings.append({"rfilename": name} | ({"size": len(content)} if with_sizes else {}))
        about = {"id": repo, "sha": get_commit(folder), "siblings": siblings}
        self.send_json(about | {"gated": "manual" if repo in self.server.gated else False})

    def resolve(self, repo: str, folder: Path, file: str):
        """Sends a small file, or the address of a large one."""
        content = list_files(folder).get(file)
        etag = f'"{hashlib.sha256(content or b"").hexdigest()}"'
        common = {"ETag": etag, "X-Repo-Commit": get_commit(folder)}
        if repo in self.server.gated:
            self.refuse(401, "GatedRepo", f"Access to model {repo} is restricted.")
        elif content is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
        elif file.endswith(".safetensors"):
            linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
            place = f"{self.server.storage_url}/{folder.relative_to(self.server.root)}/{file}"
            self.reply(302, Location=place, **common, **linked)
        else:
            self.reply(200, content, **common)

    def send_file(self, owner: str, path: str):
        """Sends a large file, from the byte that is asked for; may break off."""
        name, file = path.split("/", 1)
        content = (self.server.root / owner / name / file).read_bytes()
        first = int(re.sub(r"\D*(\d*).*", r"\1", self.headers.get("Range", "")) or 0)
        cuts = self.server.cut.get((f"{owner}/{name}", file))
        n_bytes = cuts.pop(0) if cuts else None
        span = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
        self.reply(206 if first else 200, content[first:], n_bytes, **(span if first else {}))

    def send_json(self, value):
        self.reply(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def refuse(self, status: int, code: str, message: str):
        self.reply(status, **{"X-Error-Code": code, "X-Error-Message": message})

    def reply(self, status: int, body: bytes = b"", n_bytes: int | None = None, **headers: str):
        """Sends an answer.

        Args:
            n_bytes: after how many bytes of the body the connection is closed.
        """
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if n_bytes is None else body[:n_bytes])
        if n_bytes is not None:
            self.close_connection = True


@contextmanager
def start_hub(root: Path, cache: Path) -> Iterator[Hub]:
    """A hub that the client in this process uses, with an empty cache, until the context ends."""
    hub = Hub(root)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    origins = _http._HUB_ORIGINS | {_http._url_origin(hub.url)}
    close_session()
    disable_progress_bars()
    try:
        with (
            mock.patch.object(constants, "ENDPOINT", hub.url),
            mock.patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template),
            mock.patch.object(constants, "HF_HUB_CACHE", str(cache)),
            mock.patch.object(constants, "HF_HUB_OFFLINE", False),
            mock.patch.object(_http, "_HUB_ORIGINS", origins),
        ):
            yield hub
    finally:
        enable_progress_bars()
        close_session()
        hub.is_closed.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
