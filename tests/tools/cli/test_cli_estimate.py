"""`autotp estimate` and `autotp search`: as text and as JSON; the examples of `--help` run; what is refused."""

from __future__ import annotations

import pytest

FACTORY = """
from autotp.models.gpt import GPT, GPTConfig


def make(n_layer=4):
    return GPT(GPTConfig(block_size=128, vocab_size=1024, n_layer=n_layer, n_head=4, n_embd=64))
"""


@pytest.fixture
def factory(tmp_path) -> str:  # type: ignore[no-untyped-def]
    path = tmp_path / "factory.py"
    path.write_text(FACTORY)
    return f"{path}:make"


def test_estimate_prints_the_table(autotp_command, factory: str) -> None:
    done = autotp_command("estimate", factory, "--gpu", "a100-80gb", "--batch", 8, "--tp", 2, "--pp", 2)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("tp=2, pp=2, dp=1, micro_batch=1, 1F1B on 4 x a100-80gb") and "fits: at most" in done.out


def test_estimate_prints_json_with_a_version(autotp_command, factory: str) -> None:
    done = autotp_command("estimate", factory, "--gpu", "h100-80gb", "--batch", 8, "--layers", 2, "--json")
    assert done.json["version"] == 1 and done.json["stages"] == [["h.0", "h.1"]]


def test_estimate_takes_a_budget(autotp_command, factory: str) -> None:
    given = "estimate", factory, "--gpu", "a100-80gb", "--batch", 8
    done = autotp_command(*given, "--memory", "50%")
    assert done.status == 0 and "kept for backward" in done.out and "memory      50%: a call keeps" in done.out
    assert autotp_command(*given, "--memory", 10**9, "--json").json["budgets"][0]["memory"] == 10**9
    data = [autotp_command(*given, *more, "--json").json for more in ((), ("--state-bytes", 2))]
    assert data[1]["memory"][0]["optimizer"] == pytest.approx(data[0]["memory"][0]["optimizer"] / 4)
    told = " ".join(autotp_command("estimate", "--help").out.split())
    assert "--memory BYTES|PERCENT|auto" in told and '"auto" for what the device has for tensors' in told
    wrong = autotp_command(*given, "--memory", "much")
    assert wrong.status == 2 and "memory='much' is no number of bytes" in wrong.err


def test_the_status_says_what_does_not_fit(autotp_command, factory: str) -> None:
    line = "312TF 2TB/s 0.001GB node=8x300GB/s net=25GB/s"
    done = autotp_command("estimate", factory, "--gpu", line, "--batch", 8)
    assert done.status == 1 and "does not fit" in done.out
    assert autotp_command("search", factory, "--gpus", 2, "--gpu", line, "--batch", 8).status == 1


def test_search_prints_the_best_and_why_others_lost(autotp_command, factory: str) -> None:
    done = autotp_command("search", factory, "--gpus", 2, "--gpu", "a100-80gb", "--batch", 8)
    assert done.status == 0 and done.out.startswith("the best of ") and "why it lost" in done.out


