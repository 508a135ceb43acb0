"""What was measured on targets, draft experts, heads and predictors as they were trained."""
