"""Trains the demo models from what every Python installation has: its standard library.

    python -m checkpoints.train chat --minutes 40      # a Qwen3 that answers questions about the standard library
    python -m checkpoints.train code --minutes 40      # a Llama that continues Python

The learning rate falls along a cosine over ``--minutes``, so the last minutes matter most. A servable model lies in
the output directory from the first export on and is replaced every few minutes.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from checkpoints import conversations
from swiftkv.checkpoint import read_texts, save, standard_library_files, train_tokenizer

VOCAB_SIZE = 4096
CONTEXT_TOKENS = 512
BATCH_ROWS = 4
PEAK_LEARNING_RATE = 3e-3
WARMUP_SHARE = 0.02
SHORT_SHARE = 0.6  # the first part learns from halved windows: attention costs half, and most text is local
EXPORT_EVERY_S = 120
MOST_DIGITS = 0.04  # of a file's characters
IGNORED = -100

Batch = tuple[Tensor, Tensor]  # token ids and labels, both [BATCH_ROWS, CONTEXT_TOKENS]; label t is token t + 1

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}


def chat_model(eos_token_id: int, pad_token_id: int) -> transformers.PreTrainedModel:
    """Five wide layers, heads of 64: 5.1 M parameters."""
    config = transformers.Qwen3Config(
        **_COMMON,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=800,
        use_sliding_window=False,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    return transformers.Qwen3ForCausalLM(config)


def code_model(eos_token_id: int, pad_token_id: int) -> transformers.PreTrainedModel:
    """Six layers, heads of 32: 5.2 M parameters."""
    config = transformers.LlamaConfig(
        **_COMMON,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=640,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def chat_batches(tokenizer: transformers.PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Conversations packed end to end; only what the assistant says is learnt."""
    source = conversations.Conversations(conversations.facts(), seed)
    need = BATCH_ROWS * (CONTEXT_TOKENS + 1)
    ids: list[int] = []
    learnt: list[bool] = []
    while True:
        while len(ids) < need:
            for message in source.sample():
                head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
                body = tokenizer.encode(f"{message['content']}<|im_end|>")
                tail = tokenizer.encode("\n")
                ids += head + body + tail
                learnt += [False] * len(head) + [message["role"] == "assistant"] * len(body) + [False] * len(tail)
        rows = torch.tensor(ids[:need]).view(BATCH_ROWS, CONTEXT_TOKENS + 1)
        mask = torch.tensor(learnt[:need]).view(BATCH_ROWS, CONTEXT_TOKENS + 1)
        yield rows[:, :-1], rows[:, 1:].masked_fill(~mask[:, 1:], IGNORED)
        del ids[:need], learnt[:need]


