"""The YAML file: every mistake is one line that names its key and says what would be right.

It is one file, for most of it is one list of mistakes and their messages.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.config import load_config, parse_config
from swiftkv.errors import ConfigError
from swiftkv.storage_options import FileOptions, parse_storage
from swiftkv.units import Budget, PoolBytes, format_size, parse_budget, parse_size

CONFIGS = Path(__file__).parents[1] / "configs"
MEMORY = "a size such as 256MiB or 1GiB (1.074 GB), a number of bytes, or a part of a GPU such as 60%"
ONE_MODEL = "models: [{name: chat, path: somewhere%s}]"

MISTAKES = [
    # unknown keys
    ("nodes: {}\n" + ONE_MODEL % "", "nodes: unknown key; did you mean node?"),
    (ONE_MODEL % ", kv_cahe: {}", "models[0].kv_cahe: unknown key; did you mean kv_cache?"),
    (
        ONE_MODEL % ", kv_cache: {size: 1GiB}",
        "models[0].kv_cache.size: unknown key; the keys here are memory, block_size, retention_interval, max_pinned",
    ),
    # flags of vLLM that have another name here
    (
        ONE_MODEL % ", gpu_memory_utilization: 0.9",
        "models[0].gpu_memory_utilization: unknown key; vLLM's gpu_memory_utilization is models[].kv_cache.memory here",
    ),
    (
        ONE_MODEL % ", tool-call-parser: hermes",
        "models[0].tool-call-parser: unknown key; vLLM's tool-call-parser is models[].tool_parser here",
    ),
    (ONE_MODEL % ", max-model-len: 512", "models[0].max-model-len: unknown key; did you mean max_model_len?"),
    (
        ONE_MODEL % ", block_size: 16",
        "models[0].block_size: unknown key; vLLM's block_size is models[].kv_cache.block_size here",
    ),
    (
        ONE_MODEL % ", num_speculative_tokens: 4",
        "models[0].num_speculative_tokens: unknown key; vLLM's num_speculative_tokens is "
        "models[].speculative_config.num_speculative_tokens here",
    ),
    ("model: []\n" + ONE_MODEL % "", "model: unknown key; did you mean models?"),
    (ONE_MODEL % ", model: elsewhere", "models[0].model: unknown key; vLLM's model is models[].path here"),
    # wrong units and types
    (
        ONE_MODEL % ", kv_cache: {memory: 256MB}",
        f"models[0].kv_cache.memory: '256MB' is not {MEMORY}",
    ),
    (
        ONE_MODEL % ", kv_cache: {memory: 0}",
        f"models[0].kv_cache.memory: 0 is not {MEMORY}",
    ),
    (
        ONE_MODEL % ", lending: {window: 60}",
        "models[0].lending.window: 60 is not a duration such as 500ms, 60s, 2m or 1h",
    ),
    (
        ONE_MODEL % ", lending: {budget: 175%}",
        "models[0].lending.budget: '175%' is not a percentage of the pool up to 100% such as 75%, a size such as "
        "128MiB, or 0",
    ),
    (
        ONE_MODEL % ", lending: {budget: 75}",
        "models[0].lending.budget: 75 is not a percentage of the pool up to 100% such as 75%, a size such as 128MiB, "
        "or 0",
    ),
    (ONE_MODEL % ", lending: {policy: average}", "models[0].lending.policy: 'average' is not total or longest"),
    (
        ONE_MODEL % ", lending: {window: 0s}",
        "models[0].lending.window: '0s' is not a duration such as 500ms, 60s, 2m or 1h",
    ),
    ("node: {lending: {enabled: maybe}}\n" + ONE_MODEL % "", "node.lending.enabled: 'maybe' is not on or off"),
    (
        "node: {lending: {transport: tcp}}\n" + ONE_MODEL % "",
        "node.lending.transport: 'tcp' is not auto, shm, peer or p2p",
    ),
    (
        "node: {otlp: {endpoint: localhost:4318}}\n" + ONE_MODEL % "",
        "node.otlp.endpoint: 'localhost:4318' is not a URL such as http://localhost:4318/v1/traces",
    ),
    (ONE_MODEL % ", task: chat", "models[0].task: 'chat' is not generate, embed or score"),
    (
        ONE_MODEL % ", task: embed, matryoshka_dimensions: [0]",
        "models[0].matryoshka_dimensions: [0] is not any, a list of integers of at least 1, or null",
    ),
    (
        ONE_MODEL % ", matryoshka_dimensions: any",
        "models[0].matryoshka_dimensions: only a model with task: embed has embeddings; write task: embed, or drop "
        "this",
    ),
    ("node: {lending: {stream_buffers: 3}}\n" + ONE_MODEL % "", "node.lending.stream_buffers: 3 is not 1 or 2"),
    (
        "node: {lending: {max_programs: 0}}\n" + ONE_MODEL % "",
        "node.lending.max_programs: 0 is not an integer of at least 1",
    ),
    (
        "node: {lending: {max_wait: 30}}\n" + ONE_MODEL % "",
        "node.lending.max_wait: 30 is not a duration such as 500ms, 60s, 2m or 1h",
    ),
    (
        "node: {lending: never}\n" + ONE_MODEL % "",
        "node.lending: 'never' is not on, off or a mapping with the keys enabled, transport, io_backend, "
        "stream_buffers, max_programs, max_wait",
    ),
    (
        "node: {shutdown_timeout: 1 minute}\n" + ONE_MODEL % "",
        "node.shutdown_timeout: '1 minute' is not a duration such as 500ms, 60s, 2m or 1h",
    ),
    (
        "node: {watchdog: 120}\n" + ONE_MODEL % "",
        "node.watchdog: 120 is not a duration such as 500ms, 60s, 2m or 1h, or off",
    ),
    *(
        (
            f"node: {{watchdog: {number}}}\n" + ONE_MODEL % "",
            f"node.watchdog: {shown} is not a duration such as 500ms, 60s, 2m or 1h, or off",
        )
        for number, shown in (("-1.5", "-1.5"), (".nan", "nan"), (".inf", "inf"), ("2.5", "2.5"))
    ),
    (
        "node: {load_timeout: on}\n" + ONE_MODEL % "",
        "node.load_timeout: True is not a duration such as 500ms, 60s, 2m or 1h, or off",
    ),
    (ONE_MODEL % ", kv_cache: {block_size: 24}", "models[0].kv_cache.block_size: 24 is not a multiple of 16 tokens"),
    (
        ONE_MODEL % ", kv_cache: {block_size: 64, retention_interval: 32}",
        "models[0].kv_cache.retention_interval: 32 is less than block_size (64), and a prefix is "
        "found again only where a block ends; write at least 64, or null",
    ),
    (ONE_MODEL % ", kv_cache: {block_size: 0}", "models[0].kv_cache.block_size: 0 is not a multiple of 16 tokens"),
    (ONE_MODEL % ", threads: 0", "models[0].threads: 0 is not an integer from 1 to 4096"),
    (ONE_MODEL % ", threads: '2'", "models[0].threads: '2' is not an integer from 1 to 4096"),
    (ONE_MODEL % ", max_num_seqs: 1.5", "models[0].max_num_seqs: 1.5 is not an integer of at least 1"),
    (ONE_MODEL % ", dtype: fp8", "models[0].dtype: 'fp8' is not float32, float16 or bfloat16"),
    (
        ONE_MODEL % ", kv_cache: {memory: 60%}",
        "models[0].kv_cache.memory: 60% is a part of a GPU, and this model runs on the CPU, whose memory other "
        "programs share; write a size such as 4GiB",
    ),
    (ONE_MODEL % ", device: 'cuda:0', kv_cache: {memory: 101%}", f"models[0].kv_cache.memory: '101%' is not {MEMORY}"),
    (
        ONE_MODEL % ", device: 'cuda:0', kv_cache: {memory: 60%}, lending: {budget: 10%}",
        "models[0].kv_cache.memory: 60% of a GPU is known in bytes only when the model is loaded, and what chat "
        "lends is planned before that; write a size such as 40GiB, or node.lending: off",
    ),
    (
        ONE_MODEL % ", device: 'cuda:0', dtype: float32",
        "models[0].dtype: float32 is not served on a GPU; write bfloat16 or float16",
    ),
    (ONE_MODEL % ", device: gpu", "models[0].device: 'gpu' is not cpu or cuda:N"),
    (ONE_MODEL % ", role: boss", "models[0].role: 'boss' is not master or worker"),
    (
        ONE_MODEL % ", endpoint: {port: 65536}",
        "models[0].endpoint.port: 65536 is not a port number from 0 to 65535 (0 takes any free one)",
    ),
    (
        "models: [{name: a/b, path: somewhere}]",
        "models[0].name: 'a/b' is not a name of letters, digits, '.', '_' and '-', at most 64 (it is part of a URL)",
    ),
    # missing keys
    (
        "node: {max_bodies: 1MiB}\nmodels: [{name: a, path: b}]",
        "node.max_bodies: 1MiB is less than node.max_body (16MiB), so that the largest body never fits; raise it "
        "or lower max_body",
    ),
    (
        "node: {max_connections: 0}\nmodels: [{name: a, path: b}]",
        "node.max_connections: 0 is not an integer of at least 1",
    ),
    (
        ONE_MODEL % ", served_model_name: [a, b c]",
        "models[0].served_model_name: ['a', 'b c'] is not a name, or a list of names, each of 1 to 256 characters "
        "without blanks",
    ),
    (
        "models: [{name: chat, path: a, served_model_name: x/chat}, {name: b, path: b, served_model_name: [c, chat]}]",
        "models[1].served_model_name: 'chat' is taken by models[0].name; give each its own",
    ),
    ("models: [{name: chat}]", "models[0].path: missing; write a directory in Hugging Face format, or a hub id"),
    ("node: {port: 8000}", "models: missing; write a list of at least one model"),
    ("models: []", "models: [] is not a list of at least one model"),
    (
        ONE_MODEL % ", kv_cache: ",
        "models[0].kv_cache: null is not a mapping with the keys memory, block_size, retention_interval, max_pinned",
    ),
    ("- chat", "the file holds ['chat']; write a mapping with the keys node and models"),
    # keys that exclude each other
    (
        "models: [{name: chat, path: a}, {name: chat, path: b}]",
        "models[1].name: 'chat' is taken by models[0].name; give each its own",
    ),
    (
        "models: [{name: a, path: a, endpoint: {port: 9000}}, {name: b, path: b, endpoint: {port: 9000}}]",
        "models[1].endpoint.port: 9000 is taken by models[0].endpoint.port; give each its own",
    ),
    (
        ONE_MODEL % ", endpoint: {port: 8000}",
        "models[0].endpoint.port: 8000 is taken by node.port; give each its own",
    ),
    (
        ONE_MODEL % ", role: master, lending: {budget: 75%}",
        "models[0].lending: a master borrows, it does not lend; make it a worker or drop this",
    ),
    (
        ONE_MODEL % ", tensor_parallel_size: 2, device: 'cuda:0', lending: {budget: 0}",
        "models[0].lending: with tensor_parallel_size 2 a model on GPUs neither lends nor borrows in this version; "
        "make it a worker without lending, or write tensor_parallel_size: 1",
    ),
    (
        ONE_MODEL % ", tensor_parallel_size: 2, device: 'cuda:0', role: master",
        "models[0].role: with tensor_parallel_size 2 a model on GPUs neither lends nor borrows in this version; make "
        "it a worker without lending, or write tensor_parallel_size: 1",
    ),
    (
        "node: {lending: {transport: p2p}}\n" + ONE_MODEL % ", tensor_parallel_size: 2, role: master",
        "models[0].role: with tensor_parallel_size 2 a model lends and borrows in memory that its neighbours map, and "
        "node.lending.transport is p2p; write auto there, or tensor_parallel_size: 1",
    ),
    (
        "models: [{name: a, path: x, tensor_parallel_size: 2, lending: {budget: 0}}, "
        "{name: b, path: x, tensor_parallel_size: 3, role: master}]",
        "models[0].lending: a model with tensor_parallel_size 2 lends to masters with 2 ranks or a multiple of that, "
        "and b has 3; drop this, or change one of the two",
    ),
    (
        ONE_MODEL % ", target_tpot: -1s",
        "models[0].target_tpot: '-1s' is not a duration such as 500ms, 60s, 2m or 1h, or off",
    ),
    (
        ONE_MODEL % ", long_prefill_token_threshold: 0",
        "models[0].long_prefill_token_threshold: 0 is not an integer of at least 1, or null",
    ),
    (
        ONE_MODEL % ", max_long_partial_prefills: 0",
        "models[0].max_long_partial_prefills: 0 is not an integer of at least 1",
    ),
    (
        ONE_MODEL % ", scheduling_policy: lifo",
        "models[0].scheduling_policy: 'lifo' is not fcfs, priority, spf, hrrn, turns or deadline",
    ),
    (
        ONE_MODEL % ", max_num_batched_tokens: 4294967296",
        "models[0].max_num_batched_tokens: 4294967296 is more than 2147483647, the most that can be written here",
    ),
    (
        ONE_MODEL % ", kv_cache: {retention_interval: 9223372036854775807}",
        "models[0].kv_cache.retention_interval: 9223372036854775807 is more than 2147483647, the most that can be "
        "written here",
    ),
    (ONE_MODEL % ", threads: 1000000", "models[0].threads: 1000000 is not an integer from 1 to 4096"),
    (
        "node: {allowed_hosts: [5]}\n" + ONE_MODEL % "",
        "node.allowed_hosts[0]: 5 is not an item of a list of host names without ports",
    ),
    (ONE_MODEL % ", max_num_queued_reqs: 0", "models[0].max_num_queued_reqs: 0 is not an integer of at least 1"),
    (
        ONE_MODEL % ", max_num_queued_tokens: many",
        "models[0].max_num_queued_tokens: 'many' is not an integer of at least 1, or null",
    ),
    (ONE_MODEL % ", tensor_parallel_size: 9", "models[0].tensor_parallel_size: 9 is not an integer from 1 to 8"),
    (
        ONE_MODEL % ", kv_cache: {memory: 128MiB}, lending: {budget: 2GiB}",
        "models[0].lending.budget: 2GiB is more than kv_cache.memory (128MiB); lower it or write 100%",
    ),
    (
        ONE_MODEL % ', generation_config: "a\\0b"',
        "models[0].generation_config: 'a\\x00b' has a NUL or a lone surrogate; write other text",
    ),
    (
        'node: {state_dir: "\\ud83d\\ude00"}\n' + ONE_MODEL % "",
        "node.state_dir: '\\ud83d\\ude00' has a NUL or a lone surrogate; write other text",
    ),
    (
        ONE_MODEL % ', "\\ud800": 3',
        "models[0]: the key '\\ud800' has a NUL or a lone surrogate",
    ),
    (
        ONE_MODEL % ", max_num_batched_tokens: 32",
        "models[0].max_num_batched_tokens: 32 is less than max_num_seqs (64), each of which needs a token per step; "
        "raise it or lower max_num_seqs",
    ),
]


def message_for(text: str, tmp_path: Path) -> str:
    file = tmp_path / "node.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value)


@pytest.mark.parametrize(("text", "line"), MISTAKES, ids=[line.split(":")[0] for _, line in MISTAKES])
def test_a_mistake_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    assert message_for(text, tmp_path) == line


def test_several_mistakes_are_a_line_each(tmp_path: Path) -> None:
    lines = message_for("models: [{name: a, path: b, threads: 0, dtype: fp8}]", tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines] == ["models[0].dtype", "models[0].threads"]


def test_a_key_written_twice_is_a_mistake(tmp_path: Path) -> None:
    message = message_for("models:\n- name: a\n  path: b\n  name: c\n", tmp_path)
    assert message == f"{tmp_path / 'node.yaml'}:4:3: the key 'name' is written twice"


def test_a_key_that_is_no_word_is_a_mistake(tmp_path: Path) -> None:
    assert message_for("node:\n  [port]: 8000\n", tmp_path) == f"{tmp_path / 'node.yaml'}:2:3: a key must be a word"


def test_a_key_that_is_a_number_or_a_switch_is_a_mistake(tmp_path: Path) -> None:
    assert message_for("node: !!map [a]", tmp_path) == f"{tmp_path / 'node.yaml'}:1:7: this is not a mapping"
    for key in ("1", "on", "null"):
        assert message_for(f"node: {{}}\n{key}: 2\n", tmp_path) == f"{tmp_path / 'node.yaml'}:2:1: a key must be a word"


def test_text_that_no_file_can_have_is_found_however_lists_are_nested(tmp_path: Path) -> None:
    """With anchors, a small file has lists of billions of texts, and lists that hold themselves."""
    lists = ["a0: &a0 [x, x]", *[f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]]
    text = "models: []\nself: &self [*self]\n" + "\n".join(lists) + '\nlast: ["\\0"]'
    assert message_for(text, tmp_path) == "last[0]: '\\x00' has a NUL or a lone surrogate; write other text"


def test_sections_may_be_merged(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("models:\n- &chat {name: chat, path: x, threads: 3}\n- {<<: *chat, name: code}\n")
    assert [(model.name, model.threads) for model in load_config(file).models] == [("chat", 3), ("code", 3)]


@pytest.mark.parametrize("value", ["9" * 5000, "2001-02-30", "!!int abc", "!!timestamp x", "!!bool x"])
def test_a_value_that_yaml_cannot_make_is_a_mistake(value: str, tmp_path: Path) -> None:
    message = message_for(f"node:\n  port: {value}\n", tmp_path)
    assert message.startswith(f"{tmp_path / 'node.yaml'}:2:9: ")
    assert message.endswith("cannot be read as a value of its type")


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero: has more than 4MiB"):
        load_config(Path("/dev/zero"))


def test_deep_nesting_is_a_mistake(tmp_path: Path) -> None:
    message = message_for("models: " + "[" * 3000 + "]" * 3000, tmp_path)
    assert message.endswith("node.yaml: lists and mappings are nested too deeply; write the keys node and models")


def test_broken_yaml_names_file_and_line(tmp_path: Path) -> None:
    message = message_for("node: {port: 8000\nmodels: [", tmp_path)
    assert message.startswith(f"{tmp_path / 'node.yaml'}:2:")
    assert "\n" not in message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.yaml: cannot be read: No such file or directory; name a YAML file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: File name too long; name a YAML file"):
        load_config(tmp_path / ("a" * 300))


def test_a_directory_is_a_file_of_one_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory without a config.json; name a YAML file such as"):
        load_config(tmp_path)
    directory = tmp_path / "-My model, v1.5"
    directory.mkdir()
    (directory / "config.json").touch()
    config = load_config(directory, port=0)
    (model,) = config.models
    assert (model.name, model.path, config.node.port) == ("Mymodelv1.5", str(directory), 0)


def test_blocks_are_larger_on_gpus_unless_the_file_says_otherwise() -> None:
    def block_size(**keys: object) -> int:
        return parse_config({"models": [{"name": "a", "path": "x", **keys}]}).models[0].kv_cache.block_size

    assert block_size() == block_size(device="cpu", kv_cache={"memory": "1GiB"}) == 16
    assert block_size(device="cuda:1") == block_size(device="cuda:0", kv_cache={"memory": "1GiB"}) == 64
    assert block_size(device="cuda:0", kv_cache={"block_size": 32}) == 32
    with pytest.raises(ConfigError, match=r"models\[0\]\.kv_cache: 7 is not a mapping"):
        block_size(device="cuda:0", kv_cache=7)


def test_steps_are_bounded_on_the_cpu_unless_the_file_says_otherwise() -> None:
    def target_tpot(**keys: object) -> float | None:
        return parse_config({"models": [{"name": "a", "path": "x", **keys}]}).models[0].step_limit_s

    assert target_tpot() == target_tpot(device="cpu") == 0.25
    assert target_tpot(device="cuda:0") is target_tpot(target_tpot="off") is None
    assert target_tpot(device="cuda:0", target_tpot="40ms") == 0.04


def test_defaults_for_everything_but_name_and_path() -> None:
    config = parse_config({"models": [{"name": "chat", "path": "somewhere"}]})
    model = config.models[0]
    assert (config.node.host, config.node.port, config.node.api_key_env) == ("127.0.0.1", 8000, None)
    assert (model.role, model.device, model.dtype) == ("worker", "cpu", "bfloat16")
    assert model.threads >= 1
    assert (model.max_model_len, model.max_num_seqs, model.max_num_batched_tokens) == (None, 64, 2048)
    assert (model.kv_cache.memory, model.kv_cache.block_size) == (PoolBytes(512 << 20), 16)
    assert model.lending is None
    lending = config.node.lending
    assert (lending.enabled, lending.transport, lending.stream_buffers, lending.max_wait) == (True, "auto", 2, 30.0)
    assert model.endpoint is None
    assert (model.scheduling_policy, model.long_prefill_token_threshold) == ("hrrn", None)
    assert (config.node.watchdog, config.node.load_timeout) == (120.0, 600.0)


@pytest.mark.parametrize(
    ("written", "means_s"),
    [("off", None), ("'off'", None), ("0", None), ("0.0", None), ("0s", None), ("90s", 90.0), ("250ms", 0.25)],
)
def test_a_time_limit_can_be_off(written: str, means_s: float | None) -> None:
    raw = yaml.safe_load(f"{{node: {{watchdog: {written}}}, models: [{{name: chat, path: somewhere}}]}}")
    assert parse_config(raw).node.watchdog == means_s


def test_units() -> None:
    config = parse_config(
        {
            "node": {"shutdown_timeout": "1.5s"},
            "models": [
                {
                    "name": "code",
                    "path": "p",
                    "kv_cache": {"memory": "1.5GiB"},
                    "lending": {"budget": "75%", "window": "2m"},
                }
            ],
        }
    )
    model = config.models[0]
    assert model.kv_cache.memory == PoolBytes(3 << 29)
    assert model.lending is not None
    assert (model.lending.budget, model.lending.window) == (Budget(Fraction(3, 4)), 120.0)
    assert model.lending.policy == "total"
    assert config.node.shutdown_timeout == 1.5


@pytest.mark.parametrize(
    ("written", "budget", "bytes_of_1000"),
    [
        ("75%", Budget(Fraction(3, 4)), 750),
        ("29%", Budget(Fraction(29, 100)), 290),
        ("12.5 %", Budget(Fraction(1, 8)), 125),
        ("100%", Budget(Fraction(1)), 1000),
        ("0%", Budget(Fraction(0)), 0),
        (0, Budget(0), 0),
        ("0", Budget(0), 0),
        ("128MiB", Budget(128 << 20), 128 << 20),
        ("400B", Budget(400), 400),
    ],
)
def test_a_budget_is_a_part_of_the_pool_or_bytes(written: str | int, budget: Budget, bytes_of_1000: int) -> None:
    assert parse_budget(written) == budget
    assert budget.bytes_of(1000) == bytes_of_1000
    assert parse_budget(str(budget)) == budget


@pytest.mark.parametrize(
    "written", [75, -1, 0.5, True, False, None, "", "101%", "-1%", "128", "MiB", "1e9%", "nan%", []]
)
def test_what_is_no_budget(written: object) -> None:
    with pytest.raises(ValueError, match=r"^.*$"):
        parse_budget(written)


@pytest.mark.parametrize(
    ("written", "enabled"),
    [
        ("off", False), ("on", True), ("'off'", False), ("{enabled: off}", False), ("{enabled: 'off'}", False),
        ("{enabled: true}", True), ("{stream_buffers: 1}", True),
    ],
)  # fmt: skip
def test_lending_of_a_node_is_a_switch_or_a_mapping(written: str, enabled: bool, tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(f"node: {{lending: {written}}}\n" + ONE_MODEL % "")
    assert load_config(file).node.lending.enabled is enabled
    assert load_config(file, lending=False).node.lending.enabled is False


@given(st.integers(min_value=1, max_value=1 << 63))
def test_sizes_survive_printing(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


KEY = "sixteen letters."


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"node": {"api_key_env": "SWIFTKV_TEST_KEY"}, "models": [{"name": "a", "path": "b"}]})
    monkeypatch.delenv("SWIFTKV_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^node\.api_key_env: the environment variable SWIFTKV_TEST_KEY is not set"):
        config.node.api_key()
    monkeypatch.setenv("SWIFTKV_TEST_KEY", KEY)
    assert config.node.api_key() == KEY
    monkeypatch.setenv("SWIFTKV_TEST_KEY", KEY[1:])
    with pytest.raises(ConfigError, match=r"^node\.api_key_env: the key in SWIFTKV_TEST_KEY has 15 characters, .* 16"):
        config.node.api_key()


def test_the_models_key_is_not_the_key_of_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"api_key_env": "SWIFTKV_TEST_KEY", "admin_key_env": "SWIFTKV_TEST_ADMIN_KEY"}
    config = parse_config({"node": node, "models": [{"name": "a", "path": "b"}]})
    monkeypatch.setenv("SWIFTKV_TEST_KEY", KEY)
    monkeypatch.setenv("SWIFTKV_TEST_ADMIN_KEY", "")
    with pytest.raises(ConfigError, match=r"^node\.admin_key_env: the environment variable SWIFTKV_TEST_ADMIN_KEY is"):
        config.node.admin_key()
    monkeypatch.setenv("SWIFTKV_TEST_ADMIN_KEY", KEY)
    with pytest.raises(ConfigError, match=r"^node\.admin_key_env: .* holds the same key as SWIFTKV_TEST_KEY"):
        config.node.admin_key()
    monkeypatch.setenv("SWIFTKV_TEST_ADMIN_KEY", KEY[::-1])
    assert config.node.admin_key() == KEY[::-1]


@pytest.mark.parametrize(
    ("node", "refused"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "example.org"}, True),
        ({"host": "0.0.0.0", "admin_key_env": "SWIFTKV_TEST_KEY"}, True),
        ({"host": "0.0.0.0", "api_key_env": "SWIFTKV_TEST_KEY"}, False),
        ({"host": "0.0.0.0", "allow_unauthenticated": True}, False),
    ],
)
def test_others_are_let_in_without_a_key_only_if_the_file_says_so(
    node: dict[str, object], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTKV_TEST_KEY", KEY)
    config = parse_config({"node": node, "models": [{"name": "a", "path": "b"}]})
    if not refused:
        config.node.check_access()
        return
    with pytest.raises(ConfigError, match=r"^node\.host: .* no API key; .* node\.api_key_env, .*allow_unauthenticated"):
        config.node.check_access()


@pytest.mark.parametrize(
    ("node", "checked"),
    [
        ({}, ()),
        ({"allowed_hosts": ["a.example"]}, ("a.example",)),
        ({"api_key_env": "KEY"}, None),
        ({"api_key_env": "KEY", "allowed_hosts": ["a.example"]}, ("a.example",)),
        ({"host": "0.0.0.0"}, None),
    ],
)
def test_which_names_a_node_may_be_called_by(node: dict[str, object], checked: tuple[str, ...] | None) -> None:
    assert parse_config({"node": node, "models": [{"name": "a", "path": "b"}]}).node.checked_hosts == checked


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_which_addresses_only_this_machine_reaches(host: str, loopback: bool) -> None:
    config = parse_config({"node": {"host": host}, "models": [{"name": "a", "path": "b"}]})
    assert config.node.is_loopback is loopback


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_the_files_that_come_with_it_are_right(file: Path) -> None:
    assert load_config(file).models


def test_how_far_clients_are_trusted() -> None:
    models = [{"name": "a", "path": "b", "split_special_tokens": True}]
    config = parse_config({"models": models})
    assert (config.node.show_cached_tokens, config.node.allow_priority) == ("always", False)
    assert config.models[0].split_special_tokens
    with pytest.raises(ConfigError, match=r"^node\.show_cached_tokens: 'often' is not always, salted or never"):
        parse_config({"node": {"show_cached_tokens": "often"}, "models": models})


def test_models_and_storage_are_read_without_a_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("models: [{name: chat, path: somewhere}]")
    config = load_config(file)
    gone = tmp_path / "here"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    storage = {"backend": "file", "path": "kv", "size": "1GiB"}
    added = config.with_model({"name": "code", "path": "somewhere", "tiers": {"storage": storage}})
    assert added.directory == tmp_path
    options = parse_storage(storage, "storage", added.directory)
    assert isinstance(options, FileOptions)
    assert options.directory == tmp_path / "kv"
