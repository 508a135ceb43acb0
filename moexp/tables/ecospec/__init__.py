"""EcoSpec's tables and figures."""
