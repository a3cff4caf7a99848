"""The floor: GPT, BERT and Llama with handwritten tensor parallelism, as in Megatron-LM (Shoeybi et al. 2019).

It uses plain tensors, conjugate autograd functions, column- and row-parallel products, one copy for q, k and v, and a
vocabulary-parallel embedding, head and loss. The modules are copies of the model's modules that hold this rank's parts,
so parameters keep their names; the forward is written out here. The same operators work in place as in Megatron:
all-reduces on buffers that no other operator reads, and the loss on the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.models.bert import BERT
from autotp.models.gpt import GPT

Take = Callable[[Tensor, int, int], Tensor]
"""Returns a rank's part of a full parameter: (parameter, rank, tp) -> part."""


class Copy(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)  # in place: here only products read a copy, and their gradient is a new tensor
        return grad


class Reduce(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)  # in place: products and lookups do not keep their result
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class VocabLoss(torch.autograd.Function):
    """Cross-entropy of logits cut by vocabulary: ranks exchange maxima, sums and target logits, one each for a token.

    The memory of the logits gets their softmax and then their gradient, as in Megatron. So backward can run only once.
    With `keep` they stay, for a model that also returns its logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, keep: bool = False) -> Tensor:
        """Returns the mean over targets that are not -100. logits: [tokens vocab/tp]; target: [tokens]"""
        most = logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        logits = logits - most.unsqueeze(-1) if keep else logits.sub_(most.unsqueeze(-1))
        local = target - start
        outside = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill_(outside, 0).unsqueeze(-1)
        picked = logits.gather(-1, local).squeeze(-1).masked_fill_(outside, 0)
        dist.all_reduce(picked)
        exponentials = logits.exp_()
        total = exponentials.sum(-1)
        dist.all_reduce(total)
        counted = (target != -100).to(logits.dtype)
        share = counted / counted.sum()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, outside, share)
        return (total.log() - picked) @ share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, outside, share = ctx.saved_tensors
        softmax.scatter_add_(-1, local, outside.to(softmax.dtype).sub_(1).unsqueeze(-1))
        return softmax.mul_((grad * share).unsqueeze(-1)), None, None, None


def rows(full: Tensor, rank: int, tp: int) -> Tensor:
    """Returns this rank's rows: of a column-parallel weight (torch transposes weights), its bias, the embedding."""
    return full.chunk(tp)[rank]


def columns(full: Tensor, rank: int, tp: int) -> Tensor:
    """Returns this rank's columns: of a row-parallel weight."""
    return full.chunk(tp, 1)[rank]


def fused(full: Tensor, rank: int, tp: int) -> Tensor:
    """Returns this rank's rows of q, k and v, from their fused weight."""
    return torch.cat([rows(part, rank, tp) for part in full.chunk(3)])


# The end of a parameter's name -> how it is cut; all other parameters stay whole.
GPT_CUTS: dict[str, Take] = {
    "wte.weight": rows,
    "attn.c_attn.weight": fused,
    "attn.c_attn.bias": fused,
    "attn.c_proj.weight": columns,
    "mlp.c_fc.weight": rows,
    "mlp.c_fc.bias": rows,
    "mlp.c_proj.weight": columns,
}
BERT_CUTS: dict[str, Take] = {
    "embeddings.word.weight": rows,
    "query.weight": rows,
    "query.bias": rows,
    "key.weight": rows,
    "key.bias": rows,
    "value.weight": rows,
    "value.bias": rows,
    "attention.output.weight": columns,
    "mlp.intermediate.weight": rows,
    "mlp.intermediate.bias": rows,
    "mlp.output.weight": columns,
    "mlm.bias": rows,
}


LLAMA_CUTS: dict[str, Take] = {
    "embed_tokens.weight": rows,
    "q_proj.weight": rows,
    "k_proj.weight": rows,
    "v_proj.weight": rows,
    "o_proj.weight": columns,
    "gate_proj.weight": rows,
    "up_proj.weight": rows,
    "down_proj.weight": columns,
    "lm_head.weight": rows,
}


