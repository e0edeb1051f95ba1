"""What is timed or proved on this machine, and its store."""
