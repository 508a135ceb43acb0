"""The simulator against the runtime: recorded runs replayed at costs that were measured beside them."""
