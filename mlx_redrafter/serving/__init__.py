"""The HTTP server: the APIs of OpenAI and Anthropic over an engine that drafts for one request and batches several."""
