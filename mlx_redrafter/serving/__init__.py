"""HTTP server for the OpenAI and Anthropic APIs.

Speculative decoding for few requests, batches for many.
"""
