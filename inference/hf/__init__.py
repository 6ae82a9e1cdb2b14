"""Drafts for users of transformers: `model.generate(..., custom_generate=speculative, ...)`."""

from inference.hf.method import SpeculativeOutput, speculative

__all__ = ["SpeculativeOutput", "speculative"]
