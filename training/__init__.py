"""training: how to train a draft head. Data, features, losses, objectives, the loop."""
