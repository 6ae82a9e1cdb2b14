"""Tree shapes without tokens, and fitting the best one to a head and a cost table."""
