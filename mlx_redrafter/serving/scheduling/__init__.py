"""Requests as token ids: the queue, who runs, how they are decoded, and prompt caches."""
