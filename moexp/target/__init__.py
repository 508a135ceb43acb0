"""Targets: real checkpoints, their geometry, where their experts lie, and how one is loaded without its experts."""
