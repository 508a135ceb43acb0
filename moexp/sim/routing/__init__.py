"""Routing to simulate: recordings and plain traces, as blocks that are cut to settings."""
