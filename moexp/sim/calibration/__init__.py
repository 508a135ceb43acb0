"""Measuring this machine, as a platform to simulate."""
