"""The model sizes of the Megatron papers: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053v4.

GPT-2: 355M, 2.5B and 8.3B are from table 2 (the trained models), 1.2B and 4.2B from table 1 (the scaling study, which
has the 8.3B too, with 32 heads instead of 24). Sequences have 1,024 tokens (section 4.2). The vocabulary is GPT-2's, of
50,257 tokens; the paper pads it to 51,200, which 8 ranks divide (section 5.1), and autotp does not need that.

GPT_SIZES_2021 are those of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv 2104.04473, table 1: sequences of 2,048 tokens, a vocabulary of 51,200.

BERT: table 4, with the rearranged norm of figure 7, sequences of 512 and the original vocabulary of 30,522 (section
4.2). The model that table 4 calls 336M has 334M parameters in the encoder, and 336M with the pooler and both heads.
"""

from .bert import BERTConfig
from .gpt import GPTConfig

GPT_SIZES: dict[str, GPTConfig] = {
    "355M": GPTConfig(n_layer=24, n_embd=1024, n_head=16),
    "1.2B": GPTConfig(n_layer=40, n_embd=1536, n_head=16),
    "2.5B": GPTConfig(n_layer=54, n_embd=1920, n_head=20),
    "4.2B": GPTConfig(n_layer=64, n_embd=2304, n_head=24),
    "8.3B": GPTConfig(n_layer=72, n_embd=3072, n_head=24),
}

GPT_SIZES_2021: dict[str, GPTConfig] = {
    name: GPTConfig(block_size=2048, vocab_size=51200, n_layer=layers, n_embd=width, n_head=heads)
    for name, layers, width, heads in (
        ("1.7B", 24, 2304, 24),
        ("3.6B", 30, 3072, 32),
        ("7.5B", 36, 4096, 32),
        ("18.4B", 40, 6144, 48),
        ("39.1B", 48, 8192, 64),
        ("76.1B", 60, 10240, 80),
        ("145.6B", 80, 12288, 96),
        ("310.1B", 96, 16384, 128),
        ("529.6B", 105, 20480, 128),
        ("1008B", 128, 25600, 160),
    )
}

BERT_SIZES: dict[str, BERTConfig] = {
    "334M": BERTConfig(n_layer=24, n_embd=1024, n_head=16, norm="pre"),
    "1.3B": BERTConfig(n_layer=24, n_embd=2048, n_head=32, norm="pre"),
    "3.9B": BERTConfig(n_layer=48, n_embd=2560, n_head=40, norm="pre"),
}
