"""What tables and figures are made of."""
