"""Selectors: which drafted tokens are worth verifying. Pure: no model, no store; shared with the simulator.

A choice looks at draft probabilities and at predicted expert sets, never at which token was drawn from the draft's
distribution, nor at what the target draws: otherwise sampled output would not follow the target's distribution.
"""
