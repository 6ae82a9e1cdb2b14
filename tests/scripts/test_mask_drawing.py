"""Drawn masks, by hand: two documents of three and two tokens, and a padding."""

import pytest
import torch

from scripts.mask_drawing import FAMILY_RULES, View, draw_mask, first_roots

VIEW = View(
    torch.tensor([0, 0, 0, 0, 1, 1, -1]),
    torch.tensor([False, False, True, True, False, True, False]),
    ["a", "b", " c", "\n", "longer than that", "e", "padding"],
    10,
)
TEXT = """
   document  000011-
       a 10  #......
       b 11  ##.....
      _c 12  ###....
       _ 13  ####...
longer_~ 14  ....#..
       e 15  ....##.
 padding 16  ......#
"""


def drawing(text: str) -> list[str]:
    """Lines without the space in front, which depends on the longest name."""
    return [line.strip() for line in text.strip("\n").split("\n")]


def test_causal() -> None:
    assert drawing(draw_mask("hydra", VIEW)) == drawing(TEXT)


def test_training_time_test() -> None:
    found = drawing(draw_mask("eagle3", VIEW, depth=2))
    assert found[0] == "document  000011-"
    assert found[4] == "_ 13  ####...  ......."
    assert found[8:] == [
        "step 1 10  #......  #......",
        "step 1 11  ##.....  .#.....",
        "step 1 12  ###....  ..#....",
        "step 1 13  ####...  ...#...",
        "step 1 14  ....#..  ....#..",
        "step 1 15  ....##.  .....#.",
        "step 1 16  .......  ......#",
    ]
    assert drawing(draw_mask("eagle1", VIEW, depth=1)) == drawing(TEXT)


def test_a_window_counts_from_where_a_step_has_moved() -> None:
    found = drawing(draw_mask("mtp", VIEW, depth=3, window=3))
    assert found[4] == "_ 13  .###...  .......  ......."
    assert found[11] == "step 1 13  ..##...  ...#...  ......."
    assert found[18] == "step 2 13  ...#...  ...#...  ...#..."


def test_blocks_from_the_first_root_of_each_document() -> None:
    """The second document is too short to draft in."""
    assert first_roots(VIEW).tolist() == [1]
    assert drawing(draw_mask("dflash", VIEW, depth=3)) == [
        "document  000011-",
        "root 11 row 0  #......  ###",
        "root 11 row 1  #......  ###",
        "root 11 row 2  #......  ###",
    ]
    assert drawing(draw_mask("jetspec", VIEW, depth=3))[1:] == [
        "root 11 row 0  #......  #..",
        "root 11 row 1  #......  ##.",
        "root 11 row 2  #......  ###",
    ]


def test_rollouts() -> None:
    found = drawing(draw_mask("peagle", VIEW, depth=3))
    assert found[:8] == [line + "  .." if n else line for n, line in enumerate(drawing(TEXT))]
    assert found[8:] == [
        "rollout 11 depth 1  ##.....  #.",
        "rollout 11 depth 2  ##.....  ##",
    ]


def test_nothing_to_draw_is_said() -> None:
    assert "no attention" in draw_mask("medusa", VIEW)
    nothing = View(VIEW.documents, VIEW.supervised & False, VIEW.tokens)
    assert "show other columns" in draw_mask("dspark", nothing)
    assert drawing(draw_mask("peagle", nothing))[1] == "a 0  #......"


@pytest.mark.parametrize("family", FAMILY_RULES)
def test_no_family_is_drawn_across_documents(family: str) -> None:
    lines = drawing(draw_mask(family, VIEW, depth=3))
    for line in lines[1:]:
        name, text = line.split("  ")[:2]
        column = int(name.split()[-1]) if not name.startswith(("root", "rollout")) else 11
        marks = lines[0].split("  ")[1]
        assert all(marks[i] == marks[column - 10] for i, cell in enumerate(text) if cell == "#")
