"""What llama.cpp's programs write, read; and how its rounds are held against ours."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from inference.generate import plain_generate
from inference.measuring.evaluation import Prompt
from interop import llama_cpp
from interop.llama_cpp import table
from interop.llama_cpp_compare import (
    Case,
    Comparison,
    count,
    count_drafts,
    count_server,
    spelled,
    without_end,
)
from interop.llama_cpp_runs import (
    PLAIN,
    SIMPLE,
    Continuation,
    Draft,
    LlamaCpp,
    read_completion,
    read_simple,
)
from interop.results import FAILED, LOADED, PASSED, REFUSED, SERVED, SKIPPED
from interop.setting import CannotRun, Setting
from interop.speculators_check import random_head
from tests.tiny import save_tiny_target, tiny_target

PROMPT = "<|im_start|>user\nWhich sea?<|im_end|>\n<|im_start|>assistant\nThe"

# Recorded with llama.cpp of llama-cpp-python 0.3.36 and an EAGLE-3 head of SmolLM2-135M; shortened.
TEXT = f"\n\n{PROMPT} Baltic Sea is the only\n\n\n\n"
LOG = """\
0.09.378.664 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:    395 (   0.273) 'os'
0.09.378.664 D spec        draft:  - seq_id 0, draft candidate   1, pos   0:    264 (   0.115) 'en'
0.09.381.512 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:    305 (   0.242) 'et'
0.09.462.650 D spec common_specu: called impl draft-eagle3, hist size = 37, call_count = 1, gen = 2
0.10.346.571 D accepted 0/2 draft tokens, the last target token is: (25175)
0.10.346.590 D clear kv cache from any extra tokens, n_past = 38
0.11.269.735 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:   6427 (   0.3) ' Sea'
0.11.297.750 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:    198 (   0.394) '
'
0.12.210.610 D accepted 1/2 draft tokens, the last target token is: (314)
0.48.202.671 I encoded   38 tokens in    2.390 seconds, speed:   15.900 t/s
0.48.202.680 I decoded    3 tokens in   38.001 seconds, speed:    0.079 t/s
0.48.202.708 I n_draft   = 2
0.48.202.720 I n_predict = 3
0.48.202.732 I n_drafted = 4
0.48.202.743 I n_accept  = 1
0.48.202.755 I accept    = 25.000%
"""


def test_simple_is_read() -> None:
    """Text, counts and rounds; the prompt is cut off, and the blank lines around the text."""
    found = read_simple(TEXT.encode(), LOG, PROMPT)
    assert found.text == b" Baltic Sea is the only"
    assert (found.new_tokens, found.drafted, found.accepted, found.prompt_tokens) == (3, 4, 1, 38)
    assert found.rounds == [0, 1]
    assert found.verified == [2, 2]
    assert found.drafts == [[395, 305], [6427, 198]]


@pytest.mark.parametrize(
    ("stdout", "log"),
    [
        (TEXT.replace("sea", "lake"), LOG),
        (TEXT.strip(), LOG),
        (TEXT, LOG.replace("n_accept", "accepted")),
        (TEXT, LOG.replace("encoded", "read")),
    ],
)
def test_unknown_output_is_refused(stdout: str, log: str) -> None:
    """Another prompt, or a version that writes something else."""
    with pytest.raises(CannotRun, match="unknown form"):
        read_simple(stdout.encode(), log, PROMPT)


def test_completion_is_read() -> None:
    """A server without a draft model leaves out the counts of drafts."""
    answer: dict[str, Any] = {
        "content": " Baltic",
        "tokens": [25175, 2],
        "tokens_evaluated": 38,
        "timings": {"predicted_n": 2, "draft_n": 5, "draft_n_accepted": 1},
    }
    found = read_completion(answer)
    assert (found.tokens, found.new_tokens, found.prompt_tokens) == ([25175, 2], 2, 38)
    assert (found.drafted, found.accepted) == (5, 1)
    del answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]
    assert read_completion(answer).drafted == 0


def stand_in(folder: Path, name: str, body: str) -> LlamaCpp:
    """A build folder whose program is a script."""
    path = folder / "bin" / name
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{body}", encoding="utf-8")
    path.chmod(0o755)
    return LlamaCpp(folder, folder)


def test_simple_is_run(tmp_path: Path) -> None:
    """With both models, float32 caches, no threshold, and the prompt as it is."""
    body = (
        "import json, sys\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
        f"sys.stdout.write({TEXT!r})\nsys.stderr.write({LOG!r})\n"
    )
    llama = stand_in(tmp_path, SIMPLE, body)
    draft = Draft(Path("head.gguf"), "draft-eagle3", 2)
    assert llama.simple(Path("target.gguf"), draft, PROMPT, 3).accepted == 1
    seen = json.loads((tmp_path / "seen").read_text())
    given = dict(zip(seen[::2], seen[1::2], strict=True))
    assert Path(given["--binary-file"]).read_text(encoding="utf-8") == PROMPT
    assert given["--spec-type"] == "draft-eagle3"
    assert given["--spec-draft-n-max"] == "2"
    assert given["--spec-draft-p-min"] == given["--temp"] == "0"
    caches = ("--cache-type-k", "--cache-type-v", "--spec-draft-type-k", "--spec-draft-type-v")
    assert {given[name] for name in caches} == {"f32"}


@pytest.mark.parametrize("end", ["", " [end of text]\n"])
def test_plain_text_is_read(tmp_path: Path, end: str) -> None:
    """Without the blank lines behind it, and what says that it ended."""
    llama = stand_in(tmp_path, PLAIN, f"print({'It is.' + end!r} + chr(10))\n")
    assert llama.plain(Path("target.gguf"), PROMPT, 3) == b"It is."


def test_a_program_that_fails_or_is_missing(tmp_path: Path) -> None:
    """Its last words are the reason."""
    llama = stand_in(tmp_path, SIMPLE, "import sys\nsys.exit('no such model')\n")
    draft = Draft(Path("head.gguf"), "draft-eagle3", 2)
    with pytest.raises(CannotRun, match="ended with 1: no such model"):
        llama.simple(Path("target.gguf"), draft, PROMPT, 3)
    with pytest.raises(CannotRun, match="build target llama-server"):
        llama.program("llama-server")


def case(rounds: list[int], drafts: list[list[int]]) -> Case:
    """Of a prompt that does not matter."""
    return Case(Prompt([1], id="p"), [], rounds, drafts)


def test_rounds_are_compared_while_they_begin_together() -> None:
    """A round that accepts something else ends the comparison; cut drafts count as far as they go.

    llama.cpp logs all it drafted where it verifies less, at the end of a text.
    """
    result = Comparison("eagle3", "sglang", 2)
    ours = case([0, 1, 0], [[5, 6], [7, 8], [9]])
    count_drafts(result, ours, Continuation(rounds=[0, 1, 0], drafts=[[5, 6], [7, 8], [9, 4]]))
    assert (result.compared, result.equal_drafts, result.differences) == (3, 3, {})
    count_drafts(result, ours, Continuation(rounds=[0, 2, 0], drafts=[[5, 6], [7, 1], [3, 4]]))
    assert (result.compared, result.equal_drafts) == (5, 4)
    assert result.differences["drafts"] == "prompt p: round 1 drafts [7, 1], ours [7, 8]"


def test_passed_needs_texts_and_acceptance() -> None:
    """Within a tenth of ours, and every text llama.cpp's own."""
    result = Comparison("eagle3", "sglang", 5, prompts=2, equal_plain=2)
    assert not result.passed
    for sums, accepted in ((result.ours, 50), (result.server, 59), (result.simple, 41)):
        sums.accepted, sums.rounds = accepted, 100
    assert result.passed
    assert "0.410 by llama-speculative-simple, 0.590 by llama-server" in result.summary()
    assert "| eagle3 | sglang | 5 | 2 | 0.410 | 0.590 | 0.500 |" in table([result])
    result.simple.accepted = 39
    assert not result.passed
    result.simple.accepted, result.equal_plain = 50, 1
    assert not result.passed


