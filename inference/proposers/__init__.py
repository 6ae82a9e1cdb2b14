"""Proposers: from the state of a round to a tree of draft tokens."""

from inference.proposers.base import Proposer, Resume, RowState, Session
from inference.proposers.growth import TreeOptions
from inference.proposers.heads import Eagle3Proposer, MedusaProposer, build_proposer

__all__ = [
    "Eagle3Proposer",
    "MedusaProposer",
    "Proposer",
    "Resume",
    "RowState",
    "Session",
    "TreeOptions",
    "build_proposer",
]
