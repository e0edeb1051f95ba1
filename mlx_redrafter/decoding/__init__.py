"""Options, the recipe of a text, and the functions that generate."""
