"""Which drafted tokens stand."""