def test_texts_of_prompts() -> None:
    """Only a text that has the same ids again stands for them; the end is no part of a text."""
    target = tiny_target(layers=1)
    ids = target.tokenizer.encode("ab c")
    assert spelled(target, Case(Prompt(ids[:-1]), ids[-1:], [], [])) == "ab c"
    assert spelled(target, Case(Prompt(ids[:-1]), [target.vocab_size - 1], [], [])) is None
    end = min(target.eos_token_ids)
    assert without_end(target, [5, end]) == [5]
    assert without_end(target, [end, 5]) == [end, 5]


def test_a_text_that_differs_is_explained() -> None:
    """By place; texts are compared as far as both go."""
    target = tiny_target(layers=1)
    tokens = target.tokenizer.encode("sea of it")
    ours = Case(Prompt([5, 6], id="p"), tokens, [2, 0, 1], [[3, 4], [5, 6], [7]])
    result = Comparison("eagle3", "sglang", 2)
    served = Continuation(
        text=b"ea of it all",
        rounds=[2, 0, 1, 2],
        verified=[2, 2, 1, 2],
        drafts=[[3, 4], [5, 6], [7, 8], [9, 9]],
        prompt_tokens=3,
    )
    count(result, target, ours, served, b"ea of it a")
    assert (result.simple.accepted, result.simple.rounds) == (2, 2)  # the first two are whole
    assert (result.ours.accepted, result.ours.rounds, result.equal_drafts) == (2, 2, 3)
    assert (result.prompts, result.equal_plain, result.equal_ours) == (1, 1, 1)
    count(result, target, ours, served, b"ea or it")
    assert (result.prompts, result.equal_plain, result.equal_ours) == (2, 1, 2)
    assert "prompt p: differs from its plain text at byte 4: 'f it all', 'r it'" in result.summary()
    with pytest.raises(CannotRun, match="prompt p: 3 tokens by its tokenizer, 2 by ours"):
        count(result, target, Case(Prompt([5], id="p"), tokens, [], []), served, b"")


