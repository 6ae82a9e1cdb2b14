"""What the acceptance rules of `inference.verify` are made of, and the lossy one beside them."""
