"""Building the embedded target: repair by distillation, and its quality."""
