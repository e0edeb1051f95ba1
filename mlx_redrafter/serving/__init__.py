"""HTTP server for the OpenAI and Anthropic APIs: speculative decoding for few requests, batches for
many.
"""
