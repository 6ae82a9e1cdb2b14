"""The sections of a run's YAML; `training.config` reads them."""
