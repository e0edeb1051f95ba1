"""Conversations: the session, its chat template, its memory, and saving it."""

from .session import Answer, Session

__all__ = ["Answer", "Session"]
