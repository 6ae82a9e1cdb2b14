"""One file per dialect: its tensors, its config keys, what it cannot hold."""
