"""Serve OpenVINO GenAI with just enough HTTP for `benchmarks/peers.py`: token ids in, one event a token out.

OpenVINO GenAI is a library; measured within a process it would not pay for HTTP as servers do. Needs only the packages
that export and run the model:

    pip install openvino-genai "optimum-intel[openvino]"
    optimum-cli export openvino -m CKPT --task text-generation-with-past --weight-format fp16 OV_DIR
    python benchmarks/openvino_server.py OV_DIR --port 8200
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


class Pipeline:
    """The continuous-batching pipeline, stepped by one thread for as long as there is work."""

    def __init__(self, directory: str, threads: int, cache_gib: int, precision: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2304
        scheduler.max_num_seqs = 16
        scheduler.dynamic_split_fuse = True
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_PRECISION_HINT": precision,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)
        self._arrivals: queue.Queue[tuple[list[int], int, queue.Queue[int]]] = queue.Queue()
        self._ids = itertools.count()
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, prompt: list[int], max_tokens: int) -> queue.Queue[int]:
        """Start a generation, and return a queue of its tokens; -1 ends them."""
        tokens: queue.Queue[int] = queue.Queue()
        self._arrivals.put((prompt, max_tokens, tokens))
        return tokens

    def _run(self) -> None:
        running: list[tuple[Any, int, queue.Queue[int], list[int]]] = []
        while True:
            while not running or not self._arrivals.empty():
                running.append(self._add(*self._arrivals.get()))
            self._pipeline.step()
            for item in list(running):
                handle, max_tokens, tokens, sent = item
                if handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            sent.append(token)
                            tokens.put(token)
                if len(sent) >= max_tokens:
                    tokens.put(-1)
                    running.remove(item)

    def _add(
        self, prompt: list[int], max_tokens: int, tokens: queue.Queue[int]
    ) -> tuple[Any, int, queue.Queue[int], list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        handle = self._pipeline.add_request(next(self._ids), ov.Tensor(np.array([prompt], np.int64)), config)
        return handle, max_tokens, tokens, []


def make_handler(pipeline: Pipeline) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = pipeline.generate(body["prompt"], body["max_tokens"])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            num_tokens = 0
            while (token := tokens.get()) >= 0:
                num_tokens += 1
                self._event({"choices": [{"index": 0, "text": f"{token} "}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the load generator reports."""

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the exported model")
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gib", type=int, default=1)
    parser.add_argument(
        "--precision", choices=("bf16", "f32"), default="bf16", help="f32 on processors that have only AVX2"
    )
    args = parser.parse_args()
    pipeline = Pipeline(args.model, args.threads, args.cache_gib, args.precision)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), make_handler(pipeline))
    print(f"http://127.0.0.1:{args.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
