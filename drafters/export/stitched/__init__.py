"""MTP modules in a target's own checkpoint: forms, reading, writing."""
