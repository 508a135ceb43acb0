"""Tables and sweeps of simulated runs."""
