"""One round of speculative decoding, and the loop around it."""
