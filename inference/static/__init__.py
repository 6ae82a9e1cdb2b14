"""Everything of a round as tensors of fixed shape: no loops over data, no reads by the host.

What is here can be captured in a CUDA graph and traced whole by ``torch.compile``. The decoder of
``inference.decoding`` and the proposers are the readable twins: one sequence after the other, trees
of any size.
"""
