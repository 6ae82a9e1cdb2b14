"""One-shot tools, run from the repository root as `python -m scripts.<name>`."""

import recipes as recipes  # its import makes Ctrl-C quiet from here on
