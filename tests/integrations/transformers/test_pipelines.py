"""What calls a parallel model of transformers for people: `pipeline`, and the calls of lm_eval's HFLM."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from hugging_face import both, transformers
from ranks import Checks, silence
from torch import Tensor

checks = Checks()


def tokenizer() -> Any:
    """One token for each word w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", padding_side="left"
    )


@checks.on(2)
def texts(rank: int, n: int) -> None:
    """The texts of one device, also of a batch and drawn ones; and no warning that one device does not give."""
    heard, found = [], []
    for model in both(n, "gpt2"):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        logging.getLogger("transformers").addHandler(handler)
        with silence():
            pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())
            assert pipe.model is model
            torch.manual_seed(1)
            given = ["w5 w6 w7", "w9 w8"]
            drawn = pipe(given[0], max_new_tokens=6, do_sample=True, num_return_sequences=3)
            found.append((pipe(given, max_new_tokens=6, do_sample=False, batch_size=2), drawn))
        logging.getLogger("transformers").removeHandler(handler)
        heard.append(set(stream.getvalue().splitlines()))
    assert found[0] == found[1] and len(found[0][1]) == 3
    assert heard[1] <= heard[0]


def scored(model: Any, tokens: Tensor, starts: list[int]) -> list[Any]:
    """What `HFLM._loglikelihood_tokens` computes: the log-probability of each continuation, and if it is greedy."""
    with torch.no_grad():
        logits = torch.nn.functional.log_softmax(model(tokens).logits, dim=-1, dtype=torch.float64)
    found = []
    for row, words, start in zip(logits, tokens, starts, strict=True):
        row, words = row[start - 1 : -1], words[start:]
        greedy = (row.argmax(-1) == words).all()
        found.append((torch.gather(row, 1, words[:, None]).sum().item(), bool(greedy)))
    return found


class Until(transformers.StoppingCriteria):  # type: ignore[misc]
    """Ends a row after a word, as HFLM's criterion does."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return input_ids[:, -1] % 7 == 0


@checks.on(2, rare=True)
def harness(rank: int, n: int) -> None:
    """Log-likelihoods of continuations in a padded batch, and texts until a word; lm_eval 0.4.13 itself was tried."""
    whole, parallel = both(n, "gpt2")
    tokens = torch.arange(24).view(2, 12) * 17 % 94 + 5
    expected, found = (scored(model, tokens, [4, 9]) for model in (whole, parallel))
    torch.testing.assert_close([x for x, _ in found], [x for x, _ in expected], rtol=1e-9, atol=0.0)
    assert [g for _, g in found] == [g for _, g in expected]
    assert parallel.num_parameters() == whole.num_parameters() and parallel.device == whole.device
    given = {"input_ids": tokens[:, :5], "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    stop = transformers.StoppingCriteriaList([Until()])
    how = {"max_length": 12, "stopping_criteria": stop, "pad_token_id": 0, "use_cache": True, "do_sample": False}
    texts = [model.generate(**given, **how) for model in (whole, parallel)]
    assert torch.equal(*texts)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
