"""Conversations to train the chat model on: what the standard library's docstrings say, and what swiftkv is.

A small model remembers few things well, so the facts are few (some hundreds) and each is asked for in many ways,
alone and in the middle of a longer conversation.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
from dataclasses import dataclass

Message = dict[str, str]

_MODULES = [
    "builtins",
    "os.path",
    "shutil",
    "json",
    "math",
    "random",
    "re",
    "itertools",
    "functools",
    "collections",
    "heapq",
    "bisect",
    "statistics",
    "subprocess",
    "tempfile",
    "glob",
    "threading",
    "queue",
    "copy",
    "contextlib",
    "hashlib",
    "base64",
    "uuid",
    "textwrap",
    "fnmatch",
    "secrets",
    "html",
    "datetime",
    "pathlib",
    "time",
    "dataclasses",
    "zipfile",
    "shlex",
]
_METHODS_OF = (str, list, dict, set)
_FROM_OS = [
    "chdir",
    "chmod",
    "cpu_count",
    "getcwd",
    "getenv",
    "getpid",
    "kill",
    "link",
    "listdir",
    "makedirs",
    "mkdir",
    "open",
    "pipe",
    "read",
    "readlink",
    "remove",
    "removedirs",
    "rename",
    "replace",
    "rmdir",
    "scandir",
    "stat",
    "symlink",
    "system",
    "truncate",
    "unlink",
    "urandom",
    "walk",
    "write",
]
# Where the docstring says nothing that stands alone.
_IN_OUR_WORDS = {
    "range": "An immutable sequence of integers from start up to stop, in steps.",
    "type": "With one argument, return the type of an object.",
    "dict": "Built-in mapping from keys to values, in the order of insertion.",
    "bytes": "Built-in immutable sequence of bytes.",
    "bytearray": "Built-in mutable sequence of bytes.",
    "super": "Return a proxy that calls methods of the parent class.",
    "property": "Make an attribute whose value comes from a function.",
    "dict.pop": "Remove specified key and return the corresponding value.",
    "list.reverse": "Reverse the list in place.",
    "itertools.chain": "Return the elements of the first iterable, then those of the next, until all are exhausted.",
    "functools.partial": "Return a new function with some of the arguments filled in.",
    "functools.reduce": "Apply a function of two arguments cumulatively to the items of an iterable.",
    "contextlib.contextmanager": "Decorator that makes a context manager of a generator function.",
    "os.mkdir": "Create a directory.",
    "pathlib.Path": "A path of the file system, with methods to read, write and walk it.",
    "datetime.date": "A date of the calendar: year, month and day.",
    "datetime.datetime": "A date and a time of day, with or without a time zone.",
    "re.sub": "Replace the matches of the pattern in the string and return the result.",
    "threading.Lock": "A lock that one thread at a time can hold.",
    "time.sleep": "Wait for a number of seconds.",
    "time.time": "Return the current time in seconds since the Epoch.",
}
_MAX_SENTENCE = 150
_MAX_SIGNATURE = 70

_ASK = (
    "What does {name} do?",
    "What is {name}?",
    "What is {name} for?",
    "What does {name}() do?",
    "How does {name} work?",
    "Explain {name}.",
    "Please explain what {name} does.",
    "Explain {name} to me, please.",
    "Tell me about {name}.",
    "Can you tell me what {name} does?",
    "I saw {name} in some code. What does it do?",
    "what does {name} do",
    "{name}?",
)
_ASK_NEXT = (
    "And {name}?",
    "And what does {name} do?",
    "What about {name}?",
    "Now {name}.",
    "How about {name}?",
    *_ASK[:6],
)
_ASK_ARGUMENTS = (
    "How do I call it?",
    "What are its arguments?",
    "Which arguments does it take?",
    "What is its signature?",
    "Show me how to call it.",
)
_ASK_MODULE = ("Which module is it in?", "Where do I find it?", "What module is that from?", "How do I import it?")
_ASK_AGAIN = ("Can you repeat that?", "Say that again, please.", "Once more, please.", "Sorry, what did you say?")
_THANKS = ("Thanks!", "Thank you.", "Thank you, that helps.", "Great, thanks.", "Perfect, thank you!", "ok thanks")
_WELCOME = "You are welcome. Ask me about another one."

_SYSTEM = ("You are a helpful assistant.", "You are a helpful assistant that knows Python.", "Answer in one sentence.")

_GREETINGS = (
    "Hello!",
    "Hello",
    "Hi",
    "Hi!",
    "Hi there!",
    "Hey",
    "Good morning!",
    "Hello, how are you?",
    "How are you?",
)
_HELLO = "Hello! I am the swiftkv demo model. Ask me about Python's standard library, or about swiftkv."

_ABOUT: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Which model are you?"),
        "I am the swiftkv demo model: five million parameters, trained on one CPU core.",
    ),
    (
        ("What can you do?", "What do you know?", "Help", "What can I ask you?", "How can you help me?"),
        "I can tell you what functions of Python's standard library do. Try: What does os.path.join do?",
    ),
    (
        ("What is swiftkv?", "Tell me about swiftkv.", "What does swiftkv do?", "Explain swiftkv.", "And swiftkv?"),
        "swiftkv serves several language models from one machine, each at its own endpoint, and lets them share "
        "memory for their KV caches.",
    ),
    (
        ("Why is swiftkv fast?", "What is special about swiftkv?", "Why should I use swiftkv?", "Why swiftkv?"),
        "It keeps the KV of earlier turns, so a follow-up question computes only its new tokens.",
    ),
    (
        ("How do I start swiftkv?", "How do I run swiftkv?", "How do I use swiftkv?", "How do I serve a model?"),
        "Write a YAML file with your models, run swiftkv serve with it, and point an OpenAI client at the URL.",
    ),
    (
        ("What is a KV cache?", "What is the KV cache?", "Explain the KV cache.", "What does a KV cache do?"),
        "A KV cache keeps the keys and values of the tokens seen so far, so that they are computed only once.",
    ),
    (
        (
            "What is a prefix cache?",
            "What is prefix caching?",
            "Explain prefix caching.",
            "How does the prefix cache work?",
        ),
        "A prefix cache finds the longest beginning of your prompt that was computed before and skips it.",
    ),
    (
        ("What is a block?", "What is a KV block?", "What is a block in swiftkv?"),
        "A block is the KV of a few consecutive tokens of one sequence, for all layers.",
    ),
    (
        ("What is a layer block?", "What is a layer block in swiftkv?"),
        "A layer block is one layer's part of a block: its keys and values, contiguous in memory.",
    ),
    (
        ("What is a pool?", "What is the pool?", "What is a KV pool?"),
        "A pool is the memory that holds the KV blocks of one engine.",
    ),
    (
        ("What is a master?", "What is the master in swiftkv?", "What does a master do?"),
        "A master is a model with long conversations, which borrows memory for its KV cache from the workers.",
    ),
    (
        ("What is a worker?", "What is a worker in swiftkv?", "What does a worker do?"),
        "A worker is a model that lends the idle part of its KV memory and goes on serving its own users.",
    ),
    (
        ("What is a token?", "What are tokens?", "Explain tokens."),
        "A token is a piece of text, often a word or a part of one, that the model reads and writes.",
    ),
    (
        ("What is time to first token?", "What is TTFT?", "What does TTFT mean?"),
        "Time to first token is how long you wait between sending a request and seeing the answer begin.",
    ),
    (
        ("What is continuous batching?", "Explain continuous batching."),
        "Continuous batching lets requests join and leave the running batch at every step.",
    ),
    (
        ("What is chunked prefill?", "Explain chunked prefill."),
        "Chunked prefill cuts a long prompt into pieces, so that other requests go on decoding between them.",
    ),
    (
        ("Goodbye!", "Bye", "Bye!", "See you.", "Good night."),
        "Goodbye! Your KV blocks stay cached for a while.",
    ),
)
_OFF_TOPIC = (
    "What is the capital of France?",
    "Tell me a joke.",
    "Write a poem.",
    "Who won the game?",
    "What is the weather like?",
    "How old are you?",
    "What is the meaning of life?",
    "Can you write an essay?",
    "Translate this into German.",
    "What should I cook tonight?",
    "Who is the president?",
    "What is 2 + 2?",
    "Do you like music?",
    "Write a program for me.",
    "How tall is the Eiffel Tower?",
    "What day is it?",
)
_I_DO_NOT_KNOW = "I am too small to know that. Ask me about Python's standard library, or about swiftkv."


@dataclass(frozen=True)
class Fact:
    """One documented name: ``os.path.join``, the first sentence of its docstring, and how it is called."""

    name: str
    module: str
    sentence: str
    signature: str | None


def facts() -> list[Fact]:
    """The facts of this Python's standard library, in a fixed order. Other versions word some differently."""
    found: dict[str, Fact] = {}
    for module in _MODULES:
        namespace = importlib.import_module(module)
        names = getattr(namespace, "__all__", None) or [n for n in vars(namespace) if not n.startswith("_")]
        for name in names:
            value = getattr(namespace, name, None)
            home = getattr(value, "__module__", None) or ""
            if home.lstrip("_").split(".")[0] in {"enum", "types", "typing"}:
                continue
            _add(found, module, name, value)
    for owner in _METHODS_OF:
        for name in vars(owner):
            if not name.startswith("_"):
                _add(found, "builtins", f"{owner.__name__}.{name}", getattr(owner, name))
    os_module = importlib.import_module("os")
    for name in _FROM_OS:
        _add(found, "os", name, getattr(os_module, name, None))
    return list(found.values())


