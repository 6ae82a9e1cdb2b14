"""What a check of the decoder can say."""

from collections.abc import Sequence

LOSSLESS, NOT_LOSSLESS, INCONCLUSIVE = "lossless", "not lossless", "inconclusive"


def overall(verdicts: Sequence[str]) -> str:
    """One refutation refutes; otherwise one doubt leaves it open, as does having checked nothing.

    Args:
        verdicts: of the single checks.
    """
    worst = (verdict for verdict in (NOT_LOSSLESS, INCONCLUSIVE) if verdict in verdicts)
    return next(worst, LOSSLESS if verdicts else INCONCLUSIVE)
