"""Training of EcoSpec's expert predictor, and its baselines."""
