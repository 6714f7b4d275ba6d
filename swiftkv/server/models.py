"""The models behind one gateway, and how a request finds its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from swiftkv.models.pooling import EmbeddingRecipe
from swiftkv.policies import ServiceTier, Task
from swiftkv.server.client import EngineClient
from swiftkv.server.engine_state import EngineState
from swiftkv.server.errors import ApiError
from swiftkv.server.grammars import GrammarChecker
from swiftkv.server.node_views import EngineView
from swiftkv.server.pooling.template import ScoreTemplate
from swiftkv.server.reasoning import ReasoningParser
from swiftkv.server.responses import ModelCard
from swiftkv.server.sampling_defaults import SamplingDefaults
from swiftkv.server.sleep import Sleeper
from swiftkv.server.storage_changes import StorageChanges
from swiftkv.server.targets import NO_TARGETS, Targets
from swiftkv.server.templates import TemplateRenderer
from swiftkv.server.tenants import ANYBODY, Sender
from swiftkv.server.threads import BoundedThreads
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers.base import ToolParser

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """The trust that a model puts in its clients.

    Attributes:
        show_cached_tokens: Whether `usage` tells how much of a prompt was in the cache; `salted`: only to requests with
            a `cache_salt`, which learn nothing by it about the prompts of others.
        allow_priority: Whether requests may have a `priority` other than 0, and so go before others.
        sender: The sender of the requests.
    """

    show_cached_tokens: Literal["always", "salted", "never"] = "always"
    allow_priority: bool = False
    sender: Sender = ANYBODY

    @property
    def max_tier(self) -> ServiceTier:
        """The highest service tier that requests get."""
        return self.sender.max_tier or ("priority" if self.allow_priority else "default")

    def towards(self, sender: Sender) -> ClientPolicy:
        """Return the policy for the requests of `sender`."""
        allow = self.allow_priority if sender.max_tier is None else sender.max_tier == "priority"
        return replace(self, allow_priority=allow, sender=sender)

    def shows_cached(self, cache_salt: str | None) -> bool:
        """Return whether the answer to a request with this salt shows how much of its prompt was in the cache."""
        is_apart = cache_salt is not None or self.sender.is_private
        return self.show_cached_tokens == "always" or (self.show_cached_tokens == "salted" and is_apart)


@dataclass(frozen=True)
class ModelHandle:
    """A model as the gateway knows it. `root` names its checkpoint in public; lengths and sizes are in tokens.

    Clients may also ask for it by `further_names`; answers have `name`, as vLLM's have the first name. `threads`
    tokenize, decode and render templates, so that a busy model holds up no other. All models of the node share
    `grammars`, because one process checks all grammars.
    """

    name: str
    root: str
    model_dir: Path
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    client: EngineClient
    sleeper: Sleeper
    storage: StorageChanges
    policy: ClientPolicy = ClientPolicy()
    further_names: tuple[str, ...] = ()
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    threads: BoundedThreads = field(default_factory=lambda: BoundedThreads("this model's tokenizer"))
    created: int = field(default_factory=lambda: int(time.time()))
    tool_parser: type[ToolParser] | None = None
    """The parser of calls in the form in which the model writes them; `None`: it takes no tools."""
    reasoning: ReasoningParser | None = None
    """The parser of reasoning in the form in which the model writes it; `None`: all that it writes is the answer."""
    max_num_seqs: int = 64
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    templates: TemplateRenderer | None = None
    """The node's renderer of chat templates that requests bring; `None`: they may bring none."""
    auto_wake: bool = False
    """Whether a request wakes the model, if it is asleep."""
    pooling: EmbeddingRecipe | ScoreTemplate | None = None
    """The way the model makes embeddings, or is asked for scores; `None`: it generates text."""
    targets: Targets = NO_TARGETS
    """The targets of requests that name none; those that would miss them are refused."""

    async def in_threads(self, work: Callable[[], T], num_bytes: int) -> T:
        """Do `work`, which holds about `num_bytes`, in the model's threads, when it is its sender's turn."""
        return await self.threads.run(work, num_bytes, self.policy.sender)

    def serving(self, sender: Sender) -> ModelHandle:
        """Return the model as `sender` may use it."""
        return self if sender == ANYBODY else replace(self, policy=self.policy.towards(sender))

    def card(self, name: str | None = None) -> ModelCard:
        """Return the model's card, under one of its names."""
        state = str(self.client.state)
        return ModelCard(name or self.name, self.created, self.root, self.max_model_len, state=state, task=self.task)

    def cards(self) -> list[ModelCard]:
        """Return a card for each of its names."""
        return [self.card(name) for name in self.names]

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.further_names

    @property
    def task(self) -> Task:
        match self.pooling:
            case None:
                return "generate"
            case EmbeddingRecipe():
                return "embed"
            case ScoreTemplate():
                return "score"

    def check_task(self, *tasks: Task) -> None:
        """Raise `ApiError` 400 unless the model's task is one of these."""
        if self.task not in tasks:
            message = (
                f"model '{self.name}' has the task {self.task} (models[].task), but this route is for "
                f"models with the task {' or '.join(tasks)}"
            )
            raise ApiError(400, message, param="model", code="wrong_task")

    @property
    def must_wake(self) -> bool:
        """Whether a request must wake the model first, and fails if the model cannot be woken."""
        return self.auto_wake and not self.client.state.is_there

    @property
    def takes_requests(self) -> bool:
        """Whether a request would be served now, or after it has woken the model."""
        state = self.client.state
        return state.serves or (self.auto_wake and state is EngineState.ASLEEP)


