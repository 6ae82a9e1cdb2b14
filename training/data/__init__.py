"""From rows to packed batches: sources, conversations, masks, packing, order."""
