"""From a name or a folder to a model and its drafter."""
