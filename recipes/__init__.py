"""recipes: which run. The one training main, the parity check, and the YAML files it reads."""

from recipes.guard import refuse_foreign_packages
from recipes.interrupt import quiet_interrupts

quiet_interrupts()
refuse_foreign_packages()