WRONG = {
    "gpu": (("--gpu", "a1000"), "gpu='a1000' is not known"),
    "line": (("--gpu", "312TF 2TB/s"), "does not say memory"),
    "batch": (("--gpu", "a100-80gb", "--dp", 3), "3 x 1 does not divide 8"),
    "interleave": (("--gpu", "a100-80gb", "--interleave", 3), 'interleave=3 is for schedule="interleaved"'),
    "room": (("--gpu", "312TF 2TB/s 0.0001GB node=8x300GB/s net=25GB/s"), "no room for its share of one parameter"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_error_with_status_2(autotp_command, factory: str, name: str) -> None:
    given, told = WRONG[name]
    done = autotp_command("estimate", factory, "--batch", 8, *given)
    assert (done.status, done.out) == (2, "") and told in done.err
    done = autotp_command("estimate", factory, "--batch", 8, *given, "--json")
    assert done.status == 2 and done.json["ok"] is False and told in done.json["error"]["problem"]


@pytest.mark.parametrize(
    ("given", "told"),
    [(("--gpus", 0), "gpus=0 is not a whole number"), (("--gpus", 2, "--memory", 2), "memory=2.0 is not a part")],
    ids=["gpus", "memory"],
)
def test_search_refuses_a_wrong_argument(autotp_command, factory: str, given: tuple[object, ...], told: str) -> None:
    done = autotp_command("search", factory, "--gpu", "a100-80gb", "--batch", 8, *given)
    assert (done.status, done.out) == (2, "") and told in done.err
    tiny = "312TF 2TB/s 0.0001GB node=8x300GB/s net=25GB/s"
    done = autotp_command("search", factory, "--gpus", 1, "--gpu", tiny, "--batch", 8)
    assert (done.status, done.out) == (2, "") and "no room for its share" in done.err


def test_estimate_tells_wrong_use_in_one_line(autotp_command, factory: str) -> None:
    assert autotp_command("estimate", factory, "--batch", 8).status == 2
    assert autotp_command("estimate", "no.such:thing", "--gpu", "a100-80gb", "--batch", 8).status == 2
    done = autotp_command("estimate", factory, "--gpu", "a100-80gb", "--batch", 128, "--pp", 64)
    assert (done.status, done.out) == (2, "") and "64 stages, and the model has" in done.err
    done = autotp_command("estimate", factory, "--gpu", "a100-80gb", "--batch", 7, "--dp", 2)
    assert (done.status, done.out) == (2, "") and "2 x 1 does not divide 7" in done.err


def test_estimate_takes_a_published_size(autotp_command) -> None:
    done = autotp_command("estimate", "gpt-355m", "--gpu", "a100-80gb", "--batch", 8, "--layers", 4)
    assert done.status == 0 and "where the time goes" in done.out


def test_the_page_and_the_trace_are_files(autotp_command, factory: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    html, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    given = "--gpu", "a100-80gb", "--batch", 8, "--html", html
    done = autotp_command("estimate", factory, *given, "--pp", 2, "--trace", trace)
    assert done.status == 0 and "<!doctype html>" in html.read_text() and "traceEvents" in trace.read_text()
    html.unlink()
    assert autotp_command("search", factory, "--gpus", 2, *given).status == 0 and "Other layouts" in html.read_text()
    html.unlink()
    assert autotp_command("plan", factory, "--tp", 2, "--html", html).status == 0 and "tp=2" in html.read_text()


def test_a_file_that_cannot_be_written_is_said_first(autotp_command, factory: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for command, given in (("estimate", ("--gpu", "a100-80gb", "--batch", 8)), ("plan", ("--tp", 2))):
        done = autotp_command(command, factory, *given, "--html", tmp_path / "nowhere" / "plan.html")
        assert (done.status, done.out) == (2, "") and f"there is no folder {tmp_path / 'nowhere'}" in done.err
        done = autotp_command(command, factory, *given, "--html", tmp_path)
        assert done.status == 2 and "cannot be written: it is a folder" in done.err


def test_estimate_prove_stamps_the_page(autotp_command, factory: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    given = "--gpu", "a100-80gb", "--batch", 8, "--tp", 2, "--pp", 2, "--html", tmp_path / "plan.html", "--prove"
    done = autotp_command("estimate", factory, *given)
    assert done.status == 0 and "proved on 4 ranks" in done.out
    assert "Proved by autotp.verify" in (tmp_path / "plan.html").read_text()
    data = autotp_command("estimate", factory, *given, "--json").json
    assert data["fits"] is True and data["proof"]["mesh"] is not None and data["proof"]["ok"] is True
    assert data["row"] == "[128], [128]" and any(line.startswith("schedule: 1F1B") for line in data["proof"]["proved"])
    assert any(line.startswith("The numbers.") for line in data["proof"]["not_proved"])
    assert autotp_command("estimate", factory, *given[:-1], "--json").json["proof"] is None


def test_a_dense_model_has_no_experts_to_cut(autotp_command, factory: str) -> None:
    arguments = ["estimate", factory, "--gpu", "a100-80gb", "--batch", 8, "--dp", 2, "--ep", 2]
    assert "ep=2, and no layer has experts" in autotp_command(*arguments).err