def test_tokens_of_the_server_are_compared() -> None:
    """Rounds follow from what was accepted; a difference names its place and the logits' gap."""
    target = tiny_target(layers=1)
    prompt = target.tokenizer.encode("ab c")
    tokens = plain_generate(target, [prompt], max_new_tokens=6).sequences[0]
    other = [*tokens[:3], (tokens[3] + 1) % target.vocab_size, *tokens[4:]]
    ours = Case(Prompt(prompt, id="p"), tokens, [2, 1], [[], []])
    result = Comparison("eagle3", "sglang", 2)
    count_server(result, target, ours, Continuation(tokens=tokens, new_tokens=6, accepted=3))
    assert (result.server.rounds, result.server.accepted, result.equal_server) == (2, 3, 1)
    count_server(result, target, ours, Continuation(tokens=other, new_tokens=6, accepted=3))
    assert result.equal_server == 1
    assert "prompt p: other new token 3 (logits" in result.summary()


def test_heads_are_refused_compared_or_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused is known before anything is built; one that its programs do not take leaves
    the others their turn.
    """
    place = save_tiny_target(tmp_path / "target", torch.float32)
    target = TargetModel.load(str(place))
    options = {"gated": {"markov_type": "gated"}, "bad": {}, "good": {}}
    for label, more in options.items():
        head = random_head("dspark", target, num_layers=1, markov_rank=16, **more)
        head.save_pretrained(tmp_path / label)

    def compared(
        llama: Any, target: Path, base: Path, exports: Any, *rest: Any, **more: Any
    ) -> Any:
        for label, dialect in exports:
            if label == "bad":
                raise CannotRun("the converter refuses")
            yield Comparison(label, dialect, 5)

    monkeypatch.setattr(llama_cpp, "compare_heads", compared)
    monkeypatch.setattr(llama_cpp, "fetched", lambda setting: LlamaCpp(tmp_path, tmp_path))
    monkeypatch.setattr(LlamaCpp, "convert", lambda *rest: tmp_path / "base.gguf")
    setting = Setting(place, {label: tmp_path / label for label in options}, tmp_path)
    entries = list(llama_cpp.check(setting))
    found = {(entry.dialect, entry.head, entry.check): entry.status for entry in entries}
    assert found["dspark", "gated", LOADED] == REFUSED
    assert found["dspark", "bad", LOADED] == FAILED
    assert ("dspark", "bad", SERVED) not in found
    assert found["dspark", "good", LOADED] == PASSED
    assert found["dspark", "good", SERVED] == FAILED  # nothing was compared
    assert found["sglang", "", LOADED] == SKIPPED

    def absent(setting: Setting) -> LlamaCpp:
        raise CannotRun("no cmake")

    monkeypatch.setattr(llama_cpp, "fetched", absent)
    before = llama_cpp.check(Setting(place, {"gated": tmp_path / "gated"}, tmp_path))
    assert REFUSED in {entry.status for entry in before}
    with pytest.raises(CannotRun, match="no cmake"):
        list(llama_cpp.check(setting))
