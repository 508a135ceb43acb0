"""Records the experts of every pass, for the simulator."""
