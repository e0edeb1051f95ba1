"""Chat templates, encoding and stop strings."""
