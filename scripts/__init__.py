"""One-shot tools, run from the repository root as `python -m scripts.<name>`."""

import recipes as recipes  # quiet Ctrl-C, no foreign packages
