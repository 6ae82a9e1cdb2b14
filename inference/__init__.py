"""How to decode with a draft head."""
