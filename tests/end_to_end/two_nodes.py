"""A Ray of two nodes on this machine. Run as `python -m tests.end_to_end.two_nodes FOLDER KEY=VALUE .. / KEY=VALUE ..`.

FOLDER: short, for Ray's files. Then what the head is to have and, after a slash, the other node: `num_cpus=1`,
`node_ip_address=10.0.0.2`. Prints the address when both are up, and ends with its standard input.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80 << 20


def settings(words: list[str]) -> dict[str, int | str]:
    pairs = (word.partition("=") for word in words)
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def main() -> None:
    folder, *words = sys.argv[1:]
    slash = words.index("/")
    # Where Ray notes the newest cluster of this machine: not in a folder of everybody's, which need not be there.
    os.environ["RAY_TMPDIR"] = folder
    (Path(folder) / "ray").mkdir()
    common = {"temp_dir": folder, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster()
    try:
        cluster.add_node(**settings(words[:slash]), **common)
        cluster.add_node(**settings(words[slash + 1 :]), **common)
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
