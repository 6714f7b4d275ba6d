"""The node's process of `swiftkv demo`: `swiftkv serve`, which stops when the demo has ended, however that ended.

It is started as `python -m swiftkv.demo_serve PID ARGUMENT …`, with the demo's process id and the arguments of
`swiftkv serve`.
"""

from __future__ import annotations

import os
import signal
import sys

from swiftkv.__main__ import main as run_command
from swiftkv.processes import die_with_parent


def main() -> None:
    demo, *arguments = sys.argv[1:]
    if not die_with_parent(signal.SIGTERM) or os.getppid() != int(demo):
        return
    sys.argv[1:] = ["serve", *arguments]
    run_command()


if __name__ == "__main__":
    main()
