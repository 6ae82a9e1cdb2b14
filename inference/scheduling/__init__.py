"""How much to draft: what rounds cost here, how often drafts are accepted, and what follows."""