class Megatron(nn.Module):
    """A model cut by hand; tp must divide heads, width and vocabulary. Dropout is not computed.

    Attributes:
        takes: parameter name -> the function that took its part.
    """

    def __init__(self, model: nn.Module, cuts: Mapping[str, Take], table: str, rank: int, tp: int) -> None:
        super().__init__()
        self.m, self.takes = copy.deepcopy(model), {}
        for name, parameter in self.m.named_parameters():
            take = next((take for end, take in cuts.items() if name.endswith(end)), _whole)
            self.takes[name] = take
            parameter.data = take(parameter.detach(), rank, tp).clone(memory_format=torch.contiguous_format)
        self.table = self.m.get_parameter(table)
        self.tp, self.start = tp, rank * self.table.shape[0]

    def lookup(self, tokens: Tensor) -> Tensor:
        """Returns the whole embeddings. tokens: [batch seq] -> [batch seq hidden]"""
        local = tokens - self.start
        outside = (local < 0) | (local >= self.table.shape[0])
        found = F.embedding(local.masked_fill_(outside, 0), self.table)
        return Reduce.apply(found.masked_fill_(outside.unsqueeze(-1), 0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Returns the attention of this rank's heads. q, k, v and the result: [batch seq hidden/tp]"""
        b, s, _ = q.shape
        q, k, v = (t.view(b, s, self.m.config.n_head // self.tp, -1).transpose(1, 2) for t in (q, k, v))
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).reshape(b, s, -1)
        )


class MegatronGPT(Megatron):
    """A GPT cut by hand."""

    def __init__(self, gpt: GPT, rank: int, tp: int) -> None:
        super().__init__(gpt, GPT_CUTS, "wte.weight", rank, tp)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss. tokens, labels: [batch seq]"""
        x = self.lookup(tokens) + self.m.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.m.h:
            x = self.block(block, x)
        logits = F.linear(Copy.apply(self.m.ln_f(x)), self.table)
        return VocabLoss.apply(logits.flatten(0, 1), labels.flatten(), self.start)

    def block(self, block: Any, x: Tensor) -> Tensor:
        """x and the result: [batch seq hidden], whole on every rank."""
        attn, mlp = block.attn, block.mlp
        q, k, v = F.linear(Copy.apply(block.ln_1(x)), attn.c_attn.weight, attn.c_attn.bias).chunk(3, -1)
        x = x + _row(self.attend(q, k, v, None, True), attn.c_proj)
        h = F.linear(Copy.apply(block.ln_2(x)), mlp.c_fc.weight, mlp.c_fc.bias)
        return x + _row(F.gelu(h, approximate="tanh"), mlp.c_proj)


class MegatronBERT(Megatron):
    """A BERT cut by hand, with either order of the norms."""

    def __init__(self, bert: BERT, rank: int, tp: int) -> None:
        super().__init__(bert, BERT_CUTS, "embeddings.word.weight", rank, tp)

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor, labels: Tensor, next_sentence: Tensor) -> Tensor:
        """Returns the loss of both heads. tokens, types, mask, labels: [batch seq]; next_sentence: [batch]"""
        m, pieces = self.m, self.m.embeddings
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = pieces.norm(self.lookup(tokens) + pieces.segment(types) + pieces.position(positions))
        attended = mask.bool()[:, None, None, :]
        for block in m.layer:
            x = self.block(block, x, attended)
        x = m.norm(x)
        nsp = F.cross_entropy(m.nsp(torch.tanh(m.pooler(x[:, 0]))), next_sentence)
        h = Copy.apply(m.mlm.norm(F.gelu(m.mlm.transform(x))))
        logits = F.linear(h, self.table, m.mlm.bias)
        return VocabLoss.apply(logits.flatten(0, 1), labels.flatten(), self.start) + nsp

    def block(self, block: Any, x: Tensor, mask: Tensor) -> Tensor:
        """x and the result: [batch seq hidden], whole on every rank; mask: [batch 1 1 seq]"""
        if block.norm == "pre":
            x = x + self.attention(block.attention, block.attention_norm(x), mask)
            return x + _mlp(block.mlp, block.mlp_norm(x))
        x = block.attention_norm(x + self.attention(block.attention, x, mask))
        return block.mlp_norm(x + _mlp(block.mlp, x))

    def attention(self, attention: Any, x: Tensor, mask: Tensor) -> Tensor:
        """Computes attention; the three products read one copy. x and the result: [batch seq hidden]"""
        x = Copy.apply(x)
        q, k, v = (F.linear(x, w.weight, w.bias) for w in (attention.query, attention.key, attention.value))
        return _row(self.attend(q, k, v, mask, False), attention.output)


class MegatronLlama(Megatron):
    """A Llama of transformers cut by hand: hooks copy the inputs of its products, and reduce their outputs.

    With `keep` it returns its logits beside the loss, as the Llama does; without, their memory is used again.
    """

    def __init__(self, llama: nn.Module, rank: int, tp: int, keep: bool = False) -> None:
        super().__init__(llama, LLAMA_CUTS, "model.embed_tokens.weight", rank, tp)
        self.keep = keep
        for layer in self.m.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.register_forward_hook(lambda _, __, x: Copy.apply(x))
            for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
                product.register_forward_hook(lambda _, __, x: Reduce.apply(x))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """Returns the mean loss of the next token, and the logits if they are kept. input_ids, labels: [batch seq]"""
        x = self.m.model(inputs_embeds=self.lookup(input_ids), use_cache=False).last_hidden_state
        logits = F.linear(Copy.apply(x), self.m.lm_head.weight)
        following = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = VocabLoss.apply(logits.flatten(0, 1), following.flatten(), self.start, self.keep)
        return SimpleNamespace(loss=loss, logits=logits) if self.keep else loss


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    return _row(F.gelu(F.linear(Copy.apply(x), mlp.intermediate.weight, mlp.intermediate.bias)), mlp.output)


def _row(x: Tensor, linear: nn.Linear) -> Tensor:
    """Computes a row-parallel product, with the bias added after the sum. x: [batch seq in/tp] -> [batch seq out]"""
    return Reduce.apply(F.linear(x, linear.weight)) + linear.bias


def _whole(full: Tensor, rank: int, tp: int) -> Tensor:
    return full
