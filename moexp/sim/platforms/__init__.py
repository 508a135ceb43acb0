"""Platforms to simulate: constants with their sources, shapes of models, and the machine that they make."""
