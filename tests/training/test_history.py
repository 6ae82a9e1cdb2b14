"""Which step was best, and when patience ends."""

from training.history import History
from training.options.run import EvalOptions


def history(*lengths: float, patience: int = 2, min_gain: float = 0.0) -> History:
    found = History(EvalOptions(prompts="p", every=5, patience=patience, min_gain=min_gain))
    for number, length in enumerate(lengths, start=1):
        found.add(5 * number, length)
    return found


def test_the_first_of_equals_is_best() -> None:
    assert history().best_step is None
    assert history(1.0, 2.0, 2.0, 1.5).best_step == 10


def test_patience() -> None:
    assert not history().enough
    assert not history(1.0, 0.9).enough
    assert history(1.0, 0.9, 1.0).enough, "as good is not better"
    assert not history(1.0, 0.9, 1.1, 1.0).enough
    assert not history(3.0, 2.0, 1.0, 0.5, patience=0).enough


def test_small_gains_do_not_count_but_add_up() -> None:
    assert history(1.0, 1.04, 1.08, min_gain=0.1).enough
    assert not history(1.0, 1.06, 1.12, min_gain=0.1).enough, "1.12 is better than 1.0 by 0.12"


def test_read_back_from_lines() -> None:
    found = history()
    found.read([{"step": 5, "train/loss": 1.0}, {"step": 5, "eval/acceptance_length": 1.5}])
    assert found.lengths == {5: 1.5}
    assert found.summary() == {"best_step": 5, "best_acceptance_length": 1.5}
    assert History(EvalOptions()).summary() == {}
