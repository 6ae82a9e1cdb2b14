"""The README.md of a head's folder: which target it is for, and what "lossless" means there."""

from pathlib import Path

from drafters.base import Drafter

CARD = "README.md"


def write_card(drafter: Drafter, folder: Path) -> None:
    """Write the card of a head into its folder."""
    (folder / CARD).write_text(card(drafter), encoding="utf-8")


def card(drafter: Drafter) -> str:
    """Its text."""
    config = drafter.config
    prints = config.target_fingerprint or {}
    lines = [
        f"# {drafter.family} draft head for {config.target_name}",
        "",
        "A draft head of Headway for speculative decoding, in its native format.",
        "",
        f"- target: {config.target_name}, weights {prints.get('weights', 'not recorded')}",
        f"- parameters: {drafter.num_parameters_trained():,}",
    ]
    reference = config.reference
    if not reference:
        lines += ["", "Decoding with it is lossless with respect to this target."]
        return "\n".join(lines) + "\n"
    lines += [
        f"- original target: {reference['base']}, weights {reference['base_weights']}",
        f"- adapter merged into it: {reference['adapter']}",
        "",
        "The target was trained together with this head. Decoding with it is lossless with respect "
        f"to this merged target, not to {reference['base']}: the merged target's own answers may "
        "differ from the original's, and its quality is to be measured anew.",
    ]
    return "\n".join(lines) + "\n"
