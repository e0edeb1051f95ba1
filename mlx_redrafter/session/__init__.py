"""Conversations with a model: `Session`, chat templates, memory limits, and saving."""

from .session import Answer, Session

__all__ = ["Answer", "Session"]
