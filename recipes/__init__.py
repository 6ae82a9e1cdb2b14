"""recipes: which run. The one training main, the parity check, and the YAML files it reads."""

from recipes.interrupt import quiet_interrupts

quiet_interrupts()