class ModelTable:
    """The models of one port. The threads of a model end when it leaves the table."""

    def __init__(self, models: Mapping[str, ModelHandle]) -> None:
        self._models = dict(models)

    def add(self, model: ModelHandle) -> None:
        """Add a model, in the place of one of the same name if there is one."""
        if model.name in self._models:
            self.remove(model.name)
        self._models[model.name] = model

    def remove(self, name: str) -> None:
        self._models.pop(name).threads.close()

    def only(self, name: str | None) -> ModelTable:
        """Return all models if `name` is `None`, else only the named one. Raises `ApiError` 404 if it is not there."""
        if name is None:
            return self
        model = self.get(name)
        return ModelTable({model.name: model})

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def all(self) -> list[ModelHandle]:
        return list(self._models.values())

    def get(self, name: str) -> ModelHandle:
        """Return the model that has this name. Raises `ApiError` 404 if there is none."""
        model = self._models.get(name) or next((each for each in self._models.values() if name in each.names), None)
        if model is None:
            known = ", ".join(self._models)
            raise ApiError(404, f"no model '{name}'; this node has: {known}", param="model", code="model_not_found")
        return model

    def own_names(self) -> dict[str, str]:
        """Return each model's own name, by every name that clients may write; an only model's also by ''."""
        names = {name: model.name for model in self._models.values() for name in model.names}
        return names | ({"": next(iter(self._models))} if len(self._models) == 1 else {})

    def pick(self, in_path: str | None, in_body: str | None) -> ModelHandle:
        """Return the model that a request's path or body names; where there is one model, it need not be named.

        Raises:
            ApiError: 404 for a model that is not there, 400 if none is named and there are several.
        """
        if in_path is not None:
            model = self.get(in_path)
            if in_body is not None and in_body not in model.names:
                raise ApiError(
                    404, f"this is the path of model '{in_path}', not of '{in_body}'", param="model",
                    code="model_not_found",
                )  # fmt: skip
            return model
        if in_body is not None:
            return self.get(in_body)
        if len(self._models) == 1:
            return next(iter(self._models.values()))
        known = ", ".join(self._models)
        raise ApiError(400, f"field 'model' is required; this node has: {known}", param="model", code="missing_field")

    def engines(self) -> dict[str, EngineView]:
        return {name: model.client.view() for name, model in self._models.items()}
