"""Makes the process that ranks are forked from do what each of them would do first: import, fill caches.

A rank's first graph takes half a second longer than its second one. What a test sees is the same but for that: random
numbers go on as if nothing had been drawn. There is no backward here: autograd would make its threads of the devices
that are there now, and ranks may pretend others.
"""

from __future__ import annotations

import gc

import torch

import autotp
from autotp.models.gpt import GPT, GPTConfig

with torch.random.fork_rng():
    autotp.explain(GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=2, n_head=2, n_embd=8)), tp=2)
gc.collect()
gc.freeze()  # Else a rank's garbage collection would touch, and so copy, all there is.