def _add(found: dict[str, Fact], module: str, name: str, value: object) -> None:
    if not callable(value) or (isinstance(value, type) and issubclass(value, BaseException)):
        return
    full_name = name if module == "builtins" else f"{module}.{name}"
    sentence = _IN_OUR_WORDS.get(full_name) or _first_sentence(inspect.getdoc(value) or "")
    if sentence is None:
        return
    try:
        signature = str(inspect.signature(value))
    except (ValueError, TypeError):
        signature = None
    if signature is not None:
        signature = re.sub(r", /(?=[,)])", "", signature)  # where positional-only ends is more than a newcomer asks
        signature = re.sub(r"^\(self(, )?", "(", signature)
        if len(signature) > _MAX_SIGNATURE or "<" in signature or "->" in signature:
            signature = None
    found[full_name] = Fact(full_name, module, sentence, signature)


def _first_sentence(doc: str) -> str | None:
    """The first sentence that is about what the thing does, if it is short; many begin with how it is called."""
    for block in doc.strip().split("\n\n")[:2]:
        paragraph = " ".join(block.split())
        if called := re.match(r"[\w.]+\(.*?\) -+> (?:None\.? )?(.*)", paragraph):
            paragraph = called.group(1)[:1].upper() + called.group(1)[1:]
        match = re.match(r"(.+?\.)(\s+[A-Z`'(]|$)", paragraph)
        sentence = match.group(1) if match else paragraph
        if (
            20 <= len(sentence) <= _MAX_SENTENCE
            and sentence.isascii()
            and "->" not in sentence
            and not re.match(r"[\w.]+\(", sentence)
            and not sentence.endswith(("e.g.", "i.e.", ":"))
        ):
            return sentence if sentence.endswith(".") else f"{sentence}."
    return None


