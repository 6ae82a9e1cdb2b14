"""recipes: which run. The one training main, the parity check, and the YAML files it reads."""
