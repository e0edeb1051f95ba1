"""The place of checkpoint conversion: `mlx_redrafter.convert`, through a symlink. Nothing is converted here yet."""
