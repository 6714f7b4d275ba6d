"""One request as the engine keeps it, and the checks of its parameters."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swiftkv.engine.messages import AddRequest, ReasoningMarks, SamplingParams
from swiftkv.policies import Task

MAX_TOP_LOGPROBS = 100
MAX_PROMPT_LOGPROBS = 4 << 20
"""The most entries in one answer: about 300 MB of Python objects, or a message of a quarter of `MAX_MESSAGE_BYTES`."""

_INT32_MAX = 2**31 - 1
_MAX_PRIORITY = 2**34
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request. The scheduler and the sampler keep everything that changes while it runs."""

    request_id: int
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    stop_token_ids: npt.NDArray[np.int32]  # with the model's end-of-sequence tokens, unless `ignore_eos`
    late_token_ids: npt.NDArray[np.int32]  # forbidden before `min_tokens`; with the model's ends even if `ignore_eos`
    seed: int  # 64 bits
    namespace: bytes  # prompts share cached prefixes only within one, in the engine and in storage
    priority: int
    target_ttft_s: float | None = None  # as its client wants it
    pooled_token_ids: list[int] = field(default_factory=list)  # the tokens whose logits a pooled request wants
    is_traced: bool = False
    flow: int = 0
    flow_weight: float = 1.0
    is_to_last: bool = False
    arrived_s: float = 0.0  # on CLOCK_MONOTONIC, as `AddRequest` has it

    @classmethod
    def from_message(
        cls,
        message: AddRequest,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        task: Task = "generate",
    ) -> Request:
        """Return a checked request. Raises `ValueError` with a sentence for the client."""
        if not message.prompt or len(message.prompt) % 4:
            raise ValueError("the prompt is empty or not a whole number of tokens")
        prompt = np.frombuffer(message.prompt, np.int32).copy()  # torch wants it writable
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(f"the prompt has a token id outside the vocabulary (0 to {vocab_size - 1})")
        if len(prompt) >= max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with room for one more, at most {max_model_len - 1} fit"
            )
        sampling = message.sampling
        _check_sampling(sampling, vocab_size)
        _check_pooling(message, task, vocab_size)
        if abs(message.priority) > _MAX_PRIORITY:
            raise ValueError(f"priority must be from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")
        num_prompt_logprobs = len(prompt) * (1 + (sampling.prompt_logprobs or 0))
        if sampling.prompt_logprobs is not None and num_prompt_logprobs > MAX_PROMPT_LOGPROBS:
            raise ValueError(
                f"prompt_logprobs for {len(prompt)} tokens would be {num_prompt_logprobs} numbers; "
                f"at most {MAX_PROMPT_LOGPROBS} are given in one answer"
            )
        late = {*sampling.stop_token_ids, *eos_token_ids}
        if sampling.min_tokens and sampling.allowed_token_ids and late.issuperset(sampling.allowed_token_ids):
            raise ValueError("allowed_token_ids has only ends of the answer, which min_tokens forbids")
        stop = {*sampling.stop_token_ids} if sampling.ignore_eos else late
        return cls(
            request_id=message.request_id,
            prompt=prompt,
            sampling=sampling,
            stop_token_ids=np.array(sorted(stop), np.int32),
            late_token_ids=np.array(sorted(late), np.int32),
            seed=(secrets.randbits(64) if sampling.seed is None else sampling.seed) & (2**64 - 1),
            namespace=message.cache_salt.encode(),
            priority=message.priority,
            target_ttft_s=message.target_ttft_s,
            pooled_token_ids=[] if message.pooling is None else message.pooling.token_ids,
            is_traced=message.is_traced,
            flow=message.flow,
            flow_weight=message.flow_weight,
            is_to_last=message.is_to_last,
            arrived_s=time.monotonic() if message.arrived_s is None else message.arrived_s,
        )


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise `ValueError` for a parameter out of range, including NaN and numbers that float32 cannot hold."""
    bias = params.logit_bias or {}
    rules = {
        f"max_tokens must be from 1 to {_INT32_MAX}": 1 <= params.max_tokens <= _INT32_MAX,
        "min_tokens must be from 0 to max_tokens": 0 <= params.min_tokens <= params.max_tokens,
        "temperature must be a number of at least 0": 0 <= params.temperature <= _FLOAT32_MAX,
        "top_p must be above 0 and at most 1": 0 < params.top_p <= 1,
        "top_k must be at least -1": params.top_k >= -1,
        "min_p must be from 0 to 1": 0 <= params.min_p <= 1,
        "presence_penalty must be a number": abs(params.presence_penalty) <= _FLOAT32_MAX,
        "frequency_penalty must be a number": abs(params.frequency_penalty) <= _FLOAT32_MAX,
        "repetition_penalty must be a number above 0": 0 < params.repetition_penalty <= _FLOAT32_MAX,
        "logit_bias must give numbers for token ids of the vocabulary": all(
            0 <= token < vocab_size and abs(value) <= _FLOAT32_MAX for token, value in bias.items()
        ),
        "stop_token_ids must be token ids of the vocabulary": _are_tokens(params.stop_token_ids, vocab_size),
        "allowed_token_ids must be one or more token ids of the vocabulary": params.allowed_token_ids is None
        or (bool(params.allowed_token_ids) and _are_tokens(params.allowed_token_ids, vocab_size)),
        "allowed_token_ids cannot be set with a grammar": params.allowed_token_ids is None or params.grammar is None,
        "bad_words must have token ids of the vocabulary": all(
            word and _are_tokens(word, vocab_size) for word in params.bad_words
        ),
        "thinking_budget must be a number of at least 0, with reasoning": params.thinking_budget is None
        or (params.thinking_budget >= 0 and params.reasoning is not None),
        "reasoning must begin and end with token ids of the vocabulary": _marks_reasoning(params.reasoning, vocab_size),
        "ignore_eos cannot be set with a grammar, which ends the answer": params.grammar is None
        or not params.ignore_eos,
        f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}": _in_logprob_range(params.logprobs),
        f"prompt_logprobs must be from 0 to {MAX_TOP_LOGPROBS}": _in_logprob_range(params.prompt_logprobs),
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(rule)


def _check_pooling(message: AddRequest, task: Task, vocab_size: int) -> None:
    """Raise `ValueError` for a request that does not fit the model's task."""
    pooling, sampling = message.pooling, message.sampling
    if (pooling is None) != (task == "generate"):
        raise ValueError(f"a model whose task is {task} does not take this kind of request")
    if pooling is None:
        return
    if sampling.max_tokens != 1 or sampling.prompt_logprobs is not None or sampling.grammar is not None:
        raise ValueError("a pooled request has max_tokens 1, no prompt_logprobs and no grammar: it generates nothing")
    if len(pooling.token_ids) != (2 if task == "score" else 0):
        raise ValueError(
            f"pooling.token_ids: a model whose task is {task} does not give {len(pooling.token_ids)} logits"
        )
    if not all(0 <= token < vocab_size for token in pooling.token_ids):
        raise ValueError("pooling.token_ids must be token ids of the vocabulary")


def _marks_reasoning(marks: ReasoningMarks | None, vocab_size: int) -> bool:
    if marks is None:
        return True
    begin = [] if marks.begin is None else [marks.begin]
    return bool(marks.end) and _are_tokens([*marks.end, *begin], vocab_size)


def _are_tokens(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


def _in_logprob_range(count: int | None) -> bool:
    return count is None or 0 <= count <= MAX_TOP_LOGPROBS
