"""Expert predictors: which experts verifying a drafted token would touch."""
