"""Chooses the plan of each round from measured costs and expected acceptance."""
