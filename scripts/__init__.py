"""One-shot tools, run from the repository root as `python -m scripts.<name>`."""
