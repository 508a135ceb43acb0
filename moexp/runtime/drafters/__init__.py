"""Which tokens might come next: chains by a draft path, and trees."""