def code_batches(tokenizer: transformers.PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Windows of the standard library's source, in a new order every epoch."""
    ids: list[int] = []
    for text in code_texts():
        ids += [*tokenizer.encode(text), tokenizer.eos_token_id]
    tokens = torch.tensor(ids)
    generator = torch.Generator().manual_seed(seed)
    print(f"{len(tokens):,} tokens of source", flush=True)
    while True:
        shift = int(torch.randint(CONTEXT_TOKENS, (1,), generator=generator))
        windows = tokens[shift:].unfold(0, CONTEXT_TOKENS + 1, CONTEXT_TOKENS)
        for chosen in torch.randperm(len(windows), generator=generator).split(BATCH_ROWS):
            rows = windows[chosen]
            yield rows[:, :-1], rows[:, 1:]


def code_texts() -> Iterator[str]:
    """The standard library's code: no tables of numbers, no comments, docstrings cut to their first line.

    Prose is half of the source's tokens and far harder to predict than code is.
    """
    for text in read_texts(path for path in standard_library_files() if "pydoc_data" not in path.parts):
        if sum(map(str.isdigit, text)) < MOST_DIGITS * len(text):
            yield without_prose(text)


def without_prose(source: str) -> str:
    """`source` without lines that are comments, and with docstrings of one line."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                begin, end = first.lineno - 1, first.end_lineno or first.lineno
                summary = (first.value.value.strip().splitlines() or [""])[0]
                kept = f'{" " * first.col_offset}"""{summary}"""' if end - begin > 1 else lines[begin]
                lines[begin:end] = [kept, *["#"] * (end - begin - 1)]
    return "\n".join(line for line in lines if not line.lstrip().startswith("#")) + "\n"


def chat_texts() -> Iterator[str]:
    """What the chat model's tokenizer learns its words from."""
    source = conversations.Conversations(conversations.facts(), seed=1)
    for _ in range(4000):
        yield "\n".join(message["content"] for message in source.sample())


RECIPES: dict[
    str,
    tuple[Callable[..., transformers.PreTrainedModel], Callable[[], Iterator[str]], Callable[..., Iterator[Batch]]],
] = {"chat": (chat_model, chat_texts, chat_batches), "code": (code_model, code_texts, code_batches)}


def loss_of(model: transformers.PreTrainedModel, batch: Batch) -> Tensor:
    """Mean cross-entropy over the labels that count, in nats a token."""
    ids, labels = batch
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids).last_hidden_state  # [rows, context, hidden]
        counted = labels != IGNORED
        logits = model.lm_head(hidden[counted])  # [counted tokens, vocab]
    return functional.cross_entropy(logits.float(), labels[counted])


def make_optimizers(model: transformers.PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, where it needs half the steps of AdamW; AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate(share_done: float) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    if share_done < WARMUP_SHARE:
        return PEAK_LEARNING_RATE * share_done / WARMUP_SHARE
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (share_done - WARMUP_SHARE) / (1 - WARMUP_SHARE)))


def export(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, out: Path) -> None:
    """Writes a bfloat16 copy beside ``out`` and then swaps it in, so that ``out`` is whole at any moment."""
    fresh, old = out.with_suffix(".new"), out.with_suffix(".old")
    shutil.rmtree(fresh, ignore_errors=True)
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    save(copy.to(torch.bfloat16), tokenizer, fresh, do_sample=False)
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def train(name: str, out: Path, minutes: float, seed: int) -> None:
    """Trains ``name`` for ``minutes`` and leaves it in ``out``."""
    torch.manual_seed(seed)
    make_model, make_texts, make_batches = RECIPES[name]
    tokenizer = train_tokenizer(make_texts(), VOCAB_SIZE)
    model = make_model(tokenizer.eos_token_id, tokenizer.pad_token_id)
    model.set_attn_implementation("eager")  # at this size faster on a CPU than the fused one
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizers = make_optimizers(model)

    batches = make_batches(tokenizer, seed)
    first = next(batches)  # reads and tokenizes
    start_s = exported_s = time.monotonic()
    losses: list[float] = []
    for step, batch in enumerate(itertools.chain([first], batches)):
        share_done = (time.monotonic() - start_s) / (60 * minutes)
        if share_done >= 1:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(share_done)
        if share_done < SHORT_SHARE:
            batch = (batch[0].reshape(2 * BATCH_ROWS, -1), batch[1].reshape(2 * BATCH_ROWS, -1))
        loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            rate = (step + 1) * BATCH_ROWS * CONTEXT_TOKENS / (time.monotonic() - start_s)
            print(
                f"{share_done:6.1%}  step {step + 1}  loss {sum(losses) / len(losses):.3f}  {rate:,.0f} tok/s",
                flush=True,
            )
            losses.clear()
        if time.monotonic() - exported_s > EXPORT_EVERY_S:
            export(model, tokenizer, out)
            exported_s = time.monotonic()
    export(model, tokenizer, out)
    print(f"{out} written after {step} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, help="default: checkpoints/NAME")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    train(args.name, args.out or Path(__file__).parent / args.name, args.minutes, args.seed)


if __name__ == "__main__":
    main()
