"""Turn the fields of a request into the sequences that the engine is asked for, with the model's defaults."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from swiftkv.engine.messages import ReasoningMarks, SamplingParams
from swiftkv.server.choices import StopRules
from swiftkv.server.detokenizer import StopStrings
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import SequenceRequest
from swiftkv.server.models import ModelHandle
from swiftkv.server.price import Generating
from swiftkv.server.protocol import INT64_MAX, ChatBody, CompletionBody, GenerationBody
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.truncation import Truncation, asked_truncation

_COMPLETION_MAX_TOKENS = 16
_MIN_TEMPERATURE = 0.01


def sequence_requests(
    model: ModelHandle, body: CompletionBody | ChatBody, prompts: Sequence[Sequence[int]], grammar: str | None = None
) -> list[SequenceRequest]:
    """Return `n` sequences per prompt, those of one prompt in a row; the first of them asks for the prompt's logprobs.

    `grammar` constrains all of them, after their reasoning.

    Raises:
        ApiError: 400 if a prompt or a field does not fit the model, or the whole request costs too much.
    """
    n = body.n or 1
    logprobs, prompt_logprobs = _num_logprobs(body)
    budget = _thinking_budget(model, body)
    samplings = []
    for prompt in prompts:
        sampling = _sampling_params(model, body, len(prompt), logprobs)
        marks = None if grammar is None and budget is None else _reasoning_marks(model, body, prompt)
        samplings.append(
            msgspec.structs.replace(
                sampling, grammar=grammar, reasoning=marks, thinking_budget=None if marks is None else budget
            )
        )
    Generating(
        num_prompt_tokens=[len(prompt) for prompt in prompts],
        choices=n,
        max_tokens=max(sampling.max_tokens for sampling in samplings),
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_shown=1 if isinstance(body, ChatBody) else n,
        prompt_logprobs_field="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",  # with `echo`
        logprobs=logprobs,
        whole=not body.stream,
    ).check(model.client.max_sequences_of(model.policy.sender))
    requests = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        of_prompt = prompt_bytes(model, prompt, "prompt")
        requests += [SequenceRequest(of_prompt, _of_choice(sampling, choice, prompt_logprobs)) for choice in range(n)]
    return requests


def check_grammar_fields(body: GenerationBody) -> None:
    """Check the fields that exclude a grammar.

    Raises:
        ApiError: 400.
    """
    if body.ignore_eos:
        raise ApiError(400, "field 'ignore_eos' cannot be set: a grammar ends the answer", param="ignore_eos")
    if body.allowed_token_ids is not None:
        message = "field 'allowed_token_ids' cannot be set: a grammar says which tokens are allowed"
        raise ApiError(400, message, param="allowed_token_ids")


def stop_rules(body: GenerationBody) -> StopRules:
    """Return the rules by which the gateway ends a generation."""
    return StopRules(
        strings=StopStrings(body.stops),
        token_ids=frozenset(body.stop_token_ids or ()),
        min_tokens=body.min_tokens or 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        shows_stop=bool(body.include_stop_str_in_output),
    )


def truncation(model: ModelHandle, body: CompletionBody | ChatBody) -> Truncation | None:
    """Return the cut that the prompts of a request need, `None` if they stay whole.

    Raises:
        ApiError: 400 where nothing of a prompt would be kept, or more than the model takes.
    """
    usual = 0 if isinstance(body, ChatBody) else _COMPLETION_MAX_TOKENS
    asked, _ = _asked_tokens(body)
    return asked_truncation(body, model.max_model_len, usual if asked is None else asked)


def _reasoning_marks(
    model: ModelHandle, body: CompletionBody | ChatBody, prompt: Sequence[int]
) -> ReasoningMarks | None:
    if model.reasoning is None or isinstance(body, CompletionBody):
        return None
    return model.reasoning.marks(prompt, continues=bool(body.continue_final_message))


def prompt_bytes(model: ModelHandle, prompt: Sequence[int], field: str) -> bytes:
    """Return a prompt as engines take it.

    Raises:
        ApiError: 400 if `field` has no token, or one that is not the model's.
    """
    if not prompt:
        raise ApiError(400, f"field '{field}' has no tokens", param=field)
    ids = np.asarray(prompt, "<i4")
    _check_vocabulary(model, int(ids.max()), field)
    return ids.tobytes()


def _sampling_params(
    model: ModelHandle, body: CompletionBody | ChatBody, num_prompt_tokens: int, logprobs: int | None
) -> SamplingParams:
    max_tokens = _max_tokens(model, body, num_prompt_tokens)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(
            400,
            f"field 'min_tokens' is {min_tokens}, more than the {max_tokens} tokens that may be generated",
            param="min_tokens",
        )
    defaults = model.defaults
    temperature = defaults.temperature if body.temperature is None else body.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        # Below this the logits overflow; vLLM has the same bound.
        temperature=max(temperature, _MIN_TEMPERATURE) if temperature else 0.0,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=defaults.top_k if body.top_k is None else body.top_k,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        seed=None if body.seed == -1 else body.seed,  # as in vLLM
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        logit_bias=_logit_bias(model, body),
        logprobs=logprobs,
        stop_token_ids=_stop_token_ids(model, body),
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=_allowed_token_ids(model, body),
        bad_words=_bad_words(model.tokenizer, body.bad_words or []),
    )


def _max_tokens(model: ModelHandle, body: CompletionBody | ChatBody, num_prompt_tokens: int) -> int:
    room = model.max_model_len - num_prompt_tokens
    asked, field = _asked_tokens(body)
    if isinstance(body, CompletionBody) and asked == 0:
        if not body.echo:
            raise ApiError(400, "field 'max_tokens' may be 0 only with 'echo': true", param="max_tokens")
        asked = 1  # the engine always generates; the answer leaves the token out
    if isinstance(body, ChatBody) and not body.must_fit and asked is not None and room >= 1:
        asked = min(asked, room)
    if room < 1 or (asked or 1) > room:
        raise ApiError(
            400,
            f"this model's maximum context length is {model.max_model_len} tokens, but {num_prompt_tokens} are in the "
            f"prompt and {asked or 1} are to be generated",
            param=field if room >= 1 else "messages" if isinstance(body, ChatBody) else "prompt",
            code="context_length_exceeded",
        )
    if asked is None:
        asked = room if isinstance(body, ChatBody) else min(room, _COMPLETION_MAX_TOKENS)
    return min(asked, model.defaults.max_new_tokens or asked)


def _asked_tokens(body: CompletionBody | ChatBody) -> tuple[int | None, str]:
    """Return the most tokens that a request asks for, and the field that says so."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def _num_logprobs(body: CompletionBody | ChatBody) -> tuple[int | None, int | None]:
    """Return the number of logprobs that the engine shall send per generated token, and per prompt token."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "field 'prompt_logprobs' is not supported with 'stream'", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "field 'stream_options' is only for 'stream': true", param="stream_options")
    if isinstance(body, CompletionBody):
        echoed = body.logprobs if body.echo else None
        asked = [k for k in (body.prompt_logprobs, echoed) if k is not None]
        return body.logprobs, max(asked) if asked else None
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "field 'top_logprobs' is only for 'logprobs': true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs


def _logit_bias(model: ModelHandle, body: GenerationBody) -> dict[int, float] | None:
    if not body.logit_bias:
        return None
    bias = {int(token_id): value for token_id, value in body.logit_bias.items()}
    _check_vocabulary(model, max(bias), "logit_bias")
    return bias


def _stop_token_ids(model: ModelHandle, body: GenerationBody) -> list[int]:
    token_ids = body.stop_token_ids or []
    _check_vocabulary(model, max(token_ids, default=0), "stop_token_ids")
    return token_ids


def _allowed_token_ids(model: ModelHandle, body: GenerationBody) -> list[int] | None:
    if body.allowed_token_ids is not None:
        _check_vocabulary(model, max(body.allowed_token_ids), "allowed_token_ids")
    return body.allowed_token_ids


def _bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the tokens of words as they are at the beginning of a text and, if those differ, behind a space."""
    spelled: list[list[int]] = []
    for word in map(str.lstrip, words):
        first, behind_space = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
        spelled.append(first)
        if behind_space[-len(first) :] != first:
            spelled.append(behind_space)
    return [ids for ids in spelled if ids]


def _thinking_budget(model: ModelHandle, body: CompletionBody | ChatBody) -> int | None:
    """Return the most tokens of the reasoning, `None` for any number."""
    if isinstance(body, CompletionBody) or body.thinking_token_budget in (None, -1):
        return None
    if model.reasoning is None or not model.reasoning.can_be_ended:
        if not body.must_fit:
            return None
        message = (
            f"field 'thinking_token_budget' is not supported by model '{model.name}': it needs a "
            "models[].reasoning_parser whose reasoning ends with a tag"
        )
        raise ApiError(400, message, param="thinking_token_budget")
    return body.thinking_token_budget


def _check_vocabulary(model: ModelHandle, token_id: int, field: str) -> None:
    if token_id >= model.vocab_size:
        raise ApiError(
            400, f"field '{field}': token id {token_id} is not in the model's vocabulary of {model.vocab_size} tokens",
            param=field,
        )  # fmt: skip


def _of_choice(sampling: SamplingParams, choice: int, prompt_logprobs: int | None) -> SamplingParams:
    """Return the parameters of one choice: seeds differ, and only the first choice asks for prompt logprobs."""
    if choice == 0:
        return msgspec.structs.replace(sampling, prompt_logprobs=prompt_logprobs)
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % INT64_MAX)
