"""The target: all that knows mlx-lm's model and cache classes."""
