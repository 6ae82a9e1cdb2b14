"""Is speculative output the target's own? Token for token, by its law, and by an audit."""
