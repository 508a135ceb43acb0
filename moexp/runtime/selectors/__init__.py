"""Which drafted tokens are worth verifying."""
