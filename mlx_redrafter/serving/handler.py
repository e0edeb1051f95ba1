"""mlx-lm's request handler, which gets only what has been checked, and says more about errors and drafting."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import time
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import Any

from huggingface_hub.errors import CacheNotFound
from mlx_lm.server import APIHandler, CompletionRequest, _image_parts

from ..options import PLAN_OPTIONS
from . import bodies
from .answers import Responder
from .bodies import Refusal
from .drafts import Ledger
from .images import check_urls
from .jobs import DEFAULT, Gone, Job, Unanswered
from .origins import is_loopback, is_own
from .provider import PLAIN

PATHS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/chat/completions": "messages"}
"""Where answers are had, and the field that each needs."""

SILENCE = 60.0
"""Seconds that a client may neither send nor read."""

LINGER = 2.0
"""Seconds for a client to finish sending what is not read, before the connection is closed on it."""


class Handler(APIHandler):
    """One request.

    Attributes:
        job: what becomes of a POST, once its body is read.
    """

    response_generator: Responder
    server: Any
    timeout = SILENCE
    job: Job | None = None
    _status: int | str | None = None

    def parse_request(self) -> bool:
        """Python's; whether what was asked is to be answered, whatever it is."""
        if not super().parse_request():
            return False
        try:
            self.admit()
        except Refusal as refusal:
            self.fail(refusal.status, str(refusal))
            return False
        return True

    def admit(self) -> None:
        """Refuses web pages that are neither this server's nor of --allowed-origins, and who asks by a name that may be
        another machine's: a page can point its own name at this one, and is then of the same origin. With a key it
        could, but has none.

        Raises:
            Refusal: 403.
        """
        allowed = self.response_generator.cli_args.allowed_origins
        for origin in self.headers.get_all("Origin", []):
            if not ("*" in allowed or origin in allowed or is_own(origin, self.headers.get("Host"))):
                raise Refusal(f"pages of the Origin {origin!r:.100} are not among --allowed-origins", 403)
        if self.response_generator.cli_args.api_key is not None:
            return
        for host in self.headers.get_all("Host", []):
            if not is_loopback(host):
                raise Refusal(
                    f"without --api-key the Host must be localhost, 127.0.0.1 or [::1], got {host!r:.100}", 403
                )

    def do_POST(self) -> None:
        """Checks a request, then leaves it to mlx-lm's handler; the server does not end before there is a reply."""
        with self.server.busy():
            try:
                self.authorise()
                if self.path not in PATHS:
                    raise Refusal(f"expected one of {', '.join(PATHS)}", 404)
                self.receive()
                super().do_POST()
            except Refusal as refusal:
                self.fail(refusal.status, str(refusal))
            except Unanswered as unanswered:
                if isinstance(unanswered.error, Gone):
                    self.gone(unanswered.error)
                else:
                    self.fail(unanswered.status, str(unanswered), unanswered.retry_after)
            except (ConnectionError, TimeoutError) as error:
                self.gone(error)

    def do_GET(self) -> None:
        """`/health` is open to all; the rest needs the key, if there is one."""
        try:
            if self.path != "/health":
                self.authorise()
            if self.path == "/metrics":
                self.handle_metrics()
            else:
                super().do_GET()
        except Refusal as refusal:
            self.fail(refusal.status, str(refusal))
        except (ConnectionError, TimeoutError) as error:
            self.gone(error)

    def authorise(self) -> None:
        """Compares the key that the client sends, in a time that tells nothing of it.

        Raises:
            Refusal: 401, it is another one, or none.
        """
        key = self.response_generator.cli_args.api_key
        if key is None:
            return
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        # Headers are read as Latin-1, and compare_digest takes no other strings than ASCII.
        same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), key.encode())
        if scheme.lower() != "bearer" or not same:
            raise Refusal("expected the header Authorization: Bearer KEY with this server's key", 401)

    def receive(self) -> None:
        """Reads the body and puts a checked one in its place.

        Raises:
            Refusal: it is too long, or not what it should be.
        """
        told = self.headers.get("Content-Length")
        if told is None:
            raise Refusal("Content-Length header is required", 411)
        told = told.strip()
        if not told.isascii() or not told.isdigit():
            raise Refusal("Invalid Content-Length header")
        flags = self.response_generator.cli_args
        if len(told) > 18 or int(told) > flags.max_request_bytes:
            raise Refusal(f"the body must have at most {flags.max_request_bytes} bytes", 413)
        self.asked = bodies.read(self.rfile.read(int(told)))
        most = flags.max_completion_tokens
        wanted = self.asked.get("max_completion_tokens", self.asked.get("max_tokens", 0))
        if most is not None and wanted > most:
            raise Refusal(f"max_tokens must be at most {most}, got {wanted}")
        if PATHS[self.path] not in self.asked:
            raise Refusal(f"the request has no {PATHS[self.path]}")
        messages = self.asked.get("messages", [])
        sees = self.response_generator.model_provider.processor is not None
        if not sees and any(_image_parts(messages)):
            raise Refusal("the model that is loaded sees no images")
        check_urls(messages, fetch=flags.allow_image_urls)
        clean = json.dumps(self.asked).encode()
        self.rfile = BytesIO(clean)
        self.headers.replace_header("Content-Length", str(len(clean)))

    def handle_chat_completions(self) -> CompletionRequest:
        """mlx-lm's request as a job.

        Raises:
            Unanswered: an image cannot be fetched.
        """
        try:
            request = super().handle_chat_completions()
        except Exception as error:
            refusal = Refusal(f"an image cannot be fetched: {error}")
            raise Unanswered(refusal, refusal.status) from error
        return self.as_job(request)

    def handle_text_completions(self) -> CompletionRequest:
        """mlx-lm's request as a job."""
        return self.as_job(super().handle_text_completions())

    def as_job(self, request: CompletionRequest) -> Job:
        """With what the engine has to know besides."""
        asked = self.asked
        options = {name: asked[name] for name in PLAN_OPTIONS if name in asked}
        drafter = asked.get("draft_model", DEFAULT)
        if (depth := asked.get("num_draft_tokens")) is not None:
            drafter = drafter if depth else None
            options = options or ({"draft_depth": depth} if depth else {})
        if drafter in (None, PLAIN):
            options = {}
        client = (self.client_address[0], asked.get("user", ""))
        told = asked.get("stream", False) and asked.get("stream_options", {}).get("include_drafts", False)
        self.job = Job(
            **vars(request),
            drafter=drafter,
            options=options,
            client=client,
            sock=self.connection,
            ledger=Ledger() if told else None,
        )
        return self.job

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        """As mlx-lm's; what fails in the middle is said as far as it can be."""
        try:
            super().handle_completion(request, stop_words)
        except (ConnectionError, TimeoutError, Gone) as error:
            self.gone(error)
        except Exception as error:
            status = error.status if isinstance(error, Refusal) else 500
            if not self.stream:
                self._headers_buffer: list[bytes] = []  # of the 200 that was not sent
                self.fail(status, str(error))
                return
            self.wfile.write(f"data: {json.dumps(as_error(status, str(error)))}\n\n".encode())
            self.wfile.flush()

    def validate_model_parameters(self) -> None:
        """mlx-lm's checks.

        Raises:
            Refusal: a field is out of its range.
        """
        try:
            super().validate_model_parameters()
        except ValueError as error:
            raise Refusal(str(error)) from error

    def fail(self, status: int, message: str, retry_after: int = 1) -> None:
        """Sends an error in OpenAI's shape, and waits a moment for a client that is still sending."""
        self.close_connection = True
        told = json.dumps(as_error(status, message)).encode()
        try:
            self._set_completion_headers(status)
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                self.send_header("Retry-After", str(retry_after))
            if status == HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            # Closed with something unread, the connection would be reset, and the client might not see the reply.
            self.connection.settimeout(LINGER)
            until = time.monotonic() + LINGER
            while time.monotonic() < until and self.connection.recv(1 << 16):
                pass
        except (ConnectionError, TimeoutError, OSError) as error:
            self.gone(error)

    def gone(self, error: Exception) -> None:
        """Notes that there is nobody to answer."""
        logging.info(f"A client has gone: {error}")
        self.close_connection = True

    def generate_response(self, *args: Any, **more: Any) -> dict[str, Any]:
        """mlx-lm's packet, with the reason to end that is no "length"; `usage` says what drafting did, and `redrafter`
        what it does, if that is asked for."""
        packet = self.with_usage(super().generate_response(*args, **more))
        choice = packet["choices"][0]
        if choice["finish_reason"] == "length" and self.job is not None and self.job.stopped:
            choice["finish_reason"] = "tool_calls" if self.job.called else "stop"
        if self.job is not None and self.job.ledger is not None:
            packet["redrafter"] = self.job.ledger.take()
        return packet

    def completion_usage_response(self, *args: Any, **more: Any) -> dict[str, Any]:
        """mlx-lm's last chunk; `usage` says what drafting did."""
        return self.with_usage(super().completion_usage_response(*args, **more) | {"object": self.object_type})

    def with_usage(self, packet: dict[str, Any]) -> dict[str, Any]:
        """Rounds, drafted and accepted beside OpenAI's fields."""
        if "usage" in packet and self.job is not None:
            packet["usage"] |= self.job.usage()
        return packet

    def handle_models_request(self) -> None:
        """As mlx-lm's, which fails where nothing was ever downloaded: after its headers, before its body."""
        try:
            super().handle_models_request()
        except CacheNotFound:
            model = self.response_generator.cli_args.model
            data = [{"id": model, "object": "model", "created": self.created}]
            self.wfile.write(json.dumps({"object": "list", "data": data}).encode())

    def handle_health_check(self) -> None:
        """What runs, what waits, which drafters there are; 503 where nothing would be answered."""
        responder = self.response_generator
        well = responder.is_healthy
        status = "unavailable" if not well else "draining" if responder.draining else "ok"
        told = {
            "status": status,
            "model": shown(responder.cli_args.model),
            "drafters": list(responder.model_provider.drafters),
            "running": responder.running,
            "queue": responder.queue.qsize(),
        }
        self._set_completion_headers(200 if status == "ok" else 503)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def handle_metrics(self) -> None:
        """Prometheus's text."""
        meters = self.response_generator.meters
        self.send_response(200)
        self.send_header("Content-Type", meters.content_type)
        self.end_headers()
        self.wfile.write(meters.text())

    def _set_cors_headers(self) -> None:
        """mlx-lm's `*` covers every header but the one with the key, by the Fetch standard."""
        super()._set_cors_headers()
        self.send_header("Access-Control-Allow-Headers", "Authorization")

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Keeps the status: an answer that fails is told another one than the 200 it began with."""
        self._status = code

    def end_headers(self) -> None:
        """Sends the headers; only now the reply counts, and is logged."""
        code, self._status = self._status, None
        if code is not None:
            self.response_generator.meters.replied(getattr(self, "path", ""), int(code))
            super().log_request(code)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Into the log, as everything else; of what a client sends no character moves a cursor or begins a line."""
        said = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in format % args)
        logging.info(f"{self.address_string()} {said}")


def shown(model: str) -> str:
    """A model as it is told to those without a key: of a directory its last name, and not where it is."""
    return Path(model).name if Path(model).is_absolute() else model


def as_error(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}