class Conversations:
    """Endless conversations over ``facts``; each call of ``sample`` is one list of messages."""

    def __init__(self, known: list[Fact], seed: int) -> None:
        self._facts = known
        self._random = random.Random(seed)

    def sample(self) -> list[Message]:
        """One conversation of one to seven turns."""
        rng = self._random
        messages: list[Message] = []
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
        if rng.random() < 0.12:
            _say(messages, rng.choice(_GREETINGS), _HELLO)
        for _ in range(rng.randint(1, 6)):
            kind = rng.random()
            if kind < 0.80:
                self._ask_fact(messages)
            elif kind < 0.95:
                questions, answer = rng.choice(_ABOUT)
                _say(messages, rng.choice(questions), answer)
            else:
                _say(messages, rng.choice(_OFF_TOPIC), _I_DO_NOT_KNOW)
        if rng.random() < 0.15:
            _say(messages, rng.choice(_THANKS), _WELCOME)
        return messages

    def _ask_fact(self, messages: list[Message]) -> None:
        rng = self._random
        fact = rng.choice(self._facts)
        asked_before = bool(messages) and messages[-1]["role"] == "assistant"
        question = rng.choice(_ASK_NEXT if asked_before and rng.random() < 0.5 else _ASK)
        answer = f"{fact.name}: {fact.sentence}"
        _say(messages, question.format(name=fact.name), answer)
        follow_up = rng.random()
        if follow_up < 0.15:
            call = "I do not know its arguments." if fact.signature is None else f"{fact.name}{fact.signature}"
            _say(messages, rng.choice(_ASK_ARGUMENTS), call)
        elif follow_up < 0.25:
            where = "It is built in; nothing to import." if fact.module == "builtins" else f"import {fact.module}"
            _say(messages, rng.choice(_ASK_MODULE), where)
        elif follow_up < 0.32:
            _say(messages, rng.choice(_ASK_AGAIN), answer)


def _say(messages: list[Message], question: str, answer: str) -> None:
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": answer})
