"""The kinds of drafters, one file each."""
