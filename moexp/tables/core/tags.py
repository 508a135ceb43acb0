"""How a figure came to be: every one in a table carries one of these."""

MEASURED, EMULATED, SIMULATED, PAPER = "measured", "emulated", "simulated", "paper"
