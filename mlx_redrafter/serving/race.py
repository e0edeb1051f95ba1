"""The server with a page that shows plain and drafted decoding side by side."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..decoding.options import PLAN_OPTIONS
from ..demo import demo_prompts

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from .formats.completion import Service

PAGE = Path(__file__).with_name("race.html").read_text(encoding="utf-8")


def make_race_app(service: Service) -> Starlette:
    """The server's application with the page.

    The page needs no key; its requests do if there is one.
    """
    from starlette.responses import HTMLResponse

    from .http.app import make_app

    options = service.args.options
    service.shows_drafts = True
    shape = [
        f"{name.replace('_', ' ')} {getattr(options, name)}"
        for name in PLAN_OPTIONS[1:]
        if getattr(options, name)
    ]
    is_demo = service.args.models.model is None
    about = {
        "model": service.model_name,
        "demo": is_demo,
        "example": demo_prompts("edits")[0] if is_demo else None,
        "drafter": service.drafter_name,
        "chat": bool(service.tokenizer.has_chat_template),
        "plan": ", ".join(shape) or f"plan {options.plan}",
    }
    page = PAGE.replace("@about@", html.escape(json.dumps(about)), 1)

    async def show(request: HttpRequest) -> Response:
        return HTMLResponse(page, headers={"Cache-Control": "no-store"})

    return make_app(service, show)
