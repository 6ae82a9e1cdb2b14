"""The feature store: the target's hidden states on disk, written once, read by many runs."""

from training.store.manifest import Manifest, StoreError
from training.store.reader import FeatureStore
from training.store.stored import StoredFeatures

__all__ = ["FeatureStore", "Manifest", "StoreError", "StoredFeatures"]
