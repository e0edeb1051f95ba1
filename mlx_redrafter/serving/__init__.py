"""An OpenAI-compatible server: mlx-lm's own, whose answers this package's engine decodes."""
