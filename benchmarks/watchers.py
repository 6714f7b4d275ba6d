"""Measure what watching a node costs its gateway:

    swiftkv serve configs/embedded.yaml &
    python benchmarks/watchers.py

Each watcher sends GET /admin/overview once a second, as the page does. Prints the gateway's part of a core without
watchers and with them, and the answers a minute.
"""

from __future__ import annotations

import argparse
import threading
import time

import httpx
import psutil

from swiftkv.admin_key import find_admin_key


class Watchers:
    """Threads that each ask once a second."""

    def __init__(self, url: str, key: str, seconds: float) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._seconds = seconds
        self.num_answers = 0

    def run(self, number: int) -> None:
        threads = [threading.Thread(target=self._watch) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _watch(self) -> None:
        end_s = time.monotonic() + self._seconds
        with httpx.Client(headers=self._headers) as client:
            while (started_s := time.monotonic()) < end_s:
                client.get(f"{self._url}/admin/overview").raise_for_status()
                self.num_answers += 1
                time.sleep(max(0.0, started_s + 1 - time.monotonic()))


def gateway_of(url: str) -> psutil.Process:
    """Return the process that listens on the port of `url`."""
    port = httpx.URL(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
            return psutil.Process(connection.pid)
    raise SystemExit(f"no process listens at {url}")


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the node")
    parser.add_argument("--watchers", type=int, default=17, help="number of pages that watch the node")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds without watchers, and again with them")
    args = parser.parse_args()
    key = find_admin_key(args.url)
    if key is None:
        raise SystemExit(f"no node of this user listens at {args.url}")
    gateway = gateway_of(args.url)
    began_s, began_cpu_s = time.monotonic(), cpu_s(gateway)
    time.sleep(args.seconds)
    calm = (cpu_s(gateway) - began_cpu_s) / (time.monotonic() - began_s)
    watchers = Watchers(args.url, key, args.seconds)
    began_s, began_cpu_s = time.monotonic(), cpu_s(gateway)
    watchers.run(args.watchers)
    took_s = time.monotonic() - began_s
    watched = (cpu_s(gateway) - began_cpu_s) / took_s
    print(f"gateway: {calm:.2%} of a core; {watched:.2%} with {watchers.num_answers / took_s * 60:.0f} views a minute")


if __name__ == "__main__":
    main()
