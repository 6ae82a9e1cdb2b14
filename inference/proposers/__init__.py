"""Proposers: from the state of a round to a tree of draft tokens."""

from inference.proposers.base import Proposer, Resume, RowState, Session
from inference.proposers.build import build_proposer
from inference.proposers.heads import HeadProposer
from inference.proposers.medusa import MedusaProposer
from inference.proposers.options import TreeOptions
from inference.proposers.sequential import SequentialProposer

__all__ = [
    "HeadProposer",
    "MedusaProposer",
    "Proposer",
    "Resume",
    "RowState",
    "SequentialProposer",
    "Session",
    "TreeOptions",
    "build_proposer",
]
