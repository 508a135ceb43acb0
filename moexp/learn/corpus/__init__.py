"""Text that a model writes to be trained on."""
