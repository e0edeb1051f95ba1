"""Which plan the next round takes: what rounds cost on this machine, and what they are expected to make."""
