"""Command-line interface: argument parsing and output."""
