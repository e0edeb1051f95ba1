"""The commands: argument parsing and printing."""
