"""What every training shares: the loop, optimisers, the logit loss, experts that can be trained."""
