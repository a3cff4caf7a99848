"""A rank of NCCL is lost, fails alone or stays away: the others end by themselves, with one Error that names it.

No collective fails here: `wait()` returns, and the host blocks at its next read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cards.failures import ALONE, CALLS, KILL, MEMORY, RAISE, STOP, TIMEOUT, End, ended
from cards.pretend import REAL

from autotp.distributed.peers.never_ending import GRACE, LAST, STILL

pytestmark = [pytest.mark.system, pytest.mark.skipif(REAL, reason="the machine's cards do not fail when asked to")]
AT_ONCE = GRACE + STILL + LAST + 4
"""Seconds after a loss that is seen at once; four are for a busy machine."""
IN_TIME = TIMEOUT.total_seconds() + 15
SAID = {
    KILL: "global rank 1 is lost, ended or stopped",
    STOP: "global rank 1 is lost, ended or stopped",
    RAISE: "global rank 1 raised ValueError: no rows",
    MEMORY: "global rank 1 raised OutOfMemoryError: CUDA out of memory",
    ALONE: "global rank 1 is alive, but did not come to this call",
}
USUAL = [*(("step", how) for how in SAID), ("from_pretrained", KILL), ("generate", KILL), ("train", MEMORY)]
EVERY = [(name, how) for name in CALLS for how in SAID]


def cases() -> list[object]:
    return [pytest.param(*case, marks=[] if case in USUAL else pytest.mark.rare) for case in EVERY]


def errors_of(end: End) -> list[str]:
    """The first lines of the Errors that a process printed, without the brackets around global ranks."""
    return [line.replace(")", "") for line in end.text.splitlines() if "autotp.Error" in line]


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if "from_pretrained" in request.node.name:
        from hugging_face import built

        built("gpt2").save_pretrained(tmp_path / "hf")
    return tmp_path


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "how"), cases())
def test_the_others_end_and_name_the_rank(name: str, how: str, folder: Path) -> None:
    first, last = ended(name, how, folder)
    assert [SAID[how] in line for line in errors_of(first)] == [True], first.text
    assert first.status == 1 and SAID[how] in first.error_file.replace(")", "")
    assert first.seconds < (IN_TIME if how in (STOP, ALONE) else AT_ONCE)
    if how == ALONE:
        assert ["global rank 0" in line for line in errors_of(last)] == [True], last.text
    if how in (RAISE, MEMORY, ALONE):
        assert last.status == 1 and (how == ALONE or not errors_of(last)), last.text


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [KILL, pytest.param(STOP, marks=pytest.mark.rare)])
def test_ranks_of_srun_end_by_themselves(how: str, tmp_path: Path) -> None:
    """The first rank keeps the store in which they met. It says its error, and once more in its last line."""
    first, _ = ended("step", how, tmp_path, by="srun")
    assert [SAID[how] in line for line in errors_of(first)] == [True, True], first.text
    assert first.status == 1 and first.seconds < (IN_TIME if how == STOP else AT_ONCE)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("handling", ["3", pytest.param("0", marks=pytest.mark.rare)])
def test_torchs_watchdog_may_be_faster(handling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If NCCL itself sees that a peer is lost, the watchdog ends the process with NCCL's words, unless it is off."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)
    first, _ = ended("step", KILL, tmp_path, silently=False)
    if handling == "3":
        assert first.status == -6 and "Watchdog caught" in first.text
    else:
        assert [SAID[KILL] in line for line in errors_of(first)] == [True], first.text
