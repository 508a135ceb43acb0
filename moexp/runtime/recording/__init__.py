"""Which experts every pass asked for, kept for the simulator."""
