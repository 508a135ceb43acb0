"""Verifiers: which drafted tokens stand. Pure functions of logits; output follows the target's distribution exactly."""
