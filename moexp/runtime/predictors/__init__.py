"""Which experts verifying a token would touch."""
